"""Gradients for prompts inside reentrantly checkpointed blocks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..prompts import PromptBank


class CheckpointInputs:
    """Makes the first block's input require a gradient while blocks are checkpointed with `use_reentrant=True`.

    Reentrant checkpointing gives a block's parameters gradients only if one of the block's inputs requires one, and
    the embeddings of a frozen backbone do not. transformers' `enable_input_require_grads` is for that, but it has to
    be called, fails where embeddings return more than a tensor, as Swin's do, and makes the backward pass reach the
    first block for non-reentrant checkpointing too; so it is put aside.

    Args:
        around: The modules that the first block is in, the model first, the block last.
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
        """PEFT copies embeddings that are in `modules_to_save`: their hook must not bring a copy of the model."""
        if id(self.model) not in memo:
            return self
        copied = memo[id(self)] = object.__new__(CheckpointInputs)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def remove(self) -> None:
        """Give the model its own way back."""
        vars(self.model).pop("enable_input_require_grads", None)
        # PEFT's copies of the embeddings have the hook as well.
        for module in self.model.modules():
            for key, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__self__", None) is self:
                    del module._forward_hooks[key]

    def _do_nothing(self) -> None:
        """Instead of transformers' `enable_input_require_grads`: the hook sees to it where it is needed."""

    def _require_gradient(self, embeddings: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled() or self.bank.enabled_adapter is None:
            return
        on = [module for module in self.checkpointed if module.gradient_checkpointing]
        functions = [getattr(module, "_gradient_checkpointing_func", None) for module in on]
        if any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions):
            tokens = output[0] if isinstance(output, tuple) else output
            tokens.requires_grad_(True)


def _embeddings(around: Sequence[nn.Module]) -> nn.Module | None:
    """What transformers calls the input embeddings of the innermost model around a block that has any."""
    for module in reversed(around):
        try:
            return module.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            continue
    return None
