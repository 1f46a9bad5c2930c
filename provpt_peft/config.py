"""`ProVPTConfig`: what inference needs to know of an adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft.config import PeftConfig
from peft.utils import PeftType
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn

from .backbones import check_description
from .version import __version__


_PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


@dataclass
class ProVPTConfig(PeftConfig):
    """Configuration of relocatable deep visual prompts.

    Args:
        num_prompts (`int` or `list[int]`, defaults to 10):
            Prompts at the start of training: one number for every block (VPT-Deep's uniform distribution), or a list
            of L numbers, one a block. The paper uses 1 to 200 a block, 10 is a good first try. Their sum is the budget
            N of the paper (Sec. 3.1), which relocation never changes.
        reserve (`int`, defaults to 0):
            Prompts beyond those that start in no block. They cost nothing until relocation adds them
            (`RelocationConfig.preset("adding")`).
        prompt_dropout (`float`, defaults to 0.1):
            Dropout on the entries of the prompts, independently for each image, in training only (Tab. i of the paper,
            "drop rate"). In [0, 1).
        backbone_dropout (`bool`, defaults to False):
            Whether dropout, attention dropout, drop path and other randomness of the frozen backbone stay on in
            training. VPT trains with a deterministic backbone.
        shallow (`bool`, defaults to False):
            VPT-Shallow: `num_prompts` prompts in all, which enter the first block as tokens, travel through all blocks
            and are dropped after the last. They do not move. For vision transformers without windows and without masks
            or biases of the image's size. Hidden states between the blocks hold the prompts' tokens in front.
        modules_to_save (`list[str]`, *optional*):
            Modules that are trained in full and saved with the adapter, usually the new head: `["classifier"]`.
        backbone (`dict`, *optional*):
            Description of a backbone that is not among the known families: the keyword arguments of
            [`~provpt_peft.backbones.BackboneFamily`].
        id2label (`dict[int, str]`, *optional*):
            Label names, stored so that an adapter can be loaded without knowing the data set. By default those of an
            image classifier's own config when the adapter is saved.
        problem_type (`str`, *optional*):
            What labels an image classifier has, as transformers names it: `"regression"`,
            `"single_label_classification"` or `"multi_label_classification"`. By default that of the classifier's own
            config when the adapter is saved.
        training (`dict`, *optional*):
            What is known of the adapter's training, for its model card and pictures of it: `relocation`, the settings
            of relocation; `history`, the records of the relocations; `epochs`; `metrics`, those of the last
            evaluation. Filled in by the relocator and its callback.
        provpt_version (`str`, *optional*):
            The version of this package that made the config. Filled in by itself.

    Raises:
        ValueError: If a value is out of its range. Whether `num_prompts` fits the backbone is checked when the
            adapter is put into a model.
    """

    num_prompts: int | list[int] = field(
        default=10, metadata={"help": "Prompts in every block at the start, or a list with one number for each block."}
    )
    reserve: int = field(default=0, metadata={"help": "Prompts that start in no block, for relocation to add."})
    prompt_dropout: float = field(
        default=0.1, metadata={"help": "Dropout on the prompts, independent for each image, in training only."}
    )
    backbone_dropout: bool = field(
        default=False,
        metadata={"help": "Whether the frozen backbone keeps its own dropout and drop path in training."},
    )
    shallow: bool = field(
        default=False, metadata={"help": "VPT-Shallow: prompts enter the first block as tokens and do not move."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules to train and save with the adapter, usually the head."}
    )
    backbone: dict[str, Any] | None = field(
        default=None, metadata={"help": "Description of a backbone that is not among the known families."}
    )
    id2label: dict[int, str] | None = field(
        default=None,
        metadata={"help": "Label names, stored so that an adapter can be loaded without knowing the data set."},
    )
    problem_type: str | None = field(
        default=None, metadata={"help": "What labels an image classifier has, as transformers names it."}
    )
    training: dict[str, Any] | None = field(
        default=None, metadata={"help": "What is known of the adapter's training. Filled in by itself."}
    )
    provpt_version: str | None = field(default=None, metadata={"help": "Version of provpt_peft that made the config."})

    # Prompts are found through the backbone's description, not through PEFT's name matching. Not a field: the value is
    # PEFT's word for "do not match modules by name".
    target_modules = DUMMY_TARGET_MODULES

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType.PROVPT
        if self.provpt_version is None:
            self.provpt_version = __version__
        if self.task_type is not None:
            raise ValueError(
                f"`task_type` names text tasks and has to stay unset for a vision model, got {self.task_type!r}. "
                'Leave it out; to train a head, name it in `modules_to_save`, for example ["classifier"].'
            )
        self._check_num_prompts()
        if not _is_count(self.reserve):
            raise ValueError(f"`reserve` must be a whole number from 0 on, got {self.reserve!r}. Use 0 for none.")
        if not 0.0 <= self.prompt_dropout < 1.0:
            raise ValueError(
                f"`prompt_dropout` must be in [0, 1), got {self.prompt_dropout}. Use 0.0 to switch it off."
            )
        if self.shallow and (isinstance(self.num_prompts, list) or self.reserve):
            raise ValueError(
                "With `shallow=True` all prompts enter at the first block and none move, so `num_prompts` must be one "
                f"number and `reserve` 0, got {self.num_prompts!r} and {self.reserve}. Give the number of prompts."
            )
        if self.training is not None and not isinstance(self.training, dict):
            raise ValueError(
                f"`training` must be a dict that the relocator wrote, got {self.training!r}. Leave it out."
            )
        if self.backbone is not None:
            check_description(self.backbone)
        if isinstance(self.modules_to_save, str):
            raise ValueError(
                f"`modules_to_save` must be a list of names, got the text {self.modules_to_save!r}. "
                f"Give [{self.modules_to_save!r}]."
            )
        if self.problem_type not in (None, *_PROBLEM_TYPES):
            raise ValueError(
                f"`problem_type` must be one of {', '.join(_PROBLEM_TYPES)}, got {self.problem_type!r}. Leave it out "
                "to store what the model's own config has."
            )
        if self.id2label is not None:
            self.id2label = _with_int_keys(self.id2label)
        # Not fields: they are not saved. transformers' own names are no names.
        names = self.id2label or {}
        self._labels_given = any(name != f"LABEL_{index}" for index, name in names.items())
        self._problem_type_given = self.problem_type is not None

    def _check_num_prompts(self) -> None:
        if isinstance(self.num_prompts, (list, tuple)):
            self.num_prompts = list(self.num_prompts)
            valid = all(_is_count(count) for count in self.num_prompts) and sum(self.num_prompts) > 0
            if not valid:
                raise ValueError(
                    f"`num_prompts` as a list must hold whole numbers from 0 on, not all of them 0, got "
                    f"{self.num_prompts}. Give the number of prompts each block starts with."
                )
        elif not _is_count(self.num_prompts) or self.num_prompts < 1:
            raise ValueError(
                f"`num_prompts` must be at least 1, got {self.num_prompts!r}. "
                "Give the number of prompts each block starts with."
            )

    def start_distribution(self, num_blocks: int) -> list[int]:
        """The number of prompts in each of L blocks at the start.

        Raises:
            ValueError: If `num_prompts` is a list whose length is not `num_blocks`.
        """
        if isinstance(self.num_prompts, int):
            return [self.num_prompts] + [0 if self.shallow else self.num_prompts] * (num_blocks - 1)
        if len(self.num_prompts) != num_blocks:
            raise ValueError(
                f"`num_prompts` as a list must have one number for each of the model's {num_blocks} blocks, got "
                f"{len(self.num_prompts)} numbers. An adapter only fits the backbone it was made for."
            )
        return self.num_prompts

    def remember_labels(self, model: nn.Module) -> None:
        """Take label names and kind of labels of an image classifier, unless they were given.

        Args:
            model: The base model. One that is no image classifier has no label names worth keeping.
        """
        config: Any = getattr(model, "config", None)
        if config is None or "ForImageClassification" not in type(model).__name__:
            return
        if not self._labels_given:
            self.id2label = dict(config.id2label) if config.id2label else None
        if not self._problem_type_given:
            self.problem_type = config.problem_type

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write `adapter_config.json`, and bring the model card up to date where an adapter's tensors are beside it.

        Args:
            save_directory: The folder.
            kwargs: Passed on to [`~peft.PeftConfig.save_pretrained`].
        """
        super().save_pretrained(save_directory, **kwargs)
        # `PeftModel.save_pretrained` writes its card and the tensors first and the config last, so all is there now.
        from .model_card import update_model_card

        update_model_card(save_directory, self, kwargs.get("auto_mapping_dict"))


def _with_int_keys(id2label: Any) -> dict[int, str]:
    """JSON makes text of the keys of a dict: turn them back."""
    try:
        return {int(index): str(name) for index, name in id2label.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"`id2label` must map the number of each class to its name, got {id2label!r}. "
            "Leave it out to store the names that the model's own config has."
        ) from None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
