"""An optimizer with a learning rate for the prompts and another one for the rest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from .prompts import PromptBank


# Rates for Adam and its like, found in docs/experiments/recipes.md: of 5 prompts a block or fewer, and of a head.
PROMPTS_LR, HEAD_LR = 3e-3, 1e-3


def prompts_lr(prompts_per_block: float) -> float:
    """A learning rate of the prompts that suits their number, for Adam and its like. The more prompts a block has, the
    more a step of all of them changes it: the rate falls with the square root of their number."""
    return PROMPTS_LR * min(1.0, math.sqrt(5 / prompts_per_block))


def create_provpt_optimizer(
    model: nn.Module,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    lr: float | None = None,
    head_lr: float = HEAD_LR,
    weight_decay: float = 0.0,
    **kwargs: Any,
) -> torch.optim.Optimizer:
    """Make an optimizer of all that is trained in a model, in two parameter groups: the prompts, and the head with
    whatever else `modules_to_save` names.

    A block's norm ignores the length of a prompt, so the prompts' learning rate only means something relative to their
    length (about 0.05 an entry at the start), and the head wants another one. Prompts have no weight decay: it would
    change their length and nothing else.

    Args:
        model: A model with a PROVPT adapter.
        optimizer_cls: Class of the optimizer, such as `torch.optim.AdamW`. It has to take parameter groups, as LBFGS
            does not, and vectors, as Muon does not.
        lr: Learning rate of the prompts. By default `prompts_lr` of their number, which suits Adam and its like, but
            not SGD: the paper searches from 0.05 to 50 times batch size / 256.
        head_lr: Learning rate of the rest.
        weight_decay: That of the rest.
        kwargs: Passed on to the optimizer.

    Raises:
        ValueError: If no prompts in the model are trained.

    Example:
        ```python
        >>> optimizer = create_provpt_optimizer(model, torch.optim.AdamW)
        >>> trainer = Trainer(model, args, train_dataset=train, optimizers=(optimizer, None))
        ```
    """
    banks = [module for module in model.modules() if isinstance(module, PromptBank)]
    # With how many blocks share them: a shallow adapter's are all in the first one.
    trained = [
        (p, 1 if name in bank.shallow else bank.num_blocks)
        for bank in banks
        for name, p in bank.provpt_prompts.items()
        if p.requires_grad
    ]
    prompts = [p for p, _ in trained]
    if not prompts:
        raise ValueError(
            f"The optimizer is for prompts that are trained, but the {type(model).__name__} has none. Wrap the model "
            "first: get_peft_model(model, ProVPTConfig(...)), or load an adapter with `is_trainable=True`."
        )
    if lr is None:
        lr = prompts_lr(max(len(p) / num_blocks for p, num_blocks in trained))
    ours = set(prompts)
    rest = [p for p in model.parameters() if p.requires_grad and p not in ours]
    groups: list[dict[str, Any]] = [{"params": prompts, "lr": lr, "weight_decay": 0.0}]
    if rest:
        groups.append({"params": rest, "lr": head_lr, "weight_decay": weight_decay})
    return optimizer_cls(groups, lr=lr, **kwargs)  # type: ignore[call-arg]
