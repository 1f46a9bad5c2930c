"""Relocation of prompts: scores, allocation policy, and the relocator that ties them to a training loop."""

from .config import PPOConfig, RelocationConfig
from .relocator import Relocation, Relocator


__all__ = ["PPOConfig", "Relocation", "RelocationConfig", "Relocator"]
