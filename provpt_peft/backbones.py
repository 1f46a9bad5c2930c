"""Where blocks, attention, first norm and key / value projections are, per model family.

A new family is one entry of `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any

from torch import nn

from .own_attention import AttentionInputs, data2vec_vision, maskformer_swin, swin_v2


@dataclass(frozen=True)
class BackboneFamily:
    """How to find the transformer blocks of a model family and the parts of a block that prompts pass through.

    Paths are relative to the block. `key` and `value` project a normed token to the keys and values of the attention.

    Args:
        name: Name of the family, for messages.
        block: Class name of the block module. Every module of that class is a block, in forward order.
        attention: Path of the attention module. It calls transformers' attention registry with its own `config`, or
            has an entry in `own_attention`.
        norm: Path of a norm of the block's width, the one that the block's input passes on its way to the attention.
        key: Path of the key projection.
        value: Path of the value projection.
        windowed: Whether the attention sees windows of an image (batch times windows) and not whole images.
        extra_tokens: Whether a block takes more tokens than its image has, as VPT-Shallow needs it: there are no
            windows, and no masks or biases of the image's size.
        norm_first: Whether the norm comes before the attention. Where it comes after, prompts are projected as they
            are.
        normalize_keys: Whether keys are scaled to length 1 (cosine attention).
        not_in: Class names of modules whose blocks are of the same class but see no images: text towers, decoders.
        own_attention: For an attention module that does not call the registry: a function that takes the module and
            what its `forward` takes, and returns what the registry would be given.
    """

    name: str
    block: str
    attention: str
    norm: str
    key: str
    value: str
    windowed: bool = False
    extra_tokens: bool = True
    norm_first: bool = True
    normalize_keys: bool = False
    not_in: tuple[str, ...] = ()
    own_attention: Callable[..., AttentionInputs] | None = None


def _family(
    name: str,
    block: str,
    norm: str,
    attention: str = "attention",
    key: str = "k_proj",
    value: str = "v_proj",
    **rest: Any,
) -> BackboneFamily:
    """An entry whose key and value projections are in the attention module."""
    return BackboneFamily(name, block, attention, norm, f"{attention}.{key}", f"{attention}.{value}", **rest)


def _dual(name: str, prefix: str, **rest: Any) -> BackboneFamily:
    """The vision tower of a model of images and text, whose text tower has blocks of the same class."""
    text = tuple(f"{prefix}Text{suffix}" for suffix in ("Model", "ModelWithProjection", "Transformer"))
    return _family(name, f"{prefix}EncoderLayer", "layer_norm1", "self_attn", not_in=text, **rest)


_OLD_NAMES: dict[str, Any] = {"key": "key", "value": "value"}
_NO_EXTRA_TOKENS: dict[str, Any] = {"extra_tokens": False}
_WINDOWED: dict[str, Any] = {"windowed": True, **_NO_EXTRA_TOKENS}

FAMILIES: tuple[BackboneFamily, ...] = (
    _family("ViT", "ViTLayer", "layernorm_before"),
    _family("DeiT", "DeiTLayer", "layernorm_before"),
    _family("MAE", "ViTMAELayer", "layernorm_before", not_in=("ViTMAEDecoder",)),
    _family("MSN", "ViTMSNLayer", "layernorm_before"),
    _family("I-JEPA", "IJepaLayer", "layernorm_before"),
    _family("DINOv2", "Dinov2Layer", "norm1"),
    _family("DINOv2 with registers", "Dinov2WithRegistersLayer", "norm1"),
    # transformers 5.9 named the projections of DINOv2 differently.
    _family("DINOv2", "Dinov2Layer", "norm1", "attention.attention", **_OLD_NAMES),
    _family("DINOv2 with registers", "Dinov2WithRegistersLayer", "norm1", "attention.attention", **_OLD_NAMES),
    # Rotary positions are applied before the registry is called: prompts have none.
    _family("DINOv3", "DINOv3ViTLayer", "norm1"),
    _dual("CLIP", "CLIP"),
    _dual("SigLIP", "Siglip"),
    _dual("SigLIP 2", "Siglip2", **_NO_EXTRA_TOKENS),
    _family("BEiT", "BeitLayer", "layernorm_before", **_NO_EXTRA_TOKENS),
    _family(
        "Data2Vec-Vision",
        "Data2VecVisionLayer",
        "layernorm_before",
        "attention.attention",
        own_attention=data2vec_vision,
        **_OLD_NAMES,
        **_NO_EXTRA_TOKENS,
    ),
    _family("DPT", "DPTViTLayer", "layernorm_before", "attention.attention", **_OLD_NAMES, **_NO_EXTRA_TOKENS),
    _family("Swin", "SwinLayer", "layernorm_before", **_WINDOWED),
    _family(
        "Swin V2",
        "Swinv2Layer",
        "layernorm_before",
        "attention.self",
        norm_first=False,
        normalize_keys=True,
        own_attention=swin_v2,
        **_OLD_NAMES,
        **_WINDOWED,
    ),
    _family(
        "MaskFormer's Swin",
        "MaskFormerSwinLayer",
        "layernorm_before",
        "attention.self",
        own_attention=maskformer_swin,
        **_OLD_NAMES,
        **_WINDOWED,
    ),
)

_DESCRIBE_YOUR_OWN = (
    "Describe another backbone in the config: ProVPTConfig(backbone={"
    '"block": "MyLayer", "attention": "attention", "norm": "norm1", '
    '"key": "attention.k_proj", "value": "attention.v_proj"}), where `block` is the class name of its transformer '
    "blocks and the rest are paths inside a block. Its attention module has to call transformers' attention registry."
)


def resolve(module: Any, path: str) -> Any:
    """The submodule at a dotted path, or None. `nn.Module.get_submodule` without the exception."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _has_all_parts(block: nn.Module, family: BackboneFamily) -> bool:
    return all(resolve(block, path) is not None for path in (family.attention, family.norm, family.key, family.value))


def find_blocks(model: nn.Module, description: dict | None = None) -> list[tuple[nn.Module, BackboneFamily]]:
    """The transformer blocks of a model in forward order, wherever in it they are.

    Args:
        model: The model to search.
        description: A family of the user's own, as the keyword arguments of `BackboneFamily` (`name` is optional).
            Without it the known families are tried.

    Returns:
        The blocks, and the family of each.

    Raises:
        ValueError: If there is no block to be found, or if a described block lacks one of its parts or has others.
    """
    families = FAMILIES if description is None else (BackboneFamily(**{"name": "described", **description}),)
    found = list(_matches(model, families))
    if found:
        if description is not None:
            _check_parts(*found[0])
        return found

    if description is not None:
        block = next((m for m in model.modules() if type(m).__name__ == description["block"]), None)
        if block is None:
            raise ValueError(
                f"`backbone` has to name the class of the transformer blocks, but the {type(model).__name__} has no "
                f"module of class {description['block']!r}. Look at print(model) for the class name."
            )
        parts = ("attention", "norm", "key", "value")
        missing = [f"{part}={description[part]!r}" for part in parts if resolve(block, description[part]) is None]
        raise ValueError(
            f"The paths in `backbone` have to exist in every {description['block']}, but these do not: "
            f"{', '.join(missing)}. The block has {[name for name, _ in block.named_modules() if name]}."
        )
    known = ", ".join(dict.fromkeys(family.name for family in families))
    raise ValueError(
        f"PROVPT needs transformer blocks that it knows, but found none in {type(model).__name__}. "
        f"Known families: {known}. {_DESCRIBE_YOUR_OWN}"
    )


def _check_parts(block: nn.Module, family: BackboneFamily) -> None:
    """Check that the described parts of a block can do what prompts need."""
    attention, norm = resolve(block, family.attention), resolve(block, family.norm)
    for part, path, module, needed in (
        ("attention", family.attention, attention, "config"),
        ("norm", family.norm, norm, "weight"),
    ):
        if getattr(module, needed, None) is None:
            raise ValueError(
                f"The `{part}` in `backbone` has to be a module with a `{needed}`, but {path!r} of {family.block}, a "
                f"{type(module).__name__}, has none. {_DESCRIBE_YOUR_OWN}"
            )


def _matches(model: nn.Module, families: tuple[BackboneFamily, ...]) -> Iterator[tuple[nn.Module, BackboneFamily]]:
    class_of: dict[str, str] = {}
    for name, module in model.named_modules():
        class_of[name] = class_name = type(module).__name__
        for family in families:
            if class_name == family.block and _has_all_parts(module, family):
                parts = name.split(".")
                ancestors = {class_of[".".join(parts[:depth])] for depth in range(len(parts))}
                if ancestors.isdisjoint(family.not_in):
                    yield module, family
                break


def check_description(description: dict) -> None:
    """Check that a user's description of a backbone has the right keys, without a model at hand.

    Raises:
        ValueError: If keys are missing or unknown.
    """
    # A function cannot be saved with the adapter.
    names = {field.name: field.default is MISSING for field in fields(BackboneFamily) if field.name != "own_attention"}
    required = {name for name, has_no_default in names.items() if has_no_default and name != "name"}
    missing, unknown = sorted(required - set(description)), sorted(set(description) - set(names))
    if missing or unknown:
        raise ValueError(
            f"`backbone` needs the keys {sorted(required)} (and may have {sorted(set(names) - required)}), "
            f"but missing: {missing}, unknown: {unknown}. {_DESCRIBE_YOUR_OWN}"
        )
