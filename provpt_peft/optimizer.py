"""An optimizer with a learning rate for the prompts and another one for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .prompts import PromptBank


def create_provpt_optimizer(
    model: nn.Module,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    lr: float,
    head_lr: float,
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
        lr: Learning rate of the prompts.
        head_lr: Learning rate of the rest.
        weight_decay: That of the rest.
        kwargs: Passed on to the optimizer.

    Raises:
        ValueError: If no prompts in the model are trained.

    Example:
        ```python
        >>> optimizer = create_provpt_optimizer(model, torch.optim.AdamW, lr=5e-3, head_lr=1e-3)
        >>> trainer = Trainer(model, args, train_dataset=train, optimizers=(optimizer, None))
        ```
    """
    banks = [module for module in model.modules() if isinstance(module, PromptBank)]
    prompts = [p for bank in banks for p in bank.provpt_prompts.values() if p.requires_grad]
    if not prompts:
        raise ValueError(
            f"The optimizer is for prompts that are trained, but the {type(model).__name__} has none. Wrap the model "
            "first: get_peft_model(model, ProVPTConfig(...)), or load an adapter with `is_trainable=True`."
        )
    ours = set(prompts)
    rest = [p for p in model.parameters() if p.requires_grad and p not in ours]
    groups: list[dict[str, Any]] = [{"params": prompts, "lr": lr, "weight_decay": 0.0}]
    if rest:
        groups.append({"params": rest, "lr": head_lr, "weight_decay": weight_decay})
    return optimizer_cls(groups, lr=lr, **kwargs)  # type: ignore[call-arg]
