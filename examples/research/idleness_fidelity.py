"""Which score finds the prompt that a block can do without? Each score against the exact removal of every prompt.

    python -m examples.research.idleness_fidelity
    python -m examples.research.idleness_fidelity --report      # only the table of what was measured

A backbone with 5 prompts in each block is trained as in the demo: DINOv2-S with its own epsilon of 1e-6 or with 1e-12,
and a small Swin with random weights. At each stage every prompt is removed in turn, and the change of the loss on
`--truth_images` training images is the truth. Scores are measured on those images and on the first few of them.
"exact" on the first few shows how far the truth is from itself; the results have other scores as well.

Printed for each: Spearman's rank correlation with the truth, the rank of the prompt it would move (1 is the truly most
idle), the regret of that pick (best true change minus the pick's, over best minus median), and the seconds of an epoch
with the score over those of one without.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from scipy.stats import spearmanr
from tqdm.auto import tqdm
from transformers import SwinConfig, SwinForImageClassification

from provpt_peft import ProVPTConfig, RelocationConfig, Relocator
from provpt_peft.relocation.idleness import Idleness
from provpt_peft.relocation.measure import Measurement

from . import tasks
from .common import (
    PAPER_DROPOUT,
    append_lines,
    as_batch,
    exact_idleness,
    make_model,
    make_optimizer,
    read_lines,
    results_parser,
    train_epoch,
)


def norm(measurement: Measurement) -> Idleness:
    """The shorter a prompt, the more idle."""
    lengths = measurement.tuner.prompts(measurement.adapter_name).detach().norm(dim=1)
    return Idleness.mean_of(-lengths.cpu().double()[None])


def random(measurement: Measurement) -> Idleness:
    """Any prompt."""
    return Idleness.mean_of(torch.rand(1, len(measurement.blocks()), dtype=torch.float64, generator=GENERATOR))


# Of its own, so that training draws the same numbers with and without.
GENERATOR = torch.Generator().manual_seed(0)
SCORES = {"fisher": "fisher", "taylor": "taylor", "norm": norm, "random": random, "exact": "exact"}
BACKBONES: dict[str, Callable[[int, int], PeftModel]] = {
    "DINOv2-S": lambda num_labels, seed: make_model(num_labels=num_labels, seed=seed),
    "DINOv2-S, eps 1e-12": lambda num_labels, seed: make_model(num_labels=num_labels, seed=seed, eps=1e-12),
    "Swin": lambda num_labels, seed: make_swin(num_labels, seed),
}


def make_swin(num_labels: int, seed: int) -> PeftModel:
    """A Swin of random weights for images of 28 px: 8 blocks of two widths, 5 prompts in each."""
    torch.manual_seed(seed)
    config = SwinConfig(
        image_size=28,
        patch_size=2,
        embed_dim=96,
        depths=[2, 6],
        num_heads=[3, 6],
        window_size=7,
        num_labels=num_labels,
    )
    prompts = ProVPTConfig(num_prompts=5, prompt_dropout=PAPER_DROPOUT, modules_to_save=["classifier"])
    return get_peft_model(SwinForImageClassification(config), prompts)


def fidelity(truth: torch.Tensor, score: torch.Tensor) -> dict[str, float]:
    """Rank correlation, rank and regret of the pick."""
    pick = int(score.argmax())
    return {
        "spearman": float(spearmanr(truth, score).statistic),
        "rank": int((truth > truth[pick]).sum()) + 1,
        "regret": ((truth.max() - truth[pick]) / (truth.max() - truth.median())).item(),
    }


def measure(model: Any, train: tasks.Split, truth: torch.Tensor, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All scores at one stage of training."""
    lines = []
    for images in (*args.score_images, args.truth_images):
        for name, score in SCORES.items():
            if name == "exact" and images == args.truth_images:
                continue  # the truth itself
            config = RelocationConfig(idleness=score)
            relocator = Relocator(model, config, score_batches=[as_batch(train[:images])])
            start = time.perf_counter()
            idleness, _ = relocator.measure()
            seconds = time.perf_counter() - start
            lines.append({"score": name, "images": images, "seconds": seconds, **fidelity(truth, idleness.score)})
    return lines


def run(task_name: str, backbone: str, args: argparse.Namespace) -> None:
    """Train once and append the lines of each stage to the results."""
    task = tasks.load(task_name, args.image_size, args.train_images, seed=args.seed)
    model = BACKBONES[backbone](task.num_labels, args.seed)
    optimizer = make_optimizer(model)
    epoch_seconds = None
    for epoch in tqdm(range(max(args.stages) + 1), desc=f"{task_name}, {backbone}"):
        if epoch > 0:
            start = time.perf_counter()
            train_epoch(model, optimizer, task.train, seed=epoch)
            epoch_seconds = time.perf_counter() - start
        if epoch not in args.stages:
            continue
        truth = exact_idleness(model, task.train[: args.truth_images])
        cell = {
            "task": task_name,
            "backbone": backbone,
            "epoch": epoch,
            "best": truth.max().item(),
            "worst": truth.min().item(),
        }
        cell |= {"epoch_seconds": epoch_seconds, "seed": args.seed}
        append_lines(args.output, [cell | line for line in measure(model, task.train, truth, args)])


def report(path: Path) -> None:
    """Print a line for each score: medians over the cells, and the cells in which it falls short. And the default
    score cell by cell."""
    lines = read_lines(path)
    cells = {(line["backbone"], line["task"], line["epoch"]) for line in lines}
    print(f"{len(cells)} cells")
    print("| score | images | Spearman, median | pick in the true top 3 | regret, median | largest | / epoch |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for score, images in dict.fromkeys((line["score"], line["images"]) for line in lines):
        found = [line for line in lines if (line["score"], line["images"]) == (score, images)]
        top = sum(line["rank"] <= 3 for line in found)
        spearman, regret = (statistics.median(line[name] for line in found) for name in ("spearman", "regret"))
        # Not before the first epoch.
        times = [1 + line["seconds"] / line["epoch_seconds"] for line in found if line["epoch_seconds"]] or [math.nan]
        print(
            f"| {score} | {images} | {spearman:.2f} | {top} of {len(found)} | {regret:.2f} | "
            f"{max(line['regret'] for line in found):.2f} | {statistics.median(times):.3f} |"
        )
    images_of = sorted({line["images"] for line in lines if isinstance(line["images"], int)})
    print("\n`fisher`: Spearman, rank of the pick; images in the columns")
    print(f"| backbone | task | epoch | best … worst truth | {' | '.join(map(str, images_of))} |")
    print(f"|{' --- |' * (4 + len(images_of))}")
    for cell in dict.fromkeys((line["backbone"], line["task"], line["epoch"]) for line in lines):
        found = {
            line["images"]: line
            for line in lines
            if (line["backbone"], line["task"], line["epoch"]) == cell and line["score"] == "fisher"
        }
        figures = [f"{found[images]['spearman']:.2f}, {found[images]['rank']}" for images in images_of]
        span = f"{found[images_of[0]]['best']:+.4f} … {found[images_of[0]]['worst']:+.4f}"
        print(f"| {' | '.join(map(str, cell))} | {span} | {' | '.join(figures)} |")


def main() -> None:
    parser = results_parser(__doc__, "idleness_fidelity", train_images=320, image_size=28, seed=0, threads=2)
    parser.add_argument(
        "--tasks", nargs="+", default=["digits", "location"], help="names of tasks.py (default: digits location)"
    )
    parser.add_argument("--backbones", nargs="+", default=list(BACKBONES), choices=BACKBONES, help="which (all)")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 3, 10], help="epochs (default: 0 1 3 10)")
    parser.add_argument("--truth_images", type=int, default=256, help="images of the truth (default: 256)")
    parser.add_argument("--score_images", type=int, nargs="+", default=[32, 128], help="images of the scores as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.report:
        lines = read_lines(args.output)
        done = {(line["task"], line["backbone"]) for line in lines if line["epoch"] == max(args.stages)}
        for task in args.tasks:
            for backbone in args.backbones:
                if (task, backbone) not in done:
                    run(task, backbone, args)
    report(args.output)


if __name__ == "__main__":
    main()
