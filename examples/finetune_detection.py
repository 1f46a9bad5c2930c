"""Object detection and instance segmentation with PRO-VPT, or with VPT-Deep or a new head alone for comparison.

Offline, boxes on generated scenes with the demo's DINOv2-S:

    python examples/dinov2_small.py .cache/dinov2-small
    python -m examples.research.scenes --size 84
    python examples/finetune_detection.py

COCO, boxes or masks, with a Swin-T:

    python examples/finetune_detection.py --architecture deformable-detr \\
        --train_images coco/train2017 --train_annotations coco/annotations/instances_train2017.json \\
        --test_images coco/val2017 --test_annotations coco/annotations/instances_val2017.json \\
        --model_name_or_path microsoft/swin-tiny-patch4-window7-224 --image_size 640 \\
        --head_width 256 --head_layers 6 --num_queries 300 --num_train_epochs 50 --output_dir outputs/coco
    python examples/finetune_detection.py --architecture mask2former ...

`--methods head vpt-deep pro-vpt` trains three models, one after the other. Images are resized to squares. The backbone
gets the prompts, and everything else is fully trained. A method's folder in `--output_dir` has the backbone's adapter,
the rest in `head.safetensors`, logs and, with `--save_strategy epoch`, checkpoints to resume from.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel, get_peft_model
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
from transformers.models.auto.modeling_auto import MODEL_FOR_BACKBONE_MAPPING
from transformers.models.deformable_detr.image_processing_pil_deformable_detr import DeformableDetrImageProcessorPil
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

from provpt_peft import ProVPTConfig, RelocationConfig, RelocationTrainerCallback, create_provpt_optimizer
from provpt_peft.optimizer import PROMPTS_LR, prompts_lr


METHODS = ("head", "vpt-deep", "pro-vpt")
# Names for `RelocationConfig.preset`. `adding` needs a reserve of prompts, which the script does not create.
PRESETS = ("default", "paper", "A", "B", "C", "D", "E", "F", "G")
# The demo's backbone, and its scenes at `--image_size`.
DEMO = Path(".cache/dinov2-small")
SCENES = ".cache/scenes-{size}"
# Maximum number per image, as in COCO's metric.
MOST_DETECTIONS = 100
# Options of `TrainingArguments` that have to keep their defaults, and why.
FIXED = {
    **dict.fromkeys(
        (
            "eval_strategy", "do_train", "do_eval", "do_predict", "eval_steps", "eval_delay", "eval_on_start",
            "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics",
            "include_for_metrics", "prediction_loss_only", "metric_for_best_model", "bf16_full_eval", "fp16_full_eval",
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
class DetectionArguments(TrainingArguments):
    """The images, the model, the methods and the training settings."""

    train_images: Path | None = field(default=None, metadata={"help": "Folder. Default: the demo's scenes."})
    train_annotations: Path | None = field(default=None, metadata={"help": "COCO's instances_….json."})
    test_images: Path | None = field(default=None, metadata={"help": "Folder, read once, after training."})
    test_annotations: Path | None = field(default=None, metadata={"help": "COCO's instances_….json."})
    architecture: str = field(
        default="deformable-detr",
        metadata={
            "help": "`deformable-detr` for boxes, `mask2former` for masks.",
            "choices": ("deformable-detr", "mask2former"),
        },
    )
    model_name_or_path: str = field(
        default=str(DEMO), metadata={"help": f"Checkpoint of the backbone. Default: the demo's, {DEMO}."}
    )
    head_width: int = field(default=128, metadata={"help": "Width of the detector's encoder and decoder."})
    head_epochs: float = field(
        default=5.0,
        metadata={"help": "Epochs in which only the head is trained first, for each method; 0 for none."},
    )
    head_layers: int = field(default=2, metadata={"help": "Layers of the detector's encoder, and of its decoder."})
    num_queries: int = field(default=20, metadata={"help": "Number of objects that are proposed per image."})
    image_size: int = field(default=84, metadata={"help": "Side of the images in pixels."})
    methods: list[str] = field(
        default_factory=lambda: ["vpt-deep"],
        metadata={"help": "Methods to train, one after the other, and to compare.", "choices": METHODS},
    )
    num_prompts: int = field(default=5, metadata={"help": "Prompts in each block at the start."})
    prompt_dropout: float = field(default=0.0, metadata={"help": "Dropout on the prompts."})
    learning_rate: float | None = field(
        default=None,
        metadata={
            "help": f"Learning rate of the prompts. Default: {PROMPTS_LR / 3:g} for 5 per block, less for more."
        },
    )
    head_learning_rate: float = field(default=3e-4, metadata={"help": "Learning rate of everything else."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of everything else, biases included."})
    preset: str = field(
        default="default",
        metadata={"help": "How prompts are relocated: a name of `RelocationConfig.preset`.", "choices": PRESETS},
    )
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Checkpoint folder to resume from. Give only its method in `--methods`."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [self.train_images, self.train_annotations, self.test_images, self.test_annotations]
        if all(path is None for path in given):
            folder = Path(SCENES.format(size=self.image_size))
            if not folder.exists():
                raise ValueError(
                    f"There are no scenes in {folder}. Run `python -m examples.research.scenes --size "
                    f"{self.image_size}`, or name images and annotations to train and to test on."
                )
            self.train_images, self.test_images = folder / "images" / "train", folder / "images" / "test"
            self.train_annotations = folder / "instances_train.json"
            self.test_annotations = folder / "instances_test.json"
        elif any(path is None for path in given):
            raise ValueError("Give images and annotations to train and to test on, all four, or none for the scenes.")
        if self.model_name_or_path == str(DEMO) and not DEMO.exists():
            raise ValueError(
                f"There is no backbone in {DEMO}. Run `python examples/dinov2_small.py {DEMO}`, or name another "
                "checkpoint with `--model_name_or_path`."
            )


def parse() -> DetectionArguments:
    """Read the command line. If it is not valid, exit with the reason before anything is loaded."""
    parser = HfArgumentParser(
        DetectionArguments,
        description=__doc__.splitlines()[0],
        usage="%(prog)s [options], see --help",
    )
    parser.set_defaults(
        output_dir="outputs/detection",
        num_train_epochs=4,
        logging_strategy="epoch",
        save_strategy="no",
        lr_scheduler_type="cosine",
        optim="adamw_torch",
        warmup_steps=0.1,
        max_grad_norm=0.1,
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


def check(args: DetectionArguments, changed: set[str]) -> None:
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


class Detections(torch.utils.data.Dataset):
    """Images with boxes and masks in COCO's format, resized to squares and normalised.

    Args:
        images: Folder of the images.
        annotations: COCO's JSON file.
        processor: The checkpoint's image processor, which knows how to normalise.
        size: Side in pixels.
        with_masks: Whether masks are wanted instead of boxes.
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
        """The image, resized and normalised, (3, size, size)."""
        picture = Image.open(self.images / self.coco.imgs[image]["file_name"]).convert("RGB")
        resized = picture.resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(resized, dtype=np.float32)).permute(2, 0, 1) / 255
        mean, std = (torch.tensor(v)[:, None, None] for v in (self.processor.image_mean, self.processor.image_std))
        return (pixels - mean) / std

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
        """Detections of the images, in their order, in the COCO format that `loadRes` reads."""
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
    """Call a function of pycocotools without its printed output."""
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
    # All feature maps of a ViT have the same size.
    windowed = hasattr(config, "depths")
    config.out_features = config.stage_names[-4:] if windowed else config.stage_names[-1:]
    detector = ARCHITECTURES[args.architecture](args, config, num_labels)
    # `AutoBackbone.from_pretrained` does not take a local folder.
    backbone_class = MODEL_FOR_BACKBONE_MAPPING[type(config)]
    backbone = backbone_class.from_pretrained(args.model_name_or_path, config=config)
    setattr(detector.parent, detector.name, backbone)
    return detector


def adapt_backbone(
    method: str, detector: DeformableDetr | Mask2Former, args: DetectionArguments
) -> torch.nn.Module | PeftModel:
    """Freeze the detector's backbone, and add prompts if the method has some. Returns the backbone."""
    backbone = getattr(detector.parent, detector.name)
    # The norms that transformers puts on a Swin's feature maps. No checkpoint has them.
    new = [name for name, _ in backbone.named_modules() if "hidden_states_norms." in name]
    if method == "head":
        backbone.requires_grad_(False)
        for name in new:
            backbone.get_submodule(name).requires_grad_(True)
        return backbone
    config = ProVPTConfig(num_prompts=args.num_prompts, prompt_dropout=args.prompt_dropout, modules_to_save=new)
    backbone = get_peft_model(backbone, config)
    setattr(detector.parent, detector.name, backbone)
    return backbone


def make_optimizer(model: torch.nn.Module, args: DetectionArguments) -> torch.optim.Optimizer:
    """The optimizer that `--optim` and its options name, with learning rates for the prompts and for the head."""
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args)
    if args.learning_rate is None:
        options["lr"] = prompts_lr(args.num_prompts) / 3
    if any(parameter.requires_grad for name, parameter in model.named_parameters() if "provpt_" in name):
        rest = {"head_lr": args.head_learning_rate, "weight_decay": args.weight_decay}
        return create_provpt_optimizer(model, optimizer_class, **rest, **options)
    head = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": head, "lr": args.head_learning_rate, "weight_decay": args.weight_decay}]
    return optimizer_class(groups, **options)


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


def run(method: str, args: DetectionArguments) -> dict[str, Any]:
    """Train and test one method. Returns its row of the table."""
    folder = Path(args.output_dir) / method
    set_seed(args.seed)
    processor = AutoImageProcessor.from_pretrained(args.model_name_or_path)
    masks = args.architecture == "mask2former"
    train = Detections(args.train_images, args.train_annotations, processor, args.image_size, masks)
    test = Detections(args.test_images, args.test_annotations, processor, args.image_size, masks)
    detector = make_detector(args, len(train.categories))
    model = detector.model
    # Save checkpoints under the names that the Trainer looks for when it resumes, not those of older releases.
    model.save_pretrained = functools.partial(model.save_pretrained, save_original_format=False)
    start = time.perf_counter()
    stages: list[tuple[str, dict[str, Any]]] = [(method, {})]
    # Train the head alone first, since a new head's gradients would mislead the prompts (Kumar et al. 2022).
    # Checkpoints are saved only after that.
    if args.head_epochs > 0 and args.resume_from_checkpoint is None:
        stages.insert(0, ("head", {"num_train_epochs": args.head_epochs, "max_steps": -1, "save_strategy": "no"}))
    for stage, changes in stages:
        training = copy.copy(args)
        vars(training).update(changes, output_dir=str(folder))
        backbone = adapt_backbone(stage, detector, args)
        callbacks = []
        if stage == "pro-vpt":
            callbacks.append(RelocationTrainerCallback(RelocationConfig.preset(args.preset, seed=args.seed)))
        trainer = Trainer(
            model,
            training,
            data_collator=collate,
            train_dataset=train,
            callbacks=callbacks,
            optimizers=(make_optimizer(model, args), None),
        )
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    seconds = time.perf_counter() - start

    if isinstance(backbone, PeftModel):
        backbone.save_pretrained(folder)
    inside = {id(parameter) for parameter in backbone.parameters()}
    head = {name: p.detach().contiguous() for name, p in model.named_parameters() if id(p) not in inside}
    save_file(head, folder / "head.safetensors")
    relocations = sum(record.prompt is not None for callback in callbacks for record in callback.history)
    for callback in callbacks:
        for record in callback.history:
            if record.note is not None:
                print(f"after epoch {record.epoch}: {record.note}")
        print(f"{callback.run().num_moves} moves; prompts in each block: {backbone.base_model.prompt_distribution()}")
    return {
        "method": method,
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "seconds": seconds,
        "relocations": relocations,
        **evaluate(detector, test, args.per_device_eval_batch_size),
    }


def main() -> None:
    """Train and test the methods, write their results to `results.json` and print them as a table."""
    args = parse()
    rows = []
    for method in args.methods:
        print(f"\n== {method} ==")
        rows.append(run(method, args))
    Path(args.output_dir, "results.json").write_text(json.dumps(rows, indent=2))
    print(f"\n{'method':12}{'AP':>8}{'AP50':>8}{'trainable parameters':>24}{'seconds':>10}")
    for row in rows:
        metrics = f"{row['ap']:8.4f}{row['ap50']:8.4f}"
        print(f"{row['method']:12}{metrics}{row['trainable_parameters']:24,}{row['seconds']:10.0f}")


if __name__ == "__main__":
    main()
