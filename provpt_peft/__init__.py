"""PRO-VPT for Hugging Face PEFT: visual prompts that move between blocks while training.

Importing this package registers the PEFT method `PROVPT`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import ProVPTConfig
from .model import ProVPTModel
from .optimizer import create_provpt_optimizer
from .records import Relocation
from .registration import register
from .relocation import PPOConfig, RelocationConfig, Relocator
from .share.card import keep_card, update_model_card
from .share.files import check_adapter
from .share.hub import ImageClassifier, load_image_classifier, push_to_hub
from .share.pool import ClassifierPool, Prediction
from .version import __version__


if TYPE_CHECKING:
    from .share import figures
    from .trainer.callback import RelocationTrainerCallback


def __getattr__(name: str) -> Any:
    """Import on first use what is slow to import: the callback needs the Trainer's modules, figures matplotlib."""
    if name == "RelocationTrainerCallback":
        return import_module(".trainer.callback", __name__).RelocationTrainerCallback
    if name == "figures":
        return import_module(".share.figures", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


ProVPTConfig.after_save = update_model_card
ProVPTModel.keep_card = keep_card
register(ProVPTConfig, ProVPTModel)

__all__ = [
    "ClassifierPool",
    "ImageClassifier",
    "PPOConfig",
    "Prediction",
    "ProVPTConfig",
    "ProVPTModel",
    "Relocation",
    "RelocationConfig",
    "RelocationTrainerCallback",
    "Relocator",
    "__version__",
    "check_adapter",
    "create_provpt_optimizer",
    "figures",
    "load_image_classifier",
    "push_to_hub",
]
