"""What is known of a run after it: the distribution of its prompts, its relocations, its logs.

Read from a callback or relocator that has run, from a Trainer's checkpoint, or from an adapter's folder.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from .callback import RelocationTrainerCallback
from .hub import distribution_of, read_adapter
from .relocation import Relocation, Relocator


@dataclass
class Run:
    """A run that is over, or as far as it is.

    Args:
        distribution: Prompts in each of the L blocks at the end.
        history: The records of all relocations, oldest first.
        epochs: E, the epochs that were trained.
        logs: What the Trainer logged.
    """

    distribution: list[int]
    history: list[Relocation] = field(default_factory=list)
    epochs: int = 0
    logs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def moves(self) -> list[Relocation]:
        """The records of those relocations in which a prompt moved."""
        return [record for record in self.history if record.prompt is not None]

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
        moves = list(self.moves)
        for epoch in range(max(self.epochs, *(move.epoch + 1 for move in moves), 1) - 1, -1, -1):
            table.append(list(current))
            # A record's move comes before its epoch, of which `epoch` others came first.
            while moves and moves[-1].epoch == epoch:
                move = moves.pop()
                for block, change in ((move.block, -1), (move.from_block, 1)):
                    if block:
                        current[block - 1] += change
        return table[::-1]


def read_run(source: RelocationTrainerCallback | Relocator | Run | str | os.PathLike[str]) -> Run:
    """Read a run from what is left of it.

    Args:
        source: A callback or a relocator that has run, the folder of a Trainer's checkpoint, or that of an adapter.

    Raises:
        ValueError: If there is nothing to read: training has not begun, or the folder has no adapter.
    """
    if isinstance(source, Run):
        return source
    if isinstance(source, RelocationTrainerCallback):
        if source.relocator is None:
            raise ValueError("The callback must have run, but training has not begun. Train first.")
        source = source.relocator
    if isinstance(source, Relocator):
        distribution = source.tuner.prompt_distribution(source.adapter_name)
        return Run(distribution, list(source.history), source.epoch)
    folder = Path(source)
    adapter = read_adapter(folder)
    training = adapter.config.training or {}
    try:
        history = [Relocation(**record) for record in training.get("history", [])]
    except TypeError as error:
        raise ValueError(f"{folder}: the history must hold records of relocations, got {error}. Save anew.") from None
    run = Run(distribution_of(adapter)[1:], history, training.get("epochs", 0))
    state = folder / TRAINER_STATE_NAME
    if state.is_file():
        run.logs = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return run
