"""What `torch.compile` is told about sizes that moves change, and what older releases of PyTorch lack for it."""

from __future__ import annotations

from inspect import signature

import torch
from torch._dynamo.decorators import mark_unbacked


_TAKES_LEAST_SIZE = "min" in signature(mark_unbacked).parameters
_IS_EXPORTING = getattr(torch.compiler, "is_exporting", None)


def take_any_size(tensor: torch.Tensor, dim: int) -> None:
    """Let one compiled graph take any size, from 1 on, of a tensor's dimension.

    Releases of PyTorch that cannot be told a least size compile a further graph where the size is 1.
    """
    if _TAKES_LEAST_SIZE:
        mark_unbacked(tensor, dim, min=1)
    else:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def is_exporting() -> bool:
    """Whether `torch.export` is at work. PyTorch 2.6 does not tell, and cannot export PEFT's models."""
    return _IS_EXPORTING is not None and _IS_EXPORTING()
