"""Semantic segmentation with a new head alone, with VPT-Deep and with PRO-VPT, and compare.

Offline, on generated scenes with the demo's DINOv2-S:

    python examples/segmentation/finetune_segmentation.py

ADE20K as the paper has it, SETR-PUP on a ViT-B/16, or UperNet on a Swin:

    python examples/segmentation/finetune_segmentation.py --data_folder ADEChallengeData2016 \\
        --train_split training --test_split validation --num_labels 150 --reduce_labels true --augment true \\
        --model_name_or_path google/vit-base-patch16-224-in21k --image_size 512 --head_channels 256 \\
        --num_prompts 50 --per_device_train_batch_size 16 --num_train_epochs 64 --output_dir outputs/ade20k
    python examples/segmentation/finetune_segmentation.py --head upernet \\
        --model_name_or_path microsoft/swin-tiny-patch4-window7-224 ...

A data folder has `images/<split>/NAME.jpg` (or png) and `annotations/<split>/NAME.png`, class numbers of the pixels.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
from peft import PeftModel
from PIL import Image
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    set_seed,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor


sys.path.append(str(Path(__file__).resolve().parents[1]))
import dinov2_small
import scenes
from finetuning import (
    DEFAULTS,
    PROMPTED,
    PromptArguments,
    adapt,
    check_methods,
    compare,
    load_backbone,
    make_optimizer,
    new_norms,
    relocation,
    report_relocations,
    to_pixels,
)
from setr import IGNORED, SetrPup


EXAMPLES = Path(__file__).resolve().parents[1]
METHODS = ("head", *PROMPTED)
SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
HEADS = {"setr-pup": ["head"], "upernet": ["decode_head", "auxiliary_head"]}


@dataclass
class SegmentationArguments:
    """Which images, which model."""

    data_folder: Path | None = field(
        default=None, metadata={"help": "Folder with `images` and `annotations`. Default: generated scenes."}
    )
    train_split: str = field(default="train", metadata={"help": "Sub-folder to train on."})
    test_split: str = field(default="test", metadata={"help": "Sub-folder to test on, once, after training."})
    num_labels: int = field(default=1 + len(scenes.CLASSES), metadata={"help": "Classes, that of the ground too."})
    reduce_labels: bool = field(
        default=False, metadata={"help": "Class 0 does not count and the others move down by one, as in ADE20K."}
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint of the backbone. Default: the demo's DINOv2-S."}
    )
    head: str = field(default="setr-pup", metadata={"help": "setr-pup (for ViTs) or upernet (for Swin)."})
    head_channels: int = field(default=64, metadata={"help": "Channels of the head; the papers have 256 and 512."})
    image_size: int = field(default=112, metadata={"help": "Side of a training image in pixels."})
    augment: bool = field(
        default=False, metadata={"help": "Scale by 0.5 to 2, crop and flip the training images, as is usual."}
    )
    multi_scale: bool = field(
        default=False, metadata={"help": f"Test at scales {', '.join(map(str, SCALES))} and flipped as well."}
    )
    methods: list[str] = field(
        default_factory=lambda: list(METHODS), metadata={"help": f"Methods to compare: {', '.join(METHODS)}."}
    )

    def __post_init__(self) -> None:
        check_methods(self.methods, METHODS)
        if self.head not in HEADS:
            raise ValueError(f"`--head` must be among {', '.join(HEADS)}, got {self.head!r}.")


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
        """A picture and its class numbers (height, width), as they are in the files."""
        path = self.images[index]
        labels = np.array(Image.open(self.annotations / f"{path.stem}.png"), dtype=np.int64)
        if self.args.reduce_labels:
            labels = np.where(labels == 0, IGNORED, labels - 1)
        return Image.open(path).convert("RGB"), labels

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        picture, labels = self.open(index)
        size = self.args.image_size
        # A number of the generator that the data loader seeds for each worker.
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


def make_model(args: SegmentationArguments) -> torch.nn.Module:
    """The backbone of the checkpoint with a new head."""
    if args.head == "setr-pup":
        return SetrPup.from_pretrained(args.model_name_or_path, args.num_labels, args.head_channels)
    backbone_config = AutoConfig.from_pretrained(args.model_name_or_path)
    backbone_config.out_features = backbone_config.stage_names[-4:]
    backbone = load_backbone(args.model_name_or_path, backbone_config)
    config = UperNetConfig(
        backbone_config=backbone_config, hidden_size=args.head_channels, num_labels=args.num_labels,
        auxiliary_channels=args.head_channels, auxiliary_in_channels=backbone.channels[2],
    )  # fmt: skip
    model = UperNetForSemanticSegmentation(config)
    model.backbone = backbone
    return model


@torch.no_grad()
def predict(
    model: torch.nn.Module, data: Scenes, picture: Image.Image, multiple: int, scales: tuple[float, ...]
) -> torch.Tensor:
    """Class numbers (height, width) of a whole picture, its short side resized to the training images' size.

    With several scales, probabilities at each, of the picture and of its mirror image, are averaged.

    Args:
        model: Gives logits.
        data: Knows how to prepare a picture.
        picture: Of any size.
        multiple: What sides have to be divisible by.
        scales: Of that size.
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


def mean_iou(model: torch.nn.Module, data: Scenes, multiple: int, scales: tuple[float, ...]) -> dict[str, Any]:
    """The metric over all images of a data set, each at its own size."""
    metric = evaluate.load(str(EXAMPLES / "metrics" / "mean_iou.py"))
    model.eval()
    for index in tqdm(range(len(data)), desc="test"):
        picture, labels = data.open(index)
        prediction = predict(model, data, picture, multiple, scales)
        metric.add(prediction=prediction.tolist(), reference=labels.tolist())
    return metric.compute(num_labels=data.args.num_labels, ignore_index=IGNORED)


def run(
    method: str, folder: Path, args: SegmentationArguments, prompts: PromptArguments, training: TrainingArguments
) -> dict[str, Any]:
    """Train and test one method. Returns its row of the table."""
    set_seed(training.seed)
    model = make_model(args)
    model = adapt(method, model, [*HEADS[args.head], *new_norms(model)], prompts)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    processor = AutoImageProcessor.from_pretrained(args.model_name_or_path)
    test = Scenes(folder, args.test_split, processor, args)
    callbacks = relocation(method, prompts, training.seed)
    trainer = Trainer(
        model,
        training,
        train_dataset=Scenes(folder, args.train_split, processor, args, args.augment),
        callbacks=callbacks,
        optimizers=(make_optimizer(model, prompts, training), None),
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    output = Path(training.output_dir) / method
    if isinstance(model, PeftModel):
        model.save_pretrained(output)
    # A ViT's sides are whole patches; a Swin pads by itself.
    backbone = AutoConfig.from_pretrained(args.model_name_or_path)
    multiple = backbone.patch_size if args.head == "setr-pup" else 32
    result = mean_iou(model, test, multiple, SCALES if args.multi_scale else (1.0,))
    relocations = report_relocations(callbacks, model)
    return {
        "method": method,
        "trainable_parameters": trainable,
        "seconds": seconds,
        "relocations": relocations,
        **result,
    }


def main() -> None:
    """Compare the methods and print a table."""
    parser = HfArgumentParser(
        (SegmentationArguments, PromptArguments, TrainingArguments),
        description=__doc__.splitlines()[0],
    )
    parser.set_defaults(
        output_dir="outputs/segmentation",
        num_train_epochs=4,
        logging_strategy="epoch",
        learning_rate=1e-3,
        label_names=["labels"],
        **DEFAULTS,
    )
    args, prompts, training = parser.parse_args_into_dataclasses()
    args.model_name_or_path = args.model_name_or_path or str(dinov2_small.prepare())
    folder = args.data_folder or scenes.prepare(args.image_size)
    compare(
        args.methods,
        lambda method: run(method, folder, args, prompts, training),
        training.output_dir,
        {"mean_iou": "mean IoU", "accuracy": "accuracy"},
    )


if __name__ == "__main__":
    main()
