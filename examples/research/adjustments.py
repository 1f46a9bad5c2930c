"""What does one prompt more, or one prompt elsewhere, do to a block? The paper's Findings 1 to 3 and Observation 3.

    python -m examples.research.adjustments             # measures what is missing, prints and draws
    python -m examples.research.adjustments --report    # only prints and draws

A DINOv2-S with prompts is trained as in the demo. At each stage of the training one prompt is added to, or the most
idle prompt that was not tried yet is moved to, each block in turn, always from the same state. Loss and accuracy on
validation images are measured before and after one epoch of tuning, as the difference from the same model without the
adjustment, tuned on the same batches. Repeats differ in the prompt and in the batches.

For moves, three more things are measured. The cosine similarity of the [CLS] features after each block with those
before the relocation: after pruning, after allocation and after tuning, and, to compare, after tuning without a move.
Both rewards. And how much of a reward's variance the block explains: its variance component over that and the rest's.
"""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch.nn import functional as F
from tqdm.auto import tqdm

from provpt_peft import ProVPTConfig, RelocationConfig, Relocator
from provpt_peft.relocation.placement import place

from . import tasks
from .common import (
    PAPER_DROPOUT,
    append_lines,
    make_base,
    make_optimizer,
    read_lines,
    results_parser,
    score_batch,
    train_epoch,
    variance_components,
)
from .pictures import BLUE, GREEN, VERMILLION, plt, save


COLOURS = (BLUE, VERMILLION, GREEN)
MEASURES = ("loss", "accuracy")
# Images whose features are compared.
FEATURE_IMAGES = 100


def similarity(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """Cosine similarity for each block, the mean over images."""
    return F.cosine_similarity(one, other, dim=-1).mean(dim=1).tolist()


class Bench:
    """A model in training that can be put back to where it was."""

    def __init__(self, task_name: str, eps: float, args: argparse.Namespace) -> None:
        self.args = args
        self.task = tasks.load(task_name, args.image_size, args.train_images, args.validation_images, args.seed)
        base = make_base(self.task.num_labels, args.seed, args.model_name_or_path, layer_norm_eps=eps)
        # The reserve is what is added.
        config = ProVPTConfig(
            num_prompts=args.num_prompts, reserve=args.repeats, prompt_dropout=PAPER_DROPOUT,
            modules_to_save=["classifier"],
        )  # fmt: skip
        self.model = get_peft_model(base, config)
        self.tuner = self.model.base_model
        self.optimizer = make_optimizer(self.model)
        batch = score_batch(self.task.train, RelocationConfig().score_images, args.seed)
        self.relocator = Relocator(self.model, optimizer=self.optimizer, score_batches=[batch])

    def train(self, seed: int) -> None:
        torch.manual_seed(seed)  # of the dropout
        train_epoch(self.model, self.optimizer, self.task.train, seed)

    def measures(self) -> dict[str, float]:
        """Mean loss and accuracy (%) on the validation images."""
        loss, accuracy = tasks.evaluate(self.model, self.task.validation)
        return {"loss": loss, "accuracy": 100 * accuracy}

    @torch.no_grad()
    def features(self) -> torch.Tensor:
        """[CLS] features after each block, (L, B, D)."""
        images = self.task.validation.images[:FEATURE_IMAGES]
        return torch.stack(self.model.eval()(pixel_values=images, output_hidden_states=True).hidden_states[1:])[
            :, :, 0
        ]

    def state(self) -> tuple[Any, Any]:
        trained = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}
        return (trained, self.tuner.prompt_blocks().tolist()), copy.deepcopy(self.optimizer.state_dict())

    @torch.no_grad()
    def restore(self, state: tuple[Any, Any]) -> None:
        (trained, blocks), optimizer = state
        for name, parameter in self.model.named_parameters():
            if name in trained:
                parameter.copy_(trained[name])
        for prompt, block in enumerate(blocks):
            self.tuner.move_prompt(prompt, block)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))


def measure_stage(bench: Bench, cell: dict[str, Any], adjustments: list[str], path: Path) -> None:
    """All adjustments at one stage of training; a line for each repeat is added to the results."""
    origin = bench.state()
    before, features_before = bench.measures(), bench.features()
    idleness, loss_before = bench.relocator.measure()
    most_idle = idleness.ranking()
    for repeat in range(bench.args.repeats):
        seed = 1000 * (repeat + 1) + cell["epoch"]
        bench.train(seed)
        tuned, features_tuned = bench.measures(), bench.features()
        untouched = similarity(features_before, features_tuned)
        bench.restore(origin)
        for adjustment in adjustments:
            blocks = bench.tuner.prompt_blocks()
            reserve = (blocks == 0).nonzero()[:, 0].tolist()
            prompt = (most_idle if adjustment == "move" else reserve)[repeat]
            bench.tuner.move_prompt(prompt, 0)
            pruned = similarity(features_before, bench.features())
            line = cell | {"adjustment": adjustment, "repeat": repeat, "prompt": prompt, "by_block": []}
            line |= {"idleness": idleness.score.tolist(), "idleness_stderr": idleness.stderr.tolist()}
            line |= {"from_block": int(blocks[prompt]), "similarity_pruned": pruned, "similarity_untouched": untouched}
            for block in range(1, bench.tuner.num_blocks + 1):
                bench.restore(origin)
                if block != blocks[prompt]:
                    place(bench.tuner, "default", prompt, block, bench.optimizer)
                placed, similarity_placed = bench.measures(), similarity(features_before, bench.features())
                bench.train(seed)
                after, loss_after = bench.relocator.measure()
                now = bench.measures()
                line["by_block"].append({
                    "block": block,
                    "untuned": {name: placed[name] - before[name] for name in MEASURES},
                    "tuned": {name: now[name] - tuned[name] for name in MEASURES},
                    "similarity_placed": similarity_placed,
                    "similarity_tuned": similarity(features_before, bench.features()),
                    # Eq. 8, without the score of the prompt, which is the same for all blocks.
                    "paper": loss_before - loss_after,
                    "counterfactual": -after.score[prompt].item(),
                })  # fmt: skip
            bench.restore(origin)
            append_lines(path, [line])


def run(task_name: str, eps: float, adjustments: list[str], args: argparse.Namespace) -> None:
    """Train once and measure at each stage."""
    bench = Bench(task_name, eps, args)
    for epoch in tqdm(range(1, max(args.stages) + 1), desc=f"{task_name}, eps {eps}"):
        bench.train(seed=epoch)
        if epoch in args.stages:
            cell = {"task": task_name, "eps": eps, "epoch": epoch, "seed": args.seed} | bench.measures()
            measure_stage(bench, cell, adjustments, args.output)


def cells_of(lines: list[dict[str, Any]]) -> dict[tuple[str, float, int, str], list[dict[str, Any]]]:
    """The repeats of each task, epsilon, epoch and adjustment."""
    cells: dict[tuple[str, float, int, str], list[dict[str, Any]]] = {}
    for line in lines:
        cells.setdefault((line["task"], line["eps"], line["epoch"], line["adjustment"]), []).append(line)
    return cells


def rewards_of(lines: list[dict[str, Any]], reward: str) -> torch.Tensor:
    """Rewards of the repeats of a cell, (repeats, L)."""
    return torch.tensor([[block[reward] for block in line["by_block"]] for line in lines], dtype=torch.float64)


def report(path: Path, pictures: Path) -> None:
    """Print the tables and draw a picture for each task."""
    lines = read_lines(path)
    print(
        "| task | eps | epoch | adjustment | loss: lowest … highest of blocks | loss, tuned | accuracy, tuned (pp) |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    groups = cells_of(lines)
    for group, found in groups.items():
        cells = []
        for when, name in (("untuned", "loss"), ("tuned", "loss"), ("tuned", "accuracy")):
            means = by_block(found, when, name)[0]
            digits = 4 if name == "loss" else 1
            cells.append(f"{means.min():+.{digits}f} … {means.max():+.{digits}f}")
        print(f"| {' | '.join(map(str, group))} | {' | '.join(cells)} |")

    print(
        "\n| task | eps | epoch | adjustment | variance explained by the block: paper | counterfactual | loss, tuned |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (task, eps, epoch, adjustment), found in groups.items():
        if len(found) >= 2:
            values = [rewards_of(found, reward) for reward in ("paper", "counterfactual")]
            values.append(by_repeat_and_block(found, "tuned", "loss"))
            shares = [block / (block + rest) for block, _, rest in map(variance_components, values)]
            cells = " | ".join(f"{share:.2f}" for share in shares)
            print(f"| {task} | {eps} | {epoch} | {adjustment} | {cells} |")

    print("\n| task | eps | epoch | similarity, lowest of blocks: pruned | allocated | tuned | tuned, no move |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (task, eps, epoch, adjustment), found in groups.items():
        if adjustment == "move":
            curves = [[r["similarity_pruned"] for r in found]]
            curves += [[b[f"similarity_{s}"] for r in found for b in r["by_block"]] for s in ("placed", "tuned")]
            curves.append([r["similarity_untouched"] for r in found])
            lowest = [torch.tensor(curve).mean(dim=0).min().item() for curve in curves]
            print(f"| {task} | {eps} | {epoch} | {' | '.join(f'{value:.4f}' for value in lowest)} |")

    for task, eps in dict.fromkeys((r["task"], r["eps"]) for r in lines):
        draw([r for r in lines if (r["task"], r["eps"]) == (task, eps)], pictures / f"adjustments_{task}_{eps:g}.png")


def by_repeat_and_block(lines: list[dict[str, Any]], when: str, name: str) -> torch.Tensor:
    """Differences of the repeats of a cell, (repeats, L)."""
    return torch.tensor([[block[when][name] for block in line["by_block"]] for line in lines])


def by_block(lines: list[dict[str, Any]], when: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard error over repeats for each block, (L,)."""
    values = by_repeat_and_block(lines, when, name)
    return values.mean(dim=0), values.std(dim=0) / math.sqrt(len(values))


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Change of loss and accuracy over the block, before and after tuning."""
    adjustments = list(dict.fromkeys(line["adjustment"] for line in lines))
    columns = [(when, name) for name in MEASURES for when in ("untuned", "tuned")]
    figure, axes = plt.subplots(len(adjustments), 4, figsize=(15, 3.2 * len(adjustments)), squeeze=False, sharex=True)
    for row, adjustment in zip(axes, adjustments, strict=True):
        for axis, (when, name) in zip(row, columns, strict=True):
            for colour, epoch in zip(COLOURS, sorted({line["epoch"] for line in lines}), strict=False):
                found = [r for r in lines if (r["adjustment"], r["epoch"]) == (adjustment, epoch)]
                mean, error = by_block(found, when, name)
                blocks = range(1, len(mean) + 1)
                axis.errorbar(blocks, mean, error, color=colour, marker="o", markersize=3, label=f"epoch {epoch}")
            axis.axhline(0, color="black", linewidth=0.6)
            axis.set_title(f"{adjustment}, {'after tuning' if when == 'tuned' else 'before tuning'}", fontsize=10)
            axis.set_ylabel("change of loss" if name == "loss" else "change of accuracy (pp)")
            axis.set_xticks(list(blocks))
    for axis in axes[-1]:
        axis.set_xlabel("block")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    save(figure, path)


def main() -> None:
    parser = results_parser(
        __doc__, "adjustments", checkpoint=True,
        train_images=320, validation_images=300, image_size=28, num_prompts=5, seed=0, threads=2,
    )  # fmt: skip
    parser.add_argument("--tasks", nargs="+", default=["digits"], help="names of tasks.py (default: digits)")
    parser.add_argument("--eps", type=float, nargs="+", default=[1e-6], help="epsilons of the norms (default: 1e-6)")
    parser.add_argument("--adjustments", nargs="+", default=["add", "move"], choices=["add", "move"], help="which")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 4, 10], help="epochs (default: 1 4 10)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each adjustment (default: 5)")
    parser.add_argument("--pictures", type=Path, default=Path("docs/images"), help="folder of the pictures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.report:
        done = {(line["task"], line["eps"]) for line in read_lines(args.output) if line["epoch"] == max(args.stages)}
        for task in args.tasks:
            for eps in args.eps:
                if (task, eps) not in done:
                    run(task, eps, args.adjustments, args)
    report(args.output, args.pictures)


if __name__ == "__main__":
    main()
