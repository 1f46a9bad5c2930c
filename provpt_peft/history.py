"""What is known of a run after it: the distribution of its prompts, its relocations, its metrics.

An adapter's config keeps a record of its training (`ProVPTConfig.training`). It may come from anywhere, so it is
checked before anything is made of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .config import ProVPTConfig
from .relocation import Relocation


# More epochs than these are no training but an attack on the memory of whoever draws them.
_MOST_EPOCHS = 100_000


@dataclass
class Run:
    """A run that is over, or as far as it is.

    Args:
        distribution: Prompts in each of the L blocks at the end.
        history: The records of all relocations, oldest first.
        epochs: E, the epochs that relocation has seen.
        settings: The settings of relocation, as `RelocationConfig` has them.
        metrics: Those of the last evaluation.
        logs: What the Trainer logged.
    """

    distribution: list[int]
    history: list[Relocation] = field(default_factory=list)
    epochs: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    logs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def periods(self) -> str:
        """What `epochs` counts: epochs, or periods of so many steps."""
        every = self.settings.get("relocate_every")
        return f"periods of {every} steps" if isinstance(every, int) else "epochs"

    @property
    def choices(self) -> list[Relocation]:
        """The records of those relocations in which a prompt was given to a block, its own or another."""
        return [record for record in self.history if record.prompt is not None]

    @property
    def num_moves(self) -> int:
        """How often a prompt went to another block."""
        return sum(record.block != record.from_block for record in self.choices)

    def with_history(self) -> Run:
        """The run itself.

        Raises:
            ValueError: If nothing is known of its relocations.
        """
        if not self.history:
            raise ValueError(
                "The source must have a history of relocations, but it has none: either nothing moved, or it is an "
                "adapter that was not trained with relocation. Give the callback, or a checkpoint of the Trainer."
            )
        return self

    def over_time(self) -> list[list[int]]:
        """The distribution in each epoch: E lists of L numbers. The moves are undone from the last one on."""
        table, current = [], list(self.distribution)
        choices = list(self.choices)
        epochs = max(self.epochs, *(record.epoch + 1 for record in choices), 1)
        for epoch in range(epochs - 1, -1, -1):
            table.append([max(0, count) for count in current])
            # A record's move comes before its epoch, of which `epoch` others came first.
            while choices and choices[-1].epoch == epoch:
                record = choices.pop()
                for block, change in ((record.block, -1), (record.from_block, 1)):
                    if block:
                        current[block - 1] += change
        return table[::-1]


def run_of(config: ProVPTConfig, distribution: Sequence[int]) -> Run:
    """What an adapter's config says of its training.

    Args:
        config: The adapter's config.
        distribution: Prompts in each of its L blocks.

    Raises:
        ValueError: If the record of the training is not what a relocator writes.
    """
    training = config.training or {}
    found = {
        name: _of_type(f"training[{name!r}]", training.get(name, kind()), kind)
        for name, kind in (("history", list), ("epochs", int), ("relocation", dict), ("metrics", dict))
    }
    if not 0 <= found["epochs"] <= _MOST_EPOCHS:
        raise ValueError(f"`training['epochs']` must be in 0 … {_MOST_EPOCHS}, got {found['epochs']}. Leave it out.")
    history = [_record(record, len(distribution)) for record in found["history"]]
    metrics = {str(name): value for name, value in found["metrics"].items() if _is_number(value)}
    return Run(list(distribution), history, found["epochs"], found["relocation"], metrics)


def printable(text: str, forbidden: str = "") -> str:
    """Text that came with an adapter, without what a terminal would act on, and without some other characters."""
    return "".join(c if c.isprintable() and c not in forbidden else "?" for c in text)


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold, which JSON's numbers need not be."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _of_type(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"`{name}` must be of type {kind.__name__}, got {value!r:.80}. Leave `training` out.")
    return value


def _record(record: Any, num_blocks: int) -> Relocation:
    """A record of a relocation; fields of newer versions are left out."""
    record = _of_type("training['history']", record, dict)
    known = {field.name for field in fields(Relocation)}
    values = {name: value for name, value in record.items() if name in known}
    bounds = {"epoch": _MOST_EPOCHS, "prompt": None, "from_block": num_blocks, "block": num_blocks}
    for name, last in bounds.items():
        value = values.get(name)
        if value is None and name != "epoch":
            continue
        if not isinstance(value, int) or value < 0 or (last is not None and value > last):
            raise ValueError(
                f"`{name}` of a relocation must be a whole number from 0 on"
                f"{'' if last is None else f' to {last}'}, got {value!r:.80}. Leave `training` out."
            )
    for name in ("idleness", "idleness_stderr", "loss_before", "loss_after", "reward"):
        if values.get(name) is not None and not _is_number(values[name]):
            raise ValueError(f"`{name}` of a relocation must be a number, got {values[name]!r:.80}.")
    means = values.get("block_idleness", [])
    numbers = isinstance(means, list) and all(mean is None or _is_number(mean) for mean in means)
    if not numbers or len(means) not in (0, num_blocks):
        raise ValueError(f"`block_idleness` must have a number for each of {num_blocks} blocks, got {means!r:.80}.")
    return Relocation(**values)
