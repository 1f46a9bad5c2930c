"""What the fine-tuning scripts share: how a model is adapted, and its optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel, get_peft_model
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_BACKBONE_MAPPING

from provpt_peft import ProVPTConfig, RelocationConfig, RelocationTrainerCallback
from provpt_peft.relocation.config import PRESETS


# What is trained beside the head.
PROMPTED = ("vpt-deep", "pro-vpt")

# The scripts' defaults where they are not the Trainer's.
DEFAULTS: dict[str, Any] = {
    "save_strategy": "no",
    "lr_scheduler_type": "cosine",
    "report_to": "none",
    "remove_unused_columns": False,
    "dataloader_pin_memory": torch.cuda.is_available(),
}


@dataclass
class PromptArguments:
    """How the prompts are trained."""

    num_prompts: int = field(default=5, metadata={"help": "Prompts in each block at the start."})
    prompt_dropout: float = field(default=0.1, metadata={"help": "Dropout on the prompts."})
    prompt_learning_rate: float = field(
        default=3e-3, metadata={"help": "Learning rate of the prompts. `--learning_rate` is the head's."}
    )
    preset: str = field(
        default="default", metadata={"help": f"How prompts are relocated: {', '.join(sorted(PRESETS))}."}
    )


def check_methods(methods: Sequence[str], known: Sequence[str]) -> None:
    """Check the names of methods to compare.

    Raises:
        ValueError: If one is not known.
    """
    unknown = set(methods) - set(known)
    if unknown:
        raise ValueError(f"`--methods` must be among {', '.join(known)}, got {', '.join(sorted(unknown))}.")


def adapt(
    method: str, model: torch.nn.Module, heads: Sequence[str], args: PromptArguments
) -> torch.nn.Module | PeftModel:
    """Freeze the model but for its heads, and add prompts where the method has some.

    Args:
        method: One of `PROMPTED`, or any other name for the heads alone.
        model: The model, with new heads.
        heads: Names of the modules to train in full.
        args: How many prompts, and their dropout.
    """
    if method in PROMPTED:
        config = ProVPTConfig(
            num_prompts=args.num_prompts, prompt_dropout=args.prompt_dropout, modules_to_save=list(heads)
        )
        return get_peft_model(model, config)
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if name.endswith(tuple(heads)):
            module.requires_grad_(True)
    return model


def to_pixels(picture: Image.Image, width: int, height: int, processor: Any) -> torch.Tensor:
    """A picture resized and normalised as a checkpoint's image processor does it, (3, height, width)."""
    pixels = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR), dtype=np.float32)
    mean, std = (torch.tensor(v)[:, None, None] for v in (processor.image_mean, processor.image_std))
    return (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std


def load_backbone(name_or_path: str, config: PreTrainedConfig) -> PreTrainedModel:
    """What `AutoBackbone.from_pretrained` does, which takes no local folder."""
    return MODEL_FOR_BACKBONE_MAPPING[type(config)].from_pretrained(name_or_path, config=config)


def new_norms(model: torch.nn.Module) -> list[str]:
    """Names of the norms that transformers puts on the feature maps of a Swin, which no checkpoint has."""
    return [name for name, _ in model.named_modules() if "hidden_states_norms." in name]


def relocation(method: str, args: PromptArguments, seed: int) -> list[RelocationTrainerCallback]:
    """The callback that relocates prompts, where the method does."""
    config = RelocationConfig.preset(args.preset, seed=seed)
    return [RelocationTrainerCallback(config)] if method == "pro-vpt" else []


def make_optimizer(
    model: torch.nn.Module, args: PromptArguments, training: TrainingArguments
) -> torch.optim.Optimizer:
    """AdamW with a learning rate for the prompts and one for the heads."""
    prompts, heads = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (prompts if "provpt_" in name else heads).append(parameter)
    groups = [
        {"params": prompts, "lr": args.prompt_learning_rate},
        {"params": heads, "lr": training.learning_rate},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], weight_decay=training.weight_decay)


def report_relocations(callbacks: Sequence[RelocationTrainerCallback], model: PeftModel) -> int:
    """Print where the prompts are after training, if they were relocated. Returns the number of relocations."""
    count = 0
    for callback in callbacks:
        count = sum(record.prompt is not None for record in callback.history)
        print(f"{count} relocations; prompts in each block: {model.base_model.prompt_distribution()}")
    return count


def compare(
    methods: Sequence[str], run: Callable[[str], dict[str, Any]], folder: str, metrics: dict[str, str]
) -> None:
    """Run methods one after the other, write their rows to `results.json` and print them as a table.

    Args:
        methods: Names of the methods.
        run: Trains and tests one, and returns its row.
        folder: Where to write.
        metrics: The metrics of a row that the table shows, and the heads of their columns.
    """
    rows = []
    for method in methods:
        print(f"\n== {method} ==")
        rows.append(run(method))
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "results.json").write_text(json.dumps(rows, indent=2))
    heads = "".join(f"{head:>{len(head) + 3}}" for head in metrics.values())
    print(f"\n{'method':12}{heads}{'trainable parameters':>24}{'seconds':>10}")
    for row in rows:
        values = "".join(f"{row[name]:{len(head) + 3}.4f}" for name, head in metrics.items())
        print(f"{row['method']:12}{values}{row['trainable_parameters']:24,}{row['seconds']:10.0f}")
