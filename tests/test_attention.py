"""Prompts that move and are dropped, against tokens that are prepended, which is what VPT-Deep is.

`test_families.py` has what families and their configs differ in.
"""

import copy

import pytest
import tiny
import torch
from oracles import assert_same, prepend, run

from examples.research.prepended import prepend_prompts


def distributions(num_blocks):
    """Prompts in each block: uneven, and with empty blocks."""
    uneven = [(3 * i) % 5 + 1 for i in range(num_blocks)]
    with_empty = [5, 0, *[2] * (num_blocks - 3), 0]
    return {"uneven": uneven, "empty": with_empty}


@pytest.mark.parametrize(
    ("family", "implementation"),
    [(f, i) for f in tiny.ALL_FAMILIES for i in ("sdpa", "eager") if i == "eager" or f not in tiny.EAGER_ONLY],
)
@pytest.mark.parametrize("distribution", ["uneven", "empty"])
def test_same_function_before_and_after_moves(family, distribution, implementation):
    # In double precision, since Swin V2 multiplies its cosines by up to 100, and their rounding. The eager softmax is
    # of single precision all the same.
    base = tiny.make(family, attn_implementation=implementation).double()
    plain = copy.deepcopy(base)
    plain.requires_grad_(False)
    blocks = tiny.blocks(plain)
    model = tiny.prompted(base, num_prompts=distributions(len(blocks))[distribution])
    tuner = model.base_model
    oracle_prompts = tuner.prompts().detach().clone().requires_grad_()

    inputs = {
        name: value.double() if value.is_floating_point() else value for name, value in tiny.inputs(family).items()
    }
    moves = [None, (0, len(blocks)), (2, 2), (len(oracle_prompts) - 1, 1), (1, 0)]
    for move in moves:
        if move is not None:
            tuner.move_prompt(*move)
        undo = prepend(family, blocks, oracle_prompts, tuner.prompt_blocks())
        ours = run(model, inputs, tuner.prompts())
        oracle = run(plain, inputs, oracle_prompts)
        undo()
        assert_same(ours, oracle, tolerance=1e-6)


def test_dropout_is_that_of_prepended_tokens_and_stores_a_boolean_mask():
    base = tiny.make("vit")
    plain = copy.deepcopy(base)
    plain.requires_grad_(False)
    model = tiny.prompted(base, num_prompts=7, prompt_dropout=0.5).train()
    tuner = model.base_model
    oracle_prompts = tuner.prompts().detach().clone().requires_grad_()
    prepend_prompts(tiny.blocks(plain.train()), oracle_prompts, tuner.prompt_blocks(), dropout=0.5)
    inputs = dict(pixel_values=tiny.images(5))
    saved = []
    # Both draw the mask of one block after the other, one number for each entry of each image's prompts.
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        ours = run(model, inputs, tuner.prompts())
    torch.manual_seed(3)
    assert_same(ours, run(plain, inputs, oracle_prompts))
    # The mask and the norm's input; `F.dropout` keeps a mask of floats.
    of_each_image = [tensor.dtype for tensor in saved if tensor.shape == (5, 7, 32)]
    assert of_each_image == [torch.bool, torch.float32] * 4
