"""Seven small tasks in the manner of VTAB-1k that need no hub: does it help, and against what?

    python examples/vtab/offline.py                          # runs what is missing in results/offline.jsonl
    python examples/vtab/offline.py --report                 # prints the table of what is there
    python examples/vtab/offline.py --tasks count --methods vpt-deep pro-vpt-default --seeds 0

The tasks are those of `examples/benchmarks/tasks.py`, the backbone is the demo's DINOv2-S. Each run is one line of the
results file, so a sweep that was stopped goes on where it was; several processes may share a file if each takes tasks
of its own. All methods have the same recipe: AdamW, cosine decay, and a learning rate from the same grid. The first
seed runs the whole grid, its validation accuracy chooses a rate for each method and task, and the other seeds run that
one. The table shows the chosen runs only.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm


sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import tasks
from common import append_lines, fit, read_lines, results_parser
from methods import METHODS, best_of_grid, describe, make_method_relocator, make_model, print_tables


GROUPS = {
    "natural": ("digits", "stamps"),
    "specialized": ("textile",),
    "structured": ("location", "orientation", "count", "distance"),
}
LEARNING_RATES = (1e-3, 3e-3)


def protocol(args: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a table have in common."""
    names = ("epochs", "train_images", "validation_images", "image_size", "num_prompts")
    return {"model": str(args.model_name_or_path or "DINOv2-S")} | {name: getattr(args, name) for name in names}


def run(method: str, task_name: str, seed: int, learning_rate: float, args: argparse.Namespace) -> dict[str, Any]:
    """Train and test once. Returns the line of the results; accuracies in percent."""
    task = tasks.load(task_name, args.image_size, args.train_images, args.validation_images, seed)
    model = make_model(method, task.num_labels, args.num_prompts, seed, args.model_name_or_path)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0)
    relocator = make_method_relocator(method, model, optimizer, task.train, seed)
    start = time.perf_counter()
    loss = fit(model, optimizer, task.train, args.epochs, seed, relocator, cosine=True)
    seconds = time.perf_counter() - start
    return {
        "suite": "offline",
        "method": method,
        "task": task_name,
        "seed": seed,
        "learning_rate": learning_rate,
        **protocol(args),
        "train_loss": loss,
        "validation_accuracy": 100 * tasks.evaluate(model, task.validation)[1],
        "test_accuracy": 100 * tasks.evaluate(model, task.test)[1],
        "train_seconds": seconds,
        "train_images_per_second": args.epochs * len(task.train) / seconds,
        "data_hash": tasks.data_hash(task),
        **describe(method, model, relocator),
    }


def finished(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs in the results file that followed the protocol."""
    return read_lines(args.output, protocol(args))


def chosen_rate(method: str, task: str, lines: list[dict[str, Any]], args: argparse.Namespace) -> float | None:
    """The learning rate that the first seed's validation accuracies choose, see `best_of_grid`."""
    tried = {
        line["learning_rate"]: line["validation_accuracy"]
        for line in lines
        if (line["method"], line["task"], line["seed"]) == (method, task, args.seeds[0])
    }
    return best_of_grid(args.learning_rates, tried)


def missing(seed: int, args: argparse.Namespace) -> list[tuple[str, str, int, float]]:
    """The runs of a seed that are still to be made."""
    lines = finished(args)
    done = {(line["method"], line["task"], line["seed"], line["learning_rate"]) for line in lines}
    wanted = []
    for task in args.tasks:
        for method in args.methods:
            chosen = chosen_rate(method, task, lines, args)
            rates = args.learning_rates if seed == args.seeds[0] else [] if chosen is None else [chosen]
            wanted += [(method, task, seed, rate) for rate in rates]
    return [key for key in wanted if key not in done]


def report(args: argparse.Namespace) -> None:
    """Print the tables of the chosen runs."""
    lines = finished(args)
    chosen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        method, task = line["method"], line["task"]
        if line["learning_rate"] == chosen_rate(method, task, lines, args):
            chosen.setdefault((method, task), []).append(line)
    print_tables(chosen, GROUPS, METHODS)


def main() -> None:
    parser = results_parser(
        __doc__, "offline", checkpoint=True,
        epochs=15, train_images=800, validation_images=200, image_size=56, num_prompts=5, threads=2,
    )  # fmt: skip
    parser.add_argument(
        "--methods", nargs="+", default=METHODS[:5], choices=METHODS, help=f"default: {' '.join(METHODS[:5])}"
    )
    parser.add_argument("--tasks", nargs="+", default=list(tasks.TASKS), choices=tasks.TASKS, help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds (default: 0 1 2)")
    parser.add_argument("--learning_rates", nargs="+", type=float, default=LEARNING_RATES, help="default: 1e-3 3e-3")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.report:
        for seed in args.seeds:
            for method, task, _, rate in tqdm(missing(seed, args), desc=f"seed {seed}"):
                append_lines(args.output, [run(method, task, seed, rate, args)])
    report(args)


if __name__ == "__main__":
    main()
