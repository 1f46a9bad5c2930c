"""How to train prompts, and LoRA beside them: learning rates of prompts and head, warm-up, dropout, batch size.

    python -m examples.research.recipes --tasks location count     # runs what is missing
    python -m examples.research.recipes --report                   # prints the tables of what is there

The tasks, images and steps are those of `offline.py`. Each run is one line of the results file, with its validation
and its test accuracy; recipes are to be chosen by validation, on seeds from 10 on with 1,000 validation images, which
the suite's runs are not of. The results also have recipes that cannot be run here.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from datetime import date
from typing import Any

import torch
from tqdm.auto import tqdm

from . import tasks
from .common import append_lines, fit, make_optimizer, mean_error_and_number, print_header, read_lines, results_parser
from .methods import FIRST, Recipe, make_model


# Of the runs with batches of 32, none is clipped.
OLDER = {"batch_size": 32, "max_grad_norm": None}
# Method and recipe, with one learning rate each.
RECIPES = {
    "suite": ("vpt-deep", replace(FIRST, learning_rates=(3e-3,))),
    "prompts 5e-3, head 1e-3": ("vpt-deep", Recipe((5e-3,), warmup=0.1, **OLDER)),
    "prompts 1e-2, head 1e-3": ("vpt-deep", Recipe((1e-2,), warmup=0.1, **OLDER)),
    "prompts 5e-3, head 1e-3, warm-up 0.3": ("vpt-deep", Recipe((5e-3,), **OLDER)),
    "prompts 5e-3, head 1e-3, warm-up 0.3, batch 16": ("vpt-deep", Recipe((5e-3,), max_grad_norm=None)),
    "prompts 3e-3, head 1e-3, warm-up 0.3, batch 8": ("vpt-deep", Recipe((3e-3,), batch_size=8)),
    "prompts 1e-2, head 1e-3, warm-up 0.3": ("vpt-deep", Recipe((1e-2,), **OLDER)),
    "prompts 1e-2, head 3e-3, warm-up 0.3": ("vpt-deep", Recipe((1e-2,), 3e-3, **OLDER)),
    "prompts 2e-2, head 1e-3, warm-up 0.3": ("vpt-deep", Recipe((2e-2,), **OLDER)),
    "LoRA 1, 3e-3, head 1e-3": ("lora-1", Recipe((3e-3,), warmup=0.1, **OLDER)),
    "LoRA 1, 3e-3, head 1e-3, warm-up 0.3": ("lora-1", Recipe((3e-3,), **OLDER)),
    "LoRA 1, 3e-3, head 1e-3, warm-up 0.3, batch 16": ("lora-1", Recipe((3e-3,), max_grad_norm=None)),
    "LoRA 1, 3e-3, head 1e-3, warm-up 0.3, batch 16, clipped at 1": ("lora-1", Recipe((3e-3,))),
    "LoRA 1, 1e-3, head 1e-3, warm-up 0.3, batch 16": ("lora-1", Recipe((1e-3,))),
    "LoRA 1, 1e-3, head 1e-3, warm-up 0.3, batch 8": ("lora-1", Recipe((1e-3,), batch_size=8)),
    "LoRA 1, 3e-3, head 1e-3, warm-up 0.3, batch 8": ("lora-1", Recipe((3e-3,), batch_size=8)),
}


def run(name: str, task_name: str, seed: int, args: Any) -> dict[str, Any]:
    """Train and test once. Returns the line of the results; accuracies in percent."""
    method, recipe = RECIPES[name]
    (rate,) = recipe.learning_rates
    task = tasks.load(task_name, args.image_size, args.train_images, args.validation_images, seed)
    model = make_model(method, task.num_labels, args.num_prompts, args.epochs, None, recipe.prompt_dropout, seed)
    optimizer = make_optimizer(model, rate, recipe.head_learning_rate or rate)
    loss = fit(model, optimizer, task.train, args.epochs, seed, **recipe.schedule())
    return {
        "suite": "recipes", "recipe": name, "method": method, **asdict(recipe), "task": task_name, "seed": seed,
        "epochs": args.epochs, "train_images": args.train_images, "image_size": args.image_size,
        "validation_images": args.validation_images,
        "num_prompts": args.num_prompts if method == "vpt-deep" else None,
        "num_trainable_params": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "train_loss": loss,
        "validation_accuracy": 100 * tasks.evaluate(model, task.validation)[1],
        "test_accuracy": 100 * tasks.evaluate(model, task.test)[1],
        "data_hash": tasks.data_hash(task), "date": str(date.today()), "torch": torch.__version__,
    }  # fmt: skip


def report(lines: list[dict[str, Any]]) -> None:
    """Print validation and test accuracy of each recipe on each task, over the seeds."""
    for metric in ("validation_accuracy", "test_accuracy"):
        print(f"\n{metric.replace('_', ' ')} (%), mean over seeds ± standard error (seeds)\n")
        print_header(["recipe", "prompts", *tasks.TASKS, "mean"])
        for key in dict.fromkeys((line["recipe"], line["num_prompts"]) for line in lines):
            rows = {
                task: [x[metric] for x in lines if (x["recipe"], x["num_prompts"]) == key and x["task"] == task]
                for task in tasks.TASKS
            }
            cells = [mean_error_and_number(found, ".1f") for found in rows.values()]
            mean = f"{statistics.mean(map(statistics.mean, rows.values())):.1f}" if all(rows.values()) else ""
            print(f"| {key[0]} | {key[1] or ''} | {' | '.join(cells)} | {mean} |")


def main() -> None:
    parser = results_parser(
        __doc__, "recipes", epochs=15, train_images=800, validation_images=200, image_size=56, num_prompts=5,
        threads=1,
    )  # fmt: skip
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES, help="default: all")
    parser.add_argument("--tasks", nargs="+", default=list(tasks.TASKS), choices=tasks.TASKS, help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = ("epochs", "train_images", "validation_images", "image_size")
    protocol = {name: getattr(args, name) for name in names}
    wanted = [(name, task, seed) for seed in args.seeds for name in args.recipes for task in args.tasks]
    for name, task, seed in [] if args.report else tqdm(wanted):
        num_prompts = args.num_prompts if RECIPES[name][0] == "vpt-deep" else None
        key = {"recipe": name, "task": task, "seed": seed, "num_prompts": num_prompts}
        if not read_lines(args.output, key | protocol):
            append_lines(args.output, [run(name, task, seed, args)])
    report(read_lines(args.output, protocol))


if __name__ == "__main__":
    main()
