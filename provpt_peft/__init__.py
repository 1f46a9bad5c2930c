"""PRO-VPT for Hugging Face PEFT: visual prompts that move between blocks while training.

Importing this package registers the PEFT method `PROVPT`.
"""

from .config import ProVPTConfig
from .model import ProVPTModel
from .registration import register
from .version import __version__

register(ProVPTConfig, ProVPTModel)

__all__ = ["ProVPTConfig", "ProVPTModel", "__version__"]
