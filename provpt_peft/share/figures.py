"""Pictures of what relocation did: the paper's figures, from a run, a checkpoint or a model.

Needs matplotlib: `pip install "provpt-peft[viz]"`. Every function returns a `matplotlib.figure.Figure`, so
`figure.savefig("picture.png")` writes it and a notebook shows it.

Legend: L blocks, E epochs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import torch

from ..records import Run
from .files import read_adapter


try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(
        'Pictures need matplotlib, which is not installed. Install it with pip install "provpt-peft[viz]".'
    ) from error


class HasRun(Protocol):
    """A callback or a relocator."""

    def run(self) -> Run: ...


Source = HasRun | Run | str | os.PathLike[str]

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
_WIDEST = 40.0  # largest width of a picture in inches, for any number of epochs


def read_run(source: Source) -> Run:
    """Read the record of a run.

    Args:
        source: A callback or a relocator that has run, or the folder of a Trainer's checkpoint or of an adapter.

    Raises:
        ValueError: If there is nothing to read: training has not begun, the folder has no complete adapter, or the
            source is something else.
    """
    if isinstance(source, (str, os.PathLike)):
        run = read_adapter(Path(source)).run
    else:
        run = source if isinstance(source, Run) else _run_of(source)
    if not run.distribution:
        raise ValueError("A run must have blocks to be drawn, got one without. Give the run of a model with prompts.")
    return run


def _run_of(source: HasRun) -> Run:
    run = source.run() if callable(getattr(source, "run", None)) else None
    if not isinstance(run, Run):
        raise ValueError(
            "A source must be a callback, a relocator, a `Run` or the folder of an adapter, got an object of type "
            f"{type(source).__name__}. Save a model first; give several sources as a dict, by name."
        )
    return run


def plot_distribution(sources: Source | Mapping[str, Source]) -> Figure:
    """The number of prompts in each block, as bars; several runs side by side (the paper's learned distributions).

    Args:
        sources: A callback, a relocator, a checkpoint's or an adapter's folder, or several of them by name.

    Raises:
        ValueError: If there is no source, if one has no adapter, or if the runs have different numbers of blocks.
    """
    named = sources if isinstance(sources, Mapping) else {"": sources}
    if not named:
        raise ValueError("`sources` must hold at least one run to draw, got none. Give a run, or several by name.")
    runs = {name: read_run(source) for name, source in named.items()}
    lengths = {name: len(run.distribution) for name, run in runs.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"Runs side by side must have the same number of blocks, got {lengths}. Draw one at a time.")
    (num_blocks,) = set(lengths.values())
    figure, axes = _new_axes(max(5.0, 0.35 * num_blocks * len(runs) + 1.5), 3.5)
    width = 0.8 / len(runs)
    for position, ((name, run), colour) in enumerate(zip(runs.items(), cycle(COLOURS), strict=False)):
        places = [block + (position - (len(runs) - 1) / 2) * width for block in range(1, num_blocks + 1)]
        axes.bar(places, run.distribution, width, color=colour, label=name or None)
    mean = sum(next(iter(runs.values())).distribution) / num_blocks
    axes.axhline(mean, color="black", linestyle="--", linewidth=1, label="uniform")
    axes.set(xlabel="block", ylabel="prompts", xlim=(0.4, num_blocks + 0.6))
    axes.set_xticks(range(1, num_blocks + 1))
    columns = 3
    rows = -(-(len(runs) + 1) // columns)
    axes.set_ylim(0, (1 + 0.12 * rows) * axes.get_ylim()[1])  # leaves room for the legend
    axes.legend(ncols=columns, loc="upper right")
    return figure


def plot_distribution_over_time(source: Source) -> Figure:
    """The number of prompts in each block in each epoch, as a heat map with an arrow for each move.

    Raises:
        ValueError: If the source has no adapter or no history of relocations.
    """
    run = read_run(source).with_history()
    title = "Prompts in each block (arrows: moves)"
    figure, axes = _heat_map(torch.tensor(run.over_time()).T, run, title, "prompts", cmap="cividis")
    for move in run.choices:
        if move.from_block != move.block and move.from_block and move.block:
            axes.annotate(
                "", (move.epoch + 0.5, move.block), (move.epoch + 0.5, move.from_block),
                arrowprops={"arrowstyle": "->", "color": "white", "linewidth": 1.5},
            )  # fmt: skip
    return figure


def plot_idleness(source: Source) -> Figure:
    """The mean idleness of each block's prompts at each relocation; below 0 the loss depends on them.

    Raises:
        ValueError: If the source has no adapter or no history of relocations.
    """
    run = read_run(source).with_history()
    scored = {record.epoch: record.block_idleness for record in run.history if record.block_idleness and record.epoch}
    if not scored:
        raise ValueError("The history must hold the blocks' idleness, but none of its relocations does. Train again.")
    table = torch.full((len(run.distribution), max(scored)), torch.nan)
    for epoch, idleness in scored.items():
        table[:, epoch - 1] = torch.tensor([torch.nan if value is None else value for value in idleness])
    largest = table.nan_to_num(nan=0.0).abs().max().item()
    title, label = "Mean idleness of a block's prompts", "idleness (loss units; gray: not scored)"
    figure, axes = _heat_map(table, run, title, label, cmap="PuOr", vmin=-largest, vmax=largest)
    axes.set_facecolor("lightgray")
    return figure


def _new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(min(width, _WIDEST), height), layout="constrained")
    return figure, figure.subplots()


def _heat_map(table: torch.Tensor, run: Run, title: str, label: str, **image: Any) -> tuple[Figure, Axes]:
    """Draw a table of one number per block and epoch, (L, E), with a title. The label is that of the colour bar."""
    num_blocks, epochs = table.shape
    figure, axes = _new_axes(max(5.0, 0.3 * epochs + 2), max(3.5, 0.22 * num_blocks + 1))
    extent = (0.5, epochs + 0.5, 0.5, num_blocks + 0.5)
    shown = axes.imshow(table.numpy(), origin="lower", aspect="auto", extent=extent, **image)
    axes.set(xlabel=run.periods, ylabel="block", title=title)
    axes.set_xticks(range(1, epochs + 1, max(1, epochs // 10)))
    axes.set_yticks(range(1, num_blocks + 1, max(1, num_blocks // 12)))
    ticks = None if table.is_floating_point() else MaxNLocator(integer=True)
    figure.colorbar(shown, ax=axes, label=label, ticks=ticks)
    return figure, axes
