"""The conversion of timm's layout, against that layout's own forward pass written out."""

import pytest
import tiny
import torch
from torch.nn import functional as F
from transformers import AutoModelForImageClassification, ViTImageProcessor

from examples import convert_timm_vit


WIDTH, HEADS, BLOCKS, PATCH = 32, 4, 3, 8


def made_up(prefix=""):
    """A checkpoint's tensors, with a projector where MoCo-v3 has one."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, 17, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (WIDTH,),
        "norm.weight": (WIDTH,),
        "norm.bias": (WIDTH,),
        "head.0.weight": (64, WIDTH),
    }
    for block in range(BLOCKS):
        shapes |= {
            f"blocks.{block}.{name}.{kind}": shape if kind == "weight" else shape[:1]
            for name, shape in {
                "norm1": (WIDTH,), "norm2": (WIDTH,), "attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH),
                "mlp.fc1": (2 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 2 * WIDTH),
            }.items()
            for kind in ("weight", "bias")
        }  # fmt: skip
    return {prefix + name: torch.randn(shape, generator=generator) / 5 for name, shape in shapes.items()}


def timm_forward(w, images):
    """timm's VisionTransformer up to its last norm."""
    x = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=PATCH)
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], dim=1) + w["pos_embed"]
    for block in range(BLOCKS):
        b = {name.removeprefix(f"blocks.{block}."): t for name, t in w.items() if name.startswith(f"blocks.{block}.")}
        normed = F.layer_norm(x, (WIDTH,), b["norm1.weight"], b["norm1.bias"], 1e-6)
        qkv = F.linear(normed, b["attn.qkv.weight"], b["attn.qkv.bias"])
        query, key, value = qkv.view(len(x), -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = ((query @ key.transpose(2, 3) * (WIDTH // HEADS) ** -0.5).softmax(-1) @ value).transpose(1, 2)
        x = x + F.linear(attended.flatten(2), b["attn.proj.weight"], b["attn.proj.bias"])
        normed = F.layer_norm(x, (WIDTH,), b["norm2.weight"], b["norm2.bias"], 1e-6)
        hidden = F.gelu(F.linear(normed, b["mlp.fc1.weight"], b["mlp.fc1.bias"]))
        x = x + F.linear(hidden, b["mlp.fc2.weight"], b["mlp.fc2.bias"])
    return F.layer_norm(x, (WIDTH,), w["norm.weight"], w["norm.bias"], 1e-6)


def test_moco_v3(run_script, tmp_path):
    tensors = made_up("module.base_encoder.")
    others = {
        "module.momentum_encoder.cls_token": torch.zeros(1, 1, WIDTH),
        "module.predictor.0.weight": torch.ones(2),
    }
    torch.save({"epoch": 300, "state_dict": tensors | others}, tmp_path / "vit.pth.tar")
    run_script("convert_timm_vit.py", tmp_path / "vit.pth.tar", tmp_path / "vit", "--num_heads", HEADS)
    base = AutoModelForImageClassification.from_pretrained(tmp_path / "vit", num_labels=3).eval()
    assert (base.config.num_hidden_layers, base.config.image_size, base.config.patch_size) == (BLOCKS, 32, PATCH)
    expected = timm_forward(made_up(), tiny.images())
    torch.testing.assert_close(base.vit(tiny.images()).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
    assert ViTImageProcessor.from_pretrained(tmp_path / "vit").size["height"] == 32
    assert tiny.prompted(base).base_model.prompt_distribution() == [3, 3, 3]


@pytest.mark.parametrize("wrap", [lambda tensors: tensors, lambda tensors: {"model": tensors}])
def test_bare_names(tmp_path, wrap):
    torch.save(wrap(made_up()), tmp_path / "vit.pth")
    tensors = convert_timm_vit.read(tmp_path / "vit.pth")
    assert tensors.keys() == made_up().keys()


def test_other_layouts_are_refused(tmp_path):
    torch.save(tiny.make("vit").state_dict(), tmp_path / "vit.pth")
    with pytest.raises(ValueError, match="must hold a vision transformer with timm's names"):
        convert_timm_vit.read(tmp_path / "vit.pth")


@pytest.mark.parametrize("name", ["blocks.0.ls1.gamma", "blocks.1.gamma_1", "reg_token", "dist_token"])
def test_what_would_be_left_out_of_a_block_is_refused(name):
    with pytest.raises(ValueError, match=f"but it has {name}, which `ViTModel` lacks"):
        convert_timm_vit.convert(made_up() | {name: torch.ones(1, 1, WIDTH)})


@pytest.mark.parametrize("heads", [0, 5, None])
def test_heads_that_do_not_divide_the_width_are_refused(heads):
    # By default width / 64, which is 0 here.
    with pytest.raises(ValueError, match=f"must divide the width {WIDTH}, got {heads or 0}"):
        convert_timm_vit.config_of(made_up(), heads, 1e-6)
