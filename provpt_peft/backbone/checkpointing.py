"""Gradients for prompts in blocks that use reentrant gradient checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..prompts import PromptBank


class CheckpointInputs:
    """Makes the first block's input require a gradient while blocks are checkpointed with `use_reentrant=True`.

    With reentrant checkpointing, a block's parameters get gradients only if one of the block's inputs requires a
    gradient, and the embeddings of a frozen backbone do not. transformers has `enable_input_require_grads` for this,
    but the user has to call it, it fails if the embeddings return more than a tensor (Swin), and it makes the backward
    pass reach the first block for non-reentrant checkpointing too. It is therefore replaced by a no-op.

    Args:
        around: The modules that contain the first block, from the model down to the block itself.
        bank: The prompts.
    """

    def __init__(self, around: Sequence[nn.Module], bank: PromptBank) -> None:
        self.bank = bank
        self.checkpointed = [module for module in around if hasattr(module, "gradient_checkpointing")]
        self.model = around[0]
        embeddings = _embeddings(around)
        if embeddings is not None:
            embeddings.register_forward_hook(self._require_gradient)
            vars(self.model)["enable_input_require_grads"] = self._do_nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointInputs:
        """PEFT copies embeddings that are in `modules_to_save`. Their hook must not copy the whole model along."""
        if id(self.model) not in memo:
            return self
        copied = memo[id(self)] = object.__new__(CheckpointInputs)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def remove(self) -> None:
        """Remove the hooks and restore the model's `enable_input_require_grads`."""
        vars(self.model).pop("enable_input_require_grads", None)
        # PEFT's copies of the embeddings have the hook as well.
        for module in self.model.modules():
            for key, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__self__", None) is self:
                    del module._forward_hooks[key]

    def _do_nothing(self) -> None:
        """Replaces transformers' `enable_input_require_grads`, since the hook does this where it is needed."""

    def _require_gradient(self, embeddings: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled() or self.bank.enabled_adapter is None:
            return
        on = [module for module in self.checkpointed if module.gradient_checkpointing]
        functions = [getattr(module, "_gradient_checkpointing_func", None) for module in on]
        if any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions):
            tokens = output[0] if isinstance(output, tuple) else output
            tokens.requires_grad_(True)


def _embeddings(around: Sequence[nn.Module]) -> nn.Module | None:
    """The input embeddings, as transformers defines them, of the innermost model around a block that has any."""
    for module in reversed(around):
        try:
            return module.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            continue
    return None
