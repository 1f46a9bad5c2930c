"""Which score finds the prompt that a block can do without? Each score against the exact removal of every prompt.

    python examples/benchmarks/idleness_fidelity.py
    python examples/benchmarks/idleness_fidelity.py --report      # only the table of what was measured

A DINOv2-S with 60 prompts is trained as in the demo. At each stage every prompt is removed in turn, and the change of
the loss on `--truth_images` training images is the truth. Scores are measured on those images, on the first few of
them, or gathered in the training steps of the epoch before. Printed for each: Spearman's rank correlation with the
truth, the rank of the prompt it would move (1 is the truly most idle), the regret of that pick (best true change minus
the pick's, over best minus median), and the seconds it takes over those of a training epoch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import tasks
import torch
from scipy.stats import spearmanr
from tqdm.auto import tqdm
from training import append_lines, exact_idleness, make_model, make_optimizer, read_lines, train_epoch

from provpt_peft import RelocationConfig, Relocator
from provpt_peft.relocation.idleness import Idleness


SCORES = ("fisher", "gate", "taylor", "norm", "random")


def fidelity(truth: torch.Tensor, ranking: list[int], idleness: Idleness | None) -> dict[str, float]:
    """Rank correlation, rank and regret of the pick. Without scores the ranking stands in for them."""
    pick = ranking[0]
    score = idleness.score if idleness is not None else -torch.tensor(ranking).argsort().double()
    return {
        "spearman": float(spearmanr(truth, score).statistic),
        "rank": int((truth > truth[pick]).sum()) + 1,
        "regret": ((truth.max() - truth[pick]) / (truth.max() - truth.median())).item(),
    }


def measure(
    model: Any, train: tasks.Split, truth: torch.Tensor, in_steps: Relocator, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """All scores at one stage of training."""
    lines = []
    for images in (*args.score_images, args.truth_images):
        part = train[:images]
        batches = [{"pixel_values": part.images, "labels": part.labels}]
        for name, screen in [*((name, 0) for name in SCORES), ("fisher", 2), ("fisher", 4)]:
            relocator = Relocator(model, RelocationConfig(idleness=name, screen=screen), score_batches=batches)
            start = time.perf_counter()
            idleness, _ = relocator.measure(batches)
            seconds = time.perf_counter() - start
            ranking = relocator.ranking(idleness)
            by_score = None if name in ("norm", "random") else idleness
            title = f"{name}, best of {screen} removed" if screen else name
            lines.append({"score": title, "images": images, "seconds": seconds, **fidelity(truth, ranking, by_score)})
    idleness = in_steps.window.scores()
    if idleness.images.any():
        found = fidelity(truth, idleness.ranking(), idleness)
        lines.append({"score": "fisher", "images": "training steps", "seconds": 0.0, **found})
    return lines


def run(task_name: str, eps: float, args: argparse.Namespace) -> None:
    """Train once and append the lines of each stage to the results."""
    task = tasks.load(task_name, args.image_size, args.train_images, seed=args.seed)
    model = make_model(eps=eps, num_labels=task.num_labels, seed=args.seed)
    optimizer = make_optimizer(model)
    probe = task.train[: args.truth_images]
    epoch_seconds = None
    for epoch in tqdm(range(max(args.stages) + 1), desc=f"{task_name}, eps {eps}"):
        in_steps = Relocator(model, RelocationConfig(score_images=0)) if epoch in args.stages else None
        if epoch > 0:
            start = time.perf_counter()
            record = in_steps.record_step if in_steps is not None else lambda loss: None
            train_epoch(model, optimizer, task.train.images, task.train.labels, seed=epoch, after_backward=record)
            if in_steps is None:
                epoch_seconds = time.perf_counter() - start
        if in_steps is None:
            continue
        truth = exact_idleness(model, probe.images, probe.labels)
        cell = {"task": task_name, "eps": eps, "epoch": epoch, "best": truth.max().item(), "worst": truth.min().item()}
        cell |= {"epoch_seconds": epoch_seconds, "seed": args.seed}
        append_lines(args.output, [cell | line for line in measure(model, task.train, truth, in_steps, args)])


def report(path: Path) -> None:
    """Print a line for each score: medians over the cells, and the cells in which it falls short."""
    lines = read_lines(path)
    cells = {(line["task"], line["eps"], line["epoch"], line["seed"]) for line in lines}
    print(f"{len(cells)} cells: {sorted(cells)}")
    print("| score | images | Spearman, median | pick in the true top 3 | regret, median | largest | / epoch |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    # None before the first epoch that was only trained.
    epochs = [line["epoch_seconds"] for line in lines if line["epoch_seconds"]]
    epoch_seconds = statistics.median(epochs) if epochs else float("nan")
    for score, images in dict.fromkeys((line["score"], line["images"]) for line in lines):
        found = [line for line in lines if (line["score"], line["images"]) == (score, images)]
        top = sum(line["rank"] <= 3 for line in found)
        spearman, regret, time_taken = (
            statistics.median(line[name] for line in found) for name in ("spearman", "regret", "seconds")
        )
        print(
            f"| {score} | {images} | {spearman:.2f} | {top} of {len(found)} | {regret:.2f} | "
            f"{max(line['regret'] for line in found):.2f} | {1 + time_taken / epoch_seconds:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["digits", "orientation"], help="digits, orientation")
    parser.add_argument("--eps", type=float, nargs="+", default=[1e-6, 1e-12], help="epsilons of the norms")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 3, 10], help="epochs (default: 0 1 3 10)")
    parser.add_argument("--truth_images", type=int, default=256, help="images of the truth (default: 256)")
    parser.add_argument("--score_images", type=int, nargs="+", default=[32, 64], help="images of the scores as well")
    parser.add_argument("--train_images", type=int, default=800, help="training images (default: 800)")
    parser.add_argument("--image_size", type=int, default=56, help="side of an image in pixels (default: 56)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("results/idleness_fidelity.jsonl"), help="results file")
    parser.add_argument("--report", action="store_true", help="only print the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.report:
        lines = read_lines(args.output)
        done = {(line["task"], line["eps"]) for line in lines if line["epoch"] == max(args.stages)}
        for task in args.tasks:
            for eps in args.eps:
                if (task, eps) not in done:
                    run(task, eps, args)
    report(args.output)


if __name__ == "__main__":
    main()
