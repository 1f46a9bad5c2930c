"""Semantic segmentation with PRO-VPT, or with VPT-Deep or a new head alone for comparison.

Offline, on generated scenes with the demo's DINOv2-S:

    python examples/dinov2_small.py .cache/dinov2-small
    python -m examples.research.scenes --size 112
    python examples/finetune_segmentation.py

ADE20K as in the paper with SETR-PUP on a ViT-B/16, or with UperNet on a Swin:

    python examples/finetune_segmentation.py --data_folder ADEChallengeData2016 \\
        --train_split training --test_split validation --num_labels 150 --reduce_labels true --augment true \\
        --model_name_or_path google/vit-base-patch16-224-in21k --image_size 512 --head_channels 256 \\
        --num_prompts 50 --per_device_train_batch_size 16 --num_train_epochs 64 --output_dir outputs/ade20k
    python examples/finetune_segmentation.py --head upernet \\
        --model_name_or_path microsoft/swin-tiny-patch4-window7-224 ...

`--methods head vpt-deep pro-vpt` trains three models, one after the other. A method's folder in `--output_dir` holds
its adapter, logs and, with `--save_strategy epoch`, checkpoints to resume from.

A data folder has `images/<split>/NAME.jpg` (or png), and the pixels' class numbers in `annotations/<split>/NAME.png`.
"""

from __future__ import annotations

import copy
import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel, get_peft_model
from PIL import Image
from torch import nn
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModel,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    set_seed,
)
from transformers.modeling_outputs import SemanticSegmenterOutput
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_BACKBONE_MAPPING

from provpt_peft import ProVPTConfig, RelocationConfig, RelocationTrainerCallback, create_provpt_optimizer
from provpt_peft.backbone.sizes import fixed_size
from provpt_peft.optimizer import PROMPTS_LR, prompts_lr


METHODS = ("head", "vpt-deep", "pro-vpt")
# Names for `RelocationConfig.preset`. `adding` needs a reserve of prompts, which the script does not create.
PRESETS = ("default", "paper", "A", "B", "C", "D", "E", "F", "G")
# The demo's backbone, and its scenes at `--image_size`.
DEMO = Path(".cache/dinov2-small")
SCENES = ".cache/scenes-{size}"
# The class number of ignored pixels.
IGNORED = 255
SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
HEADS = {"setr-pup": ["head"], "upernet": ["decode_head", "auxiliary_head"]}
# Options of `TrainingArguments` that have to keep their defaults, and why.
FIXED = {
    **dict.fromkeys(
        (
            "eval_strategy", "do_train", "do_eval", "do_predict", "eval_steps", "eval_delay", "eval_on_start",
            "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics",
            "include_for_metrics", "prediction_loss_only", "metric_for_best_model", "bf16_full_eval", "fp16_full_eval",
            "per_device_eval_batch_size",
        ),
        "the script trains, and tests once at the end with its own metric",
    ),
    **dict.fromkeys(
        (
            "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push",
            "hub_revision",
        ),
        "to share the adapter, call `provpt_peft.push_to_hub` after training, which uploads its model card too",
    ),
    **dict.fromkeys(("label_names", "label_smoothing_factor"), "the loss is the model's own"),
    "remove_unused_columns": "the data set gives what the model takes",
    "optim_target_modules": "optimizers that take modules cannot give prompts and head separate learning rates",
}  # fmt: skip
# Options that do nothing without prompts.
PROMPT_OPTIONS = ("num_prompts", "prompt_dropout", "learning_rate")


@dataclass
class SegmentationArguments(TrainingArguments):
    """The images, the model, the methods and the training settings."""

    data_folder: Path | None = field(
        default=None, metadata={"help": "Folder with `images` and `annotations`. Default: the demo's scenes."}
    )
    train_split: str = field(default="train", metadata={"help": "Sub-folder to train on."})
    test_split: str = field(default="test", metadata={"help": "Sub-folder to test on, once, after training."})
    num_labels: int = field(default=4, metadata={"help": "Number of classes, including the background."})
    reduce_labels: bool = field(
        default=False, metadata={"help": "Ignore class 0 and move the others down by one, as in ADE20K."}
    )
    model_name_or_path: str = field(
        default=str(DEMO), metadata={"help": f"Checkpoint of the backbone. Default: the demo's, {DEMO}."}
    )
    head: str = field(
        default="setr-pup", metadata={"help": "`setr-pup` for ViTs, `upernet` for Swin.", "choices": tuple(HEADS)}
    )
    head_channels: int = field(default=64, metadata={"help": "Channels of the head; the papers use 256 and 512."})
    image_size: int = field(default=112, metadata={"help": "Side of a training image in pixels."})
    augment: bool = field(
        default=False, metadata={"help": "Scale by 0.5 to 2, crop and flip the training images, as is usual."}
    )
    multi_scale: bool = field(
        default=False, metadata={"help": f"Test at scales {', '.join(map(str, SCALES))} and flipped as well."}
    )
    methods: list[str] = field(
        default_factory=lambda: ["vpt-deep"],
        metadata={"help": "Methods to train, one after the other, and to compare.", "choices": METHODS},
    )
    num_prompts: int = field(default=5, metadata={"help": "Prompts in each block at the start."})
    prompt_dropout: float = field(default=0.0, metadata={"help": "Dropout on the prompts."})
    learning_rate: float | None = field(
        default=None,
        metadata={"help": f"Learning rate of the prompts. Default: {PROMPTS_LR:g} for 5 per block, less for more."},
    )
    head_learning_rate: float = field(default=1e-3, metadata={"help": "Learning rate of the head."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of the head, biases included."})
    preset: str = field(
        default="default",
        metadata={"help": "How prompts are relocated: a name of `RelocationConfig.preset`.", "choices": PRESETS},
    )
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Checkpoint folder to resume from. Give only its method in `--methods`."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_folder is None:
            self.data_folder = Path(SCENES.format(size=self.image_size))
            if not self.data_folder.exists():
                raise ValueError(
                    f"There are no scenes in {self.data_folder}. Run `python -m examples.research.scenes --size "
                    f"{self.image_size}`, or name a folder with `--data_folder`."
                )
        if self.model_name_or_path == str(DEMO) and not DEMO.exists():
            raise ValueError(
                f"There is no backbone in {DEMO}. Run `python examples/dinov2_small.py {DEMO}`, or name another "
                "checkpoint with `--model_name_or_path`."
            )


def parse() -> SegmentationArguments:
    """Read the command line. If it is not valid, exit with the reason before anything is loaded."""
    parser = HfArgumentParser(
        SegmentationArguments,
        description=__doc__.splitlines()[0],
        usage="%(prog)s [options], see --help",
    )
    parser.set_defaults(
        output_dir="outputs/segmentation",
        num_train_epochs=4,
        logging_strategy="epoch",
        save_strategy="no",
        lr_scheduler_type="cosine",
        optim="adamw_torch",
        label_names=["labels"],
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    try:
        (args,) = parser.parse_args_into_dataclasses()
        check(args, {name for name, value in vars(args).items() if value != parser.get_default(name)})
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    return args


def check(args: SegmentationArguments, changed: set[str]) -> None:
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
    if set(args.methods) == {"head"}:
        for name in PROMPT_OPTIONS:
            if name in changed:
                raise ValueError(f"`--{name}` applies to prompts, but `--methods head` has none. Leave it out.")
    if "preset" in changed and "pro-vpt" not in args.methods:
        raise ValueError("`--preset` says how prompts are relocated, so `--methods` must have `pro-vpt`.")
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
    prompted = set(args.methods) != {"head"}
    if prompted and issubclass(optimizer_class, torch.optim.SGD) and args.learning_rate is None:
        raise ValueError(
            f"`--optim {args.optim.value}` needs `--learning_rate`: the default suits optimizers like Adam."
        )


# ---- data -----------------------------------------------------------------------------------------------------------


def to_pixels(picture: Image.Image, width: int, height: int, processor: Any) -> torch.Tensor:
    """A picture resized and normalised as a checkpoint's image processor does it, (3, height, width)."""
    pixels = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR), dtype=np.float32)
    mean, std = (torch.tensor(v)[:, None, None] for v in (processor.image_mean, processor.image_std))
    return (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std


class Scenes(torch.utils.data.Dataset):
    """Images and the class numbers of their pixels.

    Args:
        folder: With `images` and `annotations`.
        split: The sub-folder.
        processor: The checkpoint's image processor, which knows how to normalise.
        args: Sizes and labels.
        augment: Whether to scale, crop and flip.
    """

    def __init__(
        self, folder: Path, split: str, processor: Any, args: SegmentationArguments, augment: bool = False
    ) -> None:
        self.images = sorted((folder / "images" / split).iterdir())
        if not self.images:
            raise ValueError(f"There must be images in {folder / 'images' / split}, but there are none.")
        self.annotations = folder / "annotations" / split
        self.processor = processor
        self.args = args
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def open(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """A picture and its class numbers (height, width), at their original size."""
        path = self.images[index]
        labels = np.array(Image.open(self.annotations / f"{path.stem}.png"), dtype=np.int64)
        if self.args.reduce_labels:
            labels = np.where(labels == 0, IGNORED, labels - 1)
        return Image.open(path).convert("RGB"), labels

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        picture, labels = self.open(index)
        size = self.args.image_size
        # From the generator that the data loader seeds in each worker.
        scale = 2 ** float(torch.empty(()).uniform_(-1, 1)) if self.augment else None
        if scale is None:
            width = height = size
        else:
            width, height = (round(side * scale * size / min(picture.size)) for side in picture.size)
        resized = Image.fromarray(labels.astype(np.uint8)).resize((width, height), Image.Resampling.NEAREST)
        pixel_values = to_pixels(picture, width, height, self.processor)
        target = torch.from_numpy(np.array(resized, dtype=np.int64))
        if self.augment:
            missing = [max(0, size - side) for side in (width, height)]
            pixel_values = F.pad(pixel_values, (0, missing[0], 0, missing[1]))
            target = F.pad(target, (0, missing[0], 0, missing[1]), value=IGNORED)
            top, left = (int(torch.randint(side - size + 1, ())) for side in target.shape)
            pixel_values = pixel_values[:, top : top + size, left : left + size]
            target = target[top : top + size, left : left + size]
            if torch.rand(()) < 0.5:
                pixel_values, target = pixel_values.flip(-1), target.flip(-1)
        return {"pixel_values": pixel_values, "labels": target}


# ---- model ----------------------------------------------------------------------------------------------------------
# SETR-PUP is a vision transformer and a head that upsamples step by step (Zheng et al. 2021, Sec. 3.3).
# Legend: B images, D width, h x w patches, C classes, H x W pixels of the labels.


class ProgressiveUpsampling(nn.Module):
    """Four steps of convolution, batch norm, ReLU and upsampling by 2, then a classifier.

    Args:
        width: D, the number of input channels.
        num_labels: C.
        channels: Number of channels inside.
        steps: Number of steps.
    """

    def __init__(self, width: int, num_labels: int, channels: int = 256, steps: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        widths = [width] + [channels] * steps
        self.steps = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in itertools.pairwise(widths)
        )
        self.classify = nn.Conv2d(channels, num_labels, 1)

    def forward(self, tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Tokens (B, h * w, D) to logits (B, C, 16 h, 16 w)."""
        features = self.norm(tokens).transpose(1, 2).unflatten(2, (height, width))  # (B, D, h, w)
        for step in self.steps:
            features = F.interpolate(step(features), scale_factor=2, mode="bilinear", align_corners=False)
        return self.classify(features)


class SetrPup(nn.Module):
    """A vision transformer from transformers with the head of SETR-PUP on its last tokens.

    Args:
        backbone: A model whose `last_hidden_state` ends with the tokens of the patches, such as ViT, DeiT, DINOv2.
        num_labels: C.
        channels: Channels of the head.
    """

    def __init__(self, backbone: PreTrainedModel, num_labels: int, channels: int = 256) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = ProgressiveUpsampling(backbone.config.hidden_size, num_labels, channels)
        # ViT and DeiT need an option for other image sizes, DINOv2 adapts by itself.
        self.size_options = {} if fixed_size(backbone) is None else {"interpolate_pos_encoding": True}

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> SemanticSegmenterOutput:
        """Logits of each pixel, and the mean cross-entropy if there are labels.

        Args:
            pixel_values: (B, 3, height, width), both divisible by the patch size.
            labels: Class numbers (B, H, W), 255 for ignored pixels.
        """
        patch = self.backbone.config.patch_size
        height, width = (side // patch for side in pixel_values.shape[2:])
        tokens = self.backbone(pixel_values, **self.size_options).last_hidden_state[:, -height * width :]
        logits = self.head(tokens, height, width)
        loss = None
        if labels is not None:
            upsampled = F.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
            loss = F.cross_entropy(upsampled, labels, ignore_index=IGNORED)
        return SemanticSegmenterOutput(loss=loss, logits=logits)


def make_model(args: SegmentationArguments) -> nn.Module:
    """The backbone of the checkpoint with a new head."""
    if args.head == "setr-pup":
        return SetrPup(AutoModel.from_pretrained(args.model_name_or_path), args.num_labels, args.head_channels)
    backbone_config = AutoConfig.from_pretrained(args.model_name_or_path)
    backbone_config.out_features = backbone_config.stage_names[-4:]
    # `AutoBackbone.from_pretrained` does not take a local folder.
    backbone_class = MODEL_FOR_BACKBONE_MAPPING[type(backbone_config)]
    backbone = backbone_class.from_pretrained(args.model_name_or_path, config=backbone_config)
    config = UperNetConfig(
        backbone_config=backbone_config, hidden_size=args.head_channels, num_labels=args.num_labels,
        auxiliary_channels=args.head_channels, auxiliary_in_channels=backbone.channels[2],
    )  # fmt: skip
    model = UperNetForSemanticSegmentation(config)
    model.backbone = backbone
    return model


def adapt(method: str, model: nn.Module, args: SegmentationArguments) -> nn.Module | PeftModel:
    """Freeze the model except for its new parts, and add prompts if the method has some."""
    # The head, and the norms that transformers puts on a Swin's feature maps. No checkpoint has them.
    new = HEADS[args.head] + [name for name, _ in model.named_modules() if "hidden_states_norms." in name]
    if method != "head":
        config = ProVPTConfig(num_prompts=args.num_prompts, prompt_dropout=args.prompt_dropout, modules_to_save=new)
        return get_peft_model(model, config)
    model.requires_grad_(False)
    for name in new:
        model.get_submodule(name).requires_grad_(True)
    return model


# ---- evaluation -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def predict(
    model: torch.nn.Module, data: Scenes, picture: Image.Image, multiple: int, scales: tuple[float, ...]
) -> torch.Tensor:
    """Class numbers (height, width) of a whole picture, its short side resized to the training images' size.

    With several scales, the probabilities are averaged over the scales, for the picture and its mirror image.

    Args:
        model: A model that returns logits.
        data: The data set, which defines how to prepare a picture.
        picture: A picture of any size.
        multiple: The sides are rounded to multiples of this.
        scales: Factors of the training images' size.
    """
    device = next(model.parameters()).device
    width, height = picture.size
    total: Any = 0.0
    for scale in scales:
        short = scale * data.args.image_size / min(picture.size)
        sides = [max(multiple, round(side * short / multiple) * multiple) for side in picture.size]
        pixel_values = to_pixels(picture, *sides, data.processor)[None].to(device)
        for flip in (False, True) if len(scales) > 1 else (False,):
            logits = model(pixel_values=pixel_values.flip(-1) if flip else pixel_values).logits
            logits = F.interpolate(logits.float(), size=(height, width), mode="bilinear", align_corners=False)
            total = total + (logits.flip(-1) if flip else logits).softmax(dim=1)
    return total.argmax(dim=1)[0].cpu()


def count_pixels(prediction: np.ndarray, labels: np.ndarray, num_labels: int) -> np.ndarray:
    """The confusion matrix in pixels, (C, C), by label and prediction."""
    known = labels != IGNORED
    pairs = labels[known] * num_labels + prediction[known]
    return np.bincount(pairs, minlength=num_labels**2).reshape(num_labels, num_labels)


def mean_iou(counts: np.ndarray) -> dict[str, Any]:
    """Intersection over union of each class and their mean, and the share of correct pixels, from counts (C, C)."""
    both = counts.diagonal()
    either = counts.sum(axis=0) + counts.sum(axis=1) - both
    # A class that is neither in the labels nor predicted has none.
    iou = [b / e if e else None for b, e in zip(both.tolist(), either.tolist(), strict=True)]
    found = [value for value in iou if value is not None]
    return {"mean_iou": sum(found) / len(found), "iou": iou, "accuracy": float(both.sum() / counts.sum())}


def evaluate(model: nn.Module, data: Scenes, multiple: int, scales: tuple[float, ...]) -> dict[str, Any]:
    """The metrics over all images of a data set, each at its own size."""
    model.eval()
    counts = np.zeros((data.args.num_labels, data.args.num_labels), dtype=np.int64)
    for index in tqdm(range(len(data)), desc="test"):
        picture, labels = data.open(index)
        prediction = predict(model, data, picture, multiple, scales).numpy()
        counts += count_pixels(prediction, labels, data.args.num_labels)
    return mean_iou(counts)


# ---- training -------------------------------------------------------------------------------------------------------


def make_optimizer(model: torch.nn.Module, args: SegmentationArguments) -> torch.optim.Optimizer:
    """The optimizer that `--optim` and its options name, with learning rates for the prompts and for the head."""
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args)
    if args.learning_rate is None:
        options["lr"] = prompts_lr(args.num_prompts)
    if any(parameter.requires_grad for name, parameter in model.named_parameters() if "provpt_" in name):
        rest = {"head_lr": args.head_learning_rate, "weight_decay": args.weight_decay}
        return create_provpt_optimizer(model, optimizer_class, **rest, **options)
    head = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": head, "lr": args.head_learning_rate, "weight_decay": args.weight_decay}]
    return optimizer_class(groups, **options)


def run(method: str, args: SegmentationArguments) -> dict[str, Any]:
    """Train and test one method. Returns its row of the table."""
    folder = Path(args.output_dir) / method
    training = copy.copy(args)
    training.output_dir = str(folder)
    set_seed(args.seed)
    model = adapt(method, make_model(args), args)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    processor = AutoImageProcessor.from_pretrained(args.model_name_or_path)
    callbacks = []
    if method == "pro-vpt":
        callbacks.append(RelocationTrainerCallback(RelocationConfig.preset(args.preset, seed=args.seed)))
    trainer = Trainer(
        model,
        training,
        train_dataset=Scenes(args.data_folder, args.train_split, processor, args, args.augment),
        callbacks=callbacks,
        optimizers=(make_optimizer(model, args), None),
    )
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    seconds = time.perf_counter() - start
    if isinstance(model, PeftModel):
        model.save_pretrained(folder)
    relocations = sum(record.prompt is not None for callback in callbacks for record in callback.history)
    for callback in callbacks:
        for record in callback.history:
            if record.note is not None:
                print(f"after epoch {record.epoch}: {record.note}")
        print(f"{callback.run().num_moves} moves; prompts in each block: {model.base_model.prompt_distribution()}")
    test = Scenes(args.data_folder, args.test_split, processor, args)
    # For a ViT the sides must be whole patches; a Swin pads by itself.
    multiple = AutoConfig.from_pretrained(args.model_name_or_path).patch_size if args.head == "setr-pup" else 32
    return {
        "method": method,
        "trainable_parameters": trainable,
        "seconds": seconds,
        "relocations": relocations,
        **evaluate(model, test, multiple, SCALES if args.multi_scale else (1.0,)),
    }


def main() -> None:
    """Train and test the methods, write their results to `results.json` and print them as a table."""
    args = parse()
    rows = []
    for method in args.methods:
        print(f"\n== {method} ==")
        rows.append(run(method, args))
    Path(args.output_dir, "results.json").write_text(json.dumps(rows, indent=2))
    print(f"\n{'method':12}{'mean IoU':>11}{'accuracy':>11}{'trainable parameters':>24}{'seconds':>10}")
    for row in rows:
        metrics = f"{row['mean_iou']:11.4f}{row['accuracy']:11.4f}"
        print(f"{row['method']:12}{metrics}{row['trainable_parameters']:24,}{row['seconds']:10.0f}")


if __name__ == "__main__":
    main()
