"""State with tensors as JSON, exact to the bit."""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import torch


def to_json(state: dict[str, Any]) -> str:
    """Nested dicts, lists, plain values and tensors as text that JSON can hold; `ValueError` if there is anything
    else, such as NumPy's numbers, which `from_json` could not read."""
    torch.save(state, file := io.BytesIO())
    encoded = base64.b64encode(file.getvalue()).decode("ascii")
    try:
        from_json(encoded)
    except pickle.UnpicklingError as error:
        found = str(error).partition("GLOBAL ")[2].split(" ")[0] or "something else"
        raise ValueError(
            "A policy's `state_dict`, and the `memory` of its actions, must hold tensors and plain Python values "
            f"only, got {found}."
        ) from error
    return encoded


def from_json(encoded: str) -> dict[str, Any]:
    """The state that `to_json` was given. Code in the text is never run."""
    return torch.load(io.BytesIO(base64.b64decode(encoded)), weights_only=True)
