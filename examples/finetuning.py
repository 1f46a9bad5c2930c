"""What the fine-tuning scripts share: how a model is adapted, and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from peft import PeftModel, get_peft_model
from PIL import Image
from transformers import TrainingArguments

from provpt_peft import ProVPTConfig, RelocationConfig, RelocationTrainerCallback
from provpt_peft.relocation.config import PRESETS


# What is trained beside the head.
PROMPTED = ("vpt-deep", "pro-vpt")


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
