"""Adapter folders and Hub ids: check an adapter's files, load an adapter with all that belongs to it."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import HfApi, ModelCard, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file

from .config import ProVPTConfig
from .history import Run, run_of
from .registration import NAME
from .version import __version__


BANK = "base_model.bank."
PROMPTS = f"{BANK}provpt_prompts"
PROMPT_BLOCKS = f"{BANK}provpt_prompt_blocks"

_PROCESSOR_NAME = "preprocessor_config.json"
_SAVE_ANEW = "Download the adapter again, or save it anew."


class ImageClassifier(NamedTuple):
    """What [`load_image_classifier`] returns."""

    model: PeftModel
    image_processor: Any
    labels: dict[int, str]


class Adapter(NamedTuple):
    """What [`read_adapter`] returns."""

    config: ProVPTConfig
    tensors: dict[str, torch.Tensor]
    run: Run


def load_image_classifier(
    adapter: str | os.PathLike[str], base_model: str | os.PathLike[str] | None = None, **from_pretrained_kwargs: Any
) -> ImageClassifier:
    """Load an image classifier from its adapter: base model, prompts, head, image processor and labels in one call.

    Args:
        adapter: Folder that `PeftModel.save_pretrained` wrote, or a Hub id.
        base_model: Folder or Hub id of the base model, by default what the adapter's config names.
        from_pretrained_kwargs: Passed on to `AutoModelForImageClassification.from_pretrained`. `token`, `cache_dir`,
            `local_files_only` and `force_download` hold for the adapter's and the image processor's files too.

    Returns:
        The model in eval mode, the image processor (the adapter's own if its folder has one, otherwise the base
        model's), and the name of each class.

    Raises:
        ValueError: If the adapter's files are broken (see [`check_adapter`]), if its base model is not known, or if
            its head has another number of classes than the base model gives.

    Example:
        ```python
        >>> model, image_processor, labels = load_image_classifier("flowers-provpt")
        >>> inputs = image_processor(image, return_tensors="pt")
        >>> labels[model(**inputs).logits.argmax(-1).item()]
        'daisy'
        ```
    """
    # Slow to import, and only needed here.
    from transformers import AutoModelForImageClassification

    # From its own module: transformers 5.9 puts a placeholder that asks for torchvision at the top level.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    download: dict[str, Any] = {
        name: from_pretrained_kwargs[name]
        for name in ("token", "cache_dir", "local_files_only", "force_download")
        if name in from_pretrained_kwargs
    }
    folder = _local_folder(adapter, download)
    config, tensors, _ = read_adapter(folder)
    name = _base_model_name(folder, config, base_model)

    settings: dict[str, Any] = {}
    if base_model is None and config.revision is not None:
        settings["revision"] = config.revision
    # A config of the caller's own has these settings.
    if "config" not in from_pretrained_kwargs:
        if config.id2label is not None and not {"id2label", "num_labels"} & from_pretrained_kwargs.keys():
            settings["id2label"] = config.id2label
            settings["label2id"] = {label: index for index, label in config.id2label.items()}
        if config.problem_type is not None:
            settings["problem_type"] = config.problem_type
    settings |= from_pretrained_kwargs
    # Sizes that do not match are looked at below, where the adapter's own head is known.
    settings |= dict(ignore_mismatched_sizes=True, output_loading_info=True)
    base, loading_info = AutoModelForImageClassification.from_pretrained(name, **settings)
    _check_head(folder, name, base, tensors, loading_info)

    model = PeftModel.from_pretrained(base, str(folder), config=config).eval()
    if (folder / _PROCESSOR_NAME).is_file():
        image_processor = AutoImageProcessor.from_pretrained(folder)
    else:
        revision = {key: value for key, value in settings.items() if key == "revision"}
        image_processor = AutoImageProcessor.from_pretrained(name, **revision, **download)
    return ImageClassifier(model, image_processor, dict(base.config.id2label))


def push_to_hub(
    model: PeftModel,
    repo_id: str,
    image_processor: Any = None,
    license: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str = "Upload PRO-VPT adapter",
) -> str:
    """Upload an adapter with its model card. `model.push_to_hub` does the same, but puts an empty card over ours.

    Args:
        model: A model with a PROVPT adapter. The active one is uploaded.
        repo_id: `user/name` on the Hub; the repository is made if need be.
        image_processor: The base model's image processor, saved beside the adapter if given.
        license: Of the adapter, for the card's metadata, such as "apache-2.0".
        private: Whether a new repository is private; by default what the account's owner has set.
        token: Of an account that may write there; by default the one that was logged in with.
        commit_message: Of the commit.

    Returns:
        The address of the commit.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: If the Hub refuses.

    Example:
        ```python
        >>> push_to_hub(model, "me/flowers-provpt", image_processor)
        >>> model, image_processor, labels = load_image_classifier("me/flowers-provpt")
        ```
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    name = model.active_adapter
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved, selected_adapters=[name])
        # PEFT gives adapters of other names than `default` a folder each.
        folder = saved if name == "default" else os.path.join(saved, name)
        if image_processor is not None:
            image_processor.save_pretrained(folder)
        if license is not None:
            path = os.path.join(folder, "README.md")
            card = ModelCard.load(path)
            card.data.license = license
            card.save(path)
        return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message).commit_url


def check_adapter(folder: str | os.PathLike[str]) -> None:
    """Check the files of an adapter, without a model.

    Settings that this version does not know are a warning: they come from a newer version.

    Args:
        folder: Folder with `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ValueError: If a file is missing or broken, or if its content cannot be an adapter of this method. The message
            names the file and the cause.
    """
    read_adapter(Path(folder))


def is_hub_id(name: str | None) -> bool:
    """Whether a base model's name is an id on the Hub, and not a path or nothing."""
    if not name or os.path.isdir(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def num_blocks(config: ProVPTConfig, num_prompts_total: int) -> int:
    """L, from an adapter's config and its number of prompts N."""
    return (
        len(config.num_prompts)
        if isinstance(config.num_prompts, list)
        else (num_prompts_total - config.reserve) // config.num_prompts
    )


# ---- files ----------------------------------------------------------------------------------------------------------


def _local_folder(adapter: str | os.PathLike[str], download: dict[str, Any]) -> Path:
    if os.path.isdir(adapter):
        return Path(adapter)
    if not is_hub_id(str(adapter)):
        raise ValueError(
            f"`adapter` must be a folder or a Hub id, got {str(adapter)!r}, which is neither. "
            "Give the folder that `save_pretrained` wrote."
        )
    files = [CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, _PROCESSOR_NAME]
    return Path(snapshot_download(str(adapter), allow_patterns=files, **download))


def read_adapter(folder: Path) -> Adapter:
    """An adapter's config and tensors, checked.

    Raises:
        ValueError: As [`check_adapter`].
    """
    config = _read_config(folder / CONFIG_NAME)
    path = folder / SAFETENSORS_WEIGHTS_NAME
    tensors = _read_tensors(path)
    try:
        _check_prompts(config, tensors)
        _check_saved_modules(config, tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error} {_SAVE_ANEW}") from None
    try:
        run = run_of(config, distribution_of(config, tensors[PROMPT_BLOCKS])[1:])
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_NAME}: {error}") from None
    return Adapter(config, tensors, run)


def distribution_of(config: ProVPTConfig, blocks: torch.Tensor) -> list[int]:
    """Prompts in none of the blocks and in each of the L blocks, from the block of each prompt, (N,)."""
    return torch.bincount(blocks, minlength=num_blocks(config, len(blocks)) + 1).tolist()


def _read_config(path: Path) -> ProVPTConfig:
    if not path.is_file():
        raise ValueError(
            f"{path}: an adapter's folder must have this file, got none. "
            "Give the folder that `save_pretrained` wrote; adapters not named 'default' have a sub-folder each."
        )
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the file must be JSON, got {error}. {_SAVE_ANEW}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != NAME:
        found = settings.get("peft_type") if isinstance(settings, dict) else settings
        raise ValueError(
            f"{path}: `peft_type` must be '{NAME}', got {found!r}. "
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


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        pickled = path.with_name(WEIGHTS_NAME)
        found = (
            f"only {WEIGHTS_NAME}, a pickle file, which can run code when it is read" if pickled.exists() else "none"
        )
        raise ValueError(
            f"{path}: weights are only read from this file, got {found}. "
            "Save the adapter anew, with `safe_serialization=True`."
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: the file must be complete safetensors, got {error}. {_SAVE_ANEW}") from error


# ---- tensors --------------------------------------------------------------------------------------------------------


def _check_prompts(config: ProVPTConfig, tensors: dict[str, torch.Tensor]) -> None:
    found = {name for name in tensors if name.startswith(BANK)}
    if found != {PROMPTS, PROMPT_BLOCKS}:
        missing, surplus = sorted({PROMPTS, PROMPT_BLOCKS} - found), sorted(found - {PROMPTS, PROMPT_BLOCKS})
        raise ValueError(
            f"an adapter must have the prompts and their blocks and no other prompt tensors, got missing: {missing}, "
            f"surplus: {surplus}."
        )
    prompts, blocks = tensors[PROMPTS], tensors[PROMPT_BLOCKS]
    if prompts.dim() != 2 or prompts.numel() == 0 or not prompts.is_floating_point():
        raise ValueError(
            f"the prompts must be floating point of shape (prompts, width), got {prompts.dtype} of shape "
            f"{tuple(prompts.shape)}."
        )
    count = len(prompts)
    distributed = count - config.reserve
    if isinstance(config.num_prompts, list):
        fits, rule = distributed == sum(config.num_prompts), f"be {sum(config.num_prompts)}, the sum of"
    else:
        fits, rule = distributed > 0 and distributed % config.num_prompts == 0, "be a multiple of"
    if not fits:
        raise ValueError(
            f"the number of prompts must {rule} `num_prompts` = {config.num_prompts} in {CONFIG_NAME}, got {count}."
        )
    if tuple(blocks.shape) != (count,) or blocks.dtype != torch.int64:
        raise ValueError(
            f"the prompts' blocks must be torch.int64 of shape ({count},), got {blocks.dtype} of shape "
            f"{tuple(blocks.shape)}."
        )
    first, last = (1, 1) if config.shallow else (0, num_blocks(config, count))
    if blocks.min() < first or blocks.max() > last:
        raise ValueError(f"the prompts' blocks must be in {first} … {last}, got {blocks.min()} … {blocks.max()}.")


def _check_saved_modules(config: ProVPTConfig, tensors: dict[str, torch.Tensor]) -> None:
    saved = [name for name in tensors if not name.startswith(BANK)]
    if config.modules_to_save and not saved:
        raise ValueError(f"there must be tensors of `modules_to_save` = {config.modules_to_save}, got none.")
    if config.id2label is None:
        return
    for name in saved:
        if _is_head(name) and tensors[name].shape[:1] != (len(config.id2label),):
            raise ValueError(
                f"the head must have one output for each of the {len(config.id2label)} labels in {CONFIG_NAME}, got "
                f"{name!r} of shape {tuple(tensors[name].shape)}. Give each class a name in `id2label` there, or in "
                "the model's own config before the adapter is saved."
            )


def _is_head(name: str) -> bool:
    """Whether a tensor's first dimension counts classes. Each image classifier of the known families, a distilled DeiT
    with its two heads included, ends in a linear layer with such a name."""
    return name.endswith(("classifier.weight", "classifier.bias"))


# ---- base model -----------------------------------------------------------------------------------------------------


def _base_model_name(folder: Path, config: ProVPTConfig, base_model: str | os.PathLike[str] | None) -> str:
    name: Any = str(base_model) if base_model is not None else config.base_model_name_or_path
    if not isinstance(name, str) or not (os.path.isdir(name) or is_hub_id(name)):
        raise ValueError(
            f"{folder / CONFIG_NAME}: the base model must be a Hub id or an existing folder, got {name!r}. "
            "Pass the base model that the adapter was trained with as `base_model`."
        )
    return name


def _check_head(
    folder: Path,
    name: str,
    base: torch.nn.Module,
    tensors: dict[str, torch.Tensor],
    loading_info: dict[str, Any],
) -> None:
    """Check that adapter and base model together give every class a trained weight."""
    present = {key: tuple(tensor.shape) for key, tensor in base.state_dict().items()}
    saved = {
        key.removeprefix("base_model.model."): tuple(tensor.shape)
        for key, tensor in tensors.items()
        if not key.startswith(BANK)
    }
    for key, shape in saved.items():
        if _is_head(key) and key in present and present[key] != shape:
            raise ValueError(
                f"{folder / SAFETENSORS_WEIGHTS_NAME}: the saved head and the model's must have the same number of "
                f"classes, got {key} for {shape[0]} classes saved and {present[key][0]} in {name!r} (shapes {shape} "
                f"and {present[key]}). Pass the names of the saved classes as `id2label`."
            )
    for key, in_file, in_model in loading_info["mismatched_keys"]:
        if key not in saved:
            raise ValueError(
                f"{folder}: a head that the adapter does not bring must fit in the base model, got {key} for "
                f"{in_model[0]} classes by the labels and {in_file[0]} in {name!r} (shapes {tuple(in_model)} and "
                f"{tuple(in_file)}). Save the adapter anew with its head in `modules_to_save`."
            )
    untrained = sorted(key for key in loading_info["missing_keys"] if _is_head(key) and key not in saved)
    if untrained:
        raise ValueError(
            f"{folder}: adapter or base model must have a head, got no {untrained} in either. "
            "Save the adapter anew with its head in `modules_to_save`."
        )
