"""Object detection and instance segmentation with a new head alone, with VPT-Deep and with PRO-VPT, and compare.

Offline, boxes on generated scenes with the demo's DINOv2-S:

    python examples/detection/finetune_detection.py

COCO, boxes or masks, with a Swin-T:

    python examples/detection/finetune_detection.py --architecture deformable-detr \\
        --train_images coco/train2017 --train_annotations coco/annotations/instances_train2017.json \\
        --test_images coco/val2017 --test_annotations coco/annotations/instances_val2017.json \\
        --model_name_or_path microsoft/swin-tiny-patch4-window7-224 --image_size 640 \\
        --head_width 256 --head_layers 6 --num_queries 300 --num_train_epochs 50 --output_dir outputs/coco
    python examples/detection/finetune_detection.py --architecture mask2former ...

Images are resized to squares. The backbone gets the prompts, all else is trained in full. A method's folder holds the
backbone's adapter and, in `head.safetensors`, the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    DeformableDetrConfig,
    DeformableDetrForObjectDetection,
    HfArgumentParser,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.deformable_detr.image_processing_pil_deformable_detr import DeformableDetrImageProcessorPil
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil


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


METHODS = ("head", *PROMPTED)
# Of an image, as COCO's metric counts them.
MOST_DETECTIONS = 100


@dataclass
class DetectionArguments:
    """Which images, which model."""

    train_images: Path | None = field(default=None, metadata={"help": "Folder. Default: generated scenes."})
    train_annotations: Path | None = field(default=None, metadata={"help": "COCO's instances_….json."})
    test_images: Path | None = field(default=None, metadata={"help": "Folder, read once, after training."})
    test_annotations: Path | None = field(default=None, metadata={"help": "COCO's instances_….json."})
    architecture: str = field(
        default="deformable-detr",
        metadata={"help": f"{' (boxes) or '.join(('deformable-detr', 'mask2former'))} (masks)."},
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint of the backbone. Default: the demo's DINOv2-S."}
    )
    head_width: int = field(default=128, metadata={"help": "Width of the detector's encoder and decoder."})
    head_epochs: float = field(
        default=5.0,
        metadata={"help": "Epochs in which the head alone is trained first, whatever the method; 0 for none."},
    )
    head_layers: int = field(default=2, metadata={"help": "Layers of the detector's encoder, and of its decoder."})
    num_queries: int = field(default=20, metadata={"help": "Objects that are proposed."})
    image_size: int = field(default=84, metadata={"help": "Side of the images in pixels."})
    methods: list[str] = field(
        default_factory=lambda: list(METHODS), metadata={"help": f"Methods to compare: {', '.join(METHODS)}."}
    )

    def __post_init__(self) -> None:
        check_methods(self.methods, METHODS)
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"`--architecture` must be among {', '.join(ARCHITECTURES)}, got {self.architecture!r}.")
        given = [self.train_images, self.train_annotations, self.test_images, self.test_annotations]
        if any(path is None for path in given) and any(path is not None for path in given):
            raise ValueError("Give images and annotations to train and to test on, all four, or none for the scenes.")


class Detections(torch.utils.data.Dataset):
    """Images with boxes and masks in COCO's format, resized to squares and normalised.

    Args:
        images: Folder of the images.
        annotations: COCO's JSON file.
        processor: The checkpoint's image processor, which knows how to normalise.
        size: Side in pixels.
        with_masks: Whether masks are wanted in place of boxes.
    """

    def __init__(self, images: Path, annotations: Path, processor: Any, size: int, with_masks: bool) -> None:
        self.images = images
        self.coco = quietly(COCO, str(annotations))
        self.ids = sorted(self.coco.imgs)
        # COCO's category numbers have gaps.
        self.categories = sorted(self.coco.cats)
        self.size = size
        self.with_masks = with_masks
        self.processor = processor

    def __len__(self) -> int:
        return len(self.ids)

    def pixel_values(self, image: int) -> torch.Tensor:
        """(3, size, size)."""
        picture = Image.open(self.images / self.coco.imgs[image]["file_name"]).convert("RGB")
        return to_pixels(picture, self.size, self.size, self.processor)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self.coco.imgs[self.ids[index]]
        things = self.coco.loadAnns(self.coco.getAnnIds(image["id"], iscrowd=False))
        things = [thing for thing in things if min(thing["bbox"][2:]) > 0]
        classes = torch.tensor([self.categories.index(thing["category_id"]) for thing in things], dtype=torch.int64)
        item: dict[str, Any] = {"pixel_values": self.pixel_values(image["id"])}
        if self.with_masks:
            item["class_labels"] = classes
            item["mask_labels"] = torch.zeros(len(things), self.size, self.size)
            for row, thing in enumerate(things):
                mask = Image.fromarray(self.coco.annToMask(thing))
                item["mask_labels"][row] = torch.from_numpy(np.array(mask.resize((self.size, self.size))))
            return item
        # Corner and size in pixels to centre and size as shares of the image.
        boxes = torch.tensor([thing["bbox"] for thing in things], dtype=torch.float32).view(-1, 4)
        boxes = boxes / torch.tensor([image["width"], image["height"]] * 2)
        boxes[:, :2] += boxes[:, 2:] / 2
        return item | {"labels": {"class_labels": classes, "boxes": boxes}}

    def results(self, detections: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Detections of the images, in their order, in COCO's words: what `loadRes` reads."""
        found = []
        for image, detection in zip(self.ids, detections, strict=True):
            for score, label, where in zip(*(detection[k] for k in ("scores", "labels", "where")), strict=True):
                found.append({"image_id": image, "category_id": self.categories[label], "score": score, **where})
        return found


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch: images in one tensor, objects in a list, since their number differs."""
    return {
        name: torch.stack([item[name] for item in items]) if name == "pixel_values" else [i[name] for i in items]
        for name in items[0]
    }


def quietly(function: Any, *args: Any) -> Any:
    """Call a function of pycocotools, which prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*args)


# ---- detectors ------------------------------------------------------------------------------------------------------


class DeformableDetr:
    """Boxes: two stages and iterative refinement, on all stages of a Swin or the last of a ViT."""

    kind = "bbox"

    def __init__(self, args: DetectionArguments, backbone: Any, num_labels: int) -> None:
        self.processor = DeformableDetrImageProcessorPil()
        config = DeformableDetrConfig(
            backbone_config=backbone, num_labels=num_labels, d_model=args.head_width, num_queries=args.num_queries,
            encoder_layers=args.head_layers, decoder_layers=args.head_layers, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=2 * args.head_width, decoder_ffn_dim=2 * args.head_width,
            num_feature_levels=len(backbone.out_features), two_stage=True, two_stage_num_proposals=args.num_queries,
            with_box_refine=True, auxiliary_loss=True, dropout=0.0, bbox_loss_coefficient=2,
            giou_loss_coefficient=1,
        )  # fmt: skip
        self.model: PreTrainedModel = DeformableDetrForObjectDetection(config)
        self.parent = self.model.model.backbone
        self.name = "model"

    def detections(self, output: Any, sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
        """Scores, class numbers and boxes of each image, from the model's output and the images' sizes."""
        found = self.processor.post_process_object_detection(output, 0.0, sizes, top_k=MOST_DETECTIONS)
        for image in found:
            boxes = image.pop("boxes")
            boxes[:, 2:] -= boxes[:, :2]
            image["where"] = [{"bbox": box} for box in boxes.tolist()]
            image["scores"], image["labels"] = image["scores"].tolist(), image["labels"].tolist()
        return found


class Mask2Former:
    """Masks, on the four stages of a Swin."""

    kind = "segm"

    def __init__(self, args: DetectionArguments, backbone: Any, num_labels: int) -> None:
        self.processor = Mask2FormerImageProcessorPil()
        config = Mask2FormerConfig(
            backbone_config=backbone, num_labels=num_labels, hidden_dim=args.head_width, feature_size=args.head_width,
            mask_feature_size=args.head_width, encoder_layers=args.head_layers, decoder_layers=args.head_layers,
            encoder_feedforward_dim=2 * args.head_width, dim_feedforward=2 * args.head_width, num_attention_heads=4,
            num_queries=args.num_queries,
        )  # fmt: skip
        self.model: PreTrainedModel = Mask2FormerForUniversalSegmentation(config)
        self.parent = self.model.model.pixel_level_module
        self.name = "encoder"

    def detections(self, output: Any, sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
        """Scores, class numbers and masks of each image, from the model's output and the images' sizes."""
        processed = self.processor.post_process_instance_segmentation(
            output, threshold=0.0, target_sizes=sizes, return_binary_maps=True
        )
        found = []
        for image in processed:
            segments = image["segments_info"]
            masks = np.asarray(image["segmentation"], dtype=np.uint8) if segments else []
            runs = [coco_mask.encode(np.asfortranarray(mask)) for mask in masks]
            found.append(
                {
                    "scores": [segment["score"] for segment in segments],
                    "labels": [segment["label_id"] for segment in segments],
                    "where": [{"segmentation": run | {"counts": run["counts"].decode()}} for run in runs],
                }
            )
        return found


ARCHITECTURES = {"deformable-detr": DeformableDetr, "mask2former": Mask2Former}


def make_detector(args: DetectionArguments, num_labels: int) -> DeformableDetr | Mask2Former:
    """A detector on the backbone of the checkpoint; the rest is new."""
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    # All maps of a ViT have one size.
    windowed = hasattr(config, "depths")
    config.out_features = config.stage_names[-4:] if windowed else config.stage_names[-1:]
    detector = ARCHITECTURES[args.architecture](args, config, num_labels)
    setattr(detector.parent, detector.name, load_backbone(args.model_name_or_path, config))
    return detector


def adapt_backbone(method: str, detector: DeformableDetr | Mask2Former, prompts: PromptArguments) -> torch.nn.Module:
    """Freeze the detector's backbone, and add prompts where the method has some. Returns the backbone."""
    backbone = getattr(detector.parent, detector.name)
    backbone = adapt(method, backbone, new_norms(backbone), prompts)
    setattr(detector.parent, detector.name, backbone)
    return backbone


@torch.no_grad()
def evaluate(detector: DeformableDetr | Mask2Former, data: Detections, batch_size: int) -> dict[str, float]:
    """COCO's average precision: over IoU 0.5 to 0.95, and at 0.5."""
    model = detector.model.eval()
    device = next(model.parameters()).device
    detections = []
    for start in tqdm(range(0, len(data), batch_size), desc="test"):
        images = [data.coco.imgs[number] for number in data.ids[start : start + batch_size]]
        pixel_values = torch.stack([data.pixel_values(image["id"]) for image in images]).to(device)
        sizes = [(image["height"], image["width"]) for image in images]
        detections += detector.detections(model(pixel_values=pixel_values), sizes)
    results = data.results(detections)
    if not results:
        return {"ap": 0.0, "ap50": 0.0}
    metric = COCOeval(data.coco, quietly(data.coco.loadRes, results), detector.kind)
    for step in (metric.evaluate, metric.accumulate, metric.summarize):
        quietly(step)
    return {"ap": float(metric.stats[0]), "ap50": float(metric.stats[1])}


def run(
    method: str, args: DetectionArguments, prompts: PromptArguments, training: TrainingArguments
) -> dict[str, Any]:
    """Train and test one method. Returns its row of the table."""
    set_seed(training.seed)
    processor = AutoImageProcessor.from_pretrained(args.model_name_or_path)
    train, test = (
        Detections(images, annotations, processor, args.image_size, args.architecture == "mask2former")
        for images, annotations in (
            (args.train_images, args.train_annotations),
            (args.test_images, args.test_annotations),
        )
    )
    detector = make_detector(args, len(train.categories))
    model = detector.model
    start = time.perf_counter()
    # First the head alone: a new head's gradients would only lead prompts astray (Kumar et al. 2022).
    stages = [("head", args.head_epochs)] * (args.head_epochs > 0) + [(method, training.num_train_epochs)]
    for stage, epochs in stages:
        backbone = adapt_backbone(stage, detector, prompts)
        callbacks = relocation(stage, prompts, training.seed)
        trainer = Trainer(
            model,
            dataclasses.replace(training, num_train_epochs=epochs),
            data_collator=collate,
            train_dataset=train,
            callbacks=callbacks,
            optimizers=(make_optimizer(model, prompts, training), None),
        )
        trainer.train()
    seconds = time.perf_counter() - start
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    folder = Path(training.output_dir) / method
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(backbone, PeftModel):
        backbone.save_pretrained(folder)
    inside = {id(parameter) for parameter in backbone.parameters()}
    head = {name: p.detach().contiguous() for name, p in model.named_parameters() if id(p) not in inside}
    save_file(head, folder / "head.safetensors")
    relocations = report_relocations(callbacks, backbone)
    metrics = evaluate(detector, test, training.per_device_eval_batch_size)
    return {
        "method": method,
        "trainable_parameters": trainable,
        "seconds": seconds,
        "relocations": relocations,
        **metrics,
    }


def main() -> None:
    """Compare the methods and print a table."""
    parser = HfArgumentParser(
        (DetectionArguments, PromptArguments, TrainingArguments), description=__doc__.splitlines()[0]
    )
    parser.set_defaults(
        output_dir="outputs/detection",
        num_train_epochs=4,
        logging_strategy="epoch",
        learning_rate=3e-4,
        prompt_learning_rate=1e-3,
        prompt_dropout=0.0,
        warmup_steps=0.1,
        max_grad_norm=0.1,
        **DEFAULTS,
    )
    args, prompts, training = parser.parse_args_into_dataclasses()
    args.model_name_or_path = args.model_name_or_path or str(dinov2_small.prepare())
    if args.train_images is None:
        folder = scenes.prepare(args.image_size)
        args.train_images, args.test_images = (folder / "images" / split for split in ("train", "test"))
        args.train_annotations, args.test_annotations = (
            folder / f"instances_{split}.json" for split in ("train", "test")
        )
    compare(
        args.methods,
        lambda method: run(method, args, prompts, training),
        training.output_dir,
        {"ap": "AP", "ap50": "AP50"},
    )


if __name__ == "__main__":
    main()
