"""Loading a classifier from its adapter in one call, and adapter folders that are broken or hostile."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.auto.image_processing_auto import AutoImageProcessor

import provpt_cli
import provpt_peft
from provpt_peft import ProVPTConfig, check_adapter, load_image_classifier, push_to_hub
from provpt_peft.share import hub


NAMES = {0: "daisy", 1: "rose", 2: "tulip"}
PROMPTS = "base_model.bank.provpt_prompts"
BLOCKS = "base_model.bank.provpt_prompt_blocks"
HEAD = "base_model.model.classifier.weight"


def save_base(folder, **config):
    model = tiny.make("vit", **config)
    model.save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return model


def save_adapter(folder, base, id2label=NAMES, **config):
    """An adapter of the base model in a folder, unlike a fresh one, with label names that the base does not have."""
    model = transformers.AutoModelForImageClassification.from_pretrained(base)
    if id2label is not None:
        model.config.id2label = id2label
    model = tiny.unlike_fresh(tiny.prompted(model, id2label=id2label, **config).eval())
    model.save_pretrained(folder)
    return model


@pytest.fixture
def base(tmp_path):
    save_base(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path, base):
    save_adapter(tmp_path / "adapter", base)
    return tmp_path / "adapter"


def change_tensors(folder, **changes):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path)


def change_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---- one call -------------------------------------------------------------------------------------------------------


def test_one_call_rebuilds_model_processor_and_labels(tmp_path, base):
    saved = save_adapter(tmp_path / "adapter", base)
    model, image_processor, labels = load_image_classifier(tmp_path / "adapter")
    assert isinstance(model, PeftModel)
    assert not any(module.training for module in model.modules())
    assert labels == NAMES
    assert model.base_model.prompt_distribution() == saved.base_model.prompt_distribution() == [1, 2, 3, 5]
    image = Image.effect_noise((50, 40), 100).convert("RGB")
    inputs = image_processor(image, return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, saved(**inputs).logits)


def test_pipeline_gives_the_label_names(adapter):
    model, image_processor, labels = load_image_classifier(adapter)
    pipeline = transformers.pipeline("image-classification", model=model, image_processor=image_processor)
    image = Image.effect_noise((50, 40), 100).convert("RGB")
    with torch.no_grad():
        probabilities = model(**image_processor(image, return_tensors="pt")).logits[0].softmax(-1).tolist()
    results = pipeline(image)
    assert {result["label"]: pytest.approx(result["score"]) for result in results} == {
        labels[index]: probability for index, probability in enumerate(probabilities)
    }


@pytest.mark.parametrize(
    "load",
    [
        lambda adapter, base: transformers.pipeline(
            "image-classification", model=str(adapter), image_processor=str(base)
        ),
        lambda adapter, base: transformers.AutoModelForImageClassification.from_pretrained(adapter),
        lambda adapter, base: transformers.ViTForImageClassification.from_pretrained(base).load_adapter(str(adapter)),
    ],
    ids=["pipeline", "auto", "load_adapter"],
)
def test_what_transformers_cannot_load_is_told_the_way(adapter, base, load):
    message = r"got a bare ViTForImageClassification\. .* with `provpt_peft.load_image_classifier\(adapter\)`"
    with pytest.raises(ValueError, match=message):
        load(adapter, base)


def test_what_cannot_be_uploaded_makes_no_repository(monkeypatch):
    monkeypatch.setattr(hub, "HfApi", lambda **kwargs: pytest.fail("the Hub was asked"))
    model = tiny.make("vit")
    with pytest.raises(ValueError, match="`model` must be a `PeftModel`, got ViTForImageClassification"):
        provpt_peft.push_to_hub(model, "me/flowers")
    with pytest.raises(AttributeError, match="save_pretrained"):
        provpt_peft.push_to_hub(tiny.prompted(model), "me/flowers", image_processor=object())


def test_nothing_needs_torchvision(adapter):
    code = (
        "import sys; sys.modules['torchvision'] = None\n"
        "import tiny; from provpt_peft import load_image_classifier\n"
        f"model, _, labels = load_image_classifier({str(adapter)!r})\n"
        "made = tiny.prompted(tiny.make('vit'))\n"
        "print(labels, *(tuple(m(pixel_values=tiny.images()).logits.shape) for m in (model, made)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tiny.FOLDER, check=True)
    assert done.stdout.strip() == f"{NAMES} (2, {len(NAMES)}) (2, 3)"


def test_image_processor_of_the_adapter_comes_first(adapter):
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(adapter)
    assert load_image_classifier(adapter).image_processor.size == {"height": 16, "width": 16}


def test_image_processor_that_a_processor_of_several_inputs_saved(adapter):
    tiny.processor(16).save_pretrained(adapter)
    assert not (adapter / "preprocessor_config.json").exists()
    image_processor = load_image_classifier(adapter).image_processor
    assert image_processor.crop_size == {"height": 16, "width": 16}
    assert image_processor.to_dict() == AutoImageProcessor.from_pretrained(adapter).to_dict()


@pytest.mark.parametrize("content", ['{"processor_class": "CLIPProcessor"}', '{"image_processor": null}'])
def test_a_processor_without_images_leaves_the_base_model_s(adapter, content):
    (adapter / "processor_config.json").write_text(content)
    assert load_image_classifier(adapter).image_processor.size == {"height": 32, "width": 32}


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize(
    "content", ["", "[]", '{"image_processor": {"size"', '{"image_processor": {"image_processor_type": "X"}}']
)
def test_image_processor_that_cannot_be_read(monkeypatch, adapter, name, content):
    monkeypatch.setattr(transformers.AutoModelForImageClassification, "from_pretrained", None)
    (adapter / name).write_text(content)
    message = rf"^{adapter}: an adapter's own image processor must be one .* can load, got .* Save it again"
    with pytest.raises(ValueError, match=message):
        load_image_classifier(adapter)


@pytest.mark.parametrize(("size", "fits"), [((16, 16), False), ((16, 32), False), ((32, 32), True), (None, True)])
def test_images_of_another_size_than_the_base_model_s(adapter, base, size, fits):
    model = load_image_classifier(adapter).model
    if size is not None:
        model.train()(pixel_values=torch.randn(1, 3, *size), interpolate_pos_encoding=True)
        # Only training counts.
        with torch.no_grad():
            model(pixel_values=torch.randn(1, 3, 48, 48), interpolate_pos_encoding=True)
        model.eval()(pixel_values=torch.randn(1, 3, 48, 48), interpolate_pos_encoding=True)
        model.save_pretrained(adapter)
    if not fits:
        with pytest.raises(ValueError, match=f"must be trained on images of .* size, 32 x 32 .*, got 16 x {size[1]}"):
            load_image_classifier(adapter)
        pool = provpt_peft.ClassifierPool(base)
        with pytest.raises(ValueError, match="must be trained on images of the base model's size"):
            pool.load("flowers", adapter)
        # With its own image processor there is nothing to guess.
        transformers.ViTImageProcessorPil(size={"height": 16, "width": size[1]}).save_pretrained(adapter)
    load_image_classifier(adapter)


def test_an_adapter_without_any_image_processor(adapter, base):
    (base / "preprocessor_config.json").unlink()
    with pytest.raises(
        OSError, match=r"needs an image processor, but its folder has none.* `base_model`, or save .*save_pretrained"
    ):
        load_image_classifier(adapter)


def test_a_config_of_two_models_keeps_their_image_sizes_apart():
    config = ProVPTConfig()
    first, second = (tiny.make("vit") for _ in range(2))
    get_peft_model(first, config).train()(tiny.images())
    assert config.image_size == [32, 32]
    assert get_peft_model(second, config).peft_config["default"].image_size is None


def test_a_new_number_of_classes_comes_from_the_adapter(tmp_path, base):
    names = {0: "a", 1: "b", 2: "c", 3: "d", 4: "e"}
    settings = dict(id2label=names, ignore_mismatched_sizes=True)
    model = transformers.AutoModelForImageClassification.from_pretrained(base, **settings)
    model = tiny.prompted(model, id2label=names).eval()
    model.save_pretrained(tmp_path / "adapter")
    loaded, _, labels = load_image_classifier(tmp_path / "adapter")
    assert labels == names
    with torch.no_grad():
        assert torch.equal(loaded(tiny.images()).logits, model(tiny.images()).logits)


def test_hub_ids_are_downloaded_and_only_the_files_that_are_read(monkeypatch, adapter):
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **kwargs: asked.append((args, kwargs)) or str(adapter))
    assert load_image_classifier("someone/flowers", cache_dir="somewhere").labels == NAMES
    files = ["adapter_config.json", "adapter_model.safetensors", "preprocessor_config.json", "processor_config.json"]
    assert asked == [(("someone/flowers",), dict(allow_patterns=files, cache_dir="somewhere"))]


def test_other_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`adapter` must be a folder or a Hub id, got '.*nowhere', which is neither"):
        load_image_classifier(tmp_path / "nowhere")


@pytest.mark.parametrize("name", [None, "", "/nowhere/vit", 5])
def test_base_model_that_is_not_here(tmp_path, base, adapter, name):
    change_config(adapter, base_model_name_or_path=name)
    with pytest.raises(ValueError, match=rf"adapter_config.json: the base model .* got {name!r}. Pass .*`base_model`"):
        load_image_classifier(adapter)
    assert load_image_classifier(adapter, base_model=base).labels == NAMES


@pytest.mark.parametrize("name", ["base", "./base"])
def test_a_local_base_model_from_another_folder(tmp_path, monkeypatch, base, name):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    save_adapter("adapter", name)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained("adapter")
    pool = provpt_peft.ClassifierPool(name)
    pool.load("flowers", "adapter")
    monkeypatch.chdir(tmp_path / "other")
    assert load_image_classifier("../adapter").labels == NAMES
    # PEFT sets the name of the base model of an added adapter only when it is saved.
    monkeypatch.chdir(tmp_path)
    model = tiny.prompted(transformers.AutoModelForImageClassification.from_pretrained(name))
    model.add_adapter("second", ProVPTConfig(num_prompts=1, modules_to_save=["classifier"]))
    model.save_pretrained("both")
    for saved in ("both", "both/second"):
        assert ProVPTConfig.from_pretrained(saved).base_model_name_or_path == str(base)
    # A config that another model used does not bring that one's name.
    config = model.peft_config["second"]
    tiny.make("vit").save_pretrained("third")
    model = tiny.prompted(transformers.AutoModelForImageClassification.from_pretrained("third"))
    model.add_adapter("second", config)
    model.save_pretrained("both")
    assert ProVPTConfig.from_pretrained("both/second").base_model_name_or_path == str(tmp_path / "third")
    monkeypatch.chdir(tmp_path / "other")
    # In files of earlier versions the path is as it was given.
    change_config(tmp_path / "adapter", base_model_name_or_path=name)
    with pytest.raises((OSError, ValueError), match=rf"the base model must be .* got '{name}'.* as `base_model`"):
        load_image_classifier("../adapter", local_files_only=True)
    assert load_image_classifier("../adapter", base_model=base).labels == NAMES


def test_the_base_model_s_revision_is_used(adapter, monkeypatch):
    change_config(adapter, revision="v2")
    asked = []

    def from_pretrained(name, **settings):
        asked.append(settings.get("revision"))
        raise OSError("not here")

    monkeypatch.setattr(transformers.AutoModelForImageClassification, "from_pretrained", from_pretrained)
    with pytest.raises(OSError, match="not here"):
        load_image_classifier(adapter)
    # Of another base model it says nothing.
    with pytest.raises(OSError, match="not here"):
        load_image_classifier(adapter, base_model=ProVPTConfig.from_pretrained(adapter).base_model_name_or_path)
    assert asked == ["v2", None]


@pytest.mark.parametrize("name", ["default", "flowers"])
def test_only_the_active_adapter_is_uploaded(monkeypatch, name):
    model = tiny.prompted(tiny.make("vit"), adapter_name=name)
    model.add_adapter("other", ProVPTConfig(num_prompts=1))
    uploaded = {}

    class Api:
        def __init__(self, token):
            pass

        def create_repo(self, repo_id, **settings):
            return argparse.Namespace(repo_id=repo_id)

        def upload_folder(self, repo_id, folder_path, commit_message):
            uploaded.update(
                {str(p.relative_to(folder_path)): p.read_text() for p in Path(folder_path).rglob("*.json")}
            )
            return argparse.Namespace(commit_url="commit")

    monkeypatch.setattr("provpt_peft.share.hub.HfApi", Api)
    assert push_to_hub(model, "me/flowers") == "commit"
    assert list(uploaded) == ["adapter_config.json"]
    assert json.loads(uploaded["adapter_config.json"])["num_prompts"] == 3


# ---- labels in the config -------------------------------------------------------------------------------------------


def test_labels_are_remembered_from_an_image_classifier_only():
    model = tiny.make("vit")
    model.config.id2label = NAMES
    config = ProVPTConfig()
    config.remember_labels(model.vit)
    assert config.id2label is None
    config.remember_labels(torch.nn.Linear(2, 2))
    assert config.id2label is None
    config.remember_labels(model)
    assert config.id2label == NAMES
    assert config.id2label is not model.config.id2label
    config = ProVPTConfig(id2label={0: "given"})
    config.remember_labels(model)
    assert config.id2label == {0: "given"}


def test_labels_are_remembered_when_the_adapter_is_saved(tmp_path):
    model = tiny.make("vit")
    prompted = tiny.prompted(model)
    prompted.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path).id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    model.config.id2label = NAMES
    prompted.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path).id2label == NAMES


def test_names_that_a_file_has_beat_the_model_s_unless_they_are_none(tmp_path):
    tiny.prompted(tiny.make("vit")).save_pretrained(tmp_path)
    named = tiny.make("vit")
    named.config.id2label = NAMES
    PeftModel.from_pretrained(named, tmp_path, is_trainable=True).save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path).id2label == NAMES
    PeftModel.from_pretrained(tiny.make("vit"), tmp_path, is_trainable=True).save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path).id2label == NAMES


BIRDS = {0: "robin", 1: "crow", 2: "owl"}


def loaded_onto(folder, names, problem_type=None):
    """An adapter on a fresh model with label names of its own, to train on."""
    model = tiny.make("vit")
    model.config.id2label, model.config.problem_type = names, problem_type
    return PeftModel.from_pretrained(model, folder, is_trainable=True)


def test_the_names_of_a_file_hold_until_the_adapter_is_trained_on_others(tmp_path, adapter):
    model = loaded_onto(adapter, BIRDS, "multi_label_classification")
    model.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path).id2label == NAMES
    model.train()(pixel_values=tiny.images(2))
    model.save_pretrained(tmp_path)
    config = ProVPTConfig.from_pretrained(tmp_path)
    assert (config.id2label, config.problem_type) == (BIRDS, "multi_label_classification")


def test_names_that_were_given_hold_when_the_adapter_is_trained(tmp_path, adapter):
    model = loaded_onto(adapter, BIRDS)
    model.add_adapter("given", ProVPTConfig(num_prompts=1, id2label=NAMES))
    model.set_adapter("given")
    model.train()(pixel_values=tiny.images(2))
    model.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path / "given").id2label == NAMES


def test_each_adapter_has_the_names_that_it_was_trained_with(tmp_path):
    model = tiny.prompted(tiny.make("vit")).train()
    model.base_model.model.config.id2label = NAMES
    model(pixel_values=tiny.images(2))
    model.add_adapter("birds", ProVPTConfig(num_prompts=1, modules_to_save=["classifier"]))
    model.set_adapter("birds")
    model.base_model.model.config.id2label = BIRDS
    model(pixel_values=tiny.images(2))
    # Whichever is active when they are saved.
    model.set_adapter("default")
    model.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path).id2label == NAMES
    assert ProVPTConfig.from_pretrained(tmp_path / "birds").id2label == BIRDS


def test_patches_instead_of_images_are_training_too(tmp_path):
    model = tiny.prompted(tiny.make("siglip2")).train()
    model.base_model.model.config.id2label = NAMES
    model(**tiny.inputs("siglip2"))
    model.add_adapter("birds", ProVPTConfig(num_prompts=1, modules_to_save=["classifier"]))
    model.set_adapter("birds")
    model.base_model.model.config.id2label = BIRDS
    model(**tiny.inputs("siglip2"))
    model.set_adapter("default")
    model.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path).id2label == NAMES
    assert ProVPTConfig.from_pretrained(tmp_path / "birds").id2label == BIRDS


def test_the_model_s_config_has_the_labels_of_the_active_adapter(tmp_path, adapter, base):
    birds = tiny.prompted(tiny.make("vit"))
    birds.base_model.model.config.id2label = BIRDS
    birds.save_pretrained(tmp_path / "birds")
    model, _, _ = load_image_classifier(adapter, base_model=base)
    model.load_adapter(tmp_path / "birds", "birds", is_trainable=True)
    assert model.config.id2label == NAMES
    model.set_adapter("birds")
    assert model.config.id2label == BIRDS
    assert model.config.label2id == {"robin": 0, "crow": 1, "owl": 2}
    # Those are the labels that it is trained with, and that are saved.
    model.train()(pixel_values=tiny.images(2))
    model.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path / "birds").id2label == BIRDS
    assert ProVPTConfig.from_pretrained(tmp_path).id2label == NAMES
    with pytest.warns(UserWarning, match="Setting active adapter to default"):
        model.delete_adapter("birds")
    assert model.config.id2label == NAMES


def test_an_adapter_without_labels_goes_by_the_model_s_own():
    model = tiny.make("vit")
    model.config.id2label = BIRDS
    prompted = tiny.prompted(model, id2label=NAMES, problem_type="regression")
    # What the user put there stays; what is missing is the adapter's.
    assert (model.config.id2label, model.config.problem_type) == (BIRDS, "regression")
    prompted.add_adapter("other", ProVPTConfig(num_prompts=1))
    prompted.set_adapter("other")
    assert (model.config.id2label, model.config.problem_type) == (BIRDS, None)
    model.config.problem_type = "multi_label_classification"
    prompted.add_adapter("third", ProVPTConfig(num_prompts=1, problem_type="multi_label_classification"))
    prompted.set_adapter("third")
    assert model.config.problem_type == "multi_label_classification"


def test_labels_for_another_number_of_classes_are_not_shown():
    model = tiny.make("vit")  # of three classes
    tiny.prompted(model, id2label={0: "no", 1: "yes"})
    assert model.config.num_labels == 3


@pytest.mark.parametrize("from_file", [True, False])
def test_the_loss_is_that_of_the_adapter_s_kind_of_labels(tmp_path, from_file):
    model = tiny.prompted(tiny.make("vit"), problem_type="regression")
    if from_file:
        model.save_pretrained(tmp_path)
        model = PeftModel.from_pretrained(tiny.make("vit"), tmp_path, is_trainable=True)
    targets = torch.tensor([[0.5, 2.0, -1.0], [0.0, 1.0, 3.0]])
    output = model(pixel_values=tiny.images(2), labels=targets)
    assert output.loss.item() == pytest.approx(((output.logits - targets) ** 2).mean().item())
    model.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path).problem_type == "regression"


def test_two_kinds_of_labels_are_refused():
    model = tiny.make("vit")
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match=r"`problem_type` must be the same .* 'regression' and 'multi_label_class"):
        tiny.prompted(model, problem_type="regression")


@pytest.mark.parametrize(
    ("labels", "kind", "shown"),
    [
        (torch.tensor([0, 2]), "single_label_classification", "labels[logits.argmax(-1).item()]"),
        (torch.tensor([[0.0, 1, 1], [1, 0, 0]]), "multi_label_classification", "(logits[0] > 0)"),
    ],
)
def test_the_kind_of_labels_is_kept(tmp_path, base, labels, kind, shown):
    prompted = tiny.prompted(transformers.AutoModelForImageClassification.from_pretrained(base))
    # transformers tells it by the first labels.
    prompted(pixel_values=tiny.images(2), labels=labels)
    prompted.save_pretrained(tmp_path / "adapter")
    model, _, _ = load_image_classifier(tmp_path / "adapter", base_model=base)
    assert model.config.problem_type == kind
    assert shown in (tmp_path / "adapter" / "README.md").read_text()
    with pytest.raises(ValueError, match=r"`problem_type` must be one of regression, .* got 'other'"):
        ProVPTConfig(problem_type="other")


def test_a_config_of_the_caller_s_own(adapter, base):
    config = transformers.AutoConfig.from_pretrained(base, id2label={0: "a", 1: "b", 2: "c"})
    assert load_image_classifier(adapter, config=config).labels == {0: "a", 1: "b", 2: "c"}


def test_labels_survive_json(tmp_path):
    names = {index: f"class {index}" for index in range(12)}
    ProVPTConfig(id2label=names).save_pretrained(tmp_path)
    assert list(ProVPTConfig.from_pretrained(tmp_path).id2label.items()) == list(names.items())


@pytest.mark.parametrize("id2label", [["daisy", "rose"], {"daisy": 0}, 3])
def test_bad_labels_are_refused(id2label):
    with pytest.raises(ValueError, match="`id2label` must map the number of each class to its name, got"):
        ProVPTConfig(id2label=id2label)


# ---- number of classes ----------------------------------------------------------------------------------------------


def test_saved_head_and_base_model_of_different_numbers_of_classes(tmp_path, base):
    save_adapter(tmp_path / "adapter", base, id2label=None)
    change_config(tmp_path / "adapter", id2label=None)
    save_base(tmp_path / "other", num_labels=5)
    message = r"adapter_model.safetensors: .* classifier\.\w+ for 3 classes saved and 5 in '.*other'.*as `id2label`"
    with pytest.raises(ValueError, match=message):
        load_image_classifier(tmp_path / "adapter", base_model=tmp_path / "other")
    assert load_image_classifier(tmp_path / "adapter", base_model=tmp_path / "other", id2label=NAMES).labels == NAMES


def test_saved_head_and_labels_of_different_numbers_of_classes(adapter):
    change_config(adapter, id2label={0: "a", 1: "b"})
    message = r"adapter_model.safetensors: .* each of the 2 labels in .*, got .*classifier\.\w+' of shape \(3,"
    for function in (check_adapter, load_image_classifier):
        with pytest.raises(ValueError, match=message):
            function(adapter)


def test_labels_and_the_base_model_s_own_head_of_different_numbers_of_classes(tmp_path, base):
    save_adapter(tmp_path / "adapter", base, modules_to_save=None)
    save_base(tmp_path / "other", num_labels=5)
    message = (
        r"got classifier\.\w+ for 3 classes by the labels and 5 in '.*other'.* with its head in `modules_to_save`"
    )
    with pytest.raises(ValueError, match=message):
        load_image_classifier(tmp_path / "adapter", base_model=tmp_path / "other")


def test_no_head_anywhere(tmp_path, base):
    save_adapter(tmp_path / "adapter", base, modules_to_save=None)
    transformers.ViTModel.from_pretrained(base).save_pretrained(tmp_path / "bare")
    transformers.ViTImageProcessorPil().save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"must have a head, got no \['classifier.bias', 'classifier.weight'\]"):
        load_image_classifier(tmp_path / "adapter", base_model=tmp_path / "bare")


def test_peft_s_own_error_leaves_a_base_model_that_unloads(adapter):
    base = tiny.make("vit", num_labels=5)
    with torch.no_grad():
        before = base(tiny.images()).logits
    model = tiny.prompted(base)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_adapter(adapter, "other")
    unloaded = model.unload()
    assert unloaded is base
    with torch.no_grad():
        assert torch.equal(unloaded.eval()(tiny.images()).logits, before)


# ---- adapter folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [dict(), dict(num_prompts=[0, 5, 1, 0]), dict(modules_to_save=None), dict(id2label=None)],
)
def test_good_adapters_pass(tmp_path, config):
    tiny.prompted(tiny.make("vit"), **config).save_pretrained(tmp_path)
    assert check_adapter(tmp_path) is None


@pytest.mark.parametrize("family", tiny.ALL_FAMILIES)
def test_good_adapters_of_each_family_pass(tmp_path, family):
    tiny.prompted(tiny.make(family), id2label=NAMES).save_pretrained(tmp_path)
    check_adapter(str(tmp_path))


def test_half_precision_passes(tmp_path):
    tiny.prompted(tiny.make("vit").to(torch.bfloat16)).to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_file(tmp_path / "adapter_model.safetensors")[PROMPTS].dtype == torch.bfloat16
    check_adapter(tmp_path)


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def truncate(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def corrupt_header(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"X32"', 1))


def pickle_only(folder):
    path = folder / "adapter_model.safetensors"
    torch.save(load_file(path), folder / "adapter_model.bin")
    path.unlink()


def config_of_lora(folder):
    LoraConfig(target_modules=["q_proj"]).save_pretrained(folder)


def tensors(**changes):
    return lambda folder: change_tensors(folder, **changes)


def settings(**changes):
    return lambda folder: change_config(folder, **changes)


HOSTILE = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), r"config.json: .* this file, got none"),
    "config is a folder": (
        lambda folder: (
            (folder / "adapter_config.json").rename(folder / "x") and (folder / "adapter_config.json").mkdir()
        ),
        r"config.json: .* this file, got none",
    ),
    "empty config": (write("adapter_config.json", b""), r"config.json: the file must be JSON, got Expecting value"),
    "cut config": (
        write("adapter_config.json", b'{"peft_type": "PRO'),
        r"config.json: .* JSON, got Unterminated string",
    ),
    "binary config": (
        write("adapter_config.json", b"\xff\xfe\x00"),
        r"config.json: .* must be JSON, got 'utf-8' codec",
    ),
    "deep config": (write("adapter_config.json", b"[" * 10**6), r"config.json: .* must be JSON, got .*recursion"),
    "config is a list": (
        write("adapter_config.json", b"[1]"),
        r"config.json: `peft_type` must be 'PROVPT', got \[1\]",
    ),
    "no method": (write("adapter_config.json", b"{}"), r"config.json: `peft_type` must be 'PROVPT', got None"),
    "another method": (
        config_of_lora,
        r"config.json: `peft_type` must be 'PROVPT', got 'LORA'. Load adapters of other",
    ),
    "bad setting": (settings(num_prompts=0), r"config.json: `num_prompts` must be at least 1, got 0"),
    "setting of a wrong type": (settings(prompt_dropout="high"), r"config.json: .*must be in"),
    "no tensors": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        r"model.safetensors: weights are only read from this file, got none. Save the adapter again",
    ),
    "pickle": (pickle_only, r"model.safetensors: .* got only adapter_model.bin, a pickle file, which can run code"),
    "empty tensors": (write("adapter_model.safetensors", b""), r"model.safetensors: .*complete safetensors, got"),
    "truncated tensors": (truncate, r"model.safetensors: the file must be complete safetensors, got"),
    "corrupted tensors": (corrupt_header, r"model.safetensors: the file must be complete safetensors, got"),
    "header longer than the file": (
        write("adapter_model.safetensors", b"\xff" * 7 + b"\x00" + b"{}"),
        r"model.safetensors: the file must be complete safetensors, got",
    ),
    "pickle under a safe name": (
        lambda folder: torch.save({}, folder / "adapter_model.safetensors"),
        r"model.safetensors: the file must be complete safetensors, got",
    ),
    "no prompts": (
        tensors(**{PROMPTS: None}),
        r"model.safetensors: An adapter consists of prompts and their blocks, but prompts are missing",
    ),
    "no blocks": (tensors(**{BLOCKS: None}), r"but the prompts' blocks are missing. Save it again"),
    "surplus prompts": (
        tensors(**{f"{PROMPTS}.other": torch.zeros(12, 32)}),
        r"no prompt tensors other than prompts .* got \['base_model.bank.provpt_prompts.other'\] as well",
    ),
    "no head": (
        tensors(**{HEAD: None, "base_model.model.classifier.bias": None}),
        r"model.safetensors: there must be tensors of `modules_to_save` = \['classifier'\], got none",
    ),
    "whole-number prompts": (
        tensors(**{PROMPTS: torch.zeros(12, 32, dtype=torch.int64)}),
        r"prompts must be floating point of shape \(12, width\), got torch.int64 of shape \(12, 32\)",
    ),
    "flat prompts": (tensors(**{PROMPTS: torch.zeros(384)}), r"floating point .* got torch.float32 of shape \(384,\)"),
    "zero prompts": (tensors(**{PROMPTS: torch.zeros(0, 32)}), r"got torch.float32 of shape \(0, 32\)"),
    "zero width": (tensors(**{PROMPTS: torch.zeros(12, 0)}), r"got torch.float32 of shape \(12, 0\)"),
    "too many prompts": (
        tensors(**{PROMPTS: torch.zeros(13, 32)}),
        r"prompts must be floating point of shape \(12, width\), got torch.float32 of shape \(13, 32\)",
    ),
    "another sum": (
        settings(num_prompts=[3, 3, 3, 4]),
        r"prompts must be floating point of shape \(13, width\), got torch.float32 of shape \(12, 32\)",
    ),
    "another number of blocks": (settings(num_blocks=3), r"of shape \(9, width\), got .* of shape \(12, 32\)"),
    "absurd number of blocks": (settings(num_blocks=10**12), r"`num_blocks` must be a whole number from 1"),
    "a list for other blocks": (
        settings(num_prompts=[6, 6]),
        r"model.safetensors: An adapter only fits .* has a number for each of 2 blocks, and the model has 4",
    ),
    "saved by version 0.1, no multiple": (
        lambda folder: (
            change_config(folder, num_blocks=None),
            change_tensors(folder, **{PROMPTS: torch.zeros(13, 32)}),
        ),
        r"prompts must be floating point of shape \(12, width\), got torch.float32 of shape \(13, 32\)",
    ),
    "fewer blocks": (
        tensors(**{BLOCKS: torch.ones(11, dtype=torch.int64)}),
        r"or int64 of \(12,\), got .* shape \(11,\)",
    ),
    "fractional blocks": (
        tensors(**{BLOCKS: torch.ones(12)}),
        r"must be one-hot rows of shape \(12, 5\), or int64 of \(12,\), got torch.float32",
    ),
    "narrow blocks": (
        tensors(**{BLOCKS: torch.ones(12, dtype=torch.int32)}),
        r"or int64 of \(12,\), got torch.int32",
    ),
    "negative block": (tensors(**{BLOCKS: torch.arange(12) % 4 - 1}), r"blocks must be in 0 … 4, got -1 … 2"),
    "block above the last": (tensors(**{BLOCKS: torch.arange(12) % 6}), r"blocks must be in 0 … 4, got 0 … 5"),
    "block above the list's last": (
        lambda folder: (
            change_config(folder, num_prompts=[6, 6], num_blocks=2),
            change_tensors(folder, **{BLOCKS: torch.arange(12) % 4}),
        ),
        r"blocks must be in 0 … 2, got 0 … 3",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_broken_adapters_are_refused_before_a_model_is_touched(monkeypatch, adapter, case):
    monkeypatch.setattr(transformers.AutoModelForImageClassification, "from_pretrained", None)
    spoil, message = HOSTILE[case]
    spoil(adapter)
    for function in (check_adapter, load_image_classifier):
        with pytest.raises(ValueError, match=rf"^{adapter}/adapter_.*{message}"):
            function(adapter)


@pytest.mark.parametrize("num_prompts", [3, [3, 3, 3, 3]])
def test_configs_of_version_0_1_have_no_number_of_blocks(adapter, num_prompts):
    change_config(adapter, num_blocks=None, num_prompts=num_prompts)
    check_adapter(adapter)
    assert load_image_classifier(adapter).model.base_model.prompt_distribution() == [1, 2, 3, 5]


def test_a_pickle_file_beside_the_tensors_is_not_read(adapter):
    (adapter / "adapter_model.bin").write_bytes(b"not even a pickle")
    assert load_image_classifier(adapter).labels == NAMES


def test_settings_of_a_newer_version_are_a_warning(adapter):
    change_config(adapter, from_the_future=1, provpt_version="99.0")
    expected = (
        rf"adapter_config.json: .* provpt_peft {provpt_peft.__version__} does not know .*\['from_the_future'\].*99.0"
    )
    for function in (check_adapter, load_image_classifier):
        with pytest.warns(UserWarning, match=expected) as caught:
            function(adapter)
        # Where the user stands, and not once more by PEFT.
        assert [w.filename for w in caught if "from_the_future" in str(w.message)] == [__file__]


# ---- the record of the training, which may come from anywhere -------------------------------------------------------

RECORD = dict(epoch=1, prompt=0, from_block=1, block=4, idleness=0.1, block_idleness=[0.1, 0.2, None, 0.3])


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (5, "`training` must be a dict"),
        (dict(history=5), r"`training\['history'\]` must be of type list"),
        (dict(history=["x"]), "must be of type dict"),
        (dict(history=[RECORD | dict(block=99)]), "`block` of a relocation must be a whole number from 0 to 4"),
        (dict(history=[RECORD | dict(epoch=None)]), "`epoch` of a relocation must be a whole number"),
        (dict(history=[RECORD | dict(epoch=-1)]), "`epoch` of a relocation must be a whole number"),
        (dict(history=[RECORD | dict(prompt=-1)]), "`prompt` of a relocation must be a whole number"),
        (dict(history=[RECORD | dict(idleness="x")]), "`idleness` of a relocation must be a number"),
        (dict(history=[RECORD | dict(block_idleness=[1])]), "a number for each of 4 blocks"),
        (dict(history=[RECORD | dict(prompt=True)]), "`prompt` of a relocation must be a whole number"),
        (dict(history=[RECORD | dict(policy=[1])]), "`policy` of a relocation must map names to numbers"),
        (dict(history=[RECORD | dict(policy={"loss": "x"})]), "`policy` of a relocation must map names to numbers"),
        (dict(history=[RECORD | dict(note=5)]), "`note` of a relocation must be text"),
        (dict(epochs="x"), r"`training\['epochs'\]` must be of type int"),
        (dict(epochs=-1), r"`training\['epochs'\]` must be a whole number of at least 0"),
        (dict(metrics=[1]), r"`training\['metrics'\]` must be of type dict"),
    ],
)
def test_records_of_training_that_nobody_wrote(tmp_path, training, message):
    model = tiny.prompted(tiny.make("vit"))
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(training=training)))
    with pytest.raises(ValueError, match=message):
        check_adapter(tmp_path)
    assert provpt_cli.main(["show", str(tmp_path)]) == 1
    # Loaded by PEFT, it can still be saved again.
    if isinstance(training, dict):
        loaded = PeftModel.from_pretrained(tiny.make("vit"), tmp_path)
        loaded.save_pretrained(tmp_path / "again")
        assert "were relocated" not in (tmp_path / "again" / "README.md").read_text()


def test_records_of_newer_versions_pass(tmp_path, capsys):
    model = tiny.prompted(tiny.make("vit"), id2label={0: "a\x1b[31m", 1: "b", 2: "c"})
    model.peft_config["default"].training = dict(epochs=2, history=[RECORD | dict(new=1)], new=2)
    model.peft_config["default"].training["relocation"] = {"relocate_every": 50}
    model.peft_config["default"].training["metrics"] = {"a|b": 0.5, "![](http://x)": 1, "too large": 10**400}
    model.base_model.move_prompt(0, 4)
    model.save_pretrained(tmp_path)
    check_adapter(tmp_path)
    assert provpt_cli.main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "1 move in 2 periods of 50 steps" in shown
    assert "\x1b" not in shown
    assert "too large" not in shown
    assert "| `![](http://x)` | 1 |" in (tmp_path / "README.md").read_text()
    assert "| `a?b` | 0.5 |" in (tmp_path / "README.md").read_text()


def test_a_head_that_the_labels_do_not_fit_can_be_saved(tmp_path):
    model = tiny.make("vit")
    model.classifier = torch.nn.Linear(32, 7)
    prompted = tiny.prompted(model)
    prompted.peft_config["default"].training = dict(epochs=2, history=[RECORD])
    prompted.save_pretrained(tmp_path)
    assert (tmp_path / "distribution.png").is_file()
