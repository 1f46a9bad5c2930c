"""Where blocks, attention, first norm and key / value projections are, per model family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import nn


@dataclass(frozen=True)
class BackboneFamily:
    """How to find the transformer blocks of a model family and the parts of a block that prompts pass through.

    Paths are relative to the block. `key` and `value` project a normed token to the keys and values of the attention.

    Args:
        name: Name of the family, for messages.
        block: Class name of the block module. Every module of that class is a block, in forward order.
        attention: Path of the module that calls transformers' attention registry with its own `config`.
        norm: Path of the norm that the block's input passes on its way to the attention.
        key: Path of the key projection.
        value: Path of the value projection.
        windowed: Whether the attention sees windows of an image (batch times windows) and not whole images.
    """

    name: str
    block: str
    attention: str
    norm: str
    key: str
    value: str
    windowed: bool = False


def _vit_like(name: str, block: str, norm: str, windowed: bool = False) -> BackboneFamily:
    return BackboneFamily(name, block, "attention", norm, "attention.k_proj", "attention.v_proj", windowed)


FAMILIES: tuple[BackboneFamily, ...] = (
    _vit_like("ViT", "ViTLayer", "layernorm_before"),
    _vit_like("DeiT", "DeiTLayer", "layernorm_before"),
    _vit_like("DINOv2", "Dinov2Layer", "norm1"),
    _vit_like("DINOv2 with registers", "Dinov2WithRegistersLayer", "norm1"),
    _vit_like("Swin", "SwinLayer", "layernorm_before", windowed=True),
    # transformers 5.9 named the projections of DINOv2 differently.
    *(
        BackboneFamily(
            name, block, "attention.attention", "norm1", "attention.attention.key", "attention.attention.value"
        )
        for name, block in (
            ("DINOv2", "Dinov2Layer"),
            ("DINOv2 with registers", "Dinov2WithRegistersLayer"),
        )
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


def find_blocks(model: nn.Module, description: dict | None = None) -> list[tuple[str, nn.Module, BackboneFamily]]:
    """The transformer blocks of a model in forward order, wherever in it they are.

    Args:
        model: The model to search.
        description: A family of the user's own, as the keyword arguments of `BackboneFamily` (`name` is optional).
            Without it the known families are tried.

    Returns:
        One `(name, block, family)` for each block; the name is the block's path in the model.

    Raises:
        ValueError: If there is no block to be found, or if a described block lacks one of its parts.
    """
    families = FAMILIES if description is None else (BackboneFamily(**{"name": "described", **description}),)
    found = list(_matches(model, families))
    if found:
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


def _matches(
    model: nn.Module, families: tuple[BackboneFamily, ...]
) -> Iterator[tuple[str, nn.Module, BackboneFamily]]:
    for name, module in model.named_modules():
        class_name = type(module).__name__
        for family in families:
            if class_name == family.block and _has_all_parts(module, family):
                yield name, module, family
                break


def check_description(description: dict) -> None:
    """Check that a user's description of a backbone has the right keys, without a model at hand.

    Raises:
        ValueError: If keys are missing or unknown.
    """
    names = {field.name for field in fields(BackboneFamily)}
    required = names - {"name", "windowed"}
    missing, unknown = sorted(required - set(description)), sorted(set(description) - names)
    if missing or unknown:
        raise ValueError(
            f"`backbone` needs the keys {sorted(required)} (and may have 'name' and 'windowed'), "
            f"but missing: {missing}, unknown: {unknown}. {_DESCRIBE_YOUR_OWN}"
        )
