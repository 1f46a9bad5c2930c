"""Gradient checkpointing of blocks with prompts: always non-reentrant."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from ..prompts import PromptBank


class Checkpointing:
    """Makes the gradient checkpointing of blocks non-reentrant once an adapter is enabled, whatever the user set.

    PyTorch's default is reentrant, which is wrong here in two ways. A block's parameters get gradients only if its
    input requires one, and the embeddings of a frozen backbone do not. And each block has a backward pass of its own,
    so the prompts, one parameter for all blocks, get their gradient in parts, of which DDP averages the first only.

    transformers' remedy for the former, `enable_input_require_grads`, is replaced by a no-op: it fails if the
    embeddings return more than a tensor (Swin), and makes each backward pass reach the first block.

    Args:
        around: The modules that contain the first block, from the model down to the block itself.
        blocks: The model's transformer blocks.
        bank: The prompts.

    Attributes:
        modules: The modules that may checkpoint a block: the blocks, and what contains them.
    """

    def __init__(self, around: Sequence[nn.Module], blocks: Sequence[nn.Module], bank: PromptBank) -> None:
        self.model = around[0]
        self.bank = bank
        all_blocks = set(blocks)
        flagged = [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]
        self.modules: list[Any] = [module for module in flagged if not all_blocks.isdisjoint(module.modules())]
        vars(self.model)["enable_input_require_grads"] = self._do_nothing
        # All of them, since a part of the model may be called by itself. In older releases of transformers a block
        # calls its checkpoint before its own hooks.
        self._hooks = [module.register_forward_pre_hook(self._make_non_reentrant) for module in around]

    def remove(self) -> None:
        """Remove the hooks and restore the model's `enable_input_require_grads`."""
        vars(self.model).pop("enable_input_require_grads", None)
        for hook in self._hooks:
            hook.remove()

    def _do_nothing(self) -> None:
        """Replaces transformers' `enable_input_require_grads`."""

    def _make_non_reentrant(self, called: nn.Module, args: tuple[Any, ...]) -> None:
        if self.bank.enabled_adapter is None:
            return
        for module in self.modules:
            function = getattr(module, "_gradient_checkpointing_func", None)
            if isinstance(function, partial) and function.keywords.get("use_reentrant") is not False:
                module._gradient_checkpointing_func = partial(function, use_reentrant=False)
