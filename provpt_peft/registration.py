"""The one place that touches PEFT's registry of methods."""

from __future__ import annotations

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import register_peft_method
from peft.utils.peft_types import PeftType


NAME = "PROVPT"
PREFIX = "provpt_"


def _add_enum_member(name: str) -> None:
    """Add `name` to `PeftType`. PEFT only registers methods that are members of this enum, and Python's enums are
    closed, so the member is written into the tables that `enum` itself fills when a class is made."""
    member = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    member._sort_order_ = len(PeftType._member_names_)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    if hasattr(PeftType, "_hashable_values_"):  # Python 3.13 and later
        PeftType._hashable_values_.append(name)
    type.__setattr__(PeftType, name, member)


def register(config_cls: type, model_cls: type) -> None:
    """Make `PROVPT` a PEFT method, with its config and its tuner. Calling it again changes nothing.

    Raises:
        RuntimeError: If PEFT already has another method with this name or with our prefix.
    """
    if NAME in PeftType.__members__:
        owner = PEFT_TYPE_TO_TUNER_MAPPING.get(PeftType[NAME])
        if owner is None or owner.__module__ != model_cls.__module__:
            raise RuntimeError(
                f"`provpt_peft` registers the PEFT method {NAME}, but the installed PEFT already has one of that name "
                f"(from {owner.__module__ if owner else 'PEFT itself'}). Use that one, or install a PEFT without it."
            )
        PEFT_TYPE_TO_CONFIG_MAPPING[PeftType[NAME]] = config_cls
        PEFT_TYPE_TO_TUNER_MAPPING[PeftType[NAME]] = model_cls
        return
    if PREFIX in PEFT_TYPE_TO_PREFIX_MAPPING.values():
        raise RuntimeError(
            f"`provpt_peft` uses the prefix '{PREFIX}', but a method registered with PEFT already uses it. "
            "Import only one of the two packages."
        )
    _add_enum_member(NAME)
    register_peft_method(name=NAME.lower(), config_cls=config_cls, model_cls=model_cls, prefix=PREFIX)
