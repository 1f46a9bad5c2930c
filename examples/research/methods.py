"""What the suites share: the methods that are compared, what a run's line says of them, and the tables."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import get_peft_model

import provpt_peft
from provpt_peft import ProVPTConfig, RelocationConfig, Relocator
from provpt_peft.backbone.families import find_blocks
from provpt_peft.optimizer import PROMPTS_LR, prompts_lr

from .common import (
    PAPER_DROPOUT,
    file_bytes,
    make_base,
    make_relocator,
    mean_error_and_number,
    peak_memory,
    print_header,
    read_lines,
    starting_prompts,
    train_epoch,
    with_lora,
)
from .tasks import Split


# The letters are the strategies of the paper's Tab. 3, adding is that of its appendix. VPT-Deep with all of its
# prompts in some of the blocks shows what a distribution is worth. Fisher is the default of version 0.1.
METHODS = (
    "linear", "lora-1", "lora-2", "lora-8", "vpt-deep", "pro-vpt-paper", "pro-vpt-default", "full", "vpt-shallow",
    "pro-vpt-A", "pro-vpt-B", "pro-vpt-C", "pro-vpt-D", "pro-vpt-E", "pro-vpt-F", "pro-vpt-G", "pro-vpt-adding",
    "vpt-deep-1-4", "vpt-deep-5-8", "vpt-deep-9-12", "pro-vpt-fisher",
)  # fmt: skip
# What (A) and (B) prune is searched with the learning rate.
PRUNE_SHARES = tuple(percent / 100 for percent in range(10, 100, 10))


# Values of the settings that a search chooses, in the order of their names.
Setting = tuple[float | None, ...]


@dataclass(frozen=True)
class Recipe:
    """How a method is trained: AdamW without weight decay, and cosine decay.

    Args:
        learning_rates: Of the prompts, or of LoRA's matrices: those that the first seed's validation chooses from.
        head_learning_rate: Of the head. None: the same.
        warmup: Share of the steps in which the rates rise to their values.
        prompt_dropout: On the prompts.
        batch_size: Images of a step.
        max_grad_norm: What gradients are clipped to; None for not at all.
    """

    learning_rates: tuple[float, ...]
    head_learning_rate: float | None = 1e-3
    warmup: float = 0.3
    prompt_dropout: float = 0.0
    batch_size: int = 16
    max_grad_norm: float | None = 1.0

    def settings(self) -> dict[str, Any]:
        """The recipe as a run's line has it, beside its learning rate."""
        return {name: value for name, value in asdict(self).items() if name != "learning_rates"}

    def schedule(self) -> dict[str, Any]:
        """What `fit` takes of it."""
        names = ("batch_size", "warmup", "max_grad_norm")
        return {"cosine": True} | {name: getattr(self, name) for name in names}


# One rate for all that is trained, as version 0.1 had it.
FIRST = Recipe((1e-3, 3e-3), None, warmup=0.0, prompt_dropout=PAPER_DROPOUT, batch_size=32, max_grad_norm=None)
# Each method's own, from recipes.py. The prompts' rate is that of 5 per block, see `recipe_of`.
PROMPTS = Recipe((PROMPTS_LR,), batch_size=8)
LORA = Recipe((3e-3,))
LORA_8 = Recipe((1e-3, 3e-3))
HEAD = Recipe((3e-3, 1e-2), head_learning_rate=None)


def recipe_of(method: str, name: str, num_prompts: int) -> Recipe:
    """A method's recipe by name, `"first"` or `"own"`, for a number of prompts per block.

    Raises:
        ValueError: If a method has no recipe of its own.
    """
    if name == "first":
        return FIRST
    recipes = {"vpt": PROMPTS, "pro-vpt": PROMPTS, "lora-8": LORA_8, "lora": LORA, "linear": HEAD}
    for beginning, recipe in recipes.items():
        if method.startswith(beginning):
            return replace(recipe, learning_rates=(prompts_lr(num_prompts),)) if recipe is PROMPTS else recipe
    raise ValueError(f"There is no recipe of its own for {method!r}. Give it `--recipe first`.")


def grid_of(method: str, values: Mapping[str, Sequence[float]]) -> list[Setting]:
    """All settings of a method's search, of the values by name. Only (A) and (B) have a `prune_share`."""
    prunes = method in ("pro-vpt-A", "pro-vpt-B")
    return sorted(
        itertools.product(*(of if prunes or name != "prune_share" else [None] for name, of in values.items()))
    )


def setting_of(line: dict[str, Any], names: Sequence[str]) -> Setting:
    """The setting of a run."""
    return tuple(line[name] for name in names)


def best_of_grid(grid: Sequence[Setting], names: Sequence[str], lines: Sequence[dict[str, Any]]) -> Setting | None:
    """The setting of the run with the best validation accuracy, the first in the grid of equals. None before the grid
    is complete."""
    accuracies = {setting_of(line, names): line["validation_accuracy"] for line in lines}
    return max(grid, key=accuracies.__getitem__) if set(grid) <= set(accuracies) else None


def make_model(
    method: str,
    num_labels: int,
    num_prompts: int,
    epochs: int,
    prune_share: float | None,
    dropout: float,
    seed: int,
    checkpoint: str | None = None,
) -> torch.nn.Module:
    """The backbone with a new head, and what the method trains in it. See `starting_prompts` for the prompts that it
    begins with; `dropout` is theirs."""
    base = make_base(num_labels, seed, checkpoint)
    if method == "full":
        return base
    if method == "linear":
        base.base_model.requires_grad_(False)
        return base
    if method.startswith("lora-"):
        return with_lora(base, rank=int(method.removeprefix("lora-")))
    settings: dict[str, Any] = {"prompt_dropout": dropout, "modules_to_save": ["classifier"]}
    if method == "vpt-shallow":
        return get_peft_model(base, ProVPTConfig(num_prompts=num_prompts, shallow=True, **settings))
    strategy = method.removeprefix("pro-vpt-")
    counts, reserve = starting_prompts(strategy, num_prompts, len(find_blocks(base)), epochs, prune_share)
    return get_peft_model(base, ProVPTConfig(num_prompts=counts, reserve=reserve, **settings))


def relocation_config(method: str, prune_share: float | None) -> RelocationConfig | None:
    """The settings of a method that relocates."""
    if not method.startswith("pro-vpt-"):
        return None
    if method == "pro-vpt-fisher":
        return RelocationConfig(idleness="fisher", check_moves=False)
    changes = {} if prune_share is None else {"prune_share": prune_share}
    return RelocationConfig.preset(method.removeprefix("pro-vpt-"), **changes)


def relocation_settings(config: RelocationConfig | None) -> dict[str, Any] | None:
    """The same as plain values, without the seed, which a run's line has."""
    return None if config is None else {k: v for k, v in config.settings().items() if k != "seed"}


def read_runs(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs in a results file that have some settings, without those of presets that have changed since."""
    lines = read_lines(path, settings)
    return [
        line
        for line in lines
        if line.get("relocation") == relocation_settings(relocation_config(line["method"], line["prune_share"]))
    ]


def make_method_relocator(
    method: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Split,
    prune_share: float | None,
    seed: int,
) -> Relocator | None:
    """The relocator of a method that has one."""
    config = relocation_config(method, prune_share)
    return None if config is None else make_relocator(config, model, optimizer, train, seed)


def describe(
    method: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Split,
    relocator: Relocator | None,
) -> dict[str, Any]:
    """What a line of the results says of a trained model, under the names of PEFT's method comparison.

    Args:
        method: What was trained.
        model: The model. Its memory is measured in another training step, and in the scoring of a relocation.
        optimizer: Its optimizer.
        batch: The images of a step.
        relocator: Its relocator, if it had one.
    """
    history = relocator.history if relocator is not None else []

    def step() -> None:
        train_epoch(model, optimizer, batch, seed=0, batch_size=len(batch))
        if relocator is not None:
            relocator.measure()

    return {
        "relocation": relocation_settings(relocator.config if relocator is not None else None),
        "threads": torch.get_num_threads(),
        "num_trainable_params": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "file_size": file_bytes(model),
        "accelerator_memory_max": peak_memory(model, optimizer, step),
        "relocations": sum(record.block not in (None, record.from_block) for record in history),
        "distribution": model.base_model.prompt_distribution() if "vpt" in method else None,
        "date": str(date.today()),
        "versions": {m.__name__: m.__version__ for m in (provpt_peft, peft, transformers, torch)},
    }


def _cells(by_task: dict[str, dict[int, float]], groups: dict[str, Sequence[str]], form: str = ".2f") -> list[str]:
    """Mean, standard error and number of seeds for each task, each group and the mean of groups, as text.

    Args:
        by_task: A number for each seed of each task.
        groups: Tasks of each group. The means over tasks are of the seeds that all of them have.
        form: Format of the mean.
    """
    by_group = {
        group: {
            seed: statistics.mean(by_task[task][seed] for task in of)
            for seed in set.intersection(*(set(by_task[task]) for task in of))
        }
        for group, of in groups.items()
    }
    seeds = set.intersection(*(set(found) for found in by_group.values()))
    overall = {seed: statistics.mean(found[seed] for found in by_group.values()) for seed in seeds}
    return [
        mean_error_and_number(list(found.values()), form) for found in (*by_task.values(), *by_group.values(), overall)
    ]


def print_tables(
    chosen: dict[tuple[str, str], list[dict[str, Any]]], groups: dict[str, Sequence[str]], methods: Sequence[str]
) -> None:
    """Print a table of test accuracies and what the methods cost, then one of the differences from VPT-Deep. Numbers
    are means over seeds with their standard errors.

    Args:
        chosen: The runs to show, by method and task.
        groups: Tasks of each group, for group means and the mean of group means.
        methods: Methods in the order of the rows.
    """
    names = [task for group in groups.values() for task in group]
    accuracies = {
        method: {task: {r["seed"]: r["test_accuracy"] for r in chosen.get((method, task), [])} for task in names}
        for method in methods
    }
    header = [*names, *groups, "mean of groups"]
    costs = {
        "trained parameters": ("num_trainable_params", 1),
        "file kB": ("file_size", 1e3),
        "peak MB": ("accelerator_memory_max", 1e6),
    }
    print_header(["method", *header, *costs])
    for method, by_task in accuracies.items():
        if not any(by_task.values()):
            continue
        cells = _cells(by_task, groups)
        run = [task for task, found in by_task.items() if found]
        for name, scale in costs.values():
            # The mean over tasks, whatever the number of their runs.
            of_task = [statistics.mean(r[name] for r in chosen[method, task]) for task in run]
            cells.append(f"{statistics.mean(of_task) / scale:,.0f}")
        print(f"| {method} | {' | '.join(cells)} |")

    print("\nTest accuracy less VPT-Deep's of the same task and seed, in points:\n")
    print_header(["method", *header, "all pairs"])
    for method, by_task in accuracies.items():
        baseline = accuracies["vpt-deep"]
        differences = {
            task: {seed: value - baseline[task][seed] for seed, value in found.items() if seed in baseline[task]}
            for task, found in by_task.items()
        }
        pairs = [value for found in differences.values() for value in found.values()]
        if pairs and method != "vpt-deep":
            cells = [*_cells(differences, groups, "+.2f"), mean_error_and_number(pairs, "+.2f")]
            print(f"| {method} | {' | '.join(cells)} |")
