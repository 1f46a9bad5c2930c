"""VPT-Shallow: prompts enter the first block as tokens, travel through all blocks and are dropped after the last."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..prompts import PromptBank


class ShallowPrompts:
    """Hooks that prepend a shallow adapter's tokens to the first block's input and drop them from the last's output.

    Prepended, because rotary positions apply to the last tokens. Forward passes of other adapters are unchanged.

    Args:
        first: The first block, whose first input is the image's tokens (B, T, D).
        last: The last block, whose output has the same form.
        bank: The prompts.
    """

    def __init__(self, first: nn.Module, last: nn.Module, bank: PromptBank) -> None:
        self.bank = bank
        self._hooks = (first.register_forward_pre_hook(self._insert), last.register_forward_hook(self._drop))

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _prompts(self) -> tuple[torch.Tensor, float] | None:
        """The prompts (n, D) and their dropout, if a shallow adapter is enabled."""
        adapter = self.bank.enabled_adapter
        if adapter is None or adapter not in self.bank.shallow or self.bank.mixed() is not None:
            return None
        return self.bank.provpt_prompts[adapter], self.bank.dropout[adapter]

    def _insert(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        shallow = self._prompts()
        if shallow is None:
            return None
        tokens, (prompts, rate) = args[0], shallow
        prompts = F.dropout(prompts.expand(len(tokens), -1, -1), rate, self.bank.training)  # (B, n, D)
        return torch.cat([prompts.to(tokens.dtype), tokens], dim=1), *args[1:]

    def _drop(self, block: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        shallow = self._prompts()
        return None if shallow is None else output[:, len(shallow[0]) :]
