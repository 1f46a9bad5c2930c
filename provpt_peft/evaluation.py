"""Helpers for measuring a model: counting images, eval mode, switching randomness off or fixing it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves


# Parts of class names of modules that draw random numbers in training. DINOv3 scales its rotary positions at random.
_RANDOM_IN_TRAINING = ("Dropout", "DropPath", "RopePositionEmbedding")


def switch_randomness(model: nn.Module, on: bool) -> None:
    """Switch the random modules of a model off, or on if the module around them is in training mode. Those inside
    modules that are trained (`modules_to_save`) stay as they are."""
    for child in model.children():
        if any(name in type(child).__name__ for name in _RANDOM_IN_TRAINING):
            child.training = model.training and on
        elif not isinstance(child, AuxiliaryTrainingWrapper):
            switch_randomness(child, on)


def hold_statistics(model: nn.Module, hold: bool = True) -> None:
    """Put the layers of a model that keep running statistics (BatchNorm) into eval mode, except those that are
    trained: in training mode they would change buffers that belong to the frozen model and are not saved. Without
    `hold`, put all of them into the mode of the module around them."""
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    heads = [head for wrapper in wrappers for head in wrapper.modules_to_save.values()]
    # A layer without weights of its own is trained with the head that it is in.
    trained = {part for head in heads if _has_trained_weights(head) for part in head.modules()}
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, _NormBase):
                held = hold and child not in trained and not _has_trained_weights(child)
                child.training = parent.training and not held


def _has_trained_weights(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def images_in(batch: Any) -> int:
    """The number of images in a batch: the length of its `pixel_values`, or of its first tensor that has a length."""
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    if isinstance(batch, dict) and isinstance(batch.get("pixel_values"), (list, torch.Tensor)):
        return len(batch["pixel_values"])
    return next((len(t) for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()), 1)


def copy_of(batch: Any) -> Any:
    """A batch with copies of its tensors in new containers, for a loss that modifies its inputs."""
    return recursively_apply(lambda tensor: tensor.detach().clone(), batch)


@contextmanager
def in_eval_mode(model: nn.Module, checkpointed: Sequence[Any]) -> Iterator[None]:
    """Put a model into eval mode, and afterwards put the modules that were training back into training mode.

    Args:
        model: The model.
        checkpointed: Modules that stay in training mode if they checkpoint activations, since transformers only does
            so then. They must not read their flag for anything else.
    """
    was_training: list[Any] = [module for module in model.modules() if module.training]
    kept = [module for module in checkpointed if module.training and module.gradient_checkpointing]
    try:
        model.eval()
        for module in kept:
            module.training = True
        yield
    finally:
        for module in was_training:
            module.training = True


@contextmanager
def fixed_randomness(device: torch.device) -> Iterator[None]:
    """Seed the generators of Python, NumPy, the CPU and all devices of a type, and afterwards restore their states."""
    python, numpy = random.getstate(), np.random.get_state()
    # `fork_rng` restores the CPU's generator and those of device types with several devices, which MPS is not.
    mps = torch.mps.get_rng_state() if device.type == "mps" else None
    single = device.type in ("cpu", "mps", "meta")
    devices = range(0 if single else torch.get_device_module(device).device_count())
    with torch.random.fork_rng(devices, device_type="cuda" if single else device.type):
        random.seed(0)
        np.random.seed(0)
        # `torch.manual_seed` also seeds devices, so it is only called if their states are restored.
        (torch.default_generator.manual_seed if single and mps is None else torch.manual_seed)(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            if mps is not None:
                torch.mps.set_rng_state(mps)
