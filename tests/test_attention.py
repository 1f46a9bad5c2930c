"""Prompts inside the attention against tokens that are prepended, which is what VPT-Deep is."""

import copy

import pytest
import tiny
import torch
from oracles import prepend

from examples.research.prepended import prepend_prompts, prepend_prompts_in_windows


def run(model, inputs, prompts):
    """Logits, what comes out of each block, and the gradient of the prompts."""
    outputs = []
    record = [
        block.register_forward_hook(lambda module, args, output: outputs.append(first(output).detach()))
        for block in tiny.blocks(model)
    ]
    prompts.grad = None
    result = model(**inputs, labels=tiny.labels(len(inputs["pixel_values"])))
    result.loss.backward()
    for handle in record:
        handle.remove()
    return [result.logits.detach(), *outputs, prompts.grad.clone()]


def first(output):
    return output[0] if isinstance(output, tuple) else output


def assert_same(ours, oracle, tolerance=1e-5):
    for mine, theirs in zip(ours, oracle, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def distributions(num_blocks):
    """Prompts in each block: uniform, uneven, and with empty blocks."""
    uneven = [(3 * i) % 5 + 1 for i in range(num_blocks)]
    with_empty = [5, 0, *[2] * (num_blocks - 3), 0]
    return {"uniform": [3] * num_blocks, "uneven": uneven, "empty": with_empty}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["beit", "data2vec"])
def test_same_function_without_position_biases(family, implementation):
    """The default of the configs: no mask at all, so the kernel has to be told that the attention is not causal."""
    none = dict(use_relative_position_bias=False, use_shared_relative_position_bias=False)
    test_same_function_as_prepended_tokens(family, "uniform", implementation, **none)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [(f, i) for f in tiny.ALL_FAMILIES for i in ("sdpa", "eager") if i == "eager" or f not in tiny.EAGER_ONLY],
)
@pytest.mark.parametrize("distribution", ["uniform", "uneven", "empty"])
def test_same_function_as_prepended_tokens(family, distribution, implementation, **config):
    # In double precision, since Swin V2 multiplies its cosines by up to 100, and their rounding. The eager softmax is
    # of single precision all the same.
    base = tiny.make(family, attn_implementation=implementation, **config).double()
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


@pytest.mark.parametrize("size", [36, 40])
def test_padded_sizes_of_swin(size):
    """18 and 20 tokens a side are padded to windows of 4, in other stages too; padding is no part of an image."""
    base = tiny.make("swin", image_size=size)
    plain = copy.deepcopy(base).requires_grad_(False)
    model = tiny.prompted(base)
    tuner = model.base_model
    oracle_prompts = tuner.prompts().detach().clone().requires_grad_()
    undo = prepend_prompts_in_windows(tiny.blocks(plain), oracle_prompts, tuner.prompt_blocks())
    inputs = dict(pixel_values=tiny.images(size=size))
    ours = run(model, inputs, tuner.prompts())
    oracle = run(plain, inputs, oracle_prompts)
    undo()
    assert_same(ours, oracle)


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
