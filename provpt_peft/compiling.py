"""Hints to `torch.compile` about sizes that change when prompts move, with fallbacks for older PyTorch releases."""

from __future__ import annotations

from inspect import signature

import torch
from torch._dynamo.decorators import mark_unbacked


_TAKES_LEAST_SIZE = "min" in signature(mark_unbacked).parameters
_IS_EXPORTING = getattr(torch.compiler, "is_exporting", None)


def take_any_size(tensor: torch.Tensor, dim: int) -> None:
    """Let one compiled graph accept any size of at least 1 in a tensor's dimension.

    PyTorch releases that take no minimum size compile another graph for size 1.
    """
    if _TAKES_LEAST_SIZE:
        mark_unbacked(tensor, dim, min=1)
    else:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def is_exporting() -> bool:
    """Whether `torch.export` is running. PyTorch 2.6 does not tell, but it cannot export PEFT's models either."""
    return _IS_EXPORTING is not None and _IS_EXPORTING()
