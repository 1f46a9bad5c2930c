"""Seven small tasks in the manner of VTAB-1k that need no hub: does it help, and against what?

    python -m examples.research.offline                          # runs what is missing in the results file
    python -m examples.research.offline --report --device cpu    # prints the tables of what is there
    python -m examples.research.offline --tasks count --methods vpt-deep pro-vpt-default --seeds 0
    python -m examples.research.offline --tasks count --methods vpt-deep pro-vpt-default --num_prompts 25

The tasks are those of `tasks.py`, the backbone is the demo's DINOv2-S. Each run is one line of the
results file, so a sweep that was stopped goes on where it was; several processes may share a file if each takes tasks
of its own. Each method has its own recipe, see `recipe_of`; `--recipe first` is that of version 0.1, one for all.
Where a recipe has several learning rates, the first seed runs them all, its validation accuracy chooses one for each
method and task (and the share that (A) and (B) prune), and the other seeds run that one. Every line has its run's test
accuracy, but nothing is chosen by it, and the tables show the chosen runs only: one for `--num_prompts`, and one of
the accuracy of `--tasks` over all numbers of prompts per block whose grid is complete, which is drawn as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from . import tasks
from .common import (
    append_lines,
    fit,
    images_of,
    make_optimizer,
    mean_error_and_number,
    print_header,
    read_lines,
    refuse_other_images,
    results_parser,
)
from .methods import (
    METHODS,
    PRUNE_SHARES,
    Setting,
    best_of_grid,
    describe,
    grid_of,
    make_method_relocator,
    make_model,
    print_tables,
    read_runs,
    recipe_of,
    setting_of,
)
from .pictures import BLUE, GREEN, VERMILLION, plt, save


GROUPS = {
    "natural": ("digits", "stamps"),
    "specialized": ("textile",),
    "structured": ("location", "orientation", "count", "distance"),
}
# What the first seed chooses.
CHOSEN = ("learning_rate", "prune_share")
# Methods that are drawn over the number of prompts.
COLOURS = {"vpt-deep": VERMILLION, "pro-vpt-fisher": BLUE, "pro-vpt-default": GREEN}


def protocol(args: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a table have in common."""
    backbone = {"model": str(args.model_name_or_path or "DINOv2-S"), "device": args.device}
    lengths = {"epochs": args.epochs, "num_prompts": args.num_prompts}
    return {"recipe": args.recipe} | backbone | images_of(args) | lengths


def run(method: str, task_name: str, seed: int, setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Train and test once. Returns the line of the results; accuracies in percent."""
    learning_rate, prune_share = setting
    recipe = recipe_of(method, args.recipe, args.num_prompts)
    task = tasks.load(task_name, args.image_size, args.train_images, args.validation_images, seed)
    data_hash = tasks.data_hash(task)
    refuse_other_images(task_name, seed, data_hash, args)
    start = (args.num_prompts, args.epochs, prune_share, recipe.prompt_dropout)
    model = make_model(method, task.num_labels, *start, seed, args.model_name_or_path).to(args.device)
    optimizer = make_optimizer(model, learning_rate, recipe.head_learning_rate or learning_rate)
    relocator = make_method_relocator(method, model, optimizer, task.train, prune_share, seed)
    begin = time.perf_counter()
    loss = fit(model, optimizer, task.train, args.epochs, seed, relocator, **recipe.schedule())
    seconds = time.perf_counter() - begin
    return {
        "suite": "offline",
        "method": method,
        "task": task_name,
        "seed": seed,
        "learning_rate": learning_rate,
        "prune_share": prune_share,
        **recipe.settings(),
        **protocol(args),
        "train_loss": loss,
        "validation_accuracy": 100 * tasks.evaluate(model, task.validation)[1],
        "test_accuracy": 100 * tasks.evaluate(model, task.test)[1],
        "train_time": seconds,
        "images_per_second": args.epochs * len(task.train) / seconds,
        "data_hash": data_hash,
        **describe(method, model, optimizer, task.train[: recipe.batch_size], relocator),
    }


def finished(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs in the results file that followed the protocol, and their method's recipe as it is now."""
    lines = read_runs(args.output, protocol(args))
    if args.recipe == "first":  # lines of version 0.1 do not say what is in it
        return lines
    methods = {line["method"] for line in lines}
    recipes = {method: recipe_of(method, args.recipe, args.num_prompts).settings() for method in methods}
    return [line for line in lines if recipes[line["method"]].items() <= line.items()]


def grid(method: str, args: argparse.Namespace) -> list[Setting]:
    """The settings of a method's search."""
    rates = args.learning_rates or recipe_of(method, args.recipe, args.num_prompts).learning_rates
    return grid_of(method, dict(zip(CHOSEN, (rates, args.prune_shares), strict=True)))


def best_setting(method: str, task: str, lines: list[dict[str, Any]], args: argparse.Namespace) -> Setting | None:
    """The setting that the first seed's validation accuracies choose."""
    first = {"method": method, "task": task, "seed": args.seeds[0]}
    tried = [line for line in lines if first.items() <= line.items()]
    return best_of_grid(grid(method, args), CHOSEN, tried)


def missing(seed: int, args: argparse.Namespace) -> list[tuple[str, str, int, Setting]]:
    """The runs of a seed that are still to be made."""
    lines = finished(args)
    done = {(line["method"], line["task"], line["seed"], setting_of(line, CHOSEN)) for line in lines}
    wanted = []
    for task in args.tasks:
        for method in args.methods:
            best = best_setting(method, task, lines, args)
            settings = grid(method, args) if seed == args.seeds[0] else [] if best is None else [best]
            wanted += [(method, task, seed, setting) for setting in settings]
    return [key for key in wanted if key not in done]


def chosen_runs(args: argparse.Namespace) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The runs with the setting that was chosen, by method and task."""
    lines = finished(args)
    chosen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        method, task = line["method"], line["task"]
        if setting_of(line, CHOSEN) == best_setting(method, task, lines, args):
            chosen.setdefault((method, task), []).append(line)
    return chosen


def compare_numbers(args: argparse.Namespace) -> None:
    """Print and draw accuracies over the number of prompts, and their standard deviation over it, the spread: of the
    numbers that have all seeds."""
    others = {name: value for name, value in protocol(args).items() if name != "num_prompts"}
    counts = sorted({line["num_prompts"] for line in read_lines(args.output, others)})
    accuracies = {
        (task, n, method): {line["seed"]: line["test_accuracy"] for line in lines}
        for n in counts
        for (method, task), lines in chosen_runs(argparse.Namespace(**vars(args) | {"num_prompts": n})).items()
    }
    # Of each task: the methods that were run with more than one number, and the numbers that have all seeds of these.
    # Seeds have their own data, so a spread is over the same ones.
    drawn: dict[str, tuple[list[str], list[int]]] = {}
    for task in args.tasks:
        complete = {key for key, of_seeds in accuracies.items() if key[0] == task and of_seeds.keys() >= {*args.seeds}}
        methods = [m for m in COLOURS if sum((task, n, m) in complete for n in counts) >= 2]
        numbers = [n for n in counts if methods and all((task, n, m) in complete for m in methods)]
        if len(numbers) >= 2:
            drawn[task] = methods, numbers
    if not drawn:
        return
    counts = [n for n in counts if any(n in numbers for _, numbers in drawn.values())]
    header = ["task", "method", *(f"{n} per block" for n in counts), "spread"]
    print()
    print_header(header)
    figure, axes = plt.subplots(1, len(drawn), figsize=(4.5 * len(drawn), 3.4), squeeze=False)
    for axis, (task, (methods, numbers)) in zip(axes[0], drawn.items(), strict=True):
        for method in methods:
            runs = {n: [accuracies[task, n, method][seed] for seed in args.seeds] for n in numbers}
            means = [statistics.mean(values) for values in runs.values()]
            cells = [mean_error_and_number(runs.get(n, [])) for n in counts]
            print(f"| {task} | {method} | {' | '.join(cells)} | {statistics.stdev(means):.2f} |")
            for n, values in runs.items():
                axis.plot([n] * len(values), values, ".", color=COLOURS[method], markersize=3)
            axis.plot(numbers, means, marker="o", color=COLOURS[method], label=method)
        axis.set_xscale("log")
        axis.set_xticks(numbers, [str(n) for n in numbers])
        axis.minorticks_off()
        axis.set_xlabel("prompts per block")
        axis.set_ylabel("test accuracy (%)")
        axis.set_title(task, fontsize=10)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    save(figure, args.pictures / {"own": "numbers_of_prompts.png", "first": "robustness.png"}[args.recipe])


def main() -> None:
    parser = results_parser(
        __doc__, "offline", checkpoint=True, device=True,
        epochs=15, train_images=800, validation_images=200, image_size=56, num_prompts=5, threads=2,
    )  # fmt: skip
    parser.add_argument(
        "--methods", nargs="+", default=METHODS[:5], choices=METHODS, help=f"default: {' '.join(METHODS[:5])}"
    )
    parser.add_argument("--tasks", nargs="+", default=list(tasks.TASKS), choices=tasks.TASKS, help="default: all")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="the first one searches (default: 0 1 2)"
    )
    parser.add_argument("--recipe", choices=("own", "first"), default="own", help="default: own")
    parser.add_argument("--learning_rates", nargs="+", type=float, help="default: the recipe's")
    parser.add_argument("--prune_shares", nargs="+", type=float, default=PRUNE_SHARES, help="default: 0.1 to 0.9")
    parser.add_argument("--pictures", type=Path, default=Path("docs/images"), help="folder of the picture")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.report:
        for seed in args.seeds:
            for method, task, _, setting in tqdm(missing(seed, args), desc=f"seed {seed}"):
                append_lines(args.output, [run(method, task, seed, setting, args)])
    if not finished(args):
        raise SystemExit(f"{args.output} has no run with {protocol(args)}.")
    print_tables(chosen_runs(args), GROUPS, METHODS)
    compare_numbers(args)


if __name__ == "__main__":
    main()
