"""PRO-VPT for Hugging Face PEFT: visual prompts that move between blocks while training.

Importing this package registers the PEFT method `PROVPT`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import ProVPTConfig
from .hub import ImageClassifier, check_adapter, load_image_classifier, push_to_hub
from .model import ProVPTModel
from .registration import register
from .relocation import PPOConfig, Relocation, RelocationConfig, Relocator
from .version import __version__


if TYPE_CHECKING:
    from .callback import RelocationTrainerCallback


def __getattr__(name: str) -> Any:
    """The callback when it is asked for: it needs the Trainer's modules, a third of what importing us costs."""
    if name == "RelocationTrainerCallback":
        from .callback import RelocationTrainerCallback

        return RelocationTrainerCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register(ProVPTConfig, ProVPTModel)

__all__ = [
    "ImageClassifier",
    "PPOConfig",
    "ProVPTConfig",
    "ProVPTModel",
    "Relocation",
    "RelocationConfig",
    "RelocationTrainerCallback",
    "Relocator",
    "__version__",
    "check_adapter",
    "load_image_classifier",
    "push_to_hub",
]
