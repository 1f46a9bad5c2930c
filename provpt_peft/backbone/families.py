"""Where blocks, attention, first norm and key / value projections are, per model family.

A new family is one entry of `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from ..config import DESCRIBE_YOUR_OWN, BackboneFamily
from ..version import __version__
from .own_attention import data2vec_vision, maskformer_swin, swin_v2


def _family(
    name: str, block: str, attention: str = "attention", norm: str = "layernorm_before", old: bool = False, **rest: Any
) -> BackboneFamily:
    """An entry whose projections are in the attention module. `old` selects transformers' older names for them."""
    key, value = ("key", "value") if old else ("k_proj", "v_proj")
    return BackboneFamily(name, block, attention, norm, f"{attention}.{key}", f"{attention}.{value}", **rest)


def _dual(name: str, prefix: str, **rest: Any) -> BackboneFamily:
    """The vision tower of an image-text model, whose text tower has blocks of the same class."""
    text = tuple(f"{prefix}Text{suffix}" for suffix in ("Model", "ModelWithProjection", "Transformer"))
    return _family(name, f"{prefix}EncoderLayer", "self_attn", "layer_norm1", not_in=text, **rest)


_old = partial(_family, attention="attention.attention", old=True)
_SWIN: dict[str, Any] = {"windowed": True, "extra_tokens": False}
_OLD_SWIN: dict[str, Any] = {"attention": "attention.self", **_SWIN}

FAMILIES: tuple[BackboneFamily, ...] = (
    _family("ViT", "ViTLayer"),
    _family("DeiT", "DeiTLayer"),
    _family("MAE", "ViTMAELayer", not_in=("ViTMAEDecoder",)),
    _family("MSN", "ViTMSNLayer"),
    _family("I-JEPA", "IJepaLayer"),
    _family("DINOv2", "Dinov2Layer", norm="norm1"),
    _family("DINOv2 with registers", "Dinov2WithRegistersLayer", norm="norm1"),
    # transformers 5.9 named the projections of DINOv2 differently.
    _old("DINOv2", "Dinov2Layer", norm="norm1"),
    _old("DINOv2 with registers", "Dinov2WithRegistersLayer", norm="norm1"),
    # Rotary positions are applied before the registry is called: prompts have none.
    _family("DINOv3", "DINOv3ViTLayer", norm="norm1"),
    _dual("CLIP", "CLIP"),
    _dual("SigLIP", "Siglip"),
    _dual("SigLIP 2", "Siglip2", extra_tokens=False),
    _family("BEiT", "BeitLayer", extra_tokens=False),
    _old("Data2Vec-Vision", "Data2VecVisionLayer", extra_tokens=False, own_attention=data2vec_vision),
    _old("DPT", "DPTViTLayer", extra_tokens=False),
    _family("Swin", "SwinLayer", **_SWIN),
    _old("Swin V2", "Swinv2Layer", norm_first=False, normalize_keys=True, own_attention=swin_v2, **_OLD_SWIN),
    _old("MaskFormer's Swin", "MaskFormerSwinLayer", own_attention=maskformer_swin, **_OLD_SWIN),
)

_PARTS = ("attention", "norm", "key", "value")


def resolve(module: Any, path: str) -> Any:
    """The submodule at a dotted path, or None. `nn.Module.get_submodule` without the exception."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def find_blocks(model: nn.Module, description: dict | None = None) -> list[tuple[nn.Module, BackboneFamily]]:
    """The transformer blocks of a model in forward order, at any depth, and the family of each.

    Args:
        model: The model to search.
        description: A user-defined family, as the keyword arguments of `BackboneFamily` (`name` is optional). Without
            it, the known families are tried.

    Raises:
        ValueError: If there are no blocks or several vision towers, or if a described block does not have the parts
            that prompts need.
    """
    families = FAMILIES if description is None else (BackboneFamily(**{"name": "described", **description}),)
    found = list(_matches(model, families))
    if not found:
        raise ValueError(_why_none(model, families, described=description is not None))
    towers = list(dict.fromkeys(tower for tower, _, _ in found))
    if len(towers) > 1:
        raise ValueError(
            f"PROVPT puts prompts into the blocks of one vision model, but the {type(model).__name__} has several: "
            f"{', '.join(map(repr, towers))}. Wrap the one to tune, for example model.{towers[0]} = "
            f"get_peft_model(model.{towers[0]}, config)."
        )
    if description is not None:
        _check_parts(*found[0][1:])
    return [(block, family) for _, block, family in found]


def _why_none(model: nn.Module, families: tuple[BackboneFamily, ...], described: bool) -> str:
    """Why no block was found: there is no such class, it lacks parts, or all blocks are in excluded modules."""
    name = type(model).__name__
    of_class = {type(module).__name__: module for module in model.modules()}
    if not described:  # another library's class may have the name of one of transformers'
        of_class = {name: m for name, m in of_class.items() if type(m).__module__.startswith("transformers.")}
    known = [family for family in families if family.block in of_class]
    if not known and described:
        return (
            f"`backbone` has to name the class of the transformer blocks, but the {name} has no module of class "
            f"{families[0].block!r}. Look at print(model) for the class name."
        )
    if not known:
        names = ", ".join(dict.fromkeys(family.name for family in families))
        return (
            f"PROVPT needs transformer blocks of a known family, but found none in {name}. Known families: {names}. "
            f"{DESCRIBE_YOUR_OWN}"
        )
    family = known[0]
    block = of_class[family.block]
    missing = [f"{part}={getattr(family, part)!r}" for part in _PARTS if resolve(block, getattr(family, part)) is None]
    if not missing:
        return (
            f"PROVPT needs blocks that see images, but every {family.block} of the {name} is in a module that "
            f"`not_in` excludes: {', '.join(family.not_in)}. Use a model with a vision tower, or change `not_in` in "
            "`backbone`."
        )
    parts = f"{', '.join(missing)}. The block has {[name for name, _ in block.named_modules() if name]}."
    if described:
        return f"The paths in `backbone` have to exist in every {family.block}, but these do not: {parts}"
    return (
        f"PROVPT supports {family.name}, but in transformers {transformers.__version__} its blocks lack parts that "
        f"provpt_peft {__version__} needs. Missing in {family.block}: {parts} Install a newer provpt_peft or an older "
        f"transformers. {DESCRIBE_YOUR_OWN}"
    )


def _check_parts(block: nn.Module, family: BackboneFamily) -> None:
    """Check that the attention and the norm of a described block have what prompts need."""
    for part, path, needed in (("attention", family.attention, "config"), ("norm", family.norm, "weight")):
        module = resolve(block, path)
        if getattr(module, needed, None) is None:
            raise ValueError(
                f"The `{part}` in `backbone` must be a module with a `{needed}`, but {path!r} of {family.block} "
                f"({type(module).__name__}) has none. {DESCRIBE_YOUR_OWN}"
            )


def _matches(
    model: nn.Module, families: tuple[BackboneFamily, ...]
) -> Iterator[tuple[str, nn.Module, BackboneFamily]]:
    """For each block: the path of the innermost transformers model around it, the block, and its family."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules[name] = module
        for family in families:
            if type(module).__name__ != family.block:
                continue
            if any(resolve(module, getattr(family, part)) is None for part in _PARTS):
                continue
            parts = name.split(".")
            around = [".".join(parts[:depth]) for depth in range(len(parts))]
            if {type(modules[outer]).__name__ for outer in around}.isdisjoint(family.not_in):
                towers = [outer for outer in around if isinstance(modules[outer], PreTrainedModel)]
                yield towers[-1] if towers else "", module, family
            break
