"""Checks on a model and its optimizer before prompts are relocated, and on what scores and policies return."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

from ..model import ProVPTModel
from .config import RelocationConfig
from .idleness import Idleness
from .parallel import refuse_wrapper
from .policies import Action


def tuner_of(model: nn.Module) -> ProVPTModel:
    """The tuner in a model whose prompts can move."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, ProVPTModel)}
    if not found:
        raise ValueError(
            f"Relocation needs a model with a PROVPT adapter, got {type(model).__name__}. "
            "Wrap it first: get_peft_model(model, ProVPTConfig(...))."
        )
    if len(found) > 1:
        raise ValueError(
            f"Relocation moves the prompts of one PROVPT model, but the {type(model).__name__} has several: "
            f"{', '.join(found)}. Use a custom training loop with a `Relocator` for each: pass it that part of the "
            "model, and a `compute_loss` that calls the whole model."
        )
    (tuner,) = found.values()
    if tuner.bank.shallow.intersection(tuner.active_adapters):
        raise ValueError(
            "Relocation needs prompts that can move, but those of VPT-Shallow stay at the first block. Create the "
            "adapter with `shallow=False`."
        )
    for module in model.modules():
        refuse_wrapper(type(module).__name__)
    return tuner


def check_trained(tuner: ProVPTModel, adapter_name: str, optimizer: torch.optim.Optimizer | None) -> None:
    prompts = tuner.prompts(adapter_name)
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"`optimizer` must be the one that steps the prompts, got a {type(optimizer).__name__}. If there are "
            "several optimizers, give the one that steps the prompts."
        )
    stepped = optimizer is None or any(p is prompts for group in optimizer.param_groups for p in group["params"])
    if not (prompts.requires_grad and stepped):
        where = "are not in the optimizer" if prompts.requires_grad else "are frozen"
        raise ValueError(
            f"Relocation needs prompts that are trained, but those of the adapter {adapter_name!r} {where}. "
            "Load an adapter with `is_trainable=True`, and then create the optimizer from all parameters with "
            "`requires_grad`."
        )


def check_reserve(tuner: ProVPTModel, adapter_name: str, config: RelocationConfig) -> None:
    distributed = (tuner.prompt_blocks(adapter_name) != 0).all()
    if config.adjust == "add" and distributed and not tuner.peft_config[adapter_name].reserve:
        raise ValueError(
            '`adjust="add"` adds prompts from a reserve to blocks, but the adapter has no reserve. Create it with '
            "`ProVPTConfig(num_prompts=…, reserve=…)`."
        )


def check_idleness(idleness: Any, num_prompts: int) -> Idleness:
    """What a score returned, for N prompts."""
    parts = [idleness.score, idleness.stderr] if isinstance(idleness, Idleness) else [idleness]
    if not isinstance(idleness, Idleness) or any(
        not isinstance(part, torch.Tensor) or part.shape != (num_prompts,) for part in parts
    ):
        got = " and ".join(
            f"a tensor of shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else f"a {type(part).__name__}"
            for part in parts
        )
        raise ValueError(
            f"A score (`idleness`) must return an `Idleness` whose `score` and `stderr` are tensors of shape "
            f"({num_prompts},), a number for each prompt, got {got}. `Idleness.mean_of` makes one from scores of each "
            "image and prompt."
        )
    return idleness


def check_action(action: Any, num_blocks: int) -> Action:
    """What a policy chose, with its block as Python's own int, which records can be saved with."""
    block: Any = action.block if isinstance(action, Action) else None
    try:
        number = operator.index(block)
    except TypeError:
        number = 0
    if not 1 <= number <= num_blocks:
        got = f"block {block!r}" if isinstance(action, Action) else f"a {type(action).__name__}"
        raise ValueError(
            f"A policy's `choose` must return an `Action` with a block from 1 to {num_blocks}, got {got}. Blocks are "
            "counted from 1."
        )
    action.block = number
    return action


def check_diagnostics(learned: Any) -> dict[str, float]:
    """What a policy's `learn` returned: numbers to log. None counts as none."""
    try:
        return {name: float(value) for name, value in ({} if learned is None else learned).items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"A policy's `learn` must return a dict of numbers to log, or an empty one, got {learned!r}: {error}"
        ) from error
