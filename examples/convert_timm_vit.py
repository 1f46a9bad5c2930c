"""Convert a vision transformer with timm's names to a transformers checkpoint: MoCo-v3, MAE's own files, timm.

    python examples/convert_timm_vit.py vit-b-300ep.pth.tar moco-v3-vit-base
    python examples/convert_timm_vit.py mae_pretrain_vit_base.pth mae-vit-base --layer_norm_eps 1e-6

The width, the number of blocks, the patch size and the image size are read from the tensors. The number of heads is
the width / 64 by default. Momentum encoders, decoders, projectors and heads are left out. The script writes a
`ViTModel` without pooling and its image processor. On these,
`AutoModelForImageClassification.from_pretrained(folder, num_labels=...)` puts a new head, and PRO-VPT trains the head
and the prompts.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import ViTConfig, ViTImageProcessor, ViTModel


# MoCo-v3 saves its base encoder beside a momentum encoder, wrapped for several devices.
PREFIXES = ("module.base_encoder.", "base_encoder.", "module.", "model.", "backbone.")
NAMES = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
BLOCK_NAMES = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
# What changes a block's input in other vision transformers: tokens beside the class token, a norm before the blocks.
INPUTS = ("dist_token", "reg_token", "register_tokens", "norm_pre")
IMAGE_MEAN, IMAGE_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def without_prefix(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The encoder's tensors under timm's bare names.

    Raises:
        ValueError: If there is no encoder with timm's names.
    """
    for prefix in (*PREFIXES, ""):
        if f"{prefix}blocks.0.attn.qkv.weight" in state_dict:
            return {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
    raise ValueError(
        "The checkpoint must hold a vision transformer with timm's names (blocks.0.attn.qkv.weight), got "
        f"{sorted(state_dict)[:5]} and {max(0, len(state_dict) - 5)} more. Rename the tensors of other layouts first."
    )


def config_of(tensors: Mapping[str, torch.Tensor], num_heads: int | None, layer_norm_eps: float) -> ViTConfig:
    """The config that follows from the tensors' shapes."""
    width, channels, _, patch = tensors["patch_embed.proj.weight"].shape
    heads = width // 64 if num_heads is None else num_heads
    if heads < 1 or width % heads:
        raise ValueError(f"The number of heads must divide the width {width}, got {heads}. Set it with `--num_heads`.")
    blocks = {int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))}
    side = int((tensors["pos_embed"].shape[1] - 1) ** 0.5)
    return ViTConfig(
        hidden_size=width,
        num_hidden_layers=len(blocks),
        num_attention_heads=heads,
        intermediate_size=tensors["blocks.0.mlp.fc1.weight"].shape[0],
        num_channels=channels,
        patch_size=patch,
        image_size=side * patch,
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        layer_norm_eps=layer_norm_eps,
    )


def convert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename timm's tensors as in `ViTModel`. The fused projection (3 D, D) is queries, keys and values in this order.

    Tensors of other parts, such as a head, are left out.

    Raises:
        ValueError: If a block, or what comes before it, has a part that `ViTModel` does not have.
    """
    converted = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
        block, part = (f"layers.{match[1]}", match[2]) if match else ("", "")
        if name in NAMES:
            converted[NAMES[name]] = tensor
        elif module in NAMES:
            converted[f"{NAMES[module]}.{kind}"] = tensor
        elif part == "attn.qkv":
            for projection, third in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True):
                converted[f"{block}.attention.{projection}.{kind}"] = third.clone()
        elif part in BLOCK_NAMES:
            converted[f"{block}.{BLOCK_NAMES[part]}.{kind}"] = tensor
        elif name.startswith(("blocks.", *INPUTS)):
            raise ValueError(
                f"The checkpoint must be a plain vision transformer, but it has {name}, which `ViTModel` lacks. Look "
                "for the checkpoint in transformers' own format."
            )
    return converted


def read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, which may be nested under `state_dict` or `model`."""
    content: Any = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        content = content.get(key, content)
    return without_prefix(content)


def make_model(
    tensors: Mapping[str, torch.Tensor], num_heads: int | None = None, layer_norm_eps: float = 1e-6
) -> ViTModel:
    """A `ViTModel` from tensors with timm's bare names.

    Raises:
        RuntimeError: If a tensor is missing or has another shape.
    """
    model = ViTModel(config_of(tensors, num_heads, layer_norm_eps), add_pooling_layer=False)
    model.load_state_dict(convert(tensors))
    return model.eval()


def main() -> None:
    """Read, convert, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="file that torch.load reads")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--num_heads", type=int, help="attention heads (default: width / 64; MoCo-v3's ViT-S has 12)")
    parser.add_argument("--layer_norm_eps", type=float, default=1e-6, help="default: 1e-6, as in timm")
    options = parser.parse_args()
    model = make_model(read(options.checkpoint), options.num_heads, options.layer_norm_eps)
    # As part of a classifier, under transformers' current names: 5.9 saves older ones, which a classifier cannot find.
    model.config.save_pretrained(options.folder)
    tensors = {f"vit.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, options.folder / "model.safetensors", metadata={"format": "pt"})
    size = {"height": model.config.image_size, "width": model.config.image_size}
    ViTImageProcessor(size=size, image_mean=IMAGE_MEAN, image_std=IMAGE_STD).save_pretrained(options.folder)
    print(f"{options.folder}: {model.num_parameters():,} parameters in {model.config.num_hidden_layers} blocks.")


if __name__ == "__main__":
    main()
