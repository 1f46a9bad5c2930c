"""Prompts as tokens that go through the attention of families which `examples/research/prepended.py` does not know.

Where there is a mask or a relative position bias of the image's size, tokens cannot be prepended to the whole block.
They are prepended to the attention's input, and dropped from its output. The attention's own `forward` does the rest,
or, where its bias cannot be padded from outside, the formula of its paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tiny
import torch
from torch import nn
from torch.nn import functional as F

from examples.research.prepended import prepend_prompts, prepend_prompts_in_windows


Undo = Callable[[], None]


def prepend(
    family: str,
    blocks: Sequence[nn.Module],
    prompts: torch.Tensor,
    prompt_blocks: torch.Tensor,
    masked: bool = False,
) -> Undo:
    """Insert prompts as VPT-Deep does, by the way that fits the family; returns a function that takes them out. In
    `masked` attention, of a family whose blocks take a mask, prompts see and are seen."""
    if family == "swin":
        return prepend_prompts_in_windows(blocks, prompts, prompt_blocks)
    forwards = {"siglip2": _masked, "beit": _masked, "data2vec": _biased, "swinv2": _cosine, "maskformer_swin": _table}
    if family not in forwards and not masked:
        return prepend_prompts(blocks, prompts, prompt_blocks)
    undo: list[Undo] = []
    for number, block in enumerate(blocks, start=1):
        forwards.get(family, _masked)(block, prompts[prompt_blocks == number], undo)
    return lambda: [take_out() for take_out in undo] and None


def run(model: nn.Module, inputs: dict[str, torch.Tensor], prompts: torch.Tensor) -> list[torch.Tensor]:
    """What leaves each block and the model, and the gradient of the prompts: that of a weighted sum of what leaves the
    model."""
    outputs: list[torch.Tensor] = []
    record = [
        block.register_forward_hook(lambda module, args, output: outputs.append(first(output).detach()))
        for block in tiny.blocks(model)
    ]
    prompts.grad = None
    outcome = model(**inputs).values()
    leaving = [tensor for tensor in outcome if torch.is_tensor(tensor) and tensor.is_floating_point()]
    for handle in record:
        handle.remove()
    total = torch.stack([tensor.flatten() @ torch.arange(tensor.numel()).cos().to(tensor) for tensor in leaving])
    total.sum().backward()
    assert prompts.grad is not None
    return [*outputs, *(tensor.detach() for tensor in leaving), prompts.grad.clone()]


def first(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A block's tokens, which some families return with the attention weights."""
    return output[0] if isinstance(output, tuple) else output


def assert_same(ours: list[torch.Tensor], oracle: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    for mine, theirs in zip(ours, oracle, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def _replace(module: nn.Module, forward: Callable, undo: list[Undo]) -> None:
    module.forward = forward
    undo.append(lambda: module.__dict__.pop("forward"))


def _padded(mask: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """A mask or bias (…, T, T) to (…, n + T, n + T): prompts see and are seen."""
    if mask is None:
        return None
    return F.pad(mask, (count, 0, count, 0), value=True if mask.dtype == torch.bool else 0.0)


def _masked(block: nn.Module, prompts: torch.Tensor, undo: list[Undo]) -> None:
    """SigLIP 2, BEiT and all others with a mask: the attention takes its mask, or its bias, as an argument."""
    attention = getattr(block, "self_attn", None) or block.attention
    norm = next(getattr(block, name) for name in ("layer_norm1", "layernorm_before", "norm1") if hasattr(block, name))
    original, count = type(attention).forward, len(prompts)

    def forward(hidden_states, attention_mask=None, **kwargs):  # type: ignore[no-untyped-def]
        tokens = torch.cat([norm(prompts).expand(len(hidden_states), -1, -1), hidden_states], dim=1)
        output, weights = original(attention, tokens, attention_mask=_padded(attention_mask, count), **kwargs)
        return output[:, count:], weights

    _replace(attention, forward, undo)


def _biased(block: nn.Module, prompts: torch.Tensor, undo: list[Undo]) -> None:
    """Data2Vec-Vision: a bias of the block's own, from a module, and one that all blocks share."""
    attention = block.attention.attention
    original, count = type(attention).forward, len(prompts)
    if attention.has_relative_position_bias:
        hook = attention.relative_position_bias.register_forward_hook(lambda module, args, bias: _padded(bias, count))
        undo.append(hook.remove)

    def forward(hidden_states, output_attentions=False, relative_position_bias=None, *args):  # type: ignore[no-untyped-def]
        tokens = torch.cat([block.layernorm_before(prompts).expand(len(hidden_states), -1, -1), hidden_states], dim=1)
        bias = _padded(relative_position_bias, count)
        output, *rest = original(attention, tokens, output_attentions, bias, *args)
        return (output[:, count:], *rest)

    _replace(attention, forward, undo)


def _by_formula(block, tokens, count, attention_mask, scores_of, table):  # type: ignore[no-untyped-def]
    """Softmax attention of windows with prompts in front; the bias and the mask are the image tokens' alone."""
    attention = block.attention.self
    heads = attention.num_attention_heads
    query, key, value = (
        projection(tokens).unflatten(2, (heads, -1)).transpose(1, 2)
        for projection in (attention.query, attention.key, attention.value)
    )
    scores = scores_of(query, key)
    side = attention.window_size[0]
    for one in range(side * side):
        for other in range(side * side):
            row, column = (a - b + side - 1 for a, b in zip(divmod(one, side), divmod(other, side), strict=True))
            scores[:, :, count + one, count + other] += table[row * (2 * side - 1) + column]
    if attention_mask is not None:
        scores = scores + _padded(attention_mask.repeat(len(tokens) // len(attention_mask), 1, 1), count)[:, None]
    output = (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)
    return (output[:, count:],)


def _table(block: nn.Module, prompts: torch.Tensor, undo: list[Undo]) -> None:
    """MaskFormer's Swin: Liu et al. 2021, Eq. 4."""
    attention = block.attention.self

    def forward(windows, attention_mask=None, output_attentions=False):  # type: ignore[no-untyped-def]
        chosen = block.layernorm_before(prompts[:, : windows.shape[-1]])
        tokens = torch.cat([chosen.expand(len(windows), -1, -1), windows], dim=1)

        def scores_of(query, key):  # type: ignore[no-untyped-def]
            return query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])

        table = attention.relative_position_bias_table
        return _by_formula(block, tokens, len(chosen), attention_mask, scores_of, table)

    _replace(attention, forward, undo)


def _cosine(block: nn.Module, prompts: torch.Tensor, undo: list[Undo]) -> None:
    """Swin V2: Liu et al. 2022, Eq. 2 and 3; prompts are not normed, since the norm comes after the attention.

    Biases are 16 times a sigmoid, and scales at most 100, as in its public code. transformers adds the mask twice.
    """
    attention = block.attention.self

    def forward(windows, attention_mask=None, output_attentions=False):  # type: ignore[no-untyped-def]
        chosen = prompts[:, : windows.shape[-1]]
        tokens = torch.cat([chosen.expand(len(windows), -1, -1), windows], dim=1)

        def scores_of(query, key):  # type: ignore[no-untyped-def]
            cosine = F.cosine_similarity(query.unsqueeze(3), key.unsqueeze(2), dim=-1)
            return cosine * attention.logit_scale.exp().clamp(max=100)

        table = 16 * torch.sigmoid(
            attention.continuous_position_bias_mlp(attention.relative_coords_table).flatten(0, 2)
        )
        mask = None if attention_mask is None else 2 * attention_mask
        return _by_formula(block, tokens, len(chosen), mask, scores_of, table)

    _replace(attention, forward, undo)
