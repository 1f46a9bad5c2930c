"""Eval mode and fixed random numbers for a while."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and afterwards those of its modules that were training back into training mode."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


@contextmanager
def fixed_randomness(device: torch.device) -> Iterator[None]:
    """Seed the generators of Python, NumPy and PyTorch, and afterwards put them back to where they were."""
    python, numpy = random.getstate(), np.random.get_state()
    # `fork_rng` keeps the CPU's generator and those of devices that can have several, which MPS cannot.
    mps = torch.mps.get_rng_state() if device.type == "mps" else None
    devices = [] if device.type in ("cpu", "mps", "meta") else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            if mps is not None:
                torch.mps.set_rng_state(mps)
