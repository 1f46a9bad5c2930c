"""An optimizer with separate learning rates for the prompts and for the other trained parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from .prompts import PromptBank


# Rates for Adam-like optimizers, from docs/experiments/recipes.md: for 5 prompts per block, and for a head.
PROMPTS_LR, HEAD_LR = 3e-3, 1e-3


def prompts_lr(prompts_per_block: float) -> float:
    """The prompts' learning rate for Adam-like optimizers. The more prompts a block has, the more one step on all of
    them changes the block, so the rate falls with the square root of their number."""
    return PROMPTS_LR * math.sqrt(5 / prompts_per_block)


def _per_block(blocks: list[int]) -> float:
    """The number of prompts, the reserve included, over the number of blocks that have any."""
    return len(blocks) / max(len(set(blocks) - {0}), 1)


def create_provpt_optimizer(
    model: nn.Module,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    lr: float | None = None,
    head_lr: float = HEAD_LR,
    weight_decay: float = 0.0,
    **kwargs: Any,
) -> torch.optim.Optimizer:
    """Make an optimizer for all trainable parameters of a model, in two parameter groups: the prompts, and the head
    with everything else that `modules_to_save` names.

    A block's norm ignores the length of a prompt vector, so the prompts' learning rate only matters relative to that
    length (about 0.05 per entry at the start), and the head needs a different one. Prompts get no weight decay: it
    would only change their length.

    Args:
        model: A model with a PROVPT adapter.
        optimizer_cls: Class of the optimizer, such as `torch.optim.AdamW`. It must support parameter groups (LBFGS
            does not) and 1-D parameters (Muon does not).
        lr: Learning rate of the prompts. The default, `prompts_lr` of their number per block that has any, suits
            Adam-like optimizers but not SGD: the paper searches from 0.05 to 50 times batch size / 256.
        head_lr: Learning rate of the other trainable parameters.
        weight_decay: Weight decay of the other trainable parameters.
        kwargs: Passed on to the optimizer.

    Raises:
        ValueError: If the model has no trainable prompts, or if SGD has no `lr`.

    Example:
        ```python
        >>> optimizer = create_provpt_optimizer(model, torch.optim.AdamW)
        >>> trainer = Trainer(model, args, train_dataset=train, optimizers=(optimizer, None))
        ```
    """
    banks = [module for module in model.modules() if isinstance(module, PromptBank)]
    trained = [(bank, name, p) for bank in banks for name, p in bank.provpt_prompts.items() if p.requires_grad]
    prompts = [p for _, _, p in trained]
    if not prompts:
        raise ValueError(
            f"The optimizer needs trainable prompts, but the {type(model).__name__} has none. Wrap the model first: "
            "get_peft_model(model, ProVPTConfig(...)), or load an adapter with `is_trainable=True`."
        )
    if lr is None:
        if isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.SGD):
            raise ValueError(
                "SGD must be given `lr`, since the default suits optimizers like Adam, got none. The paper searches "
                "from 0.05 to 50 times batch size / 256."
            )
        lr = prompts_lr(max(_per_block(bank.blocks(name).tolist()) for bank, name, _ in trained))
    ours = set(prompts)
    rest = [p for p in model.parameters() if p.requires_grad and p not in ours]
    groups: list[dict[str, Any]] = [{"params": prompts, "lr": lr, "weight_decay": 0.0}]
    if rest:
        groups.append({"params": rest, "lr": head_lr, "weight_decay": weight_decay})
    return optimizer_cls(groups, lr=lr, **kwargs)  # type: ignore[call-arg]
