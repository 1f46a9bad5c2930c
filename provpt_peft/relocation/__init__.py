"""Relocation of prompts: scores, allocation policy, and the relocator that ties them to a training loop."""

from .batches import first_batches
from .config import PPOConfig, RelocationConfig
from .relocator import Relocator


__all__ = ["PPOConfig", "RelocationConfig", "Relocator", "first_batches"]
