"""Images of another size than the checkpoint's."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def fixed_size(model: nn.Module) -> tuple[int, int] | None:
    """Height and width in pixels of the images that a transformers model takes without
    `interpolate_pos_encoding=True`; None if it has no such option, as DINOv2, which adapts by itself. Swin and BEiT
    have it and need it for no size."""
    for module in model.modules():
        size: Any = getattr(getattr(module, "config", None), "image_size", None)
        if size is not None and "interpolate_pos_encoding" in inspect.signature(module.forward).parameters:
            return (size, size) if isinstance(size, int) else tuple(size)
    return None
