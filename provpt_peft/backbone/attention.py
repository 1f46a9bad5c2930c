"""Prompts enter the attention as extra keys and values, not as tokens.

VPT-Deep drops a block's prompt tokens after the block, so they affect the other tokens only through the keys and
values that the block's attention computes from them. Appending these computes the same function as prepending the
tokens, without the cost of passing the tokens through queries, output projection and MLP.

Legend: B images, W windows per image (1 unless the family is windowed), H heads, T tokens, n prompts of the block,
D width, d head size.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..config import BackboneFamily
from ..gates import Gates
from ..mixed import SeenPrompts
from ..prompts import PromptBank, transformed
from .families import FAMILIES, resolve


IMPLEMENTATION = "provpt"


class PromptedBlock:
    """One transformer block of the backbone, numbered 1 … L, and the prompts it sees.

    The constructor hooks the prompts into the block's attention; `remove` undoes this. The attention module stays in
    place and keeps its class. It only gets a copy of its config that names our attention function, or, if it does not
    call the registry, a `forward` that does.
    """

    def __init__(self, block: nn.Module, family: BackboneFamily, bank: PromptBank, number: int) -> None:
        self.block = block
        self.family = family
        self.bank = bank
        self.number = number
        self.keep_dropout = False  # whether the attention's own dropout stays on in training
        self.images: int | None = None  # B, set only if the attention sees windows
        self.width = resolve(block, family.norm).weight.shape[-1]
        self.attention = resolve(block, family.attention)
        self.attention.provpt_block = self
        if family.own_attention is not None:
            self.attention.forward = self._attend_by_registry
        else:
            self.config = self.attention.config
            self.attention.config = copy.copy(self.config)
            # The public setter of `_attn_implementation` writes into sub-configs, which models share.
            self.attention.config._attn_implementation_internal = IMPLEMENTATION
        sees_images = sees_images_first(block, family)
        self._hook = None if sees_images is None else sees_images.register_forward_pre_hook(self._count_images)
        # A user's description may be wrong: an attention that does not call the registry would ignore the prompts.
        self.reached = False
        self._check = block.register_forward_hook(self._check_reached) if family not in FAMILIES else None

    def remove(self) -> None:
        """Remove the prompts from the block and restore its attention."""
        self.attention.__dict__.pop("provpt_block", None)
        if self.family.own_attention is not None:
            self.attention.__dict__.pop("forward", None)
        else:
            self.attention.config = self.config
        for hook in (self._hook, self._check):
            if hook is not None:
                hook.remove()

    def _count_images(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.images = args[0].shape[0]
        mixed = self.bank.mixed()
        if mixed is not None:
            mixed.images = args[0].shape[0]

    def _check_reached(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.reached and not torch.compiler.is_compiling():
            raise ValueError(
                "The attention module that `backbone` describes must call transformers' attention registry with its "
                f"`config`, but {self.family.attention!r} of {self.family.block} ({type(self.attention).__name__}) "
                "did not, so the prompts had no effect. Make it call `ALL_ATTENTION_FUNCTIONS`."
            )

    def _attend_by_registry(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """`forward` of an attention module that does not call the registry, while it has prompts. Returns the context
        (B * W, T, D), and the attention weights if requested."""
        if self.bank.enabled_adapter is None:
            return type(self.attention).forward(self.attention, *args, **kwargs)
        assert self.family.own_attention is not None
        *inputs, scaling, output_attentions = self.family.own_attention(self.attention, *args, **kwargs)
        dropout = self.attention.dropout.p if self.attention.dropout.training else 0.0
        implementation = "eager" if output_attentions else "sdpa"
        # By default, the kernel assumes causal attention if there is no mask and the module has no `is_causal`.
        settings = dict(scaling=scaling, dropout=dropout, implementation=implementation, is_causal=False)
        output, weights = prompted_attention(self.attention, *inputs, **settings)
        return output.flatten(2), weights

    def attend(self, *args: Any, implementation: str | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Call the attention function that the model's own config currently names, or the one given.

        `eager` is not in the registry: it is a function in the Python module that defines the attention's class. If
        that module has none, the attention does not call the registry, and ViT's function does the same.
        """
        implementation = implementation or self.config._attn_implementation
        eager = getattr(sys.modules[type(self.attention).__module__], "eager_attention_forward", None)
        if eager is None:
            from transformers.models.vit.modeling_vit import eager_attention_forward

            eager = eager_attention_forward
        function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
        # The flash function reads its own name from the module's config again.
        module: Any = _AsItWas(self.attention, self.config) if "flash" in implementation else self.attention
        return function(module, *args, **kwargs)

    def takes_masks(self) -> bool:
        """Whether the attention function of the model's own config takes a dense mask."""
        return self.family.own_attention is not None or self.config._attn_implementation in ("eager", "sdpa")

    def keys_and_values(
        self, adapter: str, images: int, key: Tensor, rows: Tensor, gates: Gates | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the adapter's prompts at the indices `rows` (n,), each (1 or B, H, n, d), in the dtype of
        the tokens' keys (…, H, T, d). While scores are measured, the prompts pass through gates."""
        bank = self.bank
        kept, name = bank.kept(), (adapter, self.number, key.dtype, key.device)
        if kept is not None and name in kept:
            return kept[name]
        prompts = bank.provpt_prompts[adapter][rows, : self.width].unsqueeze(0)  # (1, n, D)
        rate = bank.dropout[adapter] if bank.training else 0.0
        if rate > 0.0 and transformed():
            prompts = F.dropout(prompts.expand(images, -1, -1), rate)  # separate masks under `vmap`
        elif rate > 0.0:
            # Same as `F.dropout`, with the same random numbers, but stores only a boolean mask for the backward pass.
            mask = torch.empty(images, *prompts.shape[1:], dtype=torch.bool, device=prompts.device)
            prompts = torch.where(mask.bernoulli_(1 - rate), prompts / (1 - rate), 0.0)
        if gates is not None:
            prompts = gates.on_vectors(prompts, rows, images)
        keys_and_values = self._project(prompts, key)
        if kept is not None:
            kept[name] = keys_and_values
        return keys_and_values

    def mixed_keys_and_values(self, seen: SeenPrompts, key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values for a mixed batch, in which each image has its own adapter, each (B, H, n, d)."""
        bank = self.bank
        if bank.kept() is None:  # one projection for all adapters
            found = [self._project(seen.prompts[None, :, : self.width], key)]
        else:
            found = [self.keys_and_values(name, 1, key, rows) for name, rows in seen.adapters.items()]
        keys, values = (torch.cat(parts, dim=2)[0] for parts in zip(*found, strict=True))  # (H, S, d)
        return keys[:, seen.index].transpose(0, 1), values[:, seen.index].transpose(0, 1)

    def _project(self, prompts: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of prompts (b, n, D), each (b, H, n, d)."""
        # Looked up in each call, since `modules_to_save` may have replaced them.
        norm, *projections = [resolve(self.block, getattr(self.family, part)) for part in ("norm", "key", "value")]
        prompts = prompts.to(norm.weight.dtype)
        normed = norm(prompts) if self.family.norm_first else prompts
        heads = (*normed.shape[:2], key.shape[1], key.shape[3])
        prompt_key, prompt_value = (part(normed).view(heads).transpose(1, 2).to(key.dtype) for part in projections)
        if self.family.normalize_keys:
            prompt_key = F.normalize(prompt_key, dim=-1)
        return prompt_key, prompt_value


class _AsItWas:
    """An attention module with its original config. Swapping the config on the module itself during the call would
    remove the prompts from forward passes in other threads."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.module = module
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def sees_images_first(block: nn.Module, family: BackboneFamily) -> nn.Module | None:
    """The module whose input shows the number of images, since a windowed attention only sees windows. None if the
    family is not windowed. A norm's hook also runs when gradient checkpointing recomputes the block."""
    if not family.windowed:
        return None
    return resolve(block, family.norm) if family.norm_first else block


def prompted_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers calls in a prompted block.

    Args:
        module: The attention module.
        query, key, value: (B * W, H, T, d).
        attention_mask: None, or a mask or relative position bias that broadcasts to (B * W, H, T, T).

    Returns:
        Output (B * W, T, H, d), and the attention weights (B * W, H, T, T + n) if the implementation returns them.
    """
    block: Any = module.provpt_block
    if not torch.compiler.is_compiling():
        block.reached = True
    bank = block.bank
    adapter = bank.enabled_adapter
    if adapter is not None and not block.keep_dropout:
        kwargs["dropout"] = 0.0
    images = key.shape[0] if block.images is None else block.images
    hidden, gates = None, None
    mixed = bank.mixed()
    if mixed is not None:
        mixed.check(images if block.images is None else mixed.images)
        seen = mixed.of_block(block.number)
        if seen is None:
            return block.attend(query, key, value, attention_mask, **kwargs)
        keys_and_values = block.mixed_keys_and_values(seen, key)
        if seen.hidden is not None:
            hidden = _for_each_window(seen.hidden[:, None, None], key.shape[0])  # (B * W, 1, 1, n)
    else:
        if block.number == 1:
            bank.read(adapter)
        rows = None if adapter is None or adapter in bank.shallow else bank.rows(adapter, block.number)
        if rows is None:
            return block.attend(query, key, value, attention_mask, **kwargs)
        gates = bank.gates
        # Another thread may evaluate while this adapter is scored.
        if gates is not None and not (gates.adapter_name == adapter and torch.is_grad_enabled()):
            gates = None
        keys_and_values = block.keys_and_values(adapter, images, key, rows, gates)
    prompt_key, prompt_value = (_for_each_window(x, key.shape[0]) for x in keys_and_values)
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4):
        attention_mask = _dense_mask(attention_mask, query, key)
        kwargs["implementation"] = "sdpa"
    if hidden is not None:
        attention_mask = _with_hidden(attention_mask, hidden, query, key)
        if not block.takes_masks():
            kwargs["implementation"] = "sdpa"
    elif attention_mask is not None:
        visible = True if attention_mask.dtype == torch.bool else 0.0
        attention_mask = F.pad(attention_mask, (0, prompt_key.shape[2]), value=visible)
    key = torch.cat([key, prompt_key], dim=2)  # (B * W, H, T + n, d)
    value = torch.cat([value, prompt_value], dim=2)
    output, weights = block.attend(query, key, value, attention_mask, **kwargs)
    if gates is not None:

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return block.attend(query, key, value, attention_mask, **kwargs)[0]

        output = gates.on_output(output, query, key, value, rows, images, kwargs.get("scaling"), attend)
    return output, weights


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, prompted_attention)


def _for_each_window(prompts: Tensor, batch: int) -> Tensor:
    """(1 or B, H, n, d) to (B * W, H, n, d): every window of an image sees the image's prompts."""
    expanded = prompts.unsqueeze(1).expand(-1, batch // len(prompts), -1, -1, -1)
    return expanded.reshape(batch, *prompts.shape[1:])


def _with_hidden(mask: Tensor | None, hidden: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Extend the mask over tokens, if any, to the prompts. Prompts that only pad an image's row are hidden."""
    if mask is None:
        mask = query.new_zeros(1, 1, 1, key.shape[2])
    if mask.dtype == torch.bool:
        of_prompts = ~hidden
    else:
        of_prompts = mask.new_zeros(()).masked_fill(hidden, torch.finfo(mask.dtype).min)
    leading = torch.broadcast_shapes(mask.shape[:3], hidden.shape[:3])
    return torch.cat([mask.expand(*leading, -1), of_prompts.expand(*leading, -1)], dim=-1)


def _dense_mask(attention_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """Convert a mask of flex (a `BlockMask`) or flash (2-D, over keys) to a boolean mask that broadcasts to (…, T, T).

    Neither kind can be extended by prompts directly. transformers makes a `BlockMask` even if nothing is masked.
    """
    if isinstance(attention_mask, Tensor):
        return attention_mask[:, None, None, :].bool()
    batch, heads = attention_mask.shape[:2]  # 1 where a mask is the same for all heads
    return create_mask(attention_mask.mask_mod, batch, heads, query.shape[2], key.shape[2], device=key.device)
