"""What do prompts that a score calls idle do for the loss? Each score's pick against its exact removal.

    python -m examples.research.idle_picks              # runs what is missing, two to five minutes each
    python -m examples.research.idle_picks --report     # prints the table of what is there

Nothing moves in these runs. After some epochs each score picks the prompt that it would move, on the first few images.
The truth is the loss on more images with the prompt minus that without it (Eq. 4). Each look is a line of the results.
"""

from __future__ import annotations

import itertools
import statistics
from argparse import Namespace
from datetime import date
from typing import Any

import torch
from scipy.stats import spearmanr
from tqdm.auto import tqdm

from provpt_peft import RelocationConfig

from . import tasks
from .common import append_lines, exact_idleness, make_base, make_relocator, print_header, read_lines
from .together import Together, parse_study, protocol, rate_of, study_parser, uniform_counts


SCORES = ("activity", "fisher", "taylor")
LOOKS = (1, 2, 4, 6)


def run(task_name: str, budget: int, seed: int, args: Namespace) -> list[dict[str, Any]]:
    """Train once, and look at the scores on the way. Returns a line for each look."""
    task = tasks.load(task_name, args.image_size, args.train_images, args.validation_images, seed)
    base = make_base(task.num_labels, seed, args.model_name_or_path)
    counts = uniform_counts(budget, args.num_blocks)
    together = Together(base, [counts], seed)
    (adapter,) = together.names
    lines = []

    def look(epoch: int) -> None:
        if epoch not in LOOKS:
            return
        with together.active(adapter):
            truth = exact_idleness(together.model, task.train[: args.truth_images])
            line = {
                "suite": "idle_picks", "task": task_name, "budget": budget, "seed": seed, "epoch": epoch,
                **protocol(args), "truth_images": args.truth_images, "mean": truth.mean().item(),
                "highest": truth.max().item(), "date": str(date.today()), "torch": torch.__version__,
            }  # fmt: skip
            for score in SCORES:
                config = RelocationConfig(idleness=score)
                relocator = make_relocator(config, together.model, None, task.train, seed)
                found = relocator.measure()[0].score
                pick = int(found.argmax())
                line[score] = {
                    "idle": int((found > 0).sum()), "pick": pick, "score": found[pick].item(),
                    "true": truth[pick].item(), "spearman": float(spearmanr(found, truth).statistic),
                }  # fmt: skip
        lines.append(line)

    together.fit(task.train, args.epochs, seed, rate_of(counts), after_epoch=look)
    return lines


def print_table(lines: list[dict[str, Any]], args: Namespace) -> None:
    """Print a row for each budget and score."""
    header = ["prompts", "score", "called idle", "picks", "needed", "median", "most", "rank correlation"]
    print()
    print_header(header)
    for budget, score in itertools.product(args.budgets, SCORES):
        looks = [line for line in lines if line["budget"] == budget]
        if not looks:
            continue
        idle = statistics.mean(line[score]["idle"] for line in looks) / budget
        picks = [line for line in looks if line[score]["idle"]]
        # How much the loss rises without the pick, over how much it changes without a prompt on average. At some looks
        # the average prompt raises the loss.
        shares = [-line[score]["true"] / abs(line["mean"]) for line in picks]
        rank = statistics.median(line[score]["spearman"] for line in looks)
        cells = [str(budget), score, f"{100 * idle:.0f} %", f"{len(picks)} of {len(looks)}"]
        if picks:
            needed = sum(share > 0.1 for share in shares)
            cells += [str(needed), f"{statistics.median(shares):+.2f}", f"{max(shares):+.2f}"]
        else:
            cells += ["", "", ""]
        print(f"| {' | '.join([*cells, f'{rank:.2f}'])} |")


def main() -> None:
    parser = study_parser(__doc__, "idle_picks", (12, 60))
    parser.add_argument("--truth_images", type=int, default=128, help="images of the truth (default: 128)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[30], help="default: 30")
    args = parse_study(parser)
    settings = {"suite": "idle_picks"} | protocol(args)
    keys = [] if args.report else itertools.product(args.budgets, args.seeds, args.tasks)
    for budget, seed, task in tqdm(list(keys)):
        present = read_lines(args.output, settings | {"task": task, "budget": budget, "seed": seed})
        if not present:
            append_lines(args.output, run(task, budget, seed, args))
    print_table(read_lines(args.output, settings), args)


if __name__ == "__main__":
    main()
