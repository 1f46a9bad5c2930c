"""The example without a Trainer: it relocates as the Trainer does, and its script runs on a tiny model."""

import re
import sys
from dataclasses import asdict

import pytest
import tiny
import torch
from peft import PeftModel
from training import Images, make_trainer
from transformers import AutoModelForImageClassification

from examples import custom_loop
from provpt_peft import Relocation, RelocationConfig, create_provpt_optimizer


TOLERANCE = 1e-6
CONFIGS = {
    "each epoch": dict(idleness="fisher", settle=0.0),
    "some training images": dict(adjust="random", check_moves=False, score_images=6, seed=5, settle=0.0),
    "every 5 steps": dict(adjust="random", check_moves=False, relocate_every=5, prompts_per_relocation=2, settle=0.3),
}


def assert_same_history(history, expected):
    assert len(history) == len(expected) >= 2
    for record, other in zip(map(asdict, history), map(asdict, expected), strict=True):
        for name, value in other.items():
            if isinstance(value, (float, dict)):
                assert record[name] == pytest.approx(value, rel=0, abs=TOLERANCE), name
            else:
                assert record[name] == value, name


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loop_relocates_as_the_trainer_does(tmp_path, name):
    config = RelocationConfig(**CONFIGS[name])
    # With dropout: the same numbers are drawn in the same order.
    schedule = dict(lr_scheduler_type="cosine", warmup_steps=0.3)
    trainer, callback = make_trainer(tmp_path, config=config, seed=7, per_device_eval_batch_size=4, **schedule)
    trainer.optimizer = create_provpt_optimizer(trainer.model, torch.optim.AdamW, lr=1e-2)
    trainer.train()
    model = tiny.prompted(tiny.make("vit"), prompt_dropout=0.1)
    relocator = custom_loop.train(
        model, Images(), config, epochs=4, batch_size=4, learning_rate=1e-2, seed=7, progress_bar=False
    )
    assert_same_history(relocator.history, callback.history)
    assert any(record.block != record.from_block for record in relocator.history)
    assert all((record.reward is None) == (record.note is not None) for record in relocator.history)
    difference = (model.base_model.prompts() - trainer.model.base_model.prompts()).abs().max()
    assert difference < 1e-5
    assert torch.equal(model.base_model.prompt_blocks(), trainer.model.base_model.prompt_blocks())


def test_records_as_text():
    moved = Relocation(epoch=2, prompt=7, from_block=3, block=9, idleness=0.5, reward=-0.25)
    assert custom_loop.describe(moved) == (
        "after epoch 2: prompt 7 from block 3 to 9, idleness +0.5000, reward -0.2500"
    )
    stayed = Relocation(epoch=2, prompt=7, from_block=3, block=3, idleness=0.5, reward=0.25)
    assert "prompt 7 stays in block 3, idleness +0.5000, reward +0.2500" in custom_loop.describe(stayed)
    assert custom_loop.describe(Relocation(epoch=4, note="Not finite.")) == "after epoch 4: Not finite."
    unrewarded = Relocation(epoch=2, prompt=7, from_block=3, block=9, idleness=0.5, note="Not finite.")
    assert custom_loop.describe(unrewarded).endswith("idleness +0.5000, Not finite.")


def test_a_missing_demo_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["custom_loop.py"])
    with pytest.raises(SystemExit):
        custom_loop.main()
    assert "Run `python examples/dinov2_small.py .cache/dinov2-small`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--train_images", "1797"), "must be between 1 and 1796"),
        (("--train_images", "0"), "must be between 1 and 1796"),
        (("--epochs", "0"), "--epochs must be at least 1, got 0"),
        (("--num_prompts", "0"), "--num_prompts must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(monkeypatch, capsys, option, message):
    # The checkpoint is missing, so loading it would fail otherwise.
    monkeypatch.setattr(sys, "argv", ["custom_loop.py", "--model_name_or_path", "missing", *option])
    with pytest.raises(SystemExit):
        custom_loop.main()
    assert message in capsys.readouterr().err


def test_the_script_trains_tests_and_saves(tmp_path, monkeypatch, capsys):
    tiny.make("vit").save_pretrained(tmp_path / "vit")
    arguments = dict(
        model_name_or_path=tmp_path / "vit", num_prompts=2, epochs=3, train_images=32, image_size=32, batch_size=16,
        threads=torch.get_num_threads(), output_dir=tmp_path / "adapter",
    )  # fmt: skip
    command = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["custom_loop.py", *command])
    custom_loop.main()
    output = capsys.readouterr().out
    assert "test accuracy: 0." in output
    assert not re.search(r"from block (\d+) to \1\b", output)
    base = AutoModelForImageClassification.from_pretrained(
        tmp_path / "vit", num_labels=10, ignore_mismatched_sizes=True
    )
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert f"prompts in each block: {loaded.base_model.prompt_distribution()}" in output
    assert sum(loaded.base_model.prompt_distribution()) == 8
