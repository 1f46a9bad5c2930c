"""The one place that reaches into the Trainer, which does not pass itself to callbacks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import Trainer


def calling_trainer() -> Trainer:
    """The Trainer that is calling us, found on the call stack, since no event passes it. `ValueError` if none is."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise ValueError(
        "RelocationTrainerCallback must be called by a `transformers.Trainer`, but something else called it. Use a "
        "`Relocator` in a custom training loop."
    )


def training_loss(trainer: Trainer, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch as the Trainer's training step computes it: on prepared inputs, with the Trainer's own loss,
    including label smoothing and what a subclass does."""
    inputs = trainer._prepare_inputs(batch)
    count = trainer._get_num_items_in_batch([inputs], trainer.args.device)
    with trainer.compute_loss_context_manager():
        # `compute_loss` may pop the labels from its inputs.
        return trainer.compute_loss(model, inputs, num_items_in_batch=count)
