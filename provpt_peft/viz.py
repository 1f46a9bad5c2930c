"""Pictures of what relocation did: the paper's figures, from a run, a checkpoint or a model.

Needs matplotlib: `pip install "provpt-peft[viz]"`. Every function returns a `matplotlib.figure.Figure`, so
`figure.savefig("picture.png")` writes it and a notebook shows it.

Legend: B images, L blocks, E epochs, N prompts, H heads, T tokens, h x w patches.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from .attention import PromptedBlock
from .callback import RelocationTrainerCallback
from .history import Run, run_of
from .hub import read_adapter
from .model import ProVPTModel
from .modes import in_eval_mode
from .relocation import Relocator


try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(
        'Pictures need matplotlib, which is not installed. Install it with pip install "provpt-peft[viz]".'
    ) from error


Source = RelocationTrainerCallback | Relocator | Run | str | os.PathLike[str]

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
COLOUR_MAP = "cividis"


def read_run(source: Source) -> Run:
    """Read a run from what is left of it.

    Args:
        source: A callback or a relocator that has run, the folder of a Trainer's checkpoint, or that of an adapter.

    Raises:
        ValueError: If there is nothing to read: training has not begun, or the folder has no adapter that is whole.
    """
    if isinstance(source, Run):
        return source
    if isinstance(source, RelocationTrainerCallback):
        if source.relocator is None:
            raise ValueError("The callback must have run, but training has not begun. Train first.")
        source = source.relocator
    if isinstance(source, Relocator):
        tuner, name = source.tuner, source.adapter_name
        # With the best model loaded at the end, the config knows which relocations it has seen.
        return run_of(tuner.peft_config[name], tuner.prompt_distribution(name))
    folder = Path(source)
    run = read_adapter(folder).run
    state = folder / TRAINER_STATE_NAME
    if state.is_file():
        run.logs = json.loads(state.read_text(encoding="utf-8")).get("log_history", [])
    return run


# ---- from a run or a checkpoint -------------------------------------------------------------------------------------


def plot_distribution(sources: Source | Mapping[str, Source]) -> Figure:
    """The number of prompts in each block, as bars; several runs side by side (the paper's learned distributions).

    Args:
        sources: A callback, a relocator, a checkpoint's or an adapter's folder, or several of them by name.

    Raises:
        ValueError: If a source has no adapter, or if the runs have different numbers of blocks.
    """
    named = sources if isinstance(sources, Mapping) else {"": sources}
    runs = {name: read_run(source) for name, source in named.items()}
    lengths = {name: len(run.distribution) for name, run in runs.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"Runs beside each other must have the same number of blocks, got {lengths}.")
    (num_blocks,) = set(lengths.values())
    figure, axes = _axes(max(5.0, 0.35 * num_blocks * len(runs) + 1.5), 3.5)
    width = 0.8 / len(runs)
    for position, ((name, run), colour) in enumerate(zip(runs.items(), COLOURS * len(runs), strict=False)):
        places = [block + (position - (len(runs) - 1) / 2) * width for block in range(1, num_blocks + 1)]
        axes.bar(places, run.distribution, width, color=colour, label=name or None)
    mean = sum(next(iter(runs.values())).distribution) / num_blocks
    axes.axhline(mean, color="black", linestyle="--", linewidth=1, label="uniform")
    axes.set(xlabel="block", ylabel="prompts", xlim=(0.4, num_blocks + 0.6))
    axes.set_xticks(range(1, num_blocks + 1))
    axes.legend()
    return figure


def plot_distribution_over_time(source: Source) -> Figure:
    """The number of prompts in each block in each epoch, as a heat map with an arrow for each move.

    Raises:
        ValueError: If the source has no adapter or no history of relocations.
    """
    run = read_run(source).with_history()
    table = run.over_time()  # E lists of L
    epochs, num_blocks = len(table), len(run.distribution)
    figure, axes = _axes(max(5.0, 0.3 * epochs + 2), max(3.5, 0.22 * num_blocks + 1))
    image = axes.imshow(
        torch.tensor(table).T.numpy(), origin="lower", aspect="auto", cmap=COLOUR_MAP,
        extent=(0.5, epochs + 0.5, 0.5, num_blocks + 0.5),
    )  # fmt: skip
    for move in run.choices:
        if move.from_block != move.block and move.from_block and move.block:
            axes.annotate(
                "", (move.epoch + 0.5, move.block), (move.epoch + 0.5, move.from_block),
                arrowprops={"arrowstyle": "->", "color": "white", "linewidth": 1.5},
            )  # fmt: skip
    axes.set(xlabel=run.periods, ylabel="block", title="Prompts in each block (arrows: moves)")
    _whole_ticks(axes, epochs, num_blocks)
    figure.colorbar(image, ax=axes, label="prompts", ticks=MaxNLocator(integer=True))
    return figure


def plot_idleness(source: Source) -> Figure:
    """The mean idleness of each block's prompts at each relocation; above 0 the loss is lower without them.

    Raises:
        ValueError: If the source has no adapter or no history of relocations.
    """
    run = read_run(source).with_history()
    scored = {move.epoch: move.block_idleness for move in run.choices if move.block_idleness and move.epoch}
    if not scored:
        raise ValueError("The history must hold the blocks' idleness, but no relocation of it does. Train anew.")
    epochs = max(scored)
    table = torch.full((len(run.distribution), epochs), torch.nan)
    for epoch, idleness in scored.items():
        table[:, epoch - 1] = torch.tensor([torch.nan if value is None else value for value in idleness])
    largest = table.nan_to_num(nan=0.0).abs().max().item()
    figure, axes = _axes(max(5.0, 0.3 * epochs + 2), max(3.5, 0.22 * len(table) + 1))
    image = axes.imshow(
        table.numpy(), origin="lower", aspect="auto", cmap="PuOr", vmin=-largest, vmax=largest,
        extent=(0.5, epochs + 0.5, 0.5, len(table) + 0.5),
    )  # fmt: skip
    axes.set(xlabel=run.periods, ylabel="block", title="Mean idleness of a block's prompts", facecolor="lightgray")
    _whole_ticks(axes, epochs, len(table))
    figure.colorbar(image, ax=axes, label="idleness (loss units; gray: not scored)")
    return figure


def plot_metric(runs: Mapping[str, Any], metric: str = "eval_accuracy") -> Figure:
    """A metric of the evaluations over the epochs, a line for each run.

    Args:
        runs: By name, a Trainer's `state.log_history`, or a checkpoint's folder, which has it.
        metric: Name of the metric in the logs.

    Raises:
        ValueError: If a run has no such metric.
    """
    figure, axes = _axes(5.0, 3.5)
    for (name, logs), colour in zip(runs.items(), COLOURS * len(runs), strict=False):
        logs = logs if isinstance(logs, Sequence) and not isinstance(logs, str) else read_run(logs).logs
        points = [(entry["epoch"], entry[metric]) for entry in logs if metric in entry]
        if not points:
            known = sorted({key for entry in logs for key in entry if key.startswith("eval_")})
            raise ValueError(f"The logs of {name!r} must have the metric {metric!r}, got {known}.")
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=name)
    axes.set(xlabel="epoch", ylabel=metric.removeprefix("eval_").replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


# ---- from a model ---------------------------------------------------------------------------------------------------


def prompt_attention(model: nn.Module, **inputs: torch.Tensor) -> list[list[float]]:
    """The attention weight that each prompt gets, for each block, in ascending order of the prompts.

    It is the mean over images and heads; from the class token (the first one) where the family has whole images, from
    all tokens where it has windows.

    Args:
        model: A model with a PROVPT adapter, which is enabled.
        inputs: What the model takes, such as `pixel_values`.
    """
    tuner = _tuner(model)
    weights = _attention_weights(model, tuner, inputs)
    means = []
    for block, count, of_block in zip(tuner.blocks, tuner.prompt_distribution(), weights, strict=True):
        queries = of_block if block.family.windowed else of_block[:, :, :1]  # (…, H, queries, T + n)
        means.append(queries[..., queries.shape[-1] - count :].mean(dim=(0, 1, 2)).tolist())
    return means


def plot_prompt_attention(model: nn.Module, **inputs: torch.Tensor) -> Figure:
    """The attention weights on the prompts of each block, a dot for each prompt and a bar for their sum: saturated and
    deficient blocks at a glance.

    Args:
        model: A model with a PROVPT adapter, which is enabled.
        inputs: What the model takes, such as `pixel_values`.
    """
    means = prompt_attention(model, **inputs)
    figure, axes = _axes(max(5.0, 0.35 * len(means) + 1.5), 3.5)
    blocks = range(1, len(means) + 1)
    axes.bar(blocks, [sum(block) for block in means], color="lightgray", label="all prompts of the block")
    dots = [(number, weight) for number, block in zip(blocks, means, strict=True) for weight in block]
    numbers, weights = zip(*dots, strict=True)
    axes.scatter(numbers, weights, s=12, color=COLOURS[0], label="one prompt", zorder=3)
    axes.set(xlabel="block", ylabel="share of the attention", xlim=(0.4, len(means) + 0.6))
    axes.set_xticks(blocks)
    axes.legend()
    return figure


def attention_map(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Where the class token looks in the last block, as shares of its attention on patches, (B, h, w).

    Args:
        model: A model with a PROVPT adapter and a class token.
        pixel_values: (B, 3, height, width).

    Raises:
        ValueError: If the family has no class token, or none that sees all patches, as with windows.
    """
    tuner = _tuner(model)
    last: PromptedBlock = tuner.blocks[-1]
    if last.family.windowed:
        raise ValueError(
            f"A map needs a class token that sees all patches, which {last.family.name} has not. Use a ViT's."
        )
    patch = tuner.patch_size
    sides = (patch, patch) if isinstance(patch, int) else patch
    height, width = (side // of_patch for side, of_patch in zip(pixel_values.shape[2:], sides, strict=True))
    weights = _attention_weights(model, tuner, {"pixel_values": pixel_values})[-1]
    tokens = weights.shape[2]
    if tokens <= height * width:
        raise ValueError(
            f"A map needs a class token beside the {height * width} patches, but there are {tokens} tokens in all. "
            "Use a family that has one."
        )
    patches = weights[:, :, 0, tokens - height * width : tokens].mean(dim=1)  # (B, h * w)
    return (patches / patches.sum(dim=1, keepdim=True)).unflatten(1, (height, width))


def plot_attention_maps(models: Mapping[str, nn.Module], pixel_values: torch.Tensor) -> Figure:
    """Images, and beside each where the class token of each model looks in its last block.

    Args:
        models: By name, models with a PROVPT adapter and a class token, for example VPT-Deep and PRO-VPT.
        pixel_values: (B, 3, height, width), normalised as the models take them.

    Raises:
        ValueError: If a model has no class token that sees all patches.
    """
    maps = {name: attention_map(model, pixel_values) for name, model in models.items()}
    count = len(pixel_values)
    figure = Figure(figsize=(2.2 * (len(models) + 1), 2.2 * count + 0.3), layout="constrained")
    grid = figure.subplots(count, len(models) + 1, squeeze=False)
    for row, image in enumerate(pixel_values.float().cpu()):
        low, high = image.amin(), image.amax()
        shown = ((image - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0).numpy()
        grid[row][0].imshow(shown)
        for axes, values in zip(grid[row][1:], maps.values(), strict=True):
            axes.imshow(shown.mean(axis=2), cmap="gray", vmin=0, vmax=1)
            extent = (-0.5, image.shape[2] - 0.5, image.shape[1] - 0.5, -0.5)
            axes.imshow(values[row].cpu().numpy(), cmap="inferno", alpha=0.6, extent=extent)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    for axes, name in zip(grid[0], ["image", *maps], strict=True):
        axes.set_title(name, fontsize=10)
    return figure


def plot_feature_similarity(changes: Sequence[Mapping[str, float]]) -> Figure:
    """How much the features change when a prompt is pruned, when it is allocated, and while it is tuned.

    Args:
        changes: What [`FeatureChanges`] measured (`changes`): for each relocation its epoch and the cosine similarity
            of the features before and after each stage.

    Raises:
        ValueError: If there are no changes.
    """
    if not changes:
        raise ValueError("There must be changes of features to draw, but there are none: nothing was relocated.")
    figure, axes = _axes(5.0, 3.5)
    for stage, colour in zip(("pruning", "allocation", "tuning"), COLOURS, strict=False):
        points = [(change["epoch"], change[stage]) for change in changes if stage in change]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=stage)
    axes.set(xlabel="epoch", ylabel="cosine similarity of features")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


class FeatureChanges(TrainerCallback):
    """Measures how much features change when a prompt is pruned, when it is allocated, and while it is tuned.

    It is a callback of the Trainer, given after the one that relocates. Features are the first token (the class token
    where the family has one) that leaves the last block; with windows, the mean of all tokens.

    Args:
        relocation: The callback that relocates.
        inputs: What the model takes, such as `pixel_values` of a few images.
    """

    def __init__(self, relocation: RelocationTrainerCallback, **inputs: torch.Tensor) -> None:
        self.relocation = relocation
        self.inputs = inputs
        self.changes: list[dict[str, float]] = []
        self._before: torch.Tensor | None = None
        self._allocated: torch.Tensor | None = None

    def on_epoch_end(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        now = self._features(model)
        if self._allocated is not None:
            self.changes[-1]["tuning"] = _cosine(self._allocated, now)
            self._allocated = None
        self._before = now

    def on_epoch_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        relocator = self.relocation.relocator
        if self._before is None or relocator is None or not relocator.history:
            return
        move = relocator.history[-1]
        if move.epoch != relocator.epoch or move.prompt is None or not move.block:
            return
        tuner = _tuner(model)
        tuner.move_prompt(move.prompt, 0)
        pruned = self._features(model)
        tuner.move_prompt(move.prompt, move.block)
        self._allocated = self._features(model)
        self.changes.append(
            {
                "epoch": move.epoch,
                "pruning": _cosine(self._before, pruned),
                "allocation": _cosine(pruned, self._allocated),
            }
        )

    @torch.no_grad()
    def _features(self, model: nn.Module) -> torch.Tensor:
        """(B, D), in eval mode."""
        tuner, found = _tuner(model), []
        last: PromptedBlock = tuner.blocks[-1]
        hook = last.block.register_forward_hook(lambda module, args, output: found.append(output))
        try:
            with in_eval_mode(model):
                model(**{name: tensor.to(tuner.prompts().device) for name, tensor in self.inputs.items()})
        finally:
            hook.remove()
        tokens = found[0][0] if isinstance(found[0], tuple) else found[0]
        return tokens.mean(dim=1) if last.family.windowed else tokens[:, 0]


# ---- parts ----------------------------------------------------------------------------------------------------------


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _whole_ticks(axes: Axes, epochs: int, num_blocks: int) -> None:
    axes.set_xticks(range(1, epochs + 1, max(1, epochs // 10)))
    axes.set_yticks(range(1, num_blocks + 1, max(1, num_blocks // 12)))


def _tuner(model: nn.Module) -> ProVPTModel:
    tuner = next((module for module in model.modules() if isinstance(module, ProVPTModel)), None)
    if tuner is None or tuner.bank.enabled_adapter is None:
        raise ValueError(
            f"The picture is of a model's prompts, but the {type(model).__name__} has no PROVPT adapter that is "
            "enabled. Wrap it with `get_peft_model`, or load an adapter."
        )
    if tuner.bank.enabled_adapter in tuner.bank.shallow:
        raise ValueError("The picture is of prompts in each block, and those of VPT-Shallow are tokens. Use another.")
    return tuner


@torch.no_grad()
def _attention_weights(model: nn.Module, tuner: ProVPTModel, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The attention weights (B * W, H, T, T + n) of each block, in eval mode."""
    found: list[torch.Tensor] = []
    with in_eval_mode(model), _recorded(tuner, found):
        model(**inputs)
    return found


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """The cosine of two features (B, D), the mean over images."""
    return nn.functional.cosine_similarity(one.float(), other.float(), dim=1).mean().item()


@contextmanager
def _recorded(tuner: ProVPTModel, found: list[torch.Tensor]) -> Iterator[None]:
    """Let all blocks run as `eager`, which gives weights, and keep those."""

    def recording(block: PromptedBlock) -> Any:
        def attend(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            implementation: str | None = None,
            **kwargs: Any,
        ) -> Any:
            # What was a mask for sdpa would be added to the logits.
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
            output, weights = PromptedBlock.attend(block, query, key, value, mask, implementation="eager", **kwargs)
            assert weights is not None
            found.append(weights.float())
            return output, weights

        return attend

    try:
        for block in tuner.blocks:
            block.__dict__["attend"] = recording(block)
        yield
    finally:
        for block in tuner.blocks:
            block.__dict__.pop("attend", None)
