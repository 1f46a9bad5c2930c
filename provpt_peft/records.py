"""The record of a run: the distribution of its prompts, its relocations, its metrics.

An adapter's config keeps a record of its training (`ProVPTConfig.training`). It may come from an untrusted source, so
it is checked before it is used.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any


# The most that a table over time has room for. A file may claim any number, and drawing it takes that much memory.
_MOST_EPOCHS = 100_000


@dataclass
class Relocation:
    """The record of one relocation, in plain Python values.

    Args:
        epoch: Epochs (or periods of `relocate_every` steps) of training before the move.
        prompt: k*, index of the prompt that moved. None if nothing could be decided, see `note`.
        from_block: Block it was pruned from, 1 … L, or 0 if it came from the reserve.
        block: a*, block it was given to, 1 … L, or 0 if it was pruned for good. If the move was undone, see `note`:
            the block it came from.
        idleness: Its score when it was pruned, in loss units. None for a prompt from the reserve.
        idleness_stderr: Standard error of that score over images (exact: over batches). None for fewer than two.
        block_idleness: Mean score of each block's prompts at that time, L numbers; None for a block without prompts.
        loss_before: Mean loss on the score batches before the move.
        loss_after: The same after the following epoch; None until it is known.
        reward: What the policy learned from the move, in loss units; None until it is known.
        policy: Diagnostics of the policy update that this reward triggered, if any.
        note: The reason, if nothing was moved, decided or learned, or if the move was undone.
    """

    epoch: int
    prompt: int | None = None
    from_block: int | None = None
    block: int | None = None
    idleness: float | None = None
    idleness_stderr: float | None = None
    block_idleness: list[float | None] = field(default_factory=list)
    loss_before: float | None = None
    loss_after: float | None = None
    reward: float | None = None
    policy: dict[str, float] = field(default_factory=dict)
    note: str | None = None


@dataclass
class Run:
    """A finished run, or a run so far."""

    distribution: list[int]  # prompts in each of the L blocks at the end
    history: list[Relocation] = field(default_factory=list)  # the records of all relocations, oldest first
    epochs: int = 0  # E, the epochs (or periods) that have begun
    settings: dict[str, Any] = field(default_factory=dict)  # relocation settings, the fields of `RelocationConfig`
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation

    @property
    def periods(self) -> str:
        """What `epochs` counts, in words: epochs, or periods of a number of steps."""
        every = self.settings.get("relocate_every")
        return f"periods of {every} steps" if isinstance(every, int) else "epochs"

    @property
    def moves(self) -> str:
        """The number of moves, and of epochs or periods, in words."""
        moves = "1 move" if self.num_moves == 1 else f"{self.num_moves} moves"
        if (self.epochs, self.periods) == (1, "epochs"):
            return f"{moves} in 1 epoch"
        return f"{moves} in {self.epochs} {self.periods}"

    @property
    def choices(self) -> list[Relocation]:
        """The records of the relocations that chose a prompt."""
        return [record for record in self.history if record.prompt is not None]

    @property
    def num_moves(self) -> int:
        """How often a prompt changed its block. Pruning for good and adding from the reserve count as well."""
        return sum(record.block != record.from_block for record in self.choices)

    def with_history(self) -> Run:
        """The run itself, or a `ValueError` if it has no history of relocations or is too long to draw."""
        if not self.history:
            raise ValueError(
                "The source must have a history of relocations, but it has none: training was too short for one, or "
                "an adapter was trained without relocation. Give the callback, or a checkpoint of the Trainer."
            )
        epochs = max(self.epochs, *(record.epoch for record in self.history))
        if epochs > _MOST_EPOCHS:
            raise ValueError(
                f"A run over time must have at most {_MOST_EPOCHS} {self.periods} to be drawn, got {epochs}. "
                "Draw the prompts by block (`plot_distribution`)."
            )
        return self

    def over_time(self) -> list[list[int]]:
        """The distribution in each epoch: E lists of L numbers, found by undoing the moves from last to first."""
        table, current, choices = [], list(self.distribution), list(self.choices)
        epochs = max(self.epochs, *(record.epoch + 1 for record in choices), 1)
        for epoch in range(epochs - 1, -1, -1):
            table.append([max(0, count) for count in current])
            # A move comes just before epoch number `record.epoch`, counted from 0.
            while choices and choices[-1].epoch == epoch:
                record = choices.pop()
                for block, change in ((record.block, -1), (record.from_block, 1)):
                    if block:
                        current[block - 1] += change
        return table[::-1]


def run_of(training: dict[str, Any] | None, distribution: Sequence[int]) -> Run:
    """The run that `ProVPTConfig.training` records, with the number of prompts in each of the adapter's L blocks.

    Raises:
        ValueError: If the record of the training is not what a relocator writes.
    """
    history, epochs, settings, metrics = (
        _of_type(f"training[{name!r}]", (training or {}).get(name, kind()), kind)
        for name, kind in (("history", list), ("epochs", int), ("relocation", dict), ("metrics", dict))
    )
    if epochs < 0:
        raise ValueError(f"`training['epochs']` must be a whole number of at least 0, got {epochs}. Leave it out.")
    records = [_record(record, len(distribution)) for record in history]
    numbers = {str(name): value for name, value in metrics.items() if _is_number(value)}
    return Run(list(distribution), records, epochs, settings, numbers)


def printable(text: str, forbidden: str = "") -> str:
    """Text that came with an adapter, with unprintable and `forbidden` characters replaced by `?`."""
    return "".join(c if c.isprintable() and c not in forbidden else "?" for c in text)


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold. JSON's integers can be larger."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def _of_type(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"`{name}` must be of type {kind.__name__}, got {value!r:.80}. Leave `training` out.")
    return value


def _record(record: Any, num_blocks: int) -> Relocation:
    """A checked record of a relocation. Fields of newer versions are ignored."""
    record = _of_type("training['history']", record, dict)
    values = {field.name: record[field.name] for field in fields(Relocation) if field.name in record}
    largest = {"epoch": math.inf, "prompt": math.inf, "from_block": num_blocks, "block": num_blocks}
    for name, last in largest.items():
        value = values.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= last
        if (value is not None or name == "epoch") and not whole:
            rule = f"a whole number from 0 to {last}" if last < math.inf else "a whole number of at least 0"
            raise ValueError(f"`{name}` of a relocation must be {rule}, got {value!r:.80}. Leave `training` out.")
    for name in ("idleness", "idleness_stderr", "loss_before", "loss_after", "reward"):
        if values.get(name) is not None and not _is_number(values[name]):
            raise ValueError(f"`{name}` of a relocation must be a number, got {values[name]!r:.80}.")
    means = values.get("block_idleness", [])
    numbers = isinstance(means, list) and all(mean is None or _is_number(mean) for mean in means)
    if not numbers or len(means) not in (0, num_blocks):
        raise ValueError(f"`block_idleness` must have a number for each of {num_blocks} blocks, got {means!r:.80}.")
    policy, note = values.get("policy", {}), values.get("note")
    if not (isinstance(policy, dict) and all(isinstance(value, int | float) for value in policy.values())):
        raise ValueError(
            f"`policy` of a relocation must map names to numbers, got {policy!r:.80}. Leave `training` out."
        )
    if not isinstance(note, str | None):
        raise ValueError(f"`note` of a relocation must be text, got {note!r:.80}. Leave `training` out.")
    return Relocation(**values)
