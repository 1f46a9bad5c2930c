"""The model card that saving an adapter writes."""

import ast
import copy
import pickle
import re
import socket

import pytest
import tiny
import torch
import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from training import make_trainer, moving

from provpt_peft import ProVPTConfig, check_adapter, figures
from provpt_peft.share import card as our_card


NAMES = {0: "daisy", 1: "rose", 2: "tulip"}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError(f"asked the network for {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def base(tmp_path):
    tiny.make("vit").save_pretrained(tmp_path / "base")
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def prompted(base, adapter_name="default", model_class=transformers.ViTForImageClassification, **config):
    config = dict(id2label=NAMES) | config
    model = tiny.prompted(model_class.from_pretrained(base), adapter_name, **config)
    for prompt, block in [(0, 4), (1, 4), (5, 0)]:
        model.base_model.move_prompt(prompt, block)
    return model


def metadata(folder):
    """The card's YAML, read without any help."""
    _, header, _ = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header)


def snippet(folder):
    (code,) = re.findall(r"^```python\n(.*?)^```", (folder / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return code


def test_tags_import_and_distribution(tmp_path, base):
    prompted(base).save_pretrained(tmp_path / "adapter")
    text = ModelCard.load(tmp_path / "adapter" / "README.md").text
    assert {"provpt", "peft", "visual-prompt-tuning"} <= set(metadata(tmp_path / "adapter")["tags"])
    assert "12 prompts in a vision transformer of 4 blocks, 1 of them in no block" in text
    assert "| block | 1 | 2 | 3 | 4 |\n| --- | --- | --- | --- | --- |\n| prompts | 1 | 2 | 3 | 5 |\n" in text
    assert "`import provpt_peft`" in text
    assert '`pipeline("image-classification", model=model, image_processor=image_processor)`' in text
    # PEFT's template is left out, its note of releases is not.
    assert text.lstrip().startswith("# Visual prompts\n")
    assert "More Information Needed" not in text
    assert re.search(r"### Framework versions\n\n- PEFT \d", text)


def test_distribution_of_a_list_counts_blocks_that_have_no_prompt(tmp_path, base):
    model = tiny.prompted(transformers.ViTForImageClassification.from_pretrained(base), num_prompts=[4, 2, 0, 0])
    model.save_pretrained(tmp_path / "adapter")
    text = (tmp_path / "adapter" / "README.md").read_text()
    assert "6 prompts in a vision transformer of 4 blocks. " in text
    assert "| prompts | 4 | 2 | 0 | 0 |\n" in text


@pytest.mark.parametrize("adapter_name", ["default", "flowers"])
def test_saving_again_changes_nothing_but_the_distribution(tmp_path, base, adapter_name):
    model = prompted(base, adapter_name)
    folder = tmp_path if adapter_name == "default" else tmp_path / adapter_name
    model.save_pretrained(tmp_path)
    first = (folder / "README.md").read_bytes()
    model.save_pretrained(tmp_path)
    assert (folder / "README.md").read_bytes() == first
    model.base_model.move_prompt(5, 1)
    model.save_pretrained(tmp_path)
    text = (folder / "README.md").read_text()
    assert "| prompts | 2 | 2 | 3 | 5 |\n" in text
    assert text.count("| block |") == text.count("```python") == 1


def test_a_template_that_was_filled_in_stays(tmp_path, base):
    model = prompted(base)
    card = ModelCard.from_template(ModelCardData(), developers="a gardener")
    (tmp_path / "adapter").mkdir()
    card.save(tmp_path / "adapter" / "README.md")
    model.save_pretrained(tmp_path / "adapter")
    text = ModelCard.load(tmp_path / "adapter" / "README.md").text
    assert text.lstrip().startswith("# Model Card for Model ID")
    assert "- **Developed by:** a gardener" in text
    # As an earlier version left it: the template with our section in it.
    card = ModelCard.from_template(ModelCardData())
    title, rest = card.text.split("Model ID\n", 1)
    card.text = f"{title}Model ID\n\n{our_card._START}\n\nwritten earlier\n\n{our_card._END}\n{rest}"
    card.save(tmp_path / "adapter" / "README.md")
    model.save_pretrained(tmp_path / "adapter")
    text = ModelCard.load(tmp_path / "adapter" / "README.md").text
    assert text.lstrip().startswith("# Visual prompts\n")
    assert "written earlier" not in text
    assert "More Information Needed" not in text


@pytest.mark.parametrize("title", ["# My flowers\n\n", ""])
def test_what_a_user_wrote_stays(tmp_path, base, title):
    mine = f"{title}Trained on photos of my garden.\n\n```bash\n# no title\nls\n```\n"
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "README.md").write_text(f"---\nlicense: mit\n---\n\n{mine}")
    model = prompted(base)
    for _ in range(2):
        model.save_pretrained(folder)
    text = (folder / "README.md").read_text()
    assert metadata(folder)["license"] == "mit"
    assert mine.removeprefix(title) in text
    assert text.count("| block |") == 1
    if title:
        assert text.index("# My flowers") < text.index("| block |") < text.index("Trained on")


@pytest.mark.parametrize("adapter_name", ["default", "flowers"])
def test_snippet_of_a_classifier_runs_as_printed(tmp_path, base, monkeypatch, capsys, adapter_name):
    prompted(base, adapter_name).save_pretrained(tmp_path)
    folder = tmp_path if adapter_name == "default" else tmp_path / adapter_name
    monkeypatch.chdir(folder)
    exec(snippet(folder), {})
    assert capsys.readouterr().out.strip() in NAMES.values()


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression"])
def test_snippet_of_a_classifier_with_other_labels(tmp_path, base, monkeypatch, capsys, problem_type):
    prompted(base, problem_type=problem_type).save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(snippet(tmp_path), {})
    found = ast.literal_eval(capsys.readouterr().out)
    if problem_type == "regression":
        assert len(found) == len(NAMES)
        assert all(isinstance(value, float) for value in found)
    else:
        assert set(found) <= set(NAMES.values())


def test_pickled_weights_have_a_card_without_the_base_model_s_path(tmp_path, base):
    prompted(base).save_pretrained(tmp_path, safe_serialization=False)
    assert "base_model" not in metadata(tmp_path)


def test_snippet_of_a_bare_model_runs_as_printed(tmp_path, base, monkeypatch):
    bare = transformers.ViTModel.from_pretrained(base)
    bare.save_pretrained(tmp_path / "bare")
    model = prompted(tmp_path / "bare", model_class=transformers.ViTModel, id2label=None, modules_to_save=None).eval()
    model.save_pretrained(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path / "adapter")
    names = {}
    exec(snippet(tmp_path / "adapter"), names)
    with torch.no_grad():
        expected = model(tiny.images()).last_hidden_state
        assert torch.equal(names["model"](tiny.images()).last_hidden_state, expected)


def test_base_model_that_is_unknown(tmp_path):
    tiny.prompted(tiny.make("vit"), id2label=NAMES).save_pretrained(tmp_path)
    assert 'load_image_classifier(".", base_model="path/to/the/base/model")' in snippet(tmp_path)
    assert "base_model" not in metadata(tmp_path)
    assert metadata(tmp_path)["tags"] == ["peft", "provpt", "transformers", "visual-prompt-tuning"]


def test_base_model_of_another_library(tmp_path):
    class Detector(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = tiny.make("vit").vit

        def forward(self, pixel_values):
            return self.backbone(pixel_values)

    tiny.prompted(Detector(), modules_to_save=None).save_pretrained(tmp_path)
    assert "base_model = ...  # the Detector that the adapter was made with" in snippet(tmp_path)


@pytest.mark.parametrize("adapter_name", ["default", "flowers"])
def test_a_local_base_model_leaves_no_metadata(tmp_path, base, adapter_name):
    model = prompted(base, adapter_name)
    for _ in range(2):
        model.save_pretrained(tmp_path / "adapter")
    # What PEFT writes above the folder of an adapter with a name of its own is PEFT's.
    folder = tmp_path / "adapter" / ("" if adapter_name == "default" else adapter_name)
    assert str(tmp_path) not in (folder / "README.md").read_text()
    assert metadata(folder)["library_name"] == "peft"
    assert "base_model" not in metadata(folder)
    assert not [tag for tag in metadata(folder)["tags"] if tag.startswith("base_model:")]


# PEFT's own, where it may not ask the Hub for the base model's config.
@pytest.mark.filterwarnings("ignore:Could not find a config file in someone/vit:UserWarning")
@pytest.mark.parametrize("adapter_name", ["default", "flowers"])
def test_a_base_model_of_the_hub_keeps_its_metadata(tmp_path, adapter_name):
    model = tiny.make("vit")
    model.name_or_path = model.config._name_or_path = "someone/vit"
    tiny.prompted(model, adapter_name, id2label=NAMES).save_pretrained(tmp_path)
    for folder in [tmp_path] + [tmp_path / adapter_name] * (adapter_name != "default"):
        assert metadata(folder)["base_model"] == "someone/vit"
        assert "base_model:adapter:someone/vit" in metadata(folder)["tags"]
        assert "not from the Hub" not in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["./vit", "../vit", "/nowhere/vit", "a/b/c", r"C:\vit", ""])
def test_paths_are_dropped_where_they_lead_nowhere_too(name):
    data = dict(base_model=name, tags=[f"base_model:adapter:{name}", "mine"])
    card = ModelCard(f"---\n{yaml.safe_dump(data)}---\n")
    assert our_card._drop_local_base_model(card)
    assert card.data.to_dict() == {"tags": ["mine"]}


def relocated(base):
    """An adapter that has a history, so that its card gets a picture."""
    model = prompted(base)
    model.peft_config["default"].training = dict(epochs=2, history=[dict(epoch=1, prompt=0, from_block=1, block=4)])
    return model


def test_a_picture_that_cannot_be_drawn_is_a_warning(tmp_path, base, monkeypatch, caplog):
    def fail(run):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(figures, "plot_distribution", fail)
    model = relocated(base)
    model.save_pretrained(tmp_path / "adapter")
    assert f"{tmp_path / 'adapter'}: the picture was not drawn, RuntimeError: no fonts" in caplog.text
    assert not (tmp_path / "adapter" / "distribution.png").exists()
    # The card is whole but for the picture, and the adapter is saved.
    text = (tmp_path / "adapter" / "README.md").read_text()
    assert "| prompts | 1 | 2 | 3 | 5 |\n" in text
    assert "distribution.png" not in text
    check_adapter(tmp_path / "adapter")
    caplog.clear()
    monkeypatch.undo()
    model.save_pretrained(tmp_path / "adapter")
    assert caplog.text == ""
    assert (tmp_path / "adapter" / "distribution.png").is_file()
    assert (tmp_path / "adapter" / "README.md").read_text().count("](distribution.png)") == 1


@pytest.mark.parametrize("header", [b"tags: [", b"- a list\n- and no names", b"\xff\xfe"])
def test_a_card_that_cannot_be_read_is_a_warning(tmp_path, base, caplog, header):
    (tmp_path / "adapter").mkdir()
    written = b"---\n" + header + b"\n---\n# My flowers\n"
    (tmp_path / "adapter" / "README.md").write_bytes(written)
    model = prompted(base)
    save_file(our_tensors(model), tmp_path / "adapter" / "adapter_model.safetensors")
    model.peft_config["default"].save_pretrained(str(tmp_path / "adapter"))
    assert f"{tmp_path / 'adapter'}: the model card was not written, " in caplog.text
    assert (tmp_path / "adapter" / "README.md").read_bytes() == written
    check_adapter(tmp_path / "adapter")


def our_tensors(model):
    return {name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(model).items()}


def test_a_card_that_cannot_be_written_is_a_warning(tmp_path, base, monkeypatch, caplog):
    def fail(self, path):
        raise PermissionError("read-only")

    monkeypatch.setattr(our_card.ModelCard, "save", fail)
    model = prompted(base)
    (tmp_path / "adapter").mkdir()
    our_card.update_model_card(str(tmp_path / "adapter"), model.peft_config["default"])
    assert caplog.text == ""
    save_file(our_tensors(model), tmp_path / "adapter" / "adapter_model.safetensors")
    our_card.update_model_card(str(tmp_path / "adapter"), model.peft_config["default"])
    assert "the model card was not written, PermissionError: read-only" in caplog.text


@pytest.mark.parametrize("adapter_name", ["default", "flowers"])
def test_saving_writes_nothing_above_its_folder(tmp_path, base, adapter_name):
    above = tmp_path / "above"
    folder = above / "adapter"
    folder.mkdir(parents=True)
    (above / "README.md").write_text("---\nbase_model: /nowhere\ntags:\n- base_model:adapter:/nowhere\n---\n# Mine\n")
    before = {path: path.read_bytes() for path in above.iterdir() if path.is_file()}
    model = prompted(base, adapter_name)
    model.save_pretrained(folder)
    model.peft_config[adapter_name].save_pretrained(str(folder / "config"))
    assert {path: path.read_bytes() for path in above.iterdir() if path.is_file()} == before
    assert sorted(path.name for path in (folder / "config").iterdir()) == ["adapter_config.json"]
    if adapter_name != "default":
        # PEFT's own card of all adapters, as PEFT wrote it.
        assert "provpt_peft: start" not in (folder / "README.md").read_text()


def test_a_config_alone_writes_no_card(tmp_path):
    above = "---\nlibrary_name: peft\nbase_model: /nowhere\n---\n"
    (tmp_path / "README.md").write_text(above)
    ProVPTConfig().save_pretrained(tmp_path / "alone")
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == ["adapter_config.json"]
    assert (tmp_path / "README.md").read_text() == above
    # Nor does it change one that is there.
    ProVPTConfig().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == above


def test_tensors_of_another_method_get_no_card(tmp_path):
    save_file({"lora_A": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    ProVPTConfig().save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_a_readme_above_that_is_not_peft_s_is_left_alone(tmp_path, base):
    (tmp_path / "README.md").write_text("---\nbase_model: /nowhere\n---\n# My project\n")
    before = (tmp_path / "README.md").read_bytes()
    prompted(base).save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "README.md").read_bytes() == before


def test_the_card_of_another_adapter_above_is_left_alone(tmp_path, base):
    get_peft_model(tiny.make("vit"), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    path = tmp_path / "README.md"
    path.write_text(path.read_text().replace("library_name: peft", f"library_name: peft\nbase_model: {base}"))
    before = path.read_text()
    tiny.prompted(tiny.make("vit")).save_pretrained(tmp_path / "provpt")
    assert path.read_text() == before


# ---- cards that others put over ours --------------------------------------------------------------------------------


def is_whole(folder):
    """Whether a card has our part once, below its title, and its snippet runs."""
    text = (folder / "README.md").read_text()
    exec(snippet(folder).replace('"."', repr(str(folder))), {})
    assert text.count("| block |") == text.count("provpt_peft: start") == text.count("provpt_peft: end") == 1
    assert text.index("\n# ") < text.index("provpt_peft: start")
    assert metadata(folder)["library_name"] == "peft"
    assert {"peft", "provpt", "visual-prompt-tuning"} <= set(metadata(folder)["tags"])
    assert "base_model" not in metadata(folder)
    return True


@pytest.mark.parametrize("callback", [True, False])
def test_the_trainer_s_card_has_our_part(tmp_path, base, callback):
    trainer, _ = make_trainer(tmp_path / "out", moving(score_images=8), callback=callback, model=prompted(base))
    trainer.train()
    trainer.save_model()
    for _ in range(2):
        trainer.create_model_card()
        assert is_whole(tmp_path / "out")
        text = (tmp_path / "out" / "README.md").read_text()
        assert "### Training hyperparameters" in text
        assert text.index("generated automatically") < text.index("# out") < text.index("| block |")
        assert ("](distribution.png)" in text) == callback
    counts = trainer.model.base_model.prompt_distribution()
    assert f"| prompts | {' | '.join(map(str, counts))} |\n" in text
    trainer.model.base_model.move_prompt(5, 1)
    trainer.save_model()
    assert is_whole(tmp_path / "out")
    counts = trainer.model.base_model.prompt_distribution()
    assert f"| prompts | {' | '.join(map(str, counts))} |\n" in (tmp_path / "out" / "README.md").read_text()


def test_the_trainer_s_card_of_a_loaded_adapter_has_our_part(tmp_path, base):
    prompted(base).save_pretrained(tmp_path / "out")
    model = PeftModel.from_pretrained(transformers.ViTForImageClassification.from_pretrained(base), tmp_path / "out")
    make_trainer(tmp_path / "out", callback=False, model=model)[0].create_model_card()
    assert is_whole(tmp_path / "out")


def test_a_bare_model_s_snippet_is_the_same_in_the_trainer_s_card(tmp_path, base):
    model = prompted(base, model_class=transformers.ViTModel, id2label=None, modules_to_save=None)
    model.save_pretrained(tmp_path / "out")
    before = snippet(tmp_path / "out")
    assert "ViTModel" in before
    (tmp_path / "out" / "README.md").write_text("# Another card\n")
    model.create_or_update_model_card(str(tmp_path / "out"))
    assert snippet(tmp_path / "out") == before


def test_copies_write_our_part_too_and_peft_s_class_is_left_alone(tmp_path, base):
    model = prompted(base)
    model.save_pretrained(tmp_path / "out")
    assert PeftModel.create_or_update_model_card.__module__.startswith("peft")
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert clone.create_or_update_model_card.__self__ is clone
        clone.save_pretrained(tmp_path / "clone")
        (tmp_path / "clone" / "README.md").write_text("# Another card\n")
        clone.create_or_update_model_card(str(tmp_path / "clone"))
        assert is_whole(tmp_path / "clone")


# PEFT's own, where it may not ask the Hub for the base model's config.
@pytest.mark.filterwarnings("ignore:Could not find a config file in someone/vit:UserWarning")
def test_a_hub_id_is_filled_in_where_a_card_has_none(tmp_path):
    model = tiny.make("vit")
    model.name_or_path = "someone/vit"
    tiny.prompted(model, id2label=NAMES).save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("---\nlibrary_name: transformers\ntags:\n- mine\n---\n# Another card\n")
    our_card.update_model_card(str(tmp_path))
    found = metadata(tmp_path)
    assert (found["library_name"], found["base_model"]) == ("peft", "someone/vit")
    assert found["tags"] == ["base_model:adapter:someone/vit", "mine", "peft", "provpt", "visual-prompt-tuning"]
    (tmp_path / "README.md").write_text("---\nbase_model: other/vit\n---\n")
    our_card.update_model_card(str(tmp_path))
    assert metadata(tmp_path)["base_model"] == "other/vit"
