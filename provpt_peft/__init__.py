"""PRO-VPT for Hugging Face PEFT: visual prompts that move between blocks while training.

Importing this package registers the PEFT method `PROVPT`.
"""

from .callback import RelocationTrainerCallback
from .config import ProVPTConfig
from .hub import ImageClassifier, check_adapter, load_image_classifier
from .model import ProVPTModel
from .registration import register
from .relocation import PPOConfig, Relocation, RelocationConfig, Relocator
from .version import __version__


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
]
