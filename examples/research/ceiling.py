"""What is a distribution of the prompts worth? Accuracy with fixed ones: the uniform one, and random ones beside it.

    python -m examples.research.ceiling                   # runs what is missing: 800, then the fresh seeds'
    python -m examples.research.ceiling --budgets 12 --tasks location
    python -m examples.research.ceiling --report          # prints the tables and draws the picture of what is there

Each budget has 24 distributions, the same for all tasks and seeds: a bump somewhere in the backbone, wide or narrow,
with noise (`random_counts`). Nothing moves in training. The best tenth by validation accuracy over two seeds is then
run against the uniform one on other seeds and their images. The distributions of a task, budget and seed are trained
together: their images go through the frozen backbone in one batch, which halves the time. Each run is one line of the
results file, and all lines of those that are trained together are written at their end.
"""

from __future__ import annotations

import itertools
import math
import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from tqdm.auto import tqdm

from . import tasks
from .common import (
    append_lines,
    make_base,
    mean_error_and_number,
    print_header,
    read_lines,
    refuse_other_images,
    variance_components,
)
from .pictures import BLUE, GREEN, ORANGE, VERMILLION, plt, save
from .together import Together, parse_study, protocol, rate_of, study_parser, uniform_counts


BUDGETS = (12, 6, 24, 60)
COLOURS = (VERMILLION, ORANGE, GREEN, BLUE)
UNIFORM = "uniform"
# The share of the distributions that is run on the fresh seeds.
BEST = 0.1


def random_counts(budget: int, num_blocks: int, number: int) -> list[int]:
    """Prompts in each block in random distribution `number` of a budget: multinomial, with weights of a normal bump
    whose centre (anywhere in the backbone) and width (1 to 6 blocks) are random, times exponential noise."""
    generator = torch.Generator().manual_seed(1000 * budget + number)
    centre, width = torch.rand(2, generator=generator).tolist()
    distances = torch.arange(num_blocks) - centre * (num_blocks - 1)
    weights = torch.exp(-(distances**2) / 2 / (1 + 5 * width) ** 2)
    weights *= torch.empty(num_blocks).exponential_(generator=generator)
    chosen = torch.multinomial(weights, budget, replacement=True, generator=generator)
    return torch.bincount(chosen, minlength=num_blocks).tolist()


def distributions(budget: int, args: Namespace) -> dict[str, list[int]]:
    """The distributions of a budget by name."""
    numbers = range(args.distributions)
    return {UNIFORM: uniform_counts(budget, args.num_blocks)} | {
        f"random {number}": random_counts(budget, args.num_blocks, number) for number in numbers
    }


def run(task_name: str, budget: int, names: Sequence[str], seed: int, args: Namespace) -> list[dict[str, Any]]:
    """Train and test some distributions. Returns their lines of the results; accuracies in percent."""
    task = tasks.load(task_name, args.image_size, args.train_images, args.validation_images, seed)
    data_hash = tasks.data_hash(task)
    refuse_other_images(task_name, seed, data_hash, args)
    of_names = distributions(budget, args)
    counts = [of_names[name] for name in names]
    together = Together(make_base(task.num_labels, seed, args.model_name_or_path), counts, seed)
    rates = list(map(rate_of, counts))
    # What a search that drops distributions early would see.
    looks: dict[str, list[dict[str, float]]] = {adapter: [] for adapter in together.names}

    def look(epoch: int) -> None:
        for adapter in together.names if epoch in args.looks else ():
            loss, accuracy = together.evaluate(adapter, task.validation)
            looks[adapter].append({"epoch": epoch, "validation_loss": loss, "validation_accuracy": 100 * accuracy})

    together.fit(task.train, args.epochs, seed, rates, after_epoch=look)
    lines = []
    for adapter, name, of_name in zip(together.names, names, counts, strict=True):
        lines.append({
            "suite": "ceiling", "task": task_name, "budget": budget, "distribution": name, "counts": of_name,
            "seed": seed, **protocol(args), "learning_rate": rate_of(of_name), "looks": looks[adapter],
            **together.results(adapter, task),
            "data_hash": data_hash, "date": str(date.today()), "torch": torch.__version__,
        })  # fmt: skip
    return lines


class Results:
    """The runs of a results file that followed the protocol, by task, budget, distribution and seed."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        lines = read_lines(args.output, {"suite": "ceiling"} | protocol(args))
        of_budgets = {budget: distributions(budget, args) for budget in {line["budget"] for line in lines}}
        self.lines = {
            (line["task"], line["budget"], line["distribution"], line["seed"]): line
            for line in lines
            # Other releases of PyTorch may draw other distributions, and the rate's rule may change.
            if line["counts"] == of_budgets[line["budget"]].get(line["distribution"])
            and line["learning_rate"] == rate_of(line["counts"])
        }

    def values(self, task: str, budget: int, seeds: list[int], metric: str) -> dict[str, list[float]]:
        """A metric of each distribution that has been run with all of some seeds, the uniform one first."""
        found = {
            name: [self.lines.get((task, budget, name, seed)) for seed in seeds]
            for name in distributions(budget, self.args)
        }
        return {name: [line[metric] for line in runs if line] for name, runs in found.items() if all(runs)}

    def complete(self, task: str, budget: int) -> bool:
        """Whether the search's runs of a task and budget are all there."""
        return next(self.missing(task, budget, fresh=False), None) is None

    def best(self, task: str, budget: int) -> list[str]:
        """The best tenth of the random distributions by validation accuracy; none before all have been run."""
        if not self.complete(task, budget):
            return []
        accuracies = self.values(task, budget, self.args.seeds, "validation_accuracy")
        del accuracies[UNIFORM]
        ranked = sorted(accuracies, key=lambda name: statistics.mean(accuracies[name]), reverse=True)
        return ranked[: math.ceil(BEST * len(ranked))]

    def missing(self, task: str, budget: int, fresh: bool) -> Iterator[tuple[str, int, list[str], int]]:
        """The runs of a task and budget that are still to be made: the search's, or those on the fresh seeds. Those
        that share a seed come together."""
        names = list(distributions(budget, self.args)) if not fresh else [UNIFORM, *self.best(task, budget)]
        if fresh and len(names) == 1:
            return
        for seed in self.args.fresh_seeds if fresh else self.args.seeds:
            absent = [name for name in names if (task, budget, name, seed) not in self.lines]
            if absent:
                yield task, budget, absent, seed


def first_block(counts: list[int]) -> float:
    """The first block that has prompts, from 1."""
    return next(block for block, count in enumerate(counts, 1) if count)


def centre(counts: list[int]) -> float:
    """The mean block of a prompt, from 1."""
    return sum(block * count for block, count in enumerate(counts, 1)) / sum(counts)


def used_blocks(counts: list[int]) -> float:
    """Effective number of blocks that are used: the exponential of the distribution's entropy."""
    used = [count / sum(counts) for count in counts if count]
    return math.exp(-sum(share * math.log(share) for share in used))


TRAITS = {"first block": first_block, "centre of mass": centre, "blocks used": used_blocks}


def gains(results: Results, task: str, budget: int, names: Sequence[str], seeds: list[int]) -> list[float]:
    """Test accuracy of some distributions, their mean, minus the uniform one's, of each seed; none before all have
    been run."""
    accuracies = results.values(task, budget, seeds, "test_accuracy")
    if not names or not {UNIFORM, *names} <= set(accuracies):
        return []
    by_seed = zip(zip(*(accuracies[name] for name in names), strict=True), accuracies[UNIFORM], strict=True)
    return [statistics.mean(of_seed) - uniform for of_seed, uniform in by_seed]


def best_of_others(results: Results, task: str, budget: int) -> list[str]:
    """The distribution that is best on the other tasks by validation accuracy; none where no other has been run."""
    others = [other for other in results.args.tasks if other != task and results.complete(other, budget)]
    of_tasks = [results.values(other, budget, results.args.seeds, "validation_accuracy") for other in others]
    if not of_tasks:
        return []
    means = {name: statistics.mean(run for of_task in of_tasks for run in of_task[name]) for name in of_tasks[0]}
    return [max(means, key=means.__getitem__)]


def random_ones(results: Results, task: str, budget: int) -> tuple[float, dict[str, list[float]]]:
    """Mean test accuracy of the uniform distribution over the search's seeds, and the random ones' by seed."""
    accuracies = results.values(task, budget, results.args.seeds, "test_accuracy")
    return statistics.mean(accuracies.pop(UNIFORM)), accuracies


def looked_at(results: Results, task: str, budget: int, epoch: int) -> float:
    """Rank correlation of validation accuracies after some epochs with test accuracies at the end, the mean over the
    search's seeds: what dropping distributions early would go by."""
    names = list(distributions(budget, results.args))
    ranks = []
    for seed in results.args.seeds:
        lines = [results.lines[task, budget, name, seed] for name in names]
        early = [look["validation_accuracy"] for line in lines for look in line["looks"] if look["epoch"] == epoch]
        if len(early) == len(lines):
            ranks.append(spearmanr(early, [line["test_accuracy"] for line in lines]).statistic)
    return statistics.mean(ranks) if ranks else math.nan


def _differences(pairs: list[float]) -> str:
    return mean_error_and_number(pairs, "+.1f")


def print_tables(results: Results) -> None:
    """Print what distributions are worth, then what the good ones have in common and how early it shows: a row for
    each budget and task that has all runs of the search."""
    args = results.args
    done = {budget: [task for task in args.tasks if results.complete(task, budget)] for budget in sorted(args.budgets)}
    header = ["prompts", "task", "uniform", "random", "lowest", "highest"]
    header += ["sd of distributions", "of seeds", "of the rest", "best tenth - uniform, fresh seeds"]
    print()
    print_header([*header, "best of the other tasks - uniform"])
    for budget, of_budget in done.items():
        best, of_others = [], []
        for task in of_budget:
            uniform, accuracies = random_ones(results, task, budget)
            means = [statistics.mean(runs) for runs in accuracies.values()]
            spreads = map(math.sqrt, variance_components(torch.tensor(list(accuracies.values())).T))
            numbers = [uniform, statistics.mean(means), min(means), max(means), *spreads]
            others = best_of_others(results, task, budget)
            best.append(gains(results, task, budget, results.best(task, budget), args.fresh_seeds))
            of_others.append(gains(results, task, budget, others, args.seeds))
            chosen = UNIFORM if others == [UNIFORM] else ": ".join([*others, _differences(of_others[-1])])
            cells = [str(budget), task, *(f"{number:.1f}" for number in numbers), _differences(best[-1]), chosen]
            print(f"| {' | '.join(cells)} |")
        if len(of_budget) > 1:
            pooled = [_differences([*itertools.chain(*by_task)]) for by_task in (best, of_others)]
            print(f"| {' | '.join([str(budget), 'all', *[''] * 7, *pooled])} |")

    epochs = sorted({look["epoch"] for line in results.lines.values() for look in line["looks"]})
    print()
    print_header(["prompts", "task", *TRAITS, *(f"after {epoch} epochs" for epoch in epochs)])
    for budget, of_budget in done.items():
        of_names = distributions(budget, args)
        for task in of_budget:
            _, accuracies = random_ones(results, task, budget)
            means = [statistics.mean(runs) for runs in accuracies.values()]
            counts = [of_names[name] for name in accuracies]
            ranks = [spearmanr(list(map(trait, counts)), means).statistic for trait in TRAITS.values()]
            ranks += [looked_at(results, task, budget, epoch) for epoch in epochs]
            cells = ("" if math.isnan(rank) else f"{rank:+.2f}" for rank in ranks)
            print(f"| {budget} | {task} | {' | '.join(cells)} |")


def draw(results: Results, path: Path) -> None:
    """Each random distribution's accuracy over its mean block, the larger the dot the more blocks are used."""
    args = results.args
    tasks_drawn = [task for task in args.tasks if any(results.complete(task, budget) for budget in args.budgets)]
    if not tasks_drawn:
        return
    size = (3.6 * len(tasks_drawn), 3.8)
    figure, axes = plt.subplots(1, len(tasks_drawn), figsize=size, squeeze=False, layout="constrained")
    of_budgets: dict[str, Any] = {}
    for axis, task in zip(axes[0], tasks_drawn, strict=True):
        for position, budget in enumerate(sorted(args.budgets)):
            if results.complete(task, budget):
                uniform, accuracies = random_ones(results, task, budget)
                of_names = distributions(budget, args)
                counts = [of_names[name] for name in accuracies]
                label = f"{budget} prompts"
                of_budgets[label] = axis.scatter(
                    list(map(centre, counts)),
                    [statistics.mean(runs) - uniform for runs in accuracies.values()],
                    s=[8 + 6 * used_blocks(of_name) for of_name in counts],
                    color=COLOURS[position % len(COLOURS)], alpha=0.7, linewidths=0,
                )  # fmt: skip
        axis.axhline(0, color="0.6", linewidth=0.8)
        axis.set_xlabel("mean block of a prompt")
        axis.set_title(task, fontsize=10)
    axes[0][0].set_ylabel("test accuracy minus that of uniform (points)")
    figure.legend(of_budgets.values(), of_budgets.keys(), loc="outside lower center", ncol=len(of_budgets), fontsize=8)
    save(figure, path)


def main() -> None:
    parser = study_parser(__doc__, "ceiling", BUDGETS)
    parser.add_argument("--distributions", type=int, default=24, help="random ones of a budget (default: 24)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="of the search (default: 0 1)")
    parser.add_argument("--fresh_seeds", nargs="+", type=int, default=[2, 3, 4, 5], help="default: 2 3 4 5")
    parser.add_argument(
        "--looks",
        nargs="*",
        type=int,
        default=[],
        help="epochs after which validation images are looked at (default: none)",
    )
    parser.add_argument("--pictures", type=Path, default=Path("docs/images"), help="folder of the picture")
    args = parse_study(parser)
    if min(args.distributions, len(args.seeds)) < 2:
        parser.error("a variance needs at least two distributions and two seeds")
    for budget in [] if args.report else args.budgets:
        for fresh in (False, True):
            wanted = [key for task in args.tasks for key in Results(args).missing(task, budget, fresh)]
            for key in tqdm(wanted, desc=f"{budget} prompts, {'fresh seeds' if fresh else 'search'}"):
                append_lines(args.output, run(*key, args))
    print_tables(Results(args))
    if args.report:
        draw(Results(args), args.pictures / "distributions.png")


if __name__ == "__main__":
    main()
