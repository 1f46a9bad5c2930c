"""The example scripts, as a user runs them, on tiny models and a handful of images."""

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hub_server
import numpy as np
import pytest
import tiny
import torch
from peft import PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, ViTImageProcessor

from examples import dinov2_small
from examples import finetune_image_classification as classification
from examples.research import ceiling, idle_picks, tasks
from examples.research.common import fit, make_optimizer, make_relocator
from examples.research.methods import Recipe
from examples.research.together import Together
from provpt_peft import ProVPTConfig, RelocationConfig, load_image_classifier


ROOT = Path(__file__).parent.parent


def read_results(tmp_path):
    return [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "vit"
    tiny.make("vit").save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.fixture
def image_folder(tmp_path):
    generator = np.random.default_rng(0)
    for label in ("cat", "dog"):
        for number in range(10):
            path = tmp_path / "images" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(path)
    return tmp_path / "images"


def test_finetuning_compares_the_methods(run_script, tmp_path, checkpoint):
    ViTImageProcessor(size={"height": 48, "width": 48}).save_pretrained(checkpoint)
    output = run_script(
        "finetune_image_classification.py", "--model_name_or_path", checkpoint, "--dataset_name", "digits",
        "--image_size", 32, "--methods", "linear", "lora", "vpt-deep", "pro-vpt", "--num_prompts", 2, "--preset", "G",
        "--num_train_epochs", 3, "--max_train_samples", 16, "--max_test_samples", 16, "--use_cpu", "true",
        "--output_dir", tmp_path / "out",
    )  # fmt: skip
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["method"] for row in rows] == ["linear", "lora", "vpt-deep", "pro-vpt"]
    # Head: 32 * 10 + 10 = 330; LoRA: 4 blocks * 2 modules * 2 * 32 = 512; prompts: 4 blocks * 2 * 32 = 256.
    assert [row["trainable_parameters"] for row in rows] == [330, 842, 586, 586]
    assert all(0 <= row["test_accuracy"] <= 1 for row in rows)
    assert output.count("loaded into a fresh model, gives the same predictions") == 3
    for name in ("distribution.png", "distribution_over_time.png"):
        with Image.open(tmp_path / "out" / "pro-vpt" / name) as picture:
            assert picture.width >= 500
    for row in rows:
        # As the last of three epochs has it. The weights of the backbone are in none of the files.
        assert [line["epoch"] for line in row["epochs"]] == [1, 2, 3]
        assert row["validation_accuracy"] == row["epochs"][-1]["validation_accuracy"]
        assert row["file_bytes"] < 4 * row["trainable_parameters"] + 4000
        cells = [row["method"], f"{row['validation_accuracy']:.4f}", f"{row['test_accuracy']:.4f}"]
        assert [*cells, f"{row['trainable_parameters']:,}"] in [line.split()[:4] for line in output.splitlines()]
    assert not list((tmp_path / "out" / "linear").glob("model*"))
    head = load_file(tmp_path / "out" / "linear" / "head.safetensors")
    assert {name: tensor.shape for name, tensor in head.items()} == {
        "classifier.weight": (10, 32), "classifier.bias": (10,),
    }  # fmt: skip
    with Image.open(tmp_path / "out" / "comparison.png") as picture:
        assert picture.width > 1000
    assert f"provpt show {tmp_path / 'out' / 'pro-vpt'}" in output
    # An adapter is loaded with the size that it was trained at.
    _, processor, labels = load_image_classifier(tmp_path / "out" / "pro-vpt")
    assert processor(Image.new("RGB", (8, 8)), return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 32)
    assert len(labels) == 10


def test_finetuning_on_a_folder_of_images(run_script, tmp_path, checkpoint, image_folder):
    output = run_script(
        "finetune_image_classification.py", "--model_name_or_path", checkpoint, "--train_dir", image_folder,
        "--num_prompts", 1, "--num_train_epochs", 2, "--output_dir", tmp_path / "out", "--use_cpu", "true",
    )  # fmt: skip
    assert "train: 16 images, validation: 4 images\n" in output
    # One method, unless more are asked for. Without test images there is no test accuracy.
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (row["method"], row["test_accuracy"]) == ("vpt-deep", None)
    assert f"  vpt-deep      {row['validation_accuracy']:.4f}           -" in output
    base = AutoModelForImageClassification.from_pretrained(checkpoint, num_labels=2, ignore_mismatched_sizes=True)
    model = PeftModel.from_pretrained(base, tmp_path / "out" / "vpt-deep")
    assert len(model.base_model.prompts()) == 4


def test_the_table_is_about_the_weights_that_are_saved(run_script, tmp_path, checkpoint, image_folder):
    """Those of another epoch than the last, at another image size than the checkpoint's."""
    run_script(
        "finetune_image_classification.py", "--model_name_or_path", checkpoint, "--train_dir", image_folder,
        "--validation_dir", image_folder, "--image_size", 48, "--num_train_epochs", 6, "--save_strategy", "epoch",
        "--load_best_model_at_end", "true", "--metric_for_best_model", "loss", "--greater_is_better", "true",
        "--warmup_steps", 0, "--head_learning_rate", 0.03,
        "--output_dir", tmp_path / "out", "--use_cpu", "true",
    )  # fmt: skip
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())
    model, processor, labels = load_image_classifier(tmp_path / "out" / "vpt-deep")
    right = []
    for path in sorted(image_folder.glob("*/*.png")):
        inputs = processor(Image.open(path), return_tensors="pt")
        assert inputs["pixel_values"].shape[-2:] == (48, 48)
        with torch.no_grad():
            logits = model(**inputs, interpolate_pos_encoding=True).logits
        right.append(labels[int(logits.argmax())] == path.parent.name)
    assert row["validation_accuracy"] == pytest.approx(np.mean(right))
    assert row["validation_accuracy"] != row["epochs"][-1]["validation_accuracy"]


def test_training_arguments_are_heeded(run_script, tmp_path, checkpoint, image_folder):
    """The optimizer, and resuming: the same adapter as from a run that was not stopped."""
    arguments = (
        "finetune_image_classification.py", "--model_name_or_path", checkpoint, "--train_dir", image_folder,
        "--num_prompts", 2, "--num_train_epochs", 4, "--output_dir", tmp_path / "out", "--use_cpu", "true",
        "--methods", "pro-vpt",
        "--optim", "sgd", "--optim_args", "momentum=0.75", "--learning_rate", 0.5, "--head_learning_rate", 0.25,
        "--weight_decay", 0.125, "--save_strategy", "epoch", "--lr_scheduler_type", "constant",
    )  # fmt: skip
    run_script(*arguments)
    folder = tmp_path / "out" / "pro-vpt"
    prompts, head = torch.load(folder / "checkpoint-4" / "optimizer.pt")["param_groups"]
    assert [(group["lr"], group["weight_decay"]) for group in (prompts, head)] == [(0.5, 0.0), (0.25, 0.125)]
    assert prompts["momentum"] == head["momentum"] == 0.75
    first = folder.rename(tmp_path / "first")
    results = tmp_path / "out" / "results.json"
    (row,) = json.loads(results.read_text())
    results.write_text(json.dumps([row | {"method": "lora"}, row]))
    run_script(*arguments, "--resume_from_checkpoint", first / "checkpoint-4", "--do_train", "--do_eval")
    # The rows of other methods are still there.
    lora, resumed = json.loads(results.read_text())
    assert (lora["method"], resumed["method"]) == ("lora", "pro-vpt")
    # The time of a part is no time to compare.
    assert row["seconds"] > 0
    assert resumed["seconds"] is None
    assert not (folder / "checkpoint-2").exists()
    name = "adapter_model.safetensors"
    assert (folder / name).read_bytes() == (first / name).read_bytes()
    assert (folder / name).read_bytes() != (first / "checkpoint-4" / name).read_bytes()


SCRIPTS = {
    "finetune_image_classification": ("linear", ["--model_name_or_path", "missing", "--dataset_name", "digits"]),
    "finetune_segmentation": ("head", ["--model_name_or_path", "missing", "--data_folder", "missing"]),
    "finetune_detection": (
        "head", ["--model_name_or_path", "missing", *(
            f"--{split}_{what}=missing" for split in ("train", "test") for what in ("images", "annotations")
        )],
    ),
}  # fmt: skip


def parsed(monkeypatch, script, *arguments):
    module = importlib.import_module(f"examples.{script}")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *SCRIPTS[script][1], "--use_cpu", "true", *arguments])
    result = module.parse()
    return module, result[-1] if isinstance(result, tuple) else result


@pytest.mark.parametrize("script", SCRIPTS)
def test_optimizers_have_a_group_for_prompts_and_one_for_the_head(monkeypatch, script):
    _, defaults = parsed(monkeypatch, script)
    classifies = script == "finetune_image_classification"
    assert (defaults.methods, defaults.num_prompts) == (["vpt-deep"], 10 if classifies else 5)
    options = ["--optim", "rmsprop", "--learning_rate=2", "--head_learning_rate=3", "--weight_decay=4"]
    module, args = parsed(monkeypatch, script, *options)
    model = tiny.prompted(tiny.make("vit"))
    optimizer = module.make_optimizer(model, args)
    assert type(optimizer) is torch.optim.RMSprop
    prompts, head = optimizer.param_groups
    assert [parameter.shape for parameter in prompts["params"]] == [model.base_model.prompts().shape]
    assert (prompts["lr"], prompts["weight_decay"], head["lr"], head["weight_decay"]) == (2, 0, 3, 4)
    assert len(head["params"]) == 2
    # Without prompts. Where only a head can be trained, `--learning_rate` is its own.
    model.base_model.prompts().requires_grad_(False)
    of_head = 2 if script == "finetune_image_classification" else 3
    assert [group["lr"] for group in module.make_optimizer(model, args).param_groups] == [of_head]


@pytest.mark.parametrize(("script", "rate"), [("finetune_segmentation", 1.5e-3), ("finetune_detection", 5e-4)])
def test_the_more_prompts_the_lower_their_rate(monkeypatch, script, rate):
    module, args = parsed(monkeypatch, script, "--num_prompts=20")
    model = tiny.prompted(tiny.make("vit"))
    # 3e-3 and 1e-3 for 5 prompts per block, half as much for 20.
    assert module.make_optimizer(model, args).param_groups[0]["lr"] == pytest.approx(rate)


def test_lora_has_the_same_groups_as_prompts(monkeypatch):
    options = ["--learning_rate=2", "--head_learning_rate=3", "--weight_decay=4", "--methods", "lora"]
    module, args = parsed(monkeypatch, "finetune_image_classification", *options)
    model = get_peft_model(tiny.make("vit"), module.make_config("lora", args))
    inside, head = module.make_optimizer(model, args).param_groups
    # As many weights as 10 prompts per block: 10 * 32 <= 2 modules * 2 matrices * 32 * rank.
    assert {parameter.shape[0] for parameter in inside["params"][::2]} == {3}
    _, args = parsed(monkeypatch, "finetune_image_classification", *options, "--lora_rank", "1")
    assert module.make_config("lora", args).r == 1
    assert (inside["lr"], inside["weight_decay"], head["lr"], head["weight_decay"]) == (2, 0, 3, 4)
    assert len(head["params"]) == 2


REFUSED = [
    (["--resume_from_checkpoint", "missing"], "must be a folder that the Trainer saved, got missing"),
    (["--methods", "vpt-deep", "pro-vpt", "--resume_from_checkpoint", "missing"], "A checkpoint belongs to one"),
    (["--preset", "adding"], "invalid choice"),
    (["--preset", "paper"], "`--methods` must have"),
    (["--num_prompts", "0"], "`num_prompts` must be at least 1"),
    (["--push_to_hub"], "call `provpt_peft.push_to_hub` after training"),
    (["--remove_unused_columns", "true"], "`--remove_unused_columns` has to keep its default"),
    (["--optim_target_modules", "all-linear"], "`--optim_target_modules` has to keep its default"),
    (["--optim", "adamw_8bit"], "bitsandbytes"),
    (["--optim", "adam"], "invalid choice"),
    (["--optim", "sgd"], "needs `--learning_rate`"),
    (["--do_eval"], "--do_eval"),
    (["--prompt_learning_rate", "1"], "not used"),
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: " ".join(value) * isinstance(value, list))
def test_options_that_would_be_ignored_are_refused(monkeypatch, capsys, script, options, message):
    # The model and the data are missing, so loading anything would fail otherwise.
    with pytest.raises(SystemExit, match="2"):
        parsed(monkeypatch, script, *options)
    *_, error = capsys.readouterr().err.splitlines()
    assert message in error


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_of_prompts_are_refused_where_there_are_none(monkeypatch, capsys, script):
    classifies = script == "finetune_image_classification"
    rates = ("--head_learning_rate=1", "--learning_rate=1")
    refused, heeded = rates if classifies else rates[::-1]
    parsed(monkeypatch, script, "--methods", SCRIPTS[script][0], heeded)
    for option in ("--num_prompts=1", "--prompt_dropout=0.5", refused):
        with pytest.raises(SystemExit):
            parsed(monkeypatch, script, "--methods", SCRIPTS[script][0], option)
        assert f"`{option.split('=')[0]}` applies to " in capsys.readouterr().err


@pytest.mark.parametrize("script", ["finetune_segmentation", "finetune_detection"])
def test_a_head_alone_needs_no_rate_of_prompts_for_sgd(monkeypatch, script):
    module, args = parsed(monkeypatch, script, "--methods", "head", "--optim", "sgd", "--head_learning_rate=3")
    assert module.make_optimizer(torch.nn.Linear(2, 2), args).param_groups[0]["lr"] == 3


@pytest.mark.parametrize("script", ["finetune_segmentation", "finetune_detection"])
def test_scripts_that_do_not_validate_say_so(monkeypatch, capsys, script):
    for options in (["--eval_strategy", "epoch"], ["--bf16_full_eval"], ["--label_smoothing_factor", "0.1"]):
        with pytest.raises(SystemExit):
            parsed(monkeypatch, script, *options)
        assert f"`{options[0]}` has to keep its default" in capsys.readouterr().err


def test_data_options_that_would_be_ignored_are_refused(monkeypatch, capsys, tmp_path):
    for options, message in (
        (["--image_column_name", "img"], "is not for `digits`"),
        (["--dataset_config_name", "plain"], "is for data sets of the Hub"),
        (["--train_dir", str(tmp_path)], "Give one of"),
        (["--test_dir", str(tmp_path)], "`--test_dir` needs `--train_dir`"),
        (["--eval_do_concat_batches", "false"], "has to keep its default"),
        (["--do_train", "--do_eval", "--eval_strategy", "no"], "Leave `--do_train`"),
        (["--keep_images", "true", "--dataloader_num_workers", "2"], "needs `--dataloader_persistent_workers`"),
    ):
        with pytest.raises(SystemExit):
            parsed(monkeypatch, "finetune_image_classification", *options)
        assert message in capsys.readouterr().err


def test_a_refusal_as_users_see_it(run_script, capsys):
    script = "finetune_image_classification"
    options = [*SCRIPTS[script][1], "--resume_from_checkpoint", "/nonexistent", "--optim", "sgd"]
    with pytest.raises(SystemExit, match="2"):
        run_script(f"{script}.py", *options)
    assert "error: `--resume_from_checkpoint` must be a folder" in capsys.readouterr().err


def test_help_explains_itself(monkeypatch, capsys):
    for script, (method, _) in SCRIPTS.items():
        with pytest.raises(SystemExit, match="0"):
            parsed(monkeypatch, script, "--help")
        text = " ".join(capsys.readouterr().out.split())
        for explanation in (
            "Prompts in each block at the start", "LEARNING_RATE Learning rate of the prompts",
            "HEAD_LEARNING_RATE Learning rate of ", "(default: ['vpt-deep'])", "vpt-deep,pro-vpt}", f"{{{method},",
        ):  # fmt: skip
            assert explanation in text, explanation


def test_notes_are_printed(run_script, tmp_path, checkpoint, image_folder):
    output = run_script(
        "finetune_image_classification.py", "--model_name_or_path", checkpoint, "--train_dir", image_folder,
        "--methods", "pro-vpt",
        "--num_prompts", 1, "--num_train_epochs", 4, "--learning_rate", 1e30, "--max_grad_norm", 0, "--use_cpu",
        "true", "--output_dir", tmp_path / "out", "--head_learning_rate", 1e30,
    )  # fmt: skip
    assert "\nafter epoch 1: The loss or a score was not finite" in output
    assert "\n0 moves; prompts in each block: [1, 1, 1, 1]\n" in output
    assert "None" not in output


def images_in(folder, pictures):
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for name, picture in pictures.items():
            picture.save(folder / label / name, **({"exif": TURNED} if name == "turned.jpg" else {}))
    return folder


TURNED = Image.Exif()
TURNED[274] = 6  # the camera was held upright


def test_pictures_of_all_kinds(tmp_path, checkpoint):
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8))
    pictures = {
        "gray.png": pixels.convert("L"), "clear.png": pixels.convert("RGBA"), "printed.jpg": pixels.convert("CMYK"),
        "palette.gif": pixels.convert("P"), "lines.png": pixels.convert("1"), "turned.jpg": pixels,
    }  # fmt: skip
    folder = images_in(tmp_path / "kinds", pictures)
    arguments = classification.DataArguments(train_dir=str(folder))
    splits = classification.load_images(arguments, seed=0)
    data = classification.ResizedImages(splits["train"], ViTImageProcessor.from_pretrained(checkpoint), keep=False)
    for index in range(len(data)):
        name = Path(data.split[index]["image"]["path"]).name
        picture = data.picture(data.split[index]["image"], index)
        assert (picture.mode, picture.size) == ("RGB", (20, 30) if name == "turned.jpg" else (30, 20))
        assert data[index]["pixels"].shape == (3, 32, 32)


def test_pictures_that_cannot_be_used_are_named(tmp_path, checkpoint):
    deep = Image.fromarray(np.full((20, 20), 1000, dtype=np.uint16))
    folder = images_in(tmp_path / "deep", {f"{number}.png": deep for number in range(5)})
    splits = classification.load_images(classification.DataArguments(train_dir=str(folder)), seed=0)
    processor = ViTImageProcessor.from_pretrained(checkpoint)
    with pytest.raises(ValueError, match=r"8 bits per channel, but .*[0-4]\.png has more"):
        classification.ResizedImages(splits["train"], processor, keep=False)[0]
    for path in folder.rglob("*.png"):
        path.write_text("no picture")
    with pytest.raises(ValueError, match=r"The image .*[0-4]\.png cannot be read"):
        classification.ResizedImages(splits["train"], processor, keep=False)[0]


def test_labels_and_columns(tmp_path, image_folder):
    def load(**arguments):
        return classification.load_images(classification.DataArguments(**arguments), seed=0)

    with pytest.raises(ValueError, match="There must be a column species, got image, label"):
        load(train_dir=str(image_folder), label_column_name="species")
    with pytest.raises(ValueError, match="A folder needs a sub-folder for each class"):
        load(train_dir=str(image_folder / "cat"))
    own = tmp_path / "own"
    splits = ("train", "validation", "test")
    for split in splits:
        shutil.copytree(image_folder, own / split)
    (own / "validation" / "cat" / "0.png").unlink()
    folders = {f"{split}_dir": str(own / split) for split in splits}
    loaded = load(**folders)
    assert {name: len(split) for name, split in loaded.items()} == {"train": 20, "validation": 19, "test": 20}
    assert {tuple(split.features["label"].names) for split in loaded.values()} == {("cat", "dog")}
    few = load(**folders, max_train_samples=5, max_eval_samples=6, max_test_samples=7)
    assert [len(few[split]) for split in splits] == [5, 6, 7]
    with pytest.raises(ValueError, match="has its own validation split"):
        load(**folders, train_val_split=0.1)
    with pytest.raises(ValueError, match="has no test split"):
        load(train_dir=str(own / "train"), max_test_samples=5)
    with pytest.raises(ValueError, match="`--test_dir` must be a folder, got nowhere"):
        load(train_dir=str(own / "train"), test_dir="nowhere")
    # Names or numbers of classes in another column.
    lines = [json.dumps({"file_name": f"cat/{n}.png", "species": 10 * (n % 3)}) for n in range(10)]
    (image_folder / "metadata.jsonl").write_text("\n".join(lines))
    for path in (image_folder / "dog").iterdir():
        path.unlink()
    splits = load(train_dir=str(image_folder), label_column_name="species")
    assert splits["train"].features["label"].names == ["0", "10", "20"]
    (image_folder / "metadata.jsonl").write_text("\n".join(lines[:1] + lines[3:4]))
    for number in (1, 2, 4, 5, 6, 7, 8, 9):
        (image_folder / "cat" / f"{number}.png").unlink()
    with pytest.raises(ValueError, match=r"at least two classes, got \['0'\]"):
        load(train_dir=str(image_folder), label_column_name="species")


def test_a_folder_with_something_else_in_it_gets_no_checkpoint(tmp_path):
    with pytest.raises(FileExistsError, match="must not exist or must hold a checkpoint"):
        dinov2_small.prepare(tmp_path)


@pytest.mark.parametrize("script", ["custom_loop.py", *(path.name for path in ROOT.glob("examples/finetune_*.py"))])
def test_a_script_can_be_copied_out(script):
    tree = ast.parse((ROOT / "examples" / script).read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))
    ours = {path.stem for path in ROOT.rglob("examples/**/*.py")} | {"examples", "tests", "docs"}
    assert not {name.split(".")[0] for name in imported} & ours
    assert "provpt_peft" in imported


@pytest.mark.slow
def test_idleness_fidelity(run_script, tmp_path):
    output = run_script(
        "idleness_fidelity", "--backbones", "Swin", "--tasks", "digits", "--stages", 0, 1, "--train_images", 16,
        "--truth_images", 8, "--score_images", 4, "--threads", 1, "--output", tmp_path / "results.jsonl",
    )  # fmt: skip
    lines = read_results(tmp_path)
    scores = ["fisher", "taylor", "norm", "random"]
    # The truth is the exact score of all images.
    assert [line["score"] for line in lines] == 2 * [*scores, "exact", *scores]
    assert "\n| norm | 8 | " in output


@pytest.mark.slow
def test_cost_benchmark(run_script, tmp_path):
    arguments = (
        "cost", "--shapes", "vit-tiny", "--image_size", 32, "--num_prompts", 2, "--rounds", 1,
        "--device", "cpu", "--output", tmp_path / "cost.jsonl", "--pictures", tmp_path,
    )  # fmt: skip
    output = run_script(*arguments)
    lines = {r["contender"]: r for r in map(json.loads, (tmp_path / "cost.jsonl").read_text().splitlines())}
    assert all(f"\n| {contender} |" in output for contender in lines)
    assert (tmp_path / "cost_vit-tiny_cpu_2.png").exists()
    # Head 192 * 100 + 100; 12 blocks * 2 prompts of 192; in each of 12 blocks 2 * 2 LoRA matrices of 192 * 8.
    trainable = {contender: line["trainable_parameters"] for contender, line in lines.items()}
    assert trainable["frozen backbone"] == 19_300
    assert trainable["prepended tokens"] == trainable["PRO-VPT, default preset"] == 19_300 + 4_608
    assert trainable["LoRA, r = 8"] == 19_300 + 73_728
    # Weights of 4 bytes, and the gradients of all of them at once.
    full = lines["full fine-tuning"]
    assert full["peak_memory_bytes"] > 2 * 4 * full["trainable_parameters"]
    assert full["file_bytes"] > 4 * full["trainable_parameters"]
    # What is finished is not run again.
    run_script(*arguments)
    assert len((tmp_path / "cost.jsonl").read_text().splitlines()) == len(lines) == 8


def test_strategies_of_table_3(run_script, tmp_path, checkpoint):
    arguments = (
        "strategies", "--model_name_or_path", checkpoint, "--tasks", "digits", "--seeds", 0, 1, "--epochs", 3,
        "--train_images", 32, "--image_size", 32, "--num_prompts", 2, "--output", tmp_path / "results.jsonl",
        "--threads", 1, "--strategies", "VPT baseline", "A", "adding", "default",
    )  # fmt: skip
    output = run_script(*arguments)
    lines = read_results(tmp_path)
    # All percentages of (A) on the first seed, the best of them on the second.
    names = [line["strategy"] for line in lines]
    percentages = [f"A{p}" for p in range(10, 100, 10)]
    assert names[:12] == ["VPT baseline", *percentages, "adding", "default"]
    best = max(lines[1:10], key=lambda line: line["validation_accuracy"])["strategy"]
    assert names[12:] == ["VPT baseline", best, "adding", "default"]
    # 2 prompts in each of 4 blocks; adding began with 6 and added 2.
    totals = {line["strategy"]: sum(line["distribution"]) for line in lines}
    assert (totals["VPT baseline"], totals["A50"], totals["adding"], totals["default"]) == (8, 4, 8, 8)
    assert f"(A) Pruning {best[1:]} %" in output
    # Nothing is run twice.
    run_script(*arguments)
    assert len(read_results(tmp_path)) == len(lines)


def offline_arguments(tmp_path, checkpoint):
    return (
        "offline", "--model_name_or_path", checkpoint, "--tasks", "digits", "--epochs", 2,
        "--train_images", 32, "--image_size", 32, "--output", tmp_path / "results.jsonl", "--pictures", tmp_path,
        "--device", "cpu", "--threads", 1, "--recipe", "first",
    )  # fmt: skip


def test_offline_suite_chooses_rates_and_compares_numbers_of_prompts(run_script, tmp_path, checkpoint):
    arguments = (*offline_arguments(tmp_path, checkpoint), "--seeds", 0, 1)
    compared = ("--num_prompts", 2, "--methods", "vpt-deep", "pro-vpt-default")
    output = run_script(*arguments, *compared)
    lines = read_results(tmp_path)
    # Two learning rates on the first seed, the better one by validation on the second.
    assert [line["seed"] for line in lines] == [0] * 4 + [1] * 2
    at_two = {}
    for method in ("vpt-deep", "pro-vpt-default"):
        first, second, chosen = (line for line in lines if line["method"] == method)
        at_two[method] = second if second["validation_accuracy"] > first["validation_accuracy"] else first
        assert chosen["learning_rate"] == at_two[method]["learning_rate"]
        # The table shows the mean of the chosen rate's runs.
        mean = (at_two[method]["test_accuracy"] + chosen["test_accuracy"]) / 2
        assert f"| {method} | {mean:.2f} ± " in output
        assert {at_two[method]["data_hash"], chosen["data_hash"]} == {line["data_hash"] for line in lines}
    assert len({line["data_hash"] for line in lines}) == 2  # one for each seed
    assert "a block |" not in output

    # Another number of prompts on the first seed: the same table of it, and one over both numbers on that seed.
    output = run_script(*arguments, "--seeds", 0, "--num_prompts", 1, "--methods", "vpt-deep", "pro-vpt-default")
    first, second = (line for line in read_results(tmp_path)[6:] if line["method"] == "vpt-deep")
    at_one = second if second["validation_accuracy"] > first["validation_accuracy"] else first
    assert "| task | method | 1 per block | 2 per block | spread |" in output
    one, two = at_one["test_accuracy"], at_two["vpt-deep"]["test_accuracy"]
    assert f"| digits | vpt-deep | {one:.2f} (1) | {two:.2f} (1) | {abs(one - two) / 2**0.5:.2f} |" in output
    with Image.open(tmp_path / "robustness.png") as picture:
        assert picture.width > 300
    # Nothing is run twice, and numbers are compared over the seeds that were asked for only.
    assert run_script(*arguments, *compared).count("| pro-vpt-default |") == 2
    assert len(read_results(tmp_path)) == 10


@pytest.mark.slow
def test_offline_suite_with_all_methods(run_script, tmp_path, checkpoint):
    output = run_script(
        *offline_arguments(tmp_path, checkpoint), "--num_prompts", 2, "--seeds", 0, "--learning_rates", 1e-3,
        "--prune_shares", 0.5, "--methods", *(method for method in VTAB_METHODS if method != "vpt-deep-constant"),
    )  # fmt: skip
    lines = {line["method"]: line for line in read_results(tmp_path)}
    assert all(f"\n| {method} | {line['test_accuracy']:.2f} (1) |" in output for method, line in lines.items())
    # A head of 32 * 10 + 10; 8 prompts of 32; LoRA's 2 * 2 matrices of 32 * 8 in each of 4 blocks.
    trained = {method: line["num_trainable_params"] for method, line in lines.items()}
    assert (trained["linear"], trained["vpt-deep"], trained["lora-8"]) == (330, 330 + 256, 330 + 4096)
    assert trained["pro-vpt-default"] == trained["pro-vpt-paper"] == trained["pro-vpt-adding"] == trained["vpt-deep"]
    # (B) began with 16 prompts and pruned half of them, (A) with 8. Adding began with 7.
    assert trained["pro-vpt-B"] == 330 + 512
    totals = {method: sum(line["distribution"]) for method, line in lines.items() if line["distribution"]}
    assert (totals["pro-vpt-A"], totals["pro-vpt-B"], totals["pro-vpt-adding"]) == (4, 8, 8)


def test_ceiling_runs_the_best_on_fresh_seeds(run_script, tmp_path, checkpoint):
    arguments = (
        "ceiling", "--model_name_or_path", checkpoint, "--tasks", "digits", "--epochs", 1, "--train_images", 32,
        "--image_size", 32, "--budgets", 6, "--distributions", 3, "--fresh_seeds", 7, 8,
        "--output", tmp_path / "results.jsonl", "--pictures", tmp_path,
    )  # fmt: skip
    output = run_script(*arguments)
    lines = read_results(tmp_path)
    search, fresh = lines[:8], lines[8:]
    # As far apart as can be in 4 blocks, and three random ones, on two seeds.
    assert [line["counts"] for line in search if line["distribution"] == "uniform"] == [[2, 1, 2, 1]] * 2
    assert {(line["distribution"], line["seed"]) for line in search} == {
        (name, seed) for name in ("uniform", "random 0", "random 1", "random 2") for seed in (0, 1)
    }
    assert all(sum(line["counts"]) == 6 and line["test_accuracy"] > 0 for line in lines)
    validated = {
        name: sum(line["validation_accuracy"] for line in search if line["distribution"] == name)
        for name in ("random 0", "random 1", "random 2")
    }
    best = max(validated, key=validated.get)
    assert [(line["distribution"], line["seed"]) for line in fresh] == [
        ("uniform", 7), (best, 7), ("uniform", 8), (best, 8),
    ]  # fmt: skip
    differences = [fresh[i + 1]["test_accuracy"] - fresh[i]["test_accuracy"] for i in (0, 2)]
    assert f"| {sum(differences) / 2:+.1f} ± {abs(differences[0] - differences[1]) / 2:.1f} (2) |" in output
    # Standard deviations, by numpy: of the distributions, of the seeds and of the rest.
    table = np.array([[line["test_accuracy"] for line in search if line["distribution"] == n] for n in validated])
    rest = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    noise = (rest**2).sum() / 2
    of_rows, of_columns = 2 * table.mean(1).var(ddof=1), 3 * table.mean(0).var(ddof=1)
    parts = [max(0, of_rows - noise) / 2, max(0, of_columns - noise) / 3, noise]
    assert f"| {' | '.join(f'{part**0.5:.1f}' for part in parts)} |" in output
    # Nothing is run twice.
    assert run_script(*arguments) == output
    assert len(read_results(tmp_path)) == len(lines)
    run_script(*arguments, "--report")
    with Image.open(tmp_path / "distributions.png") as picture:
        assert picture.width > 300


def test_the_distribution_that_other_tasks_choose():
    """By validation accuracy of the others, and judged by test accuracy of the task itself."""
    validation = {
        "a": {"uniform": [9, 9], "x": [1, 1], "y": [2, 2]},
        "b": {"uniform": [4, 4], "x": [6, 4], "y": [9, 7]},
    }
    test = {
        "a": {"uniform": [50, 60], "x": [70, 70], "y": [51, 63]},
        "b": {"uniform": [40, 40], "x": [9, 9], "y": [9, 9]},
    }

    class Results:
        args = SimpleNamespace(tasks=["a", "b"], seeds=[0, 1])
        complete = staticmethod(lambda task, budget: True)

        def values(self, task, budget, seeds, metric):
            return {"validation_accuracy": validation, "test_accuracy": test}[metric][task]

    assert ceiling.best_of_others(Results(), "a", 6) == ["y"]
    assert ceiling.best_of_others(Results(), "b", 6) == ["uniform"]
    assert ceiling.gains(Results(), "a", 6, ["y"], [0, 1]) == [1, 3]
    assert ceiling.gains(Results(), "a", 6, ["x", "y"], [0, 1]) == [10.5, 6.5]
    assert ceiling.gains(Results(), "a", 6, ["z"], [0, 1]) == []


def test_trained_together_is_trained_alone():
    """Runs share a batch. Prompts and heads are those of separate runs, each with its own clipping, rate and moves."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(20, 3, 32, 32, generator=generator, dtype=torch.double)
    train = tasks.Split(images, torch.randint(3, (20,), generator=generator))
    schedule = dict(epochs=3, seed=0, batch_size=8, cosine=True)
    moving = RelocationConfig(adjust="random", check_moves=False, settle=0.0, prompts_per_relocation=2)

    def alone(counts, rate, moves):
        base = tiny.make("vit").double()
        torch.manual_seed(5)
        model = get_peft_model(base, ProVPTConfig(num_prompts=counts, modules_to_save=["classifier"]))
        optimizer = make_optimizer(model, rate, 0.01)
        relocator = make_relocator(moving, model, optimizer, train, seed=6) if moves else None
        fit(model, optimizer, train, relocator=relocator, **schedule, max_grad_norm=0.01)
        head = model.base_model.model.classifier.modules_to_save["default"]
        return [model.base_model.prompts(), model.base_model.prompt_blocks(), head.weight, head.bias]

    all_counts = [[1, 1, 1, 1], [0, 4, 0, 0], [3, 0, 0, 1], [1, 1, 1, 1]]
    rates, movers = [0.1, 0.2, 0.1, 0.1], [False, True, False, True]
    together = Together(tiny.make("vit").double(), all_counts, seed=5)
    recipe = Recipe((), head_learning_rate=0.01, warmup=0.0, batch_size=8, max_grad_norm=0.01)

    def look(epoch):
        together.evaluate(together.names[1], train)

    def relocators(optimizer):
        found = {}
        for name, moves in zip(together.names, movers, strict=True):
            if moves:
                with together.active(name):
                    found[name] = make_relocator(moving, together.model, optimizer, train, seed=6)
        return found

    together.fit(train, 3, 0, rates, recipe, movers=relocators, after_epoch=look)
    tuner = together.model.base_model
    for name, *run in zip(together.names, all_counts, rates, movers, strict=True):
        head = tuner.model.classifier.modules_to_save[name]
        found = [tuner.prompts(name), tuner.prompt_blocks(name), head.weight, head.bias]
        torch.testing.assert_close(found, alone(*run), rtol=0, atol=1e-6)
    left = [tuner.prompt_distribution(name) != counts for name, counts in zip(together.names, all_counts, strict=True)]
    assert left == movers


def test_relocators_are_compared_in_pairs(run_script, tmp_path, checkpoint):
    arguments = (
        "relocators", "--model_name_or_path", checkpoint, "--tasks", "digits", "--epochs", 3, "--train_images", 32,
        "--image_size", 32, "--budgets", 8, "--seeds", 1, 2, "--output", tmp_path / "results.jsonl",
        "--candidates", "uniform", "default", "fisher, unchecked", "restart", "uniform at 0.012",
    )  # fmt: skip
    output = run_script(*arguments)
    lines = read_results(tmp_path)
    assert len(lines) == 10
    for line in lines:
        fixed = line["candidate"] in ("uniform", "restart", "uniform at 0.012")
        assert sum(line["counts"]) == 8
        assert line["counts"] == [2, 2, 2, 2] or not fixed
        assert line["learning_rate"] == (0.012 if "at" in line["candidate"] else pytest.approx(3e-3 * 2.5**0.5))
    by_name = {(line["candidate"], line["seed"]): line for line in lines}
    uniform, restarted = ([by_name[name, seed]["train_loss"] for seed in (1, 2)] for name in ("uniform", "restart"))
    assert uniform != restarted
    for name in ("default", "fisher, unchecked", "restart", "uniform at 0.012"):
        first, second = (by_name[name, s]["test_accuracy"] - by_name["uniform", s]["test_accuracy"] for s in (1, 2))
        mean = f"{(first + second) / 2:+.1f} ± {abs(first - second) / 2:.1f}"
        row = next(row for row in output.splitlines() if row.startswith(f"| {name} |"))
        assert row.endswith(f"| {mean} (2) |")
        moves = [sum(abs(c - 2) for c in by_name[name, s]["counts"]) / 2 for s in (1, 2)]
        assert row.startswith(f"| {name} | {sum(moves) / 2:.1f} |")
    # Nothing is run twice.
    assert run_script(*arguments) == output
    assert len(read_results(tmp_path)) == len(lines)


def test_what_prompts_that_a_score_calls_idle_do(run_script, tmp_path, checkpoint):
    arguments = (
        "idle_picks", "--model_name_or_path", checkpoint, "--tasks", "digits", "--epochs", 2, "--train_images", 32,
        "--image_size", 32, "--budgets", 8, "--truth_images", 8, "--output", tmp_path / "results.jsonl",
    )  # fmt: skip
    output = run_script(*arguments)
    lines = read_results(tmp_path)
    assert [line["epoch"] for line in lines] == [1, 2]
    for line in lines:
        for score in ("activity", "fisher", "taylor"):
            assert 0 <= line[score]["pick"] < 8
            assert (line[score]["score"] > 0) == (line[score]["idle"] > 0)
            assert line[score]["true"] <= line["highest"]
        row = next(row for row in output.splitlines() if row.startswith(f"| 8 | {score} |")).split(" | ")
        assert row[3] == f"{sum(line[score]['idle'] > 0 for line in lines)} of 2"
    assert run_script(*arguments) == output
    assert len(read_results(tmp_path)) == 2


def test_a_pick_is_needed_if_the_loss_rises_without_it(capsys):
    """Four looks. At the third the average prompt raises the loss, and so does the pick; at the last there is none."""
    looks = [(-0.25, -0.125, 1), (-0.5, -0.0625, 1), (0.125, 0.25, 1), (-1.0, -1.0, 0)]
    of = [{"idle": idle, "true": true, "spearman": 0.5} for _, true, idle in looks]
    lines = [
        {"budget": 8, "mean": mean, "activity": score, "fisher": score, "taylor": score}
        for (mean, _, _), score in zip(looks, of, strict=True)
    ]
    idle_picks.print_table(lines, SimpleNamespace(budgets=[8]))
    # Without the picks the loss rises by 1/2, 1/8 and -2 of what it changes without the average prompt.
    assert "| 8 | activity | 9 % | 3 of 4 | 2 | +0.12 | +0.50 | 0.50 |" in capsys.readouterr().out


VTAB_METHODS = (
    "full", "linear", "lora-1", "lora-2", "lora-8", "vpt-shallow", "vpt-deep", "vpt-deep-constant", "pro-vpt-paper",
    "pro-vpt-default",
    "pro-vpt-A", "pro-vpt-B", "pro-vpt-C", "pro-vpt-D", "pro-vpt-E", "pro-vpt-F", "pro-vpt-G", "pro-vpt-adding",
    "vpt-deep-1-4",
)  # fmt: skip


@pytest.mark.parametrize(
    ("suite", "methods"),
    [
        ("vtab-1k", ("linear", "vpt-deep", "vpt-deep-constant", "pro-vpt-default")),
        pytest.param("vtab-1k", VTAB_METHODS, marks=pytest.mark.slow),
        pytest.param("fgvc", VTAB_METHODS, marks=pytest.mark.slow),
    ],
)
def test_vtab_and_fgvc_on_a_miniature_copy_of_their_layout(run_script, tmp_path, checkpoint, suite, methods):
    generator = np.random.default_rng(0)
    task = {"vtab-1k": "kitti", "fgvc": "Stanford-cars"}[suite]
    folder = tmp_path / task
    # As in VPT's lists of the dogs: `Images` is left out.
    images = folder / "Images" if suite == "fgvc" else folder
    images.mkdir(parents=True)
    pairs = [(f"{number}.png", number % 4) for number in range(24)]
    for name, label in pairs:
        pixels = generator.integers(0, 60, size=(40, 50, 3), dtype=np.uint8) + np.uint8(60 * label)
        Image.fromarray(pixels).save(images / name)
    if suite == "vtab-1k":
        parts = {"train800": pairs[:8], "val200": pairs[8:12], "train800val200": pairs[:12], "test": pairs[12:]}
        for name, part in parts.items():
            (folder / f"{name}.txt").write_text("".join(f"{path} {label}\n" for path, label in part))
        other_split = (folder / "train800.txt").read_text()
    else:
        parts = {"train": pairs[:8], "val": pairs[8:12], "test": pairs[12:]}
        for name, part in parts.items():
            # Classes counted from 1 and with gaps, as in some of the lists.
            (folder / f"{name}.json").write_text(json.dumps({path: 2 * label + 1 for path, label in part}))
        other_split = (folder / "train.json").read_text()
    arguments = (
        "vtab", "--suite", suite, "--root", tmp_path, "--model_name_or_path", checkpoint, "--epochs", 2,
        "--image_size", 32, "--num_prompts", 2, "--base_lrs", 1, 0.1, "--weight_decays", 0, "--prune_shares", 0.5,
        "--seeds", 0, 1, "--device", "cpu", "--output", tmp_path / "results.jsonl",
    )  # fmt: skip
    output = run_script(*arguments, "--tasks", task)
    assert f"{task} is left out: {task} should have" in output
    assert "`--any_size` takes other numbers of images" in output

    # A task that is missing is named, the others run.
    other = {"vtab-1k": "dmlab", "fgvc": "nabirds"}[suite]
    output = run_script(*arguments, "--any_size", "--tasks", other, task, "--methods", *methods)
    assert f"{other} is left out: there is no" in output
    lines = read_results(tmp_path)
    assert len(lines) == len(methods) * 4
    for method in methods:
        *search, first, second = (line for line in lines if line["method"] == method)
        assert [line["split"] for line in (*search, first, second)] == ["validation"] * 2 + ["test"] * 2
        # The lower rate of equals.
        assert [line["base_lr"] for line in search] == [0.1, 1]
        best = max(search, key=lambda line: line["validation_accuracy"])
        assert first["base_lr"] == second["base_lr"] == best["base_lr"]
        assert (first["seed"], second["seed"]) == (0, 1)
        # VPT's own batch is 128 below 100 prompts per block, PRO-VPT's is 64.
        constant = method.startswith("pro-vpt") or method == "vpt-deep-constant"
        assert first["batch_size"] == (64 if constant else 128)
        assert f"\n| {method} |" in output
    run_script(*arguments, "--any_size", "--tasks", task, "--methods", "vpt-deep")
    assert len(read_results(tmp_path)) == len(lines)
    # Runs on other splits are not mixed with these.
    (folder / {"vtab-1k": "val200.txt", "fgvc": "val.json"}[suite]).write_text(other_split)
    output = run_script(*arguments, "--any_size", "--tasks", task, "--methods", "vpt-deep")
    assert "has runs on other splits" in output
    assert len(read_results(tmp_path)) == len(lines)


# In a process of its own, since the Hub's address is read when huggingface_hub is imported. The last call finds a port
# where nobody answers.
FROM_HUB = """
import argparse
from functools import partial
from examples.research import vtab
def fetch(name):
    try:
        print(vtab.folder_of("kitti", argparse.Namespace(hub_dataset=name, revision=None)))
    except vtab.MissingTask as reason:
        print(str(reason).replace(chr(10), " "))
fetch("me/suite")
fetch("me/nothing")
fetch("not a name")
vtab.snapshot_download = partial(vtab.snapshot_download, endpoint="http://127.0.0.1:9", etag_timeout=1)
fetch("me/other")
"""


def test_a_task_of_vtab_from_the_hub(tmp_path):
    files = {"kitti/test.txt": b"images/1.png 3\n", "kitti/images/1.png": b"pixels", "dmlab/test.txt": b"another task"}
    with hub_server.running() as (address, repositories):
        repositories["me/suite"] = hub_server.Repository(private=False)
        repositories["me/suite"].files |= files
        hub = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "no_proxy": "127.0.0.1"}
        result = subprocess.run(
            [sys.executable, "-c", FROM_HUB], cwd=ROOT, capture_output=True, text=True, check=True,
            env=os.environ | hub,
        )  # fmt: skip
    folder, *reasons = result.stdout.splitlines()
    found = {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}
    assert found == {"test.txt", "images/1.png"}
    assert (Path(folder) / "images/1.png").read_bytes() == b"pixels"
    missing = ("me/nothing", "not a name", "me/other")
    assert all(r.startswith(f"{n} could not be downloaded (") for r, n in zip(reasons, missing, strict=True)), reasons


@pytest.mark.slow
def test_adjustments_benchmark_and_the_noise_fitted_to_it(run_script, tmp_path, checkpoint):
    arguments = (
        "adjustments", "--model_name_or_path", checkpoint, "--stages", 1, 2, "--repeats", 2,
        "--train_images", 16, "--validation_images", 8, "--image_size", 32, "--num_prompts", 2, "--threads", 1,
        "--output", tmp_path / "results.jsonl", "--pictures", tmp_path,
    )  # fmt: skip
    output = run_script(*arguments)
    lines = read_results(tmp_path)
    cells = [(line["epoch"], line["repeat"], line["adjustment"]) for line in lines]
    assert cells == [(epoch, repeat, what) for epoch in (1, 2) for repeat in (0, 1) for what in ("add", "move")]
    for line in lines:
        assert len(line["by_block"]) == 4
        assert line["from_block"] == 0 or line["adjustment"] == "move"
        if line["adjustment"] == "move":
            # Where the prompt stays in its block, nothing has changed.
            stayed = line["by_block"][line["from_block"] - 1]
            assert stayed["untuned"] == stayed["tuned"] == {"loss": 0.0, "accuracy": 0.0}
            assert stayed["similarity_tuned"] == line["similarity_untouched"]
    assert "| digits | 1e-06 | 2 | move |" in output
    with Image.open(tmp_path / "adjustments_digits_1e-06.png") as picture:
        assert picture.width > 1000
    # Nothing is run twice.
    assert run_script(*arguments) == output
    output = run_script(
        "allocator_regret", "--fit", tmp_path / "results.jsonl", "--seeds", 1, "--moves", 4,
        "--output", tmp_path / "regret.png",
    )  # fmt: skip
    assert "noise of scores" in output


@pytest.mark.slow
def test_allocator_regret_benchmark(run_script, tmp_path):
    output = run_script(
        "allocator_regret", "--seeds", 1, "--moves", 4, "--output", tmp_path / "regret.png"
    )  # fmt: skip
    for contender in ("uniform", "thompson", "ppo (paper)", "ppo (default)", "greedy"):
        assert f"\n{contender} " in output
    with Image.open(tmp_path / "regret.png") as picture:
        assert picture.width > 500
