"""VPT-Deep by token prepending, as other implementations build it. The oracle of the tests and a benchmark contender.

It shares no code with `provpt_peft`: prompts are tokens that go through the whole block and are dropped after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F


def prepend_prompts(
    blocks: Sequence[nn.Module], prompts: torch.Tensor, prompt_blocks: torch.Tensor, dropout: float = 0.0
) -> Callable[[], None]:
    """Insert prompts after the class token of each block's input and drop them from its output.

    Args:
        blocks: The transformer blocks, in forward order; their first input is (batch, tokens, width).
        prompts: Prompt vectors, shape (N, D).
        prompt_blocks: Block of each prompt, shape (N,), counted from 1; 0 leaves a prompt out.
        dropout: Dropout on the prompts while the block is in training mode, independent for each image.

    Returns:
        A function that takes the prompts out again.
    """
    handles = []
    for number, block in enumerate(blocks, start=1):
        rows = (prompt_blocks == number).nonzero()[:, 0]
        count = len(rows)

        def insert(module, args, kwargs, rows=rows):  # type: ignore[no-untyped-def]
            tokens = args[0]
            chosen = prompts[rows].expand(len(tokens), -1, -1)
            chosen = F.dropout(chosen, dropout, module.training)
            return (torch.cat([tokens[:, :1], chosen, tokens[:, 1:]], dim=1), *args[1:]), kwargs

        def drop(module, args, output, count=count):  # type: ignore[no-untyped-def]
            return torch.cat([output[:, :1], output[:, 1 + count :]], dim=1)

        handles.append(block.register_forward_pre_hook(insert, with_kwargs=True))
        handles.append(block.register_forward_hook(drop, prepend=True))
    return lambda: [handle.remove() for handle in handles] and None


def prepend_prompts_in_windows(
    blocks: Sequence[nn.Module], prompts: torch.Tensor, prompt_blocks: torch.Tensor
) -> Callable[[], None]:
    """The same for Swin: prompts join each window, with zero relative bias and no mask, and are dropped after it.

    A prompt in a block of width D_i uses the first D_i entries of its vector. Dropout is left out.

    Args:
        blocks: The `SwinLayer` modules, in forward order.
        prompts: Prompt vectors, shape (N, D).
        prompt_blocks: Block of each prompt, shape (N,), counted from 1; 0 leaves a prompt out.

    Returns:
        A function that takes the prompts out again.
    """
    originals = [block.attention.forward for block in blocks]
    for number, block in enumerate(blocks, start=1):
        rows = (prompt_blocks == number).nonzero()[:, 0]

        def forward(windows, attention_mask=None, rows=rows, block=block, **kwargs):  # type: ignore[no-untyped-def]
            attention = block.attention
            width = windows.shape[-1]
            chosen = block.layernorm_before(prompts[rows][:, :width])
            count = len(chosen)
            tokens = torch.cat([chosen.expand(len(windows), -1, -1), windows], dim=1)
            heads, head_size = attention.num_attention_heads, width // attention.num_attention_heads
            query, key, value = (
                projection(tokens).view(len(tokens), -1, heads, head_size).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            bias = attention.relative_position_bias()
            if attention_mask is not None:
                images = len(windows) // len(attention_mask)
                bias = bias + attention_mask.repeat(images, 1, 1).unsqueeze(1)
            bias = F.pad(bias, (count, 0, count, 0))
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)
            return attention.o_proj(output)[:, count:], None

        block.attention.forward = forward

    def undo() -> None:
        for block, original in zip(blocks, originals, strict=True):
            block.attention.forward = original

    return undo
