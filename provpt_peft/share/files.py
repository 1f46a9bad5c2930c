"""An adapter's files: read and check them, without a model."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ..config import ProVPTConfig
from ..prompts import check_prompts, read_blocks
from ..records import Run, run_of
from ..registration import NAME
from ..version import __version__


BANK = "base_model.bank."
PROMPTS = f"{BANK}provpt_prompts"
PROMPT_BLOCKS = f"{BANK}provpt_prompt_blocks"

_SAVE_ANEW = "Download the adapter again, or save it again."


class Adapter(NamedTuple):
    """What [`read_adapter`] returns."""

    config: ProVPTConfig
    tensors: dict[str, torch.Tensor]
    run: Run


def check_adapter(folder: str | os.PathLike[str]) -> None:
    """Check the files of an adapter, without a model.

    Settings that this version does not know cause a warning: they come from a newer version.

    Args:
        folder: Folder with `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ValueError: If a file is missing, broken or not an adapter's. The message names the file and the cause.
    """
    read_adapter(Path(folder))


def _num_blocks(config: ProVPTConfig, count: int) -> int:
    """L, from an adapter's config, or from its number of prompts if version 0.1 saved it."""
    if isinstance(config.num_prompts, list):
        return config.num_blocks or len(config.num_prompts)
    return config.num_blocks or max((count - config.reserve) // config.num_prompts, 1)


def read_adapter(folder: Path) -> Adapter:
    """An adapter's config, tensors and training record, checked as in [`check_adapter`]."""
    config = read_config(folder / CONFIG_NAME)
    path = folder / SAFETENSORS_WEIGHTS_NAME
    tensors = _read_tensors(path)
    try:
        _check_prompts(config, tensors)
        _check_saved_modules(config, tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error} {_SAVE_ANEW}") from None
    try:
        run = run_of(config.training, distribution_of(config, read_blocks(tensors[PROMPT_BLOCKS]))[1:])
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_NAME}: {error}") from None
    return Adapter(config, tensors, run)


def saved_blocks(folder: Path) -> torch.Tensor | None:
    """The block of each prompt, (N,), or None if there is no PROVPT adapter. Nothing is checked."""
    path = folder / SAFETENSORS_WEIGHTS_NAME
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as tensors:
        return read_blocks(tensors.get_tensor(PROMPT_BLOCKS)) if PROMPT_BLOCKS in tensors.keys() else None  # noqa: SIM118


def distribution_of(config: ProVPTConfig, blocks: torch.Tensor) -> list[int]:
    """The number of prompts in no block and in each of the L blocks, from the block of each prompt, (N,)."""
    return torch.bincount(blocks, minlength=_num_blocks(config, len(blocks)) + 1).tolist()


def read_config(path: Path) -> ProVPTConfig:
    if not path.is_file():
        raise ValueError(_no_adapter(path))
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the file must be JSON, got {error}. {_SAVE_ANEW}") from error
    method = settings.get("peft_type") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or method != NAME:
        raise ValueError(
            f"{path}: `peft_type` must be '{NAME}', got {method!r}. "
            "Load adapters of other methods with `PeftModel.from_pretrained`."
        )
    known = {field.name for field in fields(ProVPTConfig)}
    if unknown := sorted(settings.keys() - known):
        warnings.warn(
            f"{path}: settings that provpt_peft {__version__} does not know are ignored: {unknown}. The file was "
            f"written by version {settings.get('provpt_version')!r:.40}; upgrade with `pip install -U provpt-peft`.",
            stacklevel=4,
        )
    try:
        return ProVPTConfig(**{key: value for key, value in settings.items() if key in known})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _no_adapter(path: Path) -> str:
    """Why there is no adapter's config at a path, and where it may be."""
    folder = path.parent
    if not folder.exists():
        return (
            f"{folder}: an adapter is a folder, but nothing has this name. "
            "Check the path; an adapter on the Hub has to be downloaded first, with `hf download`."
        )
    if not folder.is_dir():
        return f"{folder}: an adapter is a folder, got a file. Give the folder that `save_pretrained` wrote."
    found = sorted(config.parent.name for config in folder.glob(f"*/{CONFIG_NAME}"))
    instead = (
        f"one of its sub-folders that have one: {', '.join(found)}" if found else "the one `save_pretrained` wrote"
    )
    return f"{path}: an adapter's folder must have this file, got none. Give {instead}."


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        pickled = f"only {WEIGHTS_NAME}, a pickle file, which can run code when it is read"
        found = pickled if path.with_name(WEIGHTS_NAME).exists() else "none"
        raise ValueError(
            f"{path}: weights are only read from this file, got {found}. "
            "Save the adapter again, with `safe_serialization=True`."
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: the file must be complete safetensors, got {error}. {_SAVE_ANEW}") from error


def _check_prompts(config: ProVPTConfig, tensors: dict[str, torch.Tensor]) -> None:
    surplus = sorted(name for name in tensors.keys() - {PROMPTS, PROMPT_BLOCKS} if name.startswith(BANK))
    if surplus:
        raise ValueError(
            f"an adapter must have no prompt tensors other than prompts and their blocks, got {surplus} as well."
        )
    prompts = tensors.get(PROMPTS)
    count = 0 if prompts is None or not prompts.dim() else len(prompts)
    length = _num_blocks(config, count)
    expected = sum(config.start_distribution(length)) + config.reserve
    check_prompts(prompts, tensors.get(PROMPT_BLOCKS), (expected, None), length, config.shallow)


def _check_saved_modules(config: ProVPTConfig, tensors: dict[str, torch.Tensor]) -> None:
    saved = [name for name in tensors if not name.startswith(BANK)]
    if config.modules_to_save and not saved:
        raise ValueError(f"there must be tensors of `modules_to_save` = {config.modules_to_save}, got none.")
    labels = config.id2label
    for name in saved:
        if labels is not None and is_head(name) and tensors[name].shape[:1] != (len(labels),):
            raise ValueError(
                f"the head must have one output for each of the {len(labels)} labels in {CONFIG_NAME}, got {name!r} "
                f"of shape {tuple(tensors[name].shape)}. Give each class a name in `id2label` there, or in the "
                "model's own config before the adapter is saved."
            )


def is_head(name: str) -> bool:
    """Whether a tensor's first dimension is the number of classes. Each image classifier of the known families, even a
    distilled DeiT with its two heads, ends in a linear layer with such a name."""
    return name.endswith(("classifier.weight", "classifier.bias"))
