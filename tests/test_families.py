"""Every family against prepended tokens: as its config's defaults have it, and with each of its switches and masks."""

import copy
import inspect
from typing import Any

import pytest
import tiny
import torch
import transformers
from oracles import assert_same, first, prepend, run
from peft import get_peft_model

from provpt_peft import ProVPTConfig
from provpt_peft.backbone.families import FAMILIES


# Two blocks, or two stages of two, in windows of 4 x 4 tokens that are shifted in the first stage's second block.
SMALL: dict[str, dict[str, Any]] = {
    f: dict(image_size=16, depths=[2, 2], num_heads=[2, 4]) if f in tiny.WINDOWED else dict(num_hidden_layers=2)
    for f in tiny.ALL_FAMILIES
}
PROMPTS = [2, 3, 1, 2]

Switches = dict[str, dict[str, Any]]
QKV: Switches = {"no qkv_bias": dict(qkv_bias=False)}
BIASES: Switches = {
    "own": dict(use_relative_position_bias=True),
    "shared": dict(use_shared_relative_position_bias=True),
    "own and shared": dict(use_relative_position_bias=True, use_shared_relative_position_bias=True),
    "absolute": dict(use_absolute_position_embeddings=True),
}
WINDOWS: Switches = QKV | {
    "never shifted": dict(depths=[1, 1]),
    "one window": dict(image_size=8, depths=[2], num_heads=[2]),
    "padded": dict(image_size=18),  # 9 x 9 tokens in windows of 4 x 4, then 5 x 5
}

# In transformers 5.9 DINOv2 takes no mask of tokens.
MASKED_DINOV2 = "attention_mask" in inspect.signature(transformers.Dinov2Model.forward).parameters
DINOV2_MASKS = ("patches", "tokens", "pairs") if MASKED_DINOV2 else ("patches",)

# What can change the positions, the biases and the masks of each family's attention.
# - Switches of its config, beside the defaults, which each family runs with too.
# - Masks that its forward takes, beside none: "patches" whose embedding is the mask token's, "tokens" that no token
#   sees, "pairs" of tokens, a mask of four dimensions that reaches the blocks as it is, and "padding" of images.
# Where a switch or a mask is not named, the family has none.
FAMILY: dict[str, tuple[Switches, tuple[str, ...]]] = {
    # Absolute positions, always.
    "vit": (QKV, ("patches", "tokens", "pairs")),
    "deit": (QKV, ("patches", "tokens", "pairs")),
    "msn": (QKV, ("patches", "tokens", "pairs")),
    "ijepa": (QKV, ("patches", "tokens", "pairs")),
    "dinov2": (QKV, DINOV2_MASKS),
    "dinov2_registers": (QKV, DINOV2_MASKS),
    "dpt": (QKV, ()),
    # By default three quarters of the patches are hidden: they never enter the blocks.
    "mae": (QKV | {"all patches": dict(mask_ratio=0.0)}, ("tokens", "pairs")),
    # Rotary positions, always; no registers by default.
    "dinov3": (
        {
            "other biases": dict(query_bias=False, key_bias=True, value_bias=False, proj_bias=False),
            "registers": dict(num_register_tokens=2),
        },
        ("patches", "pairs"),
    ),
    # Absolute positions and biases, always. SigLIP 2 resizes the positions to the shape of each image.
    "clip": ({}, ("pairs",)),
    "siglip": ({}, ("pairs",)),
    "siglip2": ({}, ("padding",)),
    # No positions at all by default.
    "beit": (BIASES, ("patches", "tokens", "pairs")),
    "data2vec": (BIASES, ("patches",)),
    # Biases of relative positions, always, from a table or an MLP, and a mask where windows are shifted. Absolute
    # positions of Swin V2 and MaskFormer's Swin are for one token too many, and fail in transformers.
    "swin": (WINDOWS | {"absolute": dict(use_absolute_embeddings=True)}, ("patches",)),
    "swinv2": (WINDOWS | {"pretrained": dict(pretrained_window_sizes=[2, 2])}, ("patches",)),
    "maskformer_swin": (WINDOWS, ()),
}

CASES = [
    (family, switch, mask, implementation)
    for family, (switches, masks) in FAMILY.items()
    for switch in ("defaults", *switches)
    for mask in ("no mask", *masks)
    for implementation in ("sdpa", "eager")
    if implementation == "eager" or family not in tiny.EAGER_ONLY
]


def inputs_of(model, family, mask):
    """What a model takes, with a mask and without."""
    size = getattr(model.config, "image_size", None)
    images = torch.randn(2, 16, 3 * 8 * 8) if family == "siglip2" else tiny.images(size=size)
    inputs: dict[str, Any] = dict(pixel_values=images.double())
    if family == "mae":
        inputs |= dict(noise=torch.rand(2, 16))
    if family == "siglip2":
        inputs |= dict(pixel_attention_mask=None, spatial_shapes=torch.tensor([[4, 4], [3, 4]]))
    if mask == "no mask":
        return inputs, inputs
    if mask == "padding":
        return inputs | dict(pixel_attention_mask=(torch.arange(16) < torch.tensor([[16], [12]])).long()), inputs
    if mask == "patches":
        return inputs | dict(bool_masked_pos=torch.rand(2, (size // model.config.patch_size) ** 2) < 0.3), inputs
    count = first(model.embeddings(**inputs)).shape[1]
    visible = torch.rand(2, count) < 0.7 if mask == "tokens" else torch.rand(2, 1, count, count) < 0.7
    visible[..., [0, -1]] = True
    if mask == "pairs" and model.config._attn_implementation == "eager":
        visible = torch.where(visible, 0.0, torch.finfo(torch.float32).min).double()
    return inputs | dict(attention_mask=visible), inputs


def without_randomness(model, training):
    """Set the mode, but for what draws random numbers, which stays off in a prompted model."""
    for module in model.train(training).modules():
        if any(name in type(module).__name__ for name in ("Dropout", "DropPath", "RopePosition")):
            module.eval()


def tokens_seen_by_the_first(model, inputs):
    """The tokens of the first image that its first token depends on through the first block, (T,)."""
    block = tiny.blocks(model)[0]
    calls = []
    handle = block.register_forward_pre_hook(lambda module, *call: calls.append(call), with_kwargs=True)
    model(**inputs)
    handle.remove()
    [((tokens, *rest), kwargs)] = calls
    tokens = tokens.detach().requires_grad_()
    output = first(block(tokens, *rest, **kwargs))[0, 0]
    return (torch.autograd.grad(output @ torch.arange(len(output)).cos().to(output), tokens)[0][0] != 0).any(dim=1)


def last_in_sight(block, family, count):
    """The last token of the first token's window, or of all."""
    side = round(count**0.5)
    return (side + 1) * (block.window_size - 1) if family in tiny.WINDOWED else count - 1


@pytest.mark.parametrize(("family", "switch", "mask", "implementation"), CASES)
def test_same_function_as_prepended_tokens(family, switch, mask, implementation):
    """What leaves the model and each block, and the gradients of the prompts, in eval mode and in training mode."""
    settings = SMALL[family] | FAMILY[family][0].get(switch, {})
    if implementation == "eager":
        settings |= dict(attn_implementation="eager")
    # Double precision, but for the eager softmax of most families, which is of single precision all the same.
    tolerance = 1e-5 if implementation == "eager" and family not in tiny.EAGER_ONLY else 1e-10
    base = tiny.bare(family, mask_token=mask == "patches", **settings).double()
    assert base.config._attn_implementation == implementation
    inputs, unmasked = inputs_of(base, family, mask)
    plain = copy.deepcopy(base).requires_grad_(False)
    blocks = tiny.blocks(plain)
    model = get_peft_model(base, ProVPTConfig(num_prompts=PROMPTS[: len(blocks)], prompt_dropout=0.0)).eval()
    tuner = model.base_model
    with torch.no_grad():
        tuner.prompts().normal_()
        without = plain(**inputs).last_hidden_state
        if inputs is not unmasked:
            assert (plain(**unmasked).last_hidden_state - without).abs().max() > 1e2 * tolerance
    oracle_prompts = tuner.prompts().detach().clone().requires_grad_()

    for training in (False, True):
        model.train(training)
        without_randomness(plain, training)
        ours = run(model, inputs, tuner.prompts())
        undo = prepend(family, blocks, oracle_prompts, tuner.prompt_blocks(), masked=mask in ("tokens", "pairs"))
        oracle = run(plain, inputs, oracle_prompts)
        undo()
        assert_same(ours, oracle, tolerance)

    assert all(block.reached for block in tuner.blocks)
    assert (ours[len(blocks)] - without).abs().max() > 1e2 * tolerance
    assert (tuner.prompts().grad.abs().amax(dim=1) > 1e2 * tolerance).all()
    seen = tokens_seen_by_the_first(model, inputs)
    assert seen[last_in_sight(blocks[0], family, len(seen))]


def test_every_family_is_here():
    assert set(FAMILY) == set(tiny.ALL_FAMILIES)
    models = [tiny.bare(family, **SMALL[family]) for family in FAMILY]
    assert {type(block).__name__ for model in models for block in tiny.blocks(model)} == {f.block for f in FAMILIES}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("prefix", ["CLIP", "Siglip", "Siglip2"])
def test_vision_tower_beside_a_masked_text(prefix, implementation):
    """The mask of the text's padding, and CLIP's causal one, are the text tower's alone."""
    base = tiny.dual(prefix, attn_implementation=implementation).double()
    images, ids = tiny.inputs(prefix.lower()), torch.tensor([[1, 5, 6, 2], [1, 7, 2, 0]])
    text = dict(input_ids=ids, attention_mask=(ids != 0).long())
    inputs = images | dict(pixel_values=images["pixel_values"].double()) | text
    plain = copy.deepcopy(base).requires_grad_(False)
    model = get_peft_model(base, ProVPTConfig(num_prompts=[2, 3], prompt_dropout=0.0)).eval()
    tuner = model.base_model
    oracle_prompts = tuner.prompts().detach().clone().requires_grad_()
    ours = run(model, inputs, tuner.prompts())
    prepend(prefix.lower(), tiny.blocks(plain.vision_model), oracle_prompts, tuner.prompt_blocks())
    assert_same(ours, run(plain, inputs, oracle_prompts), tolerance=1e-6 if implementation == "eager" else 1e-10)
    assert (tuner.prompts().grad.abs().amax(dim=1) > 1e-3).all()
