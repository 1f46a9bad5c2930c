"""How to train prompts, and LoRA beside them: learning rates of prompts and head, warm-up, dropout, initial scale.

    python -m examples.research.recipes --tasks location count     # runs what is missing
    python -m examples.research.recipes --report                   # prints the tables of what is there

The tasks, images and steps are those of `offline.py`. Each run is one line of the results file, with its validation
and its test accuracy; recipes are to be chosen by validation.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tqdm.auto import tqdm

from provpt_peft import ProVPTConfig

from . import tasks
from .common import append_lines, make_base, mean_and_error, read_lines, results_parser, train_epoch


BATCH_SIZE = 32


@dataclass(frozen=True)
class Recipe:
    """How a method is trained.

    Args:
        method: `"vpt"`, `"lora-1"`, `"lora-8"` or `"linear"`.
        learning_rate: Of the prompts, or of LoRA's matrices.
        head_learning_rate: Of the head.
        warmup: Share of the steps in which the rates rise to their values, before they fall as a cosine.
        dropout: On the prompts.
        scale: Standard deviation of the prompts' start; 0.0 for VPT's uniform one.
        optimizer: `"adamw"`, or `"muon"` for what is not the head.
    """

    method: str
    learning_rate: float
    head_learning_rate: float
    warmup: float = 0.1
    dropout: float = 0.0
    scale: float = 0.0
    optimizer: str = "adamw"


RECIPES = {
    "suite": Recipe("vpt", 3e-3, 3e-3, warmup=0.0, dropout=0.1),
    "prompts 1e-2, head 1e-3": Recipe("vpt", 1e-2, 1e-3),
    "prompts 5e-3, head 1e-3": Recipe("vpt", 5e-3, 1e-3),
    "prompts 3e-3, head 1e-3": Recipe("vpt", 3e-3, 1e-3),
    "prompts 5e-3, head 3e-3": Recipe("vpt", 5e-3, 3e-3),
    "prompts 1e-2, head 3e-3": Recipe("vpt", 1e-2, 3e-3),
    "prompts 5e-3, head 1e-3, dropout 0.1": Recipe("vpt", 5e-3, 1e-3, dropout=0.1),
    "prompts 5e-3, head 1e-3, no warm-up": Recipe("vpt", 5e-3, 1e-3, warmup=0.0),
    "prompts 1e-2, head 1e-3, warm-up 0.3": Recipe("vpt", 1e-2, 1e-3, warmup=0.3),
    "prompts 1e-2, head 3e-3, warm-up 0.3": Recipe("vpt", 1e-2, 3e-3, warmup=0.3),
    "prompts 2e-2, head 1e-3, warm-up 0.3": Recipe("vpt", 2e-2, 1e-3, warmup=0.3),
    "prompts 2e-2, head 1e-3, warm-up 0.5": Recipe("vpt", 2e-2, 1e-3, warmup=0.5),
    "unit scale, prompts 1e-1, head 1e-3": Recipe("vpt", 1e-1, 1e-3, scale=1.0),
    "Muon, prompts 1e-1, head 1e-3": Recipe("vpt", 1e-1, 1e-3, optimizer="muon"),
    "Muon, prompts 5e-2, head 1e-3": Recipe("vpt", 5e-2, 1e-3, optimizer="muon"),
    "LoRA 1, 1e-3, head 1e-3": Recipe("lora-1", 1e-3, 1e-3),
    "LoRA 1, 3e-3, head 1e-3": Recipe("lora-1", 3e-3, 1e-3),
    "LoRA 1, 3e-3, head 1e-3, warm-up 0.3": Recipe("lora-1", 3e-3, 1e-3, warmup=0.3),
    "LoRA 1, 1e-2, head 1e-3": Recipe("lora-1", 1e-2, 1e-3),
    "LoRA 8, 1e-3, head 1e-3": Recipe("lora-8", 1e-3, 1e-3),
    "LoRA 8, 3e-3, head 1e-3": Recipe("lora-8", 3e-3, 1e-3),
}


def make_model(recipe: Recipe, num_labels: int, num_prompts: int, seed: int) -> torch.nn.Module:
    """The demo's backbone with what the recipe trains in it."""
    base = make_base(num_labels, seed)
    if recipe.method.startswith("lora"):
        rank = int(recipe.method.removeprefix("lora-"))
        config = LoraConfig(
            r=rank, lora_alpha=rank, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]
        )
        return get_peft_model(base, config)
    model = get_peft_model(
        base, ProVPTConfig(num_prompts=num_prompts, prompt_dropout=recipe.dropout, modules_to_save=["classifier"])
    )
    if recipe.scale:
        with torch.no_grad():
            model.base_model.prompts().normal_(std=recipe.scale)
    return model


class Each:
    """Several optimizers, or schedules, as one."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def run(name: str, task_name: str, seed: int, args: Any) -> dict[str, Any]:
    """Train and test once. Returns the line of the results; accuracies in percent."""
    recipe = RECIPES[name]
    task = tasks.load(task_name, args.image_size, args.train_images, args.validation_images, seed)
    model = make_model(recipe, task.num_labels, args.num_prompts, seed)
    head = [p for n, p in model.named_parameters() if p.requires_grad and "modules_to_save" in n]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and "modules_to_save" not in n]
    make_optimizer = {"adamw": torch.optim.AdamW, "muon": torch.optim.Muon}[recipe.optimizer]
    optimizers = [
        make_optimizer(rest, lr=recipe.learning_rate, weight_decay=0.0),
        torch.optim.AdamW(head, lr=recipe.head_learning_rate, weight_decay=0.0),
    ]
    steps = args.epochs * math.ceil(len(task.train) / BATCH_SIZE)
    warmup = round(recipe.warmup * steps)

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    for epoch in range(args.epochs):
        loss = train_epoch(
            model, Each(optimizers), task.train, 1000 * seed + epoch, batch_size=BATCH_SIZE, scheduler=Each(schedules)
        )
    return {
        "suite": "recipes", "recipe": name, **asdict(recipe), "task": task_name, "seed": seed,
        "epochs": args.epochs, "train_images": args.train_images, "image_size": args.image_size,
        "validation_images": args.validation_images,
        "num_prompts": args.num_prompts if recipe.method == "vpt" else None,
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
        print(f"| recipe | prompts | {' | '.join(tasks.TASKS)} | mean |\n|{' --- |' * (len(tasks.TASKS) + 3)}")
        for key in dict.fromkeys((line["recipe"], line["num_prompts"]) for line in lines):
            rows = {
                task: [x[metric] for x in lines if (x["recipe"], x["num_prompts"]) == key and x["task"] == task]
                for task in tasks.TASKS
            }
            cells = [f"{mean_and_error(found, '.1f')} ({len(found)})" if found else "" for found in rows.values()]
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
    wanted = [(name, task, seed) for seed in args.seeds for name in args.recipes for task in args.tasks]
    for name, task, seed in [] if args.report else tqdm(wanted):
        key = {
            "recipe": name, "task": task, "seed": seed, "epochs": args.epochs, "image_size": args.image_size,
            "train_images": args.train_images, "validation_images": args.validation_images,
            "num_prompts": args.num_prompts if RECIPES[name].method == "vpt" else None,
        }  # fmt: skip
        if not read_lines(args.output, key):
            append_lines(args.output, [run(name, task, seed, args)])
    report(read_lines(args.output))


if __name__ == "__main__":
    main()
