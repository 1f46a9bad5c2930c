"""Image sizes, batch sizes and precisions other than the native ones, against prepended tokens."""

import copy

import pytest
import tiny
import torch
from oracles import prepend

from provpt_peft.backbone.sizes import fixed_size


def pair(family, dtype=torch.float32):
    """A prompted model in eval mode, its oracle, and the prompts of each."""
    base = tiny.make(family).to(dtype)
    plain = copy.deepcopy(base).requires_grad_(False)
    model = tiny.prompted(base)
    tuner = model.base_model
    oracle_prompts = tuner.prompts().detach().clone().requires_grad_()
    # The oracle's own, in the backbone's precision.
    prepend(family, tiny.blocks(plain), oracle_prompts.to(dtype), tuner.prompt_blocks())
    return model, plain, tuner.prompts(), oracle_prompts


def run(model, prompts, **inputs):
    output = model(**inputs)
    output.logits.float().square().mean().backward()
    return output.logits.detach().float(), prompts.grad.float()


SIZED = [
    ("vit", dict(interpolate_pos_encoding=True)),
    ("deit", dict(interpolate_pos_encoding=True)),
    ("dinov2", {}),
    ("dinov2_registers", {}),
    ("dinov3", {}),
    ("clip", dict(interpolate_pos_encoding=True)),
    ("siglip", dict(interpolate_pos_encoding=True)),
    ("swin", dict(interpolate_pos_encoding=True)),
    ("swinv2", dict(interpolate_pos_encoding=True)),
]


# Sides that shrink a window in the last stage are no size of Swin: transformers cannot then.
@pytest.mark.parametrize("size", [(48, 48), (40, 48)])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("family", "others"), SIZED)
def test_other_sizes_and_shapes(family, others, size, count):
    model, plain, prompts, oracle_prompts = pair(family)
    inputs = dict(pixel_values=torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1)))
    ours, oracle = run(model, prompts, **inputs, **others), run(plain, oracle_prompts, **inputs, **others)
    for mine, theirs in zip(ours, oracle, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["vit", "deit", "msn", "ijepa", "clip", "siglip", "mae"])
def test_models_of_a_fixed_size_refuse_another_without_the_option(family):
    model = tiny.prompted(tiny.make(family))
    assert fixed_size(model) == (32, 32)
    with pytest.raises((ValueError, RuntimeError), match=r"match model \(32\*32\)|must match the size of tensor"):
        model(pixel_values=tiny.images(size=48))


@pytest.mark.parametrize("family", ["dinov2", "dinov2_registers", "dinov3"])
def test_models_of_no_fixed_size_take_another(family):
    model = tiny.prompted(tiny.make(family))
    assert fixed_size(model) is None
    model(pixel_values=tiny.images(size=48))


@pytest.mark.parametrize("family", tiny.ALL_FAMILIES)
def test_one_image_is_as_in_a_batch(family):
    model, *_ = pair(family)
    inputs = tiny.inputs(family, 3)
    with torch.no_grad():
        batch = model(**inputs).logits
        each = [model(**{name: tensor[i : i + 1] for name, tensor in inputs.items()}).logits for i in range(3)]
    torch.testing.assert_close(torch.cat(each), batch, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["vit", "dinov2", "swin", "swinv2", "data2vec", "dinov3", "beit"])
def test_half_precision_backbones_are_as_exact_as_prepended_tokens(family, dtype):
    full_model, _, full_prompts, _ = pair(family)
    full = run(full_model, full_prompts, **tiny.inputs(family))
    model, plain, prompts, oracle_prompts = pair(family, dtype)
    assert prompts.dtype == torch.float32
    inputs = {name: tensor.to(dtype) for name, tensor in tiny.inputs(family).items()}
    ours, oracle = run(model, prompts, **inputs), run(plain, oracle_prompts, **inputs)
    for mine, theirs, exact in zip(ours, oracle, full, strict=True):
        assert mine.isfinite().all()
        # Rounding differs, its size does not.
        assert (mine - exact).norm() <= 1.5 * (theirs - exact).norm()
