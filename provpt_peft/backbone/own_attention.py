"""Attention modules that compute attention themselves and never call transformers' attention registry.

Each has a function here that takes the module and the arguments of its `forward`, and returns what other modules pass
to the registry's attention function. The prompts are then added as in other families. Hidden states are (B * W, T, D),
masks of shifted windows (W, T, T). The modules keep their weights, and their own `forward` when no adapter is enabled.

Legend: B images, W windows per image, H heads, T tokens, D width, d head size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class AttentionInputs(NamedTuple):
    """The arguments of an attention function."""

    query: Tensor  # (B * W, H, T, d), as are key and value
    key: Tensor
    value: Tensor
    mask: Tensor | None  # additive mask or relative position bias that broadcasts to (B * W, H, T, T)
    scaling: float  # factor of the products of queries and keys
    output_attentions: bool  # whether to return weights, which not every implementation can


def maskformer_swin(
    attention: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
) -> AttentionInputs:
    """MaskFormer's own Swin: a table of relative position biases."""
    query, key, value = _heads(attention, hidden_states)
    bias = _by_position(attention, attention.relative_position_bias_table)
    mask = _with_window_mask(bias, attention_mask, len(query))
    return AttentionInputs(query, key, value, mask, key.shape[-1] ** -0.5, output_attentions)


def swin_v2(
    attention: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
) -> AttentionInputs:
    """Swin V2: cosine attention with a scale per head, and biases computed by an MLP."""
    query, key, value = _heads(attention, hidden_states)
    scale = attention.logit_scale.clamp(max=math.log(1.0 / 0.01)).exp()  # (H, 1, 1)
    table = attention.continuous_position_bias_mlp(attention.relative_coords_table)
    bias = 16 * torch.sigmoid(_by_position(attention, table.view(-1, query.shape[1])))
    # transformers adds the mask, 0 or -100, twice.
    mask = _with_window_mask(bias, None if attention_mask is None else 2 * attention_mask, len(query))
    query, key = F.normalize(query, dim=-1) * scale, F.normalize(key, dim=-1)
    return AttentionInputs(query, key, value, mask, 1.0, output_attentions)


def data2vec_vision(
    attention: Any,
    hidden_states: Tensor,
    output_attentions: bool = False,
    relative_position_bias: Tensor | None = None,
    interpolate_pos_encoding: bool = False,
    resolution: tuple[int, int] | None = None,
) -> AttentionInputs:
    """Data2Vec-Vision: biases per block, biases shared by all blocks (1, H, T, T), both, or none. `resolution` is the
    images' height and width in pixels."""
    query, key, value = _heads(attention, hidden_states)
    mask = relative_position_bias
    if attention.has_relative_position_bias:
        assert resolution is not None
        window = tuple(side // attention.config.patch_size for side in resolution)
        own = attention.relative_position_bias(window, interpolate_pos_encoding, dim_size=hidden_states.shape[1])
        mask = own if mask is None else own + mask  # (1, H, T, T)
    return AttentionInputs(query, key, value, mask, key.shape[-1] ** -0.5, output_attentions)


def _heads(attention: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values (B * W, H, T, d)."""
    shape = (*hidden_states.shape[:2], attention.num_attention_heads, attention.attention_head_size)
    projections = (attention.query, attention.key, attention.value)
    return tuple(projection(hidden_states).view(shape).transpose(1, 2) for projection in projections)


def _by_position(attention: Any, table: Tensor) -> Tensor:
    """Expand a table of biases (positions, H) to (1, H, T, T)."""
    tokens = attention.window_size[0] * attention.window_size[1]
    bias = table[attention.relative_position_index.view(-1)].view(tokens, tokens, -1)
    return bias.permute(2, 0, 1).unsqueeze(0)


def _with_window_mask(bias: Tensor, mask: Tensor | None, batch: int) -> Tensor:
    """Add the mask of an image's windows (W, T, T) to a bias (1, H, T, T). Broadcasts to (B * W, H, T, T)."""
    if mask is None:
        return bias
    return bias + mask.repeat(batch // len(mask), 1, 1).unsqueeze(1)
