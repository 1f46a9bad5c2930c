"""What relocators gain over prompts that stay where they are, in pairs: same images, same seed, same batches.

    python -m examples.research.relocators                             # runs what is missing
    python -m examples.research.relocators --budgets 12 --tasks count
    python -m examples.research.relocators --report                    # prints the tables of what is there

All begin with the uniform distribution. Those of a task, budget and seed are trained together. Each run is one line of
the results file, and all lines of those that are trained together are written at their end.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch
from tqdm.auto import tqdm

from provpt_peft import RelocationConfig, Relocator

from . import tasks
from .common import (
    Mover,
    append_lines,
    make_base,
    make_relocator,
    mean_and_error,
    mean_error_and_number,
    print_header,
    read_lines,
    refuse_other_images,
)
from .together import Together, parse_study, protocol, rate_of, study_parser, uniform_counts


BUDGETS = (24, 60)
UNIFORM = "uniform"
METRICS = {"validation": "validation_accuracy", "test": "test_accuracy"}


class Restart:
    """Gives prompts new vectors where they stand: those that `"fisher, unchecked"` would move, when it would."""

    def __init__(self, relocator: Relocator, optimizer: torch.optim.Optimizer, seed: int) -> None:
        self.relocator = relocator
        self.optimizer = optimizer
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def relocate(self, progress: float) -> None:
        """Give the most idle prompt a new vector, if its score is above 0."""
        if not 0 < progress < 1 - self.relocator.config.settle:
            return
        idleness, _ = self.relocator.measure()
        prompt = idleness.ranking()[0]
        if idleness.score[prompt] > 0:
            bound = self.relocator.tuner.bank.bound
            prompts = self.relocator.tuner.prompts(self.relocator.adapter_name)
            prompts[prompt].uniform_(-bound, bound, generator=self.generator)
            state = self.optimizer.state[prompts]
            state["exp_avg"][prompt] = 0
            state["exp_avg_sq"][prompt] = state["exp_avg_sq"].mean(dim=0)

    def finish(self) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True)
class Candidate:
    """What is compared.

    Args:
        relocation: How its prompts move; None if they stay.
        restart: Instead of moving, the prompts get new vectors.
        learning_rate: Of the prompts; None for that of `rate_of`.
    """

    relocation: RelocationConfig | None = None
    restart: bool = False
    learning_rate: float | None = None


_FISHER = RelocationConfig(idleness="fisher")
_UNCHECKED = replace(_FISHER, check_moves=False)
CANDIDATES: dict[str, Candidate] = {
    UNIFORM: Candidate(),
    "default": Candidate(RelocationConfig()),
    "default, unchecked": Candidate(RelocationConfig(check_moves=False)),
    "fisher": Candidate(_FISHER),
    "fisher, unchecked": Candidate(_UNCHECKED),
    "fisher, unchecked, 128 images": Candidate(replace(_UNCHECKED, score_images=128)),
    "exact, unchecked, 128 images": Candidate(replace(_UNCHECKED, idleness="exact", score_images=128)),
    "restart": Candidate(_UNCHECKED, restart=True),
    "paper": Candidate(RelocationConfig.preset("paper")),
    **{f"uniform at {rate:g}": Candidate(learning_rate=rate) for rate in (3e-3, 6e-3, 1.2e-2, 2.4e-2)},
}
DEFAULT = (UNIFORM, "default", "fisher, unchecked")


def run(task_name: str, budget: int, names: Sequence[str], seed: int, args: Namespace) -> list[dict[str, Any]]:
    """Train and test some candidates. Returns their lines of the results; accuracies in percent."""
    task = tasks.load(task_name, args.image_size, args.train_images, args.validation_images, seed)
    data_hash = tasks.data_hash(task)
    refuse_other_images(task_name, seed, data_hash, args)
    counts = uniform_counts(budget, args.num_blocks)
    base = make_base(task.num_labels, seed, args.model_name_or_path)
    together = Together(base, [counts] * len(names), seed)
    of_adapter = dict(zip(together.names, (CANDIDATES[name] for name in names), strict=True))
    rates = [c.learning_rate or rate_of(counts) for c in of_adapter.values()]

    def movers(optimizer: torch.optim.Optimizer) -> dict[str, Mover]:
        made: dict[str, Mover] = {}
        for adapter, candidate in of_adapter.items():
            if candidate.relocation is not None:
                with together.active(adapter):
                    relocator = make_relocator(candidate.relocation, together.model, optimizer, task.train, seed)
                made[adapter] = Restart(relocator, optimizer, seed) if candidate.restart else relocator
        return made

    together.fit(task.train, args.epochs, seed, rates, movers=movers)
    lines = []
    for adapter, name, rate in zip(together.names, names, rates, strict=True):
        lines.append({
            "suite": "relocators", "task": task_name, "budget": budget, "candidate": name, "seed": seed,
            **protocol(args), "learning_rate": rate, **together.results(adapter, task),
            "counts": together.model.base_model.prompt_distribution(adapter),
            "data_hash": data_hash, "date": str(date.today()), "torch": torch.__version__,
        })  # fmt: skip
    return lines


Key = tuple[str, int, str, int]


def finished(args: Namespace) -> dict[Key, dict[str, Any]]:
    """The runs of the results file that followed the protocol, by task, budget, candidate and seed."""
    lines = read_lines(args.output, {"suite": "relocators"} | protocol(args))
    return {(line["task"], line["budget"], line["candidate"], line["seed"]): line for line in lines}


def print_table(budget: int, args: Namespace) -> None:
    """Print a row for each candidate of a budget: accuracies less those of the one that they are compared with."""
    lines = finished(args)
    header = ["candidate", "moves", *args.tasks, *(f"all pairs, {split}" for split in METRICS)]
    print(f"\n{budget} prompts: accuracy less that of {args.against!r}, in points\n")
    print_header(header)
    for name in args.candidates:
        pairs = [
            (task, line, lines[task, budget, args.against, seed])
            for task, seed in itertools.product(args.tasks, args.seeds)
            if (line := lines.get((task, budget, name, seed))) and (task, budget, args.against, seed) in lines
        ]
        if name == args.against or not pairs:
            continue
        by_split = {
            split: [(task, line[metric] - other[metric]) for task, line, other in pairs]
            for split, metric in METRICS.items()
        }
        cells = [
            mean_and_error(found, "+.1f") if (found := [d for of, d in by_split["test"] if of == task]) else ""
            for task in args.tasks
        ]
        cells += [mean_error_and_number([d for _, d in of], "+.1f") for of in by_split.values()]
        moved = sum(map(distance, (line["counts"] for _, line, _ in pairs), (o["counts"] for _, _, o in pairs)))
        print(f"| {name} | {moved / len(pairs):.1f} | {' | '.join(cells)} |")


def distance(counts: Sequence[int], others: Sequence[int]) -> int:
    """How many prompts have to move to make one distribution of another."""
    return sum(max(0, count - other) for count, other in zip(counts, others, strict=True))


def main() -> None:
    parser = study_parser(__doc__, "relocators", BUDGETS)
    parser.add_argument(
        "--candidates", nargs="+", default=list(DEFAULT), choices=CANDIDATES, help=f"default: {', '.join(DEFAULT)}"
    )
    parser.add_argument("--against", default=UNIFORM, choices=CANDIDATES, help="what they are compared with")
    parser.add_argument("--seeds", nargs="+", type=int, default=[20, 21, 22], help="default: 20 21 22")
    args = parse_study(parser)
    for budget, seed in itertools.product([] if args.report else args.budgets, args.seeds):
        for task in tqdm(args.tasks, desc=f"{budget} prompts, seed {seed}"):
            absent = [name for name in args.candidates if (task, budget, name, seed) not in finished(args)]
            if absent:
                append_lines(args.output, run(task, budget, absent, seed, args))
    for budget in args.budgets:
        print_table(budget, args)


if __name__ == "__main__":
    main()
