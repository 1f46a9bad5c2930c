"""What an image classifier's own config says of its labels, while the adapters of a model take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from .config import ProVPTConfig, are_names, classifier_config


class ShownLabels:
    """Puts the active adapter's `id2label` and `problem_type` into the config of an image classifier, where pipelines
    and transformers' losses look for them. What the user put there stays."""

    def __init__(self) -> None:
        # By setting: what was put there, and what had been there before.
        self._shown: dict[str, Any] = {}
        self._own: dict[str, Any] = {}

    def show(self, model: nn.Module, active: ProVPTConfig, others: Sequence[ProVPTConfig]) -> None:
        """Show the active adapter's where the model has none of its own, or only those of another adapter, with which
        it was made or trained. An adapter without any goes by the model's own."""
        config = classifier_config(model)
        if config is None:
            return
        for name, is_set in (("id2label", are_names), ("problem_type", bool)):
            present, wanted = getattr(config, name), getattr(active, name)
            if name not in self._shown or present != self._shown[name]:
                self._own[name] = present
            own = self._own[name]
            free = not is_set(own) or any(getattr(other, name) == own for other in others)
            if name == "id2label" and len(wanted or ()) != len(own or ()):
                free = False  # the head is not the adapter's
            self._shown[name] = shown = wanted if is_set(wanted) and free else own
            if shown != present:
                setattr(config, name, shown)
                if name == "id2label":
                    config.label2id = {label: index for index, label in shown.items()}


def check_problem_type(model: nn.Module, new: ProVPTConfig, others: Sequence[ProVPTConfig]) -> None:
    """Refuse a new adapter that names another kind of labels than the model, whose loss goes by its own config."""
    config = classifier_config(model)
    if config is None or new.problem_type is None or new.is_from_file:
        return
    if config.problem_type not in (None, new.problem_type, *(other.problem_type for other in others)):
        raise ValueError(
            "`problem_type` must be the same in ProVPTConfig and in the model's own config, by which transformers "
            f"computes the loss, got {new.problem_type!r} and {config.problem_type!r}. Leave it out of ProVPTConfig, "
            f"or set `model.config.problem_type = {new.problem_type!r}`."
        )
