"""`ProVPTConfig`: what inference needs to know about an adapter."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, overload

import numpy as np
from peft.config import PeftConfig
from peft.utils import PeftType
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn

from .version import __version__


# No backbone has more blocks, and no image a longer side in pixels; a file that says so is broken.
_LARGEST = 10_000
_FILLED_IN = ("num_blocks", "id2label", "problem_type", "training", "image_size")
_PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


DESCRIBE_YOUR_OWN = (
    "Describe another backbone in the config: ProVPTConfig(backbone={"
    '"block": "MyLayer", "attention": "attention", "norm": "norm1", '
    '"key": "attention.k_proj", "value": "attention.v_proj"}), where `block` is the class name of its transformer '
    "blocks and the rest are paths inside a block. Its attention module must call transformers' attention registry."
)


@dataclass(frozen=True)
class BackboneFamily:
    """How to find the transformer blocks of a model family and the parts of a block that prompts pass through.

    Args:
        name: Name of the family, for messages.
        block: Class name of the block module. Every module of that class is a block, in forward order.
        attention: Path of the attention module in the block. It calls transformers' attention registry with its own
            `config`, or `own_attention` has a function for it.
        norm: Path of the norm before the attention. With `norm_first=False`, any norm of the block's width.
        key: Path of the projection that computes the attention's keys from normed tokens.
        value: Path of the projection that computes its values.
        windowed: Whether the attention sees windows (batch size times windows per image) instead of whole images.
        extra_tokens: Whether a block accepts extra tokens, as VPT-Shallow needs: it has no windows, and no masks or
            biases tied to the image size.
        norm_first: Whether the norm comes before the attention. If not, prompts are projected without it.
        normalize_keys: Whether keys are scaled to length 1 (cosine attention).
        not_in: Class names of modules to exclude. Their blocks have the same class but see no images: text towers,
            decoders.
        own_attention: For an attention module that does not call the registry: a function that takes the module and
            the arguments of its `forward`, and returns the arguments for the registry's attention function.
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
    own_attention: Callable[..., Any] | None = None


def check_description(description: dict) -> None:
    """Check the keys of a user's description of a backbone: `ValueError` if some are missing or unknown."""
    required = {field.name for field in fields(BackboneFamily) if field.default is MISSING} - {"name"}
    # A function cannot be saved with the adapter.
    optional = {field.name for field in fields(BackboneFamily)} - required - {"own_attention"}
    missing, unknown = sorted(required - set(description)), sorted(set(description) - required - optional)
    if missing or unknown:
        raise ValueError(
            f"`backbone` needs the keys {sorted(required)} (and may have {sorted(optional)}), "
            f"but missing: {missing}, unknown: {unknown}. {DESCRIBE_YOUR_OWN}"
        )


@dataclass
class ProVPTConfig(PeftConfig):
    """Configuration of relocatable deep visual prompts.

    Args:
        num_prompts: Prompts per block at the start of training: one number for all blocks (VPT-Deep), or a list of L
            numbers, one per block. The paper uses 1 to 200 per block; 10 is a good first try. The sum over blocks is
            the paper's budget N (Sec. 3.1), which relocation never changes.
        reserve: Additional prompts that start in no block. They cost nothing until relocation adds them
            (`RelocationConfig.preset("adding")`).
        prompt_dropout: Dropout rate in [0, 1) on the entries of the prompts, independent for each image, in training
            only. The paper uses 0.1 (Tab. i, "drop rate"). In short training it costs accuracy, and it makes each
            step slower.
        backbone_dropout: Whether dropout, drop path and other randomness of the frozen backbone stay on in training.
            VPT trains with a deterministic backbone.
        shallow: VPT-Shallow: `num_prompts` prompts in total, which enter the first block as tokens, pass through all
            blocks and are dropped after the last. They do not move. Needs a vision transformer without windows and
            without masks or biases tied to the image size. Hidden states between the blocks start with the prompt
            tokens.
        modules_to_save: Modules that are trained in full and saved with the adapter, usually the new head:
            `["classifier"]`.
        backbone: Description of a backbone outside the known families, as keyword arguments of
            [`BackboneFamily`][provpt_peft.config.BackboneFamily].
        id2label: Label names. By default taken from the image classifier's own config when the adapter is saved.
        problem_type: Kind of labels of an image classifier, in transformers' terms: `"regression"`,
            `"single_label_classification"` or `"multi_label_classification"`. Default as for `id2label`.
        training: Record of the adapter's training, for its model card and figures: `relocation`, the relocation
            settings; `history`, the records of the relocations; `epochs`; `metrics`, the metrics of the last
            evaluation. Filled in by the relocator and its callback.
        image_size: Height and width in pixels of the last images that the adapter was trained on. Filled in by
            training. `load_image_classifier` compares it with what the image processor makes.
        num_blocks: L, the number of the model's blocks. Filled in when the adapter is added to a model.
        provpt_version: The version of this package that made the config. Filled in automatically.

    Raises:
        ValueError: If a value is out of its range. Whether `num_prompts` fits the backbone is checked when the
            adapter is added to a model.
    """

    num_prompts: int | list[int] = 10
    reserve: int = 0
    prompt_dropout: float = 0.0
    backbone_dropout: bool = False
    shallow: bool = False
    modules_to_save: list[str] | None = None
    backbone: dict[str, Any] | None = None
    id2label: dict[int, str] | None = None
    problem_type: str | None = None
    training: dict[str, Any] | None = None
    image_size: list[int] | None = None
    num_blocks: int | None = None
    provpt_version: str | None = None

    # Called after a config was written, with its folder, the config and PEFT's name for the base model's class.
    # `provpt_peft` sets it to the function that writes the model card.
    after_save: ClassVar[Callable[[str, ProVPTConfig, dict[str, str] | None], None] | None] = None

    # PEFT's word for "do not match modules by name". Not a field.
    target_modules = DUMMY_TARGET_MODULES

    def __post_init__(self) -> None:
        super().__post_init__()
        make_plain(self, ProVPTConfig)
        self.peft_type = PeftType.PROVPT
        # Not a field, so not saved. Users leave the version out; a copy of a config counts as a file.
        self.is_from_file = self.provpt_version is not None
        self.provpt_version = self.provpt_version or __version__
        if self.task_type is not None:
            raise ValueError(
                f"`task_type` names text tasks and has to stay unset for a vision model, got {self.task_type!r}. "
                'Leave it out; to train a head, name it in `modules_to_save`, for example ["classifier"].'
            )
        self._check_num_prompts()
        if self.shallow and (isinstance(self.num_prompts, list) or self.reserve):
            raise ValueError(
                "With `shallow=True` all prompts enter at the first block and none move, so `num_prompts` must be one "
                f"number and `reserve` 0, got {self.num_prompts!r} and {self.reserve}. Give the number of prompts."
            )
        blocks, modules, size = self.num_blocks, self.modules_to_save, self.image_size
        for name, valid, rule, instead in (
            ("reserve", _is_count(self.reserve), "a whole number of at least 0", "Use 0 for none."),
            ("prompt_dropout", _is_share(self.prompt_dropout), "in [0, 1)", "Use 0.0 to switch it off."),
            ("backbone_dropout", isinstance(self.backbone_dropout, bool), "True or False", "Leave it out for False."),
            ("shallow", isinstance(self.shallow, bool), "True or False", "Leave it out for False."),
            ("backbone", isinstance(self.backbone, dict | None), "a dict", DESCRIBE_YOUR_OWN),
            ("training", isinstance(self.training, dict | None), "a dict that the relocator wrote", "Leave it out."),
            (
                "num_blocks",
                blocks is None or _is_size(blocks),
                f"a whole number from 1 to {_LARGEST}",
                "Leave it out.",
            ),
            (
                "image_size",
                size is None or (isinstance(size, list) and len(size) == 2 and all(map(_is_size, size))),
                f"a height and a width from 1 to {_LARGEST} pixels",
                "Leave it out.",
            ),
            ("modules_to_save", not isinstance(modules, str), "a list of names", f"Give [{modules!r}]."),
            (
                "problem_type",
                self.problem_type in (None, *_PROBLEM_TYPES),
                f"one of {', '.join(_PROBLEM_TYPES)}",
                "Leave it out to store what the model's own config has.",
            ),
        ):
            if not valid:
                raise ValueError(f"`{name}` must be {rule}, got {getattr(self, name)!r}. {instead}")
        if self.backbone is not None:
            check_description(self.backbone)
        if self.id2label is not None:
            try:  # JSON turns a dict's keys into strings
                self.id2label = {int(index): str(name) for index, name in self.id2label.items()}
            except (AttributeError, TypeError, ValueError):
                raise ValueError(
                    f"`id2label` must map the number of each class to its name, got {self.id2label!r}. "
                    "Leave it out to store the names that the model's own config has."
                ) from None
        # Not fields, so not saved.
        self._labels_given = are_names(self.id2label)
        self._problem_type_given = self.problem_type is not None
        self._trained = False  # since it was made or read
        self._as_given: dict[str, Any] | None = None

    def for_a_model(self) -> ProVPTConfig:
        """The config for a new adapter: this object, which PEFT keeps. If another adapter already uses it, a copy
        without the values that were filled in for that adapter."""
        if self._as_given is None:
            return self
        config = copy.copy(self)
        for name, value in self._as_given.items():
            setattr(config, name, value)
        config._as_given = None
        config.base_model_name_or_path = None  # that of the other adapter
        return config

    def take(self, num_blocks: int) -> None:
        """Become the config of an adapter in a model with `num_blocks` blocks."""
        self._as_given = {name: getattr(self, name) for name in _FILLED_IN}
        self.num_blocks, self.training, self._trained = num_blocks, None, False

    def _check_num_prompts(self) -> None:
        if isinstance(self.num_prompts, list):
            valid = all(map(_is_count, self.num_prompts)) and sum(self.num_prompts) > 0
            rule = "as a list must hold whole numbers of at least 0, not all of them 0"
        else:
            valid = _is_count(self.num_prompts) and self.num_prompts > 0
            rule = "must be at least 1"
        if not valid:
            raise ValueError(
                f"`num_prompts` {rule}, got {self.num_prompts!r}. Give the number of prompts each block starts with."
            )

    def start_distribution(self, num_blocks: int) -> list[int]:
        """The number of prompts in each of L blocks at the start.

        Raises:
            ValueError: If the config was made for another number of blocks.
        """
        if isinstance(self.num_prompts, list):
            distribution, given = self.num_prompts, "`num_prompts` has a number for each of"
        else:
            rest = [0 if self.shallow else self.num_prompts] * ((self.num_blocks or num_blocks) - 1)
            distribution, given = [self.num_prompts, *rest], "it was made for"
        if len(distribution) != num_blocks:
            raise ValueError(
                f"An adapter only fits the number of blocks it was made for, but {given} {len(distribution)} blocks, "
                f"and the model has {num_blocks}. Use the backbone it was made for, or make a new config."
            )
        return distribution

    def remember_labels(self, model: nn.Module) -> None:
        """Take `id2label` and `problem_type` from an image classifier's config, unless they were given. Those of a
        file count as given until the adapter is trained again, with labels that have names."""
        config = classifier_config(model)
        if config is None:
            return
        again = self.is_from_file and self._trained
        labels = dict(config.id2label) if config.id2label else None
        # A head of another size has other labels than the file says, whether they have names or not.
        if not self._labels_given or (again and (are_names(labels) or len(labels or ()) != len(self.id2label or ()))):
            self.id2label = labels
        if not self._problem_type_given or (again and config.problem_type is not None):
            self.problem_type = config.problem_type

    def remember_training(self, image_size: Sequence[int] | None) -> None:
        """Note a training step, and the height and width of its images if it had any, for whoever loads the adapter
        without their processor."""
        self._trained = True
        if image_size is not None:
            self.image_size = list(image_size)

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write `adapter_config.json` as PEFT does, and update the model card if the adapter's tensors are in the same
        folder."""
        super().save_pretrained(save_directory, **kwargs)
        # `PeftModel.save_pretrained` writes its card and the tensors first and the config last: all files exist now.
        if ProVPTConfig.after_save is not None:
            ProVPTConfig.after_save(save_directory, self, kwargs.get("auto_mapping_dict"))


@overload
def absolute(base_model: str) -> str: ...


@overload
def absolute(base_model: None) -> None: ...


def absolute(base_model: str | None) -> str | None:
    """The absolute path of a base model in a local folder; any other name as it is."""
    return os.path.abspath(base_model) if base_model and os.path.isdir(base_model) else base_model


def classifier_config(model: nn.Module) -> Any:
    """An image classifier's own config, which names its classes. None for other models."""
    return getattr(model, "config", None) if "ForImageClassification" in type(model).__name__ else None


def are_names(id2label: dict[int, str] | None) -> bool:
    """Whether labels have names. transformers' placeholders (`LABEL_0`) are none."""
    return any(name != f"LABEL_{index}" for index, name in (id2label or {}).items())


def make_plain(config: Any, cls: type) -> None:
    """Convert the settings that `cls` itself declares to what a file stores (see `plain`)."""
    for setting in fields(config):
        if setting.name in cls.__annotations__:
            setattr(config, setting.name, plain(getattr(config, setting.name)))


def plain(value: Any) -> Any:
    """A setting as JSON stores it: Python's numbers instead of NumPy's, lists instead of tuples and sets."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_size(value: Any) -> bool:
    return _is_count(value) and 0 < value <= _LARGEST


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value < 1.0
