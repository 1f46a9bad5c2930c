"""Adapters on the Hub and in folders: load one with everything it needs, upload one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import HfApi, ModelCard, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

from ..config import ProVPTConfig
from .files import is_head, read_adapter


_IMAGE_PROCESSOR_NAME = "preprocessor_config.json"
# What a `Processor` writes: the settings of its image processor among those of other inputs.
_PROCESSOR_NAME = "processor_config.json"


class ImageClassifier(NamedTuple):
    """What [`load_image_classifier`] returns."""

    model: PeftModel
    image_processor: Any
    labels: dict[int, str]


def load_image_classifier(
    adapter: str | os.PathLike[str], base_model: str | os.PathLike[str] | None = None, **from_pretrained_kwargs: Any
) -> ImageClassifier:
    """Load an image classifier from its adapter: base model, prompts, head, image processor and labels in one call.

    Args:
        adapter: Folder that `PeftModel.save_pretrained` wrote, or a Hub id.
        base_model: Folder or Hub id of the base model, by default what the adapter's config names.
        from_pretrained_kwargs: Passed on to `AutoModelForImageClassification.from_pretrained`. `token`, `cache_dir`,
            `local_files_only` and `force_download` apply to the adapter's and the image processor's files too.

    Returns:
        The model in eval mode, the image processor (the adapter's own if its folder has one, otherwise the base
        model's), and the name of each class.

    Raises:
        ValueError: If the files of the adapter (see [`check_adapter`][provpt_peft.check_adapter]) or of its image
            processor are broken, if its folder has no image processor and the base model's makes images of another
            size than it was trained on, if its base model is not known, or if its head and the base model have
            different numbers of classes.
        OSError: If the base model is not a complete model in a folder and cannot be downloaded from the Hub.

    Example:
        ```python
        >>> model, image_processor, labels = load_image_classifier("flowers-provpt")
        >>> inputs = image_processor(image, return_tensors="pt")
        >>> labels[model(**inputs).logits.argmax(-1).item()]
        'daisy'
        ```
    """
    from transformers import AutoModelForImageClassification  # slow to import

    download = chosen(from_pretrained_kwargs, "token", "cache_dir", "local_files_only", "force_download")
    folder = local_folder(adapter, download)
    config, tensors, _ = read_adapter(folder)
    name: Any = config.base_model_name_or_path if base_model is None else str(base_model)
    if not isinstance(name, str) or not (os.path.isdir(name) or is_hub_id(name)):
        raise ValueError(
            f"{folder / CONFIG_NAME}: the base model must be a Hub id or an existing folder, got {name!r}. "
            "Pass the base model that the adapter was trained with as `base_model`."
        )

    settings: dict[str, Any] = {}
    if base_model is None and config.revision is not None:
        settings["revision"] = config.revision
    # A config that the caller passes has these settings already.
    if "config" not in from_pretrained_kwargs:
        if config.id2label is not None and not {"id2label", "num_labels"} & from_pretrained_kwargs.keys():
            settings["id2label"] = config.id2label
            settings["label2id"] = {label: index for index, label in config.id2label.items()}
        if config.problem_type is not None:
            settings["problem_type"] = config.problem_type
    settings |= from_pretrained_kwargs
    image_processor = image_processor_of(folder, name, config, **chosen(settings, "revision"), **download)
    # Mismatched sizes are checked below, where the adapter's own head is known.
    settings |= dict(ignore_mismatched_sizes=True, output_loading_info=True)
    try:
        base, loading_info = AutoModelForImageClassification.from_pretrained(name, **settings)
    except OSError as error:
        raise OSError(
            f"{folder / CONFIG_NAME}: the base model must be a Hub id or an existing folder, got {name!r}, which is "
            "not a complete model here and cannot be downloaded. Pass the base model that the adapter was trained "
            f"with as `base_model`. ({error})"
        ) from error
    _check_head(folder, name, base, tensors, loading_info)

    model = PeftModel.from_pretrained(base, str(folder), config=config).eval()
    return ImageClassifier(model, image_processor, dict(base.config.id2label))


def image_processor_of(folder: Path, base_model: str, config: ProVPTConfig, **download: Any) -> Any:
    """The adapter's own image processor if its folder has one, otherwise that of the base model.

    Raises:
        ValueError: If the adapter's own cannot be loaded, or if the base model's makes images of another size than
            those that the adapter was trained on.
    """
    # Slow to import. At its top level, transformers 5.9 has only a placeholder, which asks for torchvision.
    from PIL import Image  # image processors need it as well
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    try:
        if _brings_image_processor(folder):
            return AutoImageProcessor.from_pretrained(folder)
    except Exception as error:
        raise ValueError(
            f"{folder}: an adapter's own image processor must be one that `AutoImageProcessor` can load, got "
            f"{type(error).__name__}: {error}. Save it again with `image_processor.save_pretrained`, or delete "
            f"{_IMAGE_PROCESSOR_NAME} and {_PROCESSOR_NAME} there to use the base model's."
        ) from error
    try:
        image_processor = AutoImageProcessor.from_pretrained(base_model, **download)
    except OSError as error:
        raise OSError(
            f"{folder}: an adapter needs an image processor, but its folder has none, and that of its base model "
            f"{base_model!r} cannot be loaded. Pass the base model that the adapter was trained with as `base_model`, "
            "or save the image processor that you trained with there: `image_processor.save_pretrained(folder)`. "
            f"({error})"
        ) from error
    if config.image_size is not None:
        height, width = config.image_size
        made = image_processor(Image.new("RGB", (width, height)), return_tensors="pt")["pixel_values"].shape[-2:]
        if tuple(made) != (height, width):
            raise ValueError(
                f"{folder}: an adapter without its own image processor must be trained on images of the base model's "
                f"size, {made[0]} x {made[1]} for {base_model!r}, got {height} x {width}. Save the image processor "
                "that you trained with there: `image_processor.save_pretrained(folder)`."
            )
    return image_processor


def _brings_image_processor(folder: Path) -> bool:
    path = folder / _PROCESSOR_NAME
    return (folder / _IMAGE_PROCESSOR_NAME).is_file() or (
        path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("image_processor") is not None
    )


def chosen(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names if name in settings}


def push_to_hub(
    model: PeftModel,
    repo_id: str,
    image_processor: Any = None,
    license: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str = "Upload PRO-VPT adapter",
) -> str:
    """Upload an adapter with its model card, and return the address of the commit.

    `model.push_to_hub` and `trainer.push_to_hub` upload it too, without license and image processor.

    Args:
        model: A model with a PROVPT adapter. The active one is uploaded.
        repo_id: `user/name` on the Hub; the repository is created if it does not exist.
        image_processor: The base model's image processor, saved beside the adapter if given. For a `Processor`, such
            as a `CLIPProcessor`, its image processor is saved.
        license: License of the adapter for the card's metadata, such as "apache-2.0".
        private: Whether a new repository is private; by default the account's setting.
        token: Token of an account that may write there; by default that of the login.
        commit_message: Message of the commit.

    Raises:
        ValueError: If the model is not a `PeftModel`.
        huggingface_hub.errors.HfHubHTTPError: If the Hub refuses.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(
            f"`model` must be a `PeftModel`, got {type(model).__name__}. Give what `get_peft_model` returned."
        )
    name = model.active_adapter
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved, selected_adapters=[name])
        # PEFT gives each adapter that is not named `default` its own folder.
        folder = Path(saved) if name == "default" else Path(saved, name)
        if image_processor is not None:
            getattr(image_processor, "image_processor", image_processor).save_pretrained(folder)
        if license is not None:
            card = ModelCard.load(folder / "README.md")
            card.data.license = license
            card.save(folder / "README.md")
        # After all that may fail locally, since a failure would leave an empty repository.
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message).commit_url


def is_hub_id(name: str | None) -> bool:
    """Whether a base model's name is a Hub id, not a path and not empty."""
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return not os.path.isdir(name or "")


def local_folder(adapter: str | os.PathLike[str], download: dict[str, Any]) -> Path:
    if os.path.isdir(adapter):
        return Path(adapter)
    if not is_hub_id(str(adapter)):
        raise ValueError(
            f"`adapter` must be a folder or a Hub id, got {str(adapter)!r}, which is neither. "
            "Give the folder that `save_pretrained` wrote."
        )
    files = [CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, _IMAGE_PROCESSOR_NAME, _PROCESSOR_NAME]
    return Path(snapshot_download(str(adapter), allow_patterns=files, **download))


def _check_head(
    folder: Path, name: str, base: torch.nn.Module, tensors: dict[str, torch.Tensor], loading_info: dict[str, Any]
) -> None:
    """Check that adapter and base model together give every class a trained weight."""
    present = {key: tuple(tensor.shape) for key, tensor in base.state_dict().items()}
    saved = {key.removeprefix("base_model.model."): tuple(tensor.shape) for key, tensor in tensors.items()}
    for key, shape in saved.items():
        if is_head(key) and present.get(key, shape) != shape:
            raise ValueError(
                f"{folder / SAFETENSORS_WEIGHTS_NAME}: the saved head and the model's must have the same number of "
                f"classes, got {key} for {shape[0]} classes saved and {present[key][0]} in {name!r} (shapes {shape} "
                f"and {present[key]}). Pass the names of the saved classes as `id2label`."
            )
    for key, in_file, in_model in loading_info["mismatched_keys"]:
        if key not in saved:
            raise ValueError(
                f"{folder}: the labels of an adapter without a head must fit the base model's head, got {key} for "
                f"{in_model[0]} classes by the labels and {in_file[0]} in {name!r} (shapes {tuple(in_model)} and "
                f"{tuple(in_file)}). Save the adapter again with its head in `modules_to_save`."
            )
    check_trained(folder, saved, loading_info["missing_keys"])


def check_trained(folder: Path, saved: Collection[str], missing: Iterable[str]) -> None:
    """Check that what the base model lacks of its head (`missing`) is among the adapter's tensors (`saved`): names in
    the base model."""
    untrained = sorted(key for key in set(missing).difference(saved) if is_head(key))
    if untrained:
        raise ValueError(
            f"{folder}: the adapter or the base model must have a head, got no {untrained} in either. "
            "Save the adapter again with its head in `modules_to_save`."
        )
