"""Many tasks on one backbone: each image's prediction by `load_image_classifier` alone is the oracle."""

import json
import shutil
import threading

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import ViTImageProcessor

from provpt_peft import ClassifierPool, load_image_classifier


TASKS = {"birds": ["hen", "owl"], "cars": ["bus", "van", "car", "cab", "jeep"], "digits": [str(n) for n in range(3)]}


@pytest.fixture
def folder(tmp_path):
    """A backbone, and adapters for tasks of other numbers of classes and prompts, one at another image size."""
    for family in ("vit", "swin"):
        tiny.make(family).save_pretrained(tmp_path / family)
        ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / family)
        for number, (task, labels) in enumerate(TASKS.items()):
            save_task(tmp_path, family, task, labels, seed=number)
    ViTImageProcessor(size={"height": 48, "width": 48}).save_pretrained(tmp_path / "vit-cars")
    return tmp_path


def save_task(folder, family, task, labels, seed=0, **config):
    from transformers import AutoModelForImageClassification

    base = AutoModelForImageClassification.from_pretrained(
        folder / family, id2label=dict(enumerate(labels)), ignore_mismatched_sizes=True
    )
    counts = [seed] * (6 if family == "swin" else 4)
    config = dict(num_prompts=[*counts[:-1], seed + 2]) | config
    model = tiny.prompted(base, **config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "provpt_" in name or "modules_to_save" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder / f"{family}-{task}")


def pictures(count, seed=0):
    generator = np.random.default_rng(seed)
    return [Image.fromarray(generator.integers(0, 255, (20, 20, 3), dtype=np.uint8)) for _ in range(count)]


def alone(folder, images, tasks, family="vit"):
    found = []
    for image, task in zip(images, tasks, strict=True):
        model, processor, labels = load_image_classifier(folder / f"{family}-{task}")
        sizes = {"interpolate_pos_encoding": True}
        with torch.no_grad():
            row = model(**processor(image, return_tensors="pt"), **sizes).logits[0].softmax(dim=-1)
        found.append({labels[number]: row[number].item() for number in row.argsort(descending=True).tolist()})
    return found


def assert_same(predictions, expected):
    for prediction, scores in zip(predictions, expected, strict=True):
        assert list(prediction.scores) == list(scores)
        assert prediction.label == next(iter(scores))
        assert list(prediction.scores.values()) == pytest.approx(list(scores.values()), abs=1e-5)


MIXED = ["cars", "birds", "digits", "birds", "cars"]


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_each_image_is_as_by_itself(folder, family):
    pool = ClassifierPool(folder / family, lambda name: folder / f"{family}-{name}")
    images = pictures(5)
    predictions = pool.classify(images, MIXED)
    assert [prediction.task for prediction in predictions] == MIXED
    assert_same(predictions, alone(folder, images, MIXED, family))
    assert sorted(pool.tasks) == sorted(TASKS)
    assert pool.classify([], []) == []


def test_the_least_recently_used_makes_room(folder):
    found = []

    def find(name):
        found.append(name)
        return folder / f"vit-{name}" if name in TASKS else None

    pool = ClassifierPool(folder / "vit", find, capacity=2)
    images = pictures(5)
    expected = alone(folder, images, MIXED)
    assert_same(pool.classify(images, MIXED), expected)  # three tasks in a pool of two
    assert len(pool.tasks) == 2
    pool.classify(images[:2], ["cars", "birds"])
    pool.classify(images[:1], ["cars"])
    pool.classify(images[:1], ["digits"])
    assert pool.tasks == ["cars", "digits"]
    found.clear()
    pool.classify(images[:2], ["cars", "digits"])
    assert found == []
    with pytest.raises(KeyError, match="no task 'cats'"):
        pool.classify(images[:1], ["cats"])
    assert_same(pool.classify(images, MIXED), expected)


def test_bytes_of_what_is_resident(folder):
    pool = ClassifierPool(folder / "vit")
    pool.load("birds", folder / "vit-birds")
    # 2 prompts of 32 numbers, their rows of 5, a head of 2 * 32 + 2; 4 bytes each.
    assert pool.nbytes == 4 * (2 * 32 + 2 * 5 + 2 * 32 + 2)
    pool.load("birds", folder / "vit-birds")
    assert (pool.tasks, pool.labels("birds")) == (["birds"], TASKS["birds"])
    pool.unload("birds")
    assert (pool.nbytes, pool.tasks) == (0, [])
    assert list(pool._bank.provpt_prompts) == ["none"]
    with pytest.raises(KeyError):
        pool.unload("birds")


def test_kinds_of_labels(folder):
    for task, kind in (("tags", "multi_label_classification"), ("age", "regression")):
        save_task(folder, "vit", task, ["a", "b", "c"], problem_type=kind)
    pool = ClassifierPool(folder / "vit", lambda name: folder / f"vit-{name}")
    image = pictures(1)
    logits = {}
    for task in ("tags", "age"):
        model, processor, labels = load_image_classifier(folder / f"vit-{task}")
        with torch.no_grad():
            row = model(**processor(image[0], return_tensors="pt")).logits[0]
        logits[task] = {labels[number]: row[number] for number in range(3)}
    tags, age = pool.classify(image * 2, ["tags", "age"])
    assert tags.scores == pytest.approx(
        {name: value.sigmoid().item() for name, value in logits["tags"].items()}, abs=1e-5
    )
    assert age.scores == pytest.approx({name: value.item() for name, value in logits["age"].items()}, abs=1e-5)


def test_adapters_that_do_not_fit_are_refused(folder):
    pool = ClassifierPool(folder / "vit")
    pool.load("birds", folder / "vit-birds")
    with pytest.raises(ValueError, match=r"must be for the pool's base model, '.*vit' .*got one for '.*swin'"):
        pool.load("cars", folder / "swin-cars")
    with pytest.raises(ValueError, match="only fits the number of blocks it was made for"):
        pool.load("cars", folder / "swin-cars", same_base=True)
    save_task(folder, "vit", "shallow", ["a", "b"], num_prompts=2, shallow=True)
    with pytest.raises(ValueError, match="VPT-Shallow cannot share a batch"):
        pool.load("shallow", folder / "vit-shallow")
    save_task(folder, "vit", "norm", ["a", "b"], modules_to_save=["classifier", "layernorm"])
    with pytest.raises(ValueError, match=r"a linear head only, got vit\.layernorm"):
        pool.load("norm", folder / "vit-norm")
    path = folder / "vit-cars" / "adapter_model.safetensors"
    tensors = load_file(path)
    head = "base_model.model.classifier.weight"
    save_file(tensors | {head: tensors[head][:, :5].contiguous()}, path)
    with pytest.raises(ValueError, match=r"the head must take the backbone's 32 features, got .*\(5, 5\)"):
        pool.load("cars", folder / "vit-cars")
    save_file({name: tensor for name, tensor in tensors.items() if name != head}, path)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a head must have a weight, got classifier\.bias alone"):
            pool.load("birds", folder / "vit-cars")
    assert len(pool._bank.provpt_prompts) == 2  # the one that no image names, and birds
    save_task(folder, "vit", "twins", ["a", "a", "b"])
    with pytest.raises(ValueError, match="each class must have a unique name"):
        pool.load("twins", folder / "vit-twins")
    path.write_bytes(b"broken")
    other_revision = shutil.copytree(folder / "vit-birds", folder / "vit-birds-v2", dirs_exist_ok=True)
    config = json.loads((other_revision / "adapter_config.json").read_text())
    (other_revision / "adapter_config.json").write_text(json.dumps(config | {"revision": "v2"}))
    with pytest.raises(ValueError, match=r"base model, .* \(revision None\), got one for .* \('v2'\)"):
        pool.load("cars", other_revision)
    with pytest.raises(ValueError, match="must be complete safetensors"):
        pool.load("cars", folder / "vit-cars")
    with pytest.raises(ValueError, match="a task for each image, got 2 images"):
        pool.classify(pictures(2), ["birds"])
    with pytest.raises(ValueError, match="`capacity` must be at least 1, got 0"):
        ClassifierPool(folder / "vit", capacity=0)
    # What is there goes on.
    assert pool.tasks == ["birds"]
    assert_same(pool.classify(pictures(1), ["birds"]), alone(folder, pictures(1), ["birds"]))


def test_a_failure_while_a_task_is_put_in_leaves_the_others(folder, monkeypatch):
    pool = ClassifierPool(folder / "vit", capacity=1)
    pool.load("birds", folder / "vit-birds")
    monkeypatch.setattr("provpt_peft.share.pool.read_blocks", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        pool.load("cars", folder / "vit-cars")
    assert (pool.tasks, len(pool._bank.provpt_prompts)) == (["birds"], 2)


def test_autocast(folder):
    pool = ClassifierPool(folder / "vit", lambda name: folder / f"vit-{name}")
    images = pictures(5)
    expected = pool.classify(images, MIXED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for found, exact in zip(pool.classify(images, MIXED), expected, strict=True):
            assert found.scores == pytest.approx(exact.scores, abs=0.05)


def test_an_oblong_backbone(folder):
    from transformers import AutoModelForImageClassification

    shutil.rmtree(folder / "vit")
    tiny.make("vit", image_size=(32, 16)).save_pretrained(folder / "vit")
    ViTImageProcessor(size={"height": 32, "width": 16}).save_pretrained(folder / "vit")
    model = tiny.prompted(AutoModelForImageClassification.from_pretrained(folder / "vit")).eval()
    model.save_pretrained(folder / "vit-plain")
    pool = ClassifierPool(folder / "vit", lambda name: folder / f"vit-{name}")
    (image,) = pictures(1)
    with torch.no_grad():
        logits = model(**ViTImageProcessor.from_pretrained(folder / "vit")(image, return_tensors="pt")).logits[0]
    scores = pool.classify([image], ["plain"])[0].scores
    assert sorted(scores.values()) == pytest.approx(sorted(logits.softmax(dim=-1).tolist()), abs=1e-5)


def test_an_adapter_without_a_head_has_the_base_model_s(folder):
    model = tiny.prompted(tiny.make("vit"), modules_to_save=None)
    model.base_model.model.name_or_path = model.peft_config["default"].base_model_name_or_path = str(folder / "vit")
    model.save_pretrained(folder / "vit-plain")
    pool = ClassifierPool(folder / "vit", lambda name: folder / f"vit-{name}")
    images = pictures(2)
    assert_same(pool.classify(images, ["plain", "cars"])[:1], alone(folder, images[:1], ["plain"]))


def test_a_head_that_nobody_trained_is_refused(folder):
    """As by `load_image_classifier`: with random weights, predictions would differ from run to run."""
    from transformers import AutoModelForImageClassification

    tiny.make("vit").vit.save_pretrained(folder / "bare")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "bare")
    pool = ClassifierPool(folder / "bare")
    labels = dict(enumerate("abc"))
    for modules, name in ((None, "headless"), (["classifier"], "whole")):
        base = AutoModelForImageClassification.from_pretrained(folder / "bare", id2label=labels)
        tiny.prompted(base, modules_to_save=modules).save_pretrained(folder / name)
    for load in (load_image_classifier, lambda adapter: pool.load("task", adapter)):
        with pytest.raises(ValueError, match=r"the base model must have a head, got no \['classifier\.bias', "):
            load(folder / "headless")
    pool.load("task", folder / "whole")
    assert sorted(pool.labels("task")) == ["a", "b", "c"]


def test_labels_that_do_not_fit_the_base_model_s_head_are_refused(folder):
    save_task(folder, "vit", "five", list("abc"), modules_to_save=None, id2label=dict(enumerate("abcde")))
    pool = ClassifierPool(folder / "vit")
    with pytest.raises(ValueError, match=r"must fit the base model's head.*got 5 labels for 3 classes"):
        pool.load("five", folder / "vit-five")
    assert pool.tasks == []


def test_threads_load_evict_and_classify(folder):
    for number in range(6):
        shutil.copytree(folder / "vit-birds", folder / f"vit-birds{number}")
        save_task(folder, "vit", f"birds{number}", [f"{number}a", f"{number}b"], seed=number)
    names = [f"birds{number}" for number in range(6)]
    images = pictures(6)
    expected = dict(zip(names, alone(folder, images, names), strict=True))
    pool = ClassifierPool(folder / "vit", lambda name: folder / f"vit-{name}", capacity=3)
    failures = []

    def client(seed):
        order = np.random.default_rng(seed)
        for _ in range(10):
            chosen = order.choice(6, size=4).tolist()
            try:
                predictions = pool.classify([images[n] for n in chosen], [names[n] for n in chosen])
                assert_same(predictions, [expected[names[n]] for n in chosen])
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(pool.tasks) == 3
