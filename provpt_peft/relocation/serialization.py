"""Nested state with tensors as JSON, exact to the bit: tensors travel as base64 text of a safetensors file."""

from __future__ import annotations

import base64
from typing import Any

import torch
from safetensors.torch import load, save


_TENSOR = "__tensor__"


def to_json(state: Any) -> dict[str, Any]:
    """A JSON-able form of nested dicts (with str or int keys), lists, plain values and tensors."""
    tensors: dict[str, torch.Tensor] = {}

    def encode(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().cpu().contiguous()
            return {_TENSOR: name}
        if isinstance(value, dict):
            # A list of pairs, since JSON would turn int keys (those of optimizer states) into text.
            return {"items": [[key, encode(item)] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            return [encode(item) for item in value]
        return value

    tree = encode(state)
    return {"tree": tree, "tensors": base64.b64encode(save(tensors)).decode("ascii")}


def from_json(encoded: dict[str, Any]) -> Any:
    """The state that `to_json` was given; tuples come back as lists."""
    tensors = load(base64.b64decode(encoded["tensors"]))

    def decode(value: Any) -> Any:
        if isinstance(value, dict):
            if _TENSOR in value:
                return tensors[value[_TENSOR]]
            return {key: decode(item) for key, item in value["items"]}
        if isinstance(value, list):
            return [decode(item) for item in value]
        return value

    return decode(encoded["tree"])
