"""What users of such software run into, as far as no other file tests it. tests/README.md has the whole list."""

import re

import pytest
import tiny
import torch
from peft import PeftModel
from training import Images, make_trainer, moving

from provpt_peft import RelocationConfig, Relocator


def test_other_image_sizes_with_interpolated_positions():
    model = tiny.prompted(tiny.make("vit"))
    with pytest.raises(ValueError, match="doesn't match model"):
        model(pixel_values=tiny.images(size=48))
    output = model(pixel_values=tiny.images(size=48), labels=tiny.labels(), interpolate_pos_encoding=True)
    output.loss.backward()
    assert (model.base_model.prompts().grad.abs().sum(dim=1) > 0).all()


def test_other_image_sizes_in_the_trainer(tmp_path):
    """The recipe: a collator that adds the argument to each batch."""

    def collate(items):
        return {
            "pixel_values": torch.stack([item["pixel_values"] for item in items]),
            "labels": torch.stack([item["labels"] for item in items]),
            "interpolate_pos_encoding": True,
        }

    class Larger(Images):
        def __getitem__(self, index):
            return super().__getitem__(index) | {"pixel_values": tiny.images(1, seed=index, size=48)[0]}

    trainer, callback = make_trainer(
        tmp_path, moving(), train_dataset=Larger(), data_collator=collate, num_train_epochs=3
    )
    trainer.eval_dataset = Larger(8)
    trainer.train()
    assert len(callback.history) == 2
    assert trainer.evaluate()["eval_loss"] > 0


def test_eval_loss_with_the_default_label_names(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    model = trainer.model.eval()
    with torch.no_grad():
        data = Images(8, seed=5)
        expected = model(pixel_values=data.pixel_values, labels=data.labels).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("given", [None, iter([]), (batch for batch in ())])
def test_relocator_without_images_that_it_can_read_again(given):
    model = tiny.prompted(tiny.make("vit"))
    found = "none" if given is None else f"a {type(given).__name__}, which can be read only once"
    with pytest.raises(ValueError, match=rf"which must be a list .*, got {found}\. Give .*first_batches\(loader, 5\)"):
        Relocator(model, RelocationConfig(score_images=5), score_batches=given)


def test_relocator_whose_images_are_none():
    relocator = Relocator(tiny.prompted(tiny.make("vit")), score_batches=[])
    with pytest.raises(ValueError, match="on the score batches, but there are none"):
        relocator.relocate(progress=0)


@pytest.mark.parametrize("classes", [2, 5])
def test_two_adapters_with_different_numbers_of_classes_fail_at_load(tmp_path, classes):
    tiny.prompted(tiny.make("vit", num_labels=classes)).save_pretrained(tmp_path)
    model = tiny.prompted(tiny.make("vit"))
    with pytest.raises(RuntimeError, match=rf"torch.Size\(\[{classes}, 32\]\).*torch.Size\(\[3, 32\]\)"):
        model.load_adapter(tmp_path, "other")
    assert isinstance(model, PeftModel)


@pytest.mark.parametrize(("title", "count"), [("What users run into", 28), ("Faults that were seen", 35)])
def test_lists_of_what_went_wrong_name_tests_that_exist(title, count):
    section = (tiny.FOLDER / "README.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| \d+ ", line)]
    assert [int(re.match(r"\| (\d+) ", row)[1]) for row in rows] == list(range(1, count + 1))
    defined = "\n".join(path.read_text() for path in tiny.FOLDER.rglob("test_*.py"))
    for row in rows:
        named = re.findall(r"\b(test_\w+)(?!\.py|\w)", row)
        tests = [name for name in named if f"def {name}(" in defined]
        files = [name for name in named if any(tiny.FOLDER.rglob(f"{name}.py"))]
        assert tests, row
        assert sorted(tests + files) == sorted(named), row
