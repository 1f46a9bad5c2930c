"""Compare strategies of adapting the distribution of prompts: the rows of the paper's Tab. 3, and settings of ours.

    python -m examples.research.strategies              # runs what is missing in the results file
    python -m examples.research.strategies --report     # prints the tables of what is there

Each run is one line of the results file, so a run that was stopped goes on where it was. Runs are independent: several
processes may share a file if each takes seeds or tasks of its own. Settings are compared on validation accuracy; the
test split is read once a run, for the table. The results also have settings that cannot be run here, see `ABLATIONS`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from tqdm.auto import tqdm

from provpt_peft import ProVPTConfig, RelocationConfig

from . import tasks
from .common import (
    PAPER_DROPOUT,
    append_lines,
    fit,
    make_base,
    make_optimizer,
    make_relocator,
    mean_and_error,
    mean_and_spread,
    read_lines,
    results_parser,
    starting_prompts,
)


# The default of version 0.1, with which all of this was run.
FIRST_DEFAULT = RelocationConfig(idleness="fisher", check_moves=False)
# Runs by name: settings of `RelocationConfig`, or None where nothing is relocated. Percentages are those of (A), (B).
PERCENTAGES = range(10, 100, 10)
# The baseline's budget in some of the blocks only.
FIXED = [f"VPT in blocks {blocks}" for blocks in ("1-4", "5-8", "9-12", "1-6")]
STRATEGIES: dict[str, RelocationConfig | None] = {
    "VPT baseline": None,
    **dict.fromkeys(FIXED),
    **{f"A{p}": RelocationConfig.preset("A", prune_share=p / 100) for p in PERCENTAGES},
    **{f"B{p}": RelocationConfig.preset("B", prune_share=p / 100) for p in PERCENTAGES},
    **{name: RelocationConfig.preset(name) for name in ("C", "D", "E", "F", "G", "adding", "paper")},
    "default": FIRST_DEFAULT,
}
TITLES = {
    "VPT baseline": "VPT baseline",
    "A": "(A) Pruning",
    "B": "(B) Pruning",
    "C": "(C) Naive RL",
    "D": "(D) Random & Thompson",
    "E": "(E) Random & PPO",
    "F": "(F) Idleness & Thompson",
    "G": "(G) Idleness & PPO",
    "adding": "Adding",
    "paper": "paper preset",
    "default": "default of version 0.1",
    **{name: name for name in FIXED},
}
# Settings of the default changed, one at a time. None: a setting that the package does not have, whose runs are shown.
ABLATIONS: dict[str, dict[str, Any] | None] = {
    "trigger=always": None,
    "trigger=opportunity": None,
    "significance=2": None,
    "reward=counterfactual": None,
    "allocator=greedy": {"allocator": "greedy"},
    "allocator=uniform": {"allocator": "uniform"},
    "start=own": None,
    "start=fresh": None,
    "start=best": None,
    "settle=0": {"settle": 0.0},
    "settle=0.7": {"settle": 0.7},
    "prompts_per_relocation=3": {"prompts_per_relocation": 3},
    "prompts_per_relocation=3, trigger=opportunity": None,
    "score_images=128": {"score_images": 128},
    "screen=4": None,
    "score on held-out images": {},
}
RUNNABLE = {name: changes for name, changes in ABLATIONS.items() if changes is not None}
STRATEGIES |= {name: replace(FIRST_DEFAULT, **changes) for name, changes in RUNNABLE.items()}


def protocol(args: argparse.Namespace) -> dict[str, int]:
    """What all runs of a table have in common."""
    names = ("epochs", "train_images", "validation_images", "image_size", "num_prompts")
    return {name: getattr(args, name) for name in names}


def finished(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs in the results file that followed the protocol."""
    return read_lines(args.output, protocol(args))


def make_model(name: str, args: argparse.Namespace, num_labels: int, seed: int) -> PeftModel:
    """The backbone with the prompts that a strategy begins with."""
    base = make_base(num_labels, seed, args.model_name_or_path)
    num_blocks = base.config.num_hidden_layers
    share = int(name[1:]) / 100 if name[1:].isdecimal() else None
    strategy = name if share is None else name[0]
    num_prompts, reserve = starting_prompts(strategy, args.num_prompts, num_blocks, args.epochs, share)
    config = ProVPTConfig(
        num_prompts=num_prompts, reserve=reserve, prompt_dropout=PAPER_DROPOUT, modules_to_save=["classifier"]
    )
    return get_peft_model(base, config)


def run(name: str, task_name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train and test one strategy. Returns its line of the results."""
    task = tasks.load(task_name, args.image_size, args.train_images, args.validation_images, seed)
    model = make_model(name, args, task.num_labels, seed)
    optimizer = make_optimizer(model)
    config = STRATEGIES[name]
    relocator = None
    if config is not None:
        source = task.validation if name == "score on held-out images" else task.train
        relocator = make_relocator(config, model, optimizer, source, seed)
    start = time.perf_counter()
    loss = fit(model, optimizer, task.train, args.epochs, seed, relocator)
    history = relocator.history if relocator is not None else []
    head = sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and "provpt_" not in n)
    tuner = model.base_model
    # Pruning for good asks no policy.
    policy = getattr(relocator.policy, "ppo", None) if relocator and config.adjust != "prune" else None
    networks = 0 if policy is None else sum(p.numel() for m in (policy.actor, policy.critic) for p in m.parameters())
    return {
        "strategy": name,
        "task": task_name,
        "seed": seed,
        **protocol(args),
        "train_loss": loss,
        "validation_accuracy": 100 * tasks.evaluate(model, task.validation)[1],
        "test_accuracy": 100 * tasks.evaluate(model, task.test)[1],
        "trained_parameters": tuner.prompts().numel() + networks,
        "head_parameters": head,
        "moves": sum(record.block not in (None, record.from_block) for record in history),
        "relocations": sum(record.prompt is not None for record in history),
        "distribution": tuner.prompt_distribution(),
        "history": [
            [r.epoch, r.prompt, r.from_block, r.block, r.idleness, r.idleness_stderr, r.reward] for r in history
        ],
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def chosen_percentage(letter: str, task: str, lines: list[dict[str, Any]]) -> str | None:
    """The percentage of (A) or (B) with the best validation accuracy on the first seed, as the name of its run."""
    tried = [
        line for line in lines if line["task"] == task and line["seed"] == 0 and line["strategy"] in
        {f"{letter}{p}" for p in PERCENTAGES}
    ]  # fmt: skip
    if len(tried) < len(PERCENTAGES):
        return None
    return max(tried, key=lambda line: line["validation_accuracy"])["strategy"]


def report(lines: list[dict[str, Any]]) -> None:
    """Print Tab. 3 for each task, mean and standard deviation over seeds, and a table of the settings."""
    for task in sorted({line["task"] for line in lines}):
        rows = [line for line in lines if line["task"] == task]
        print(f"\n{task}")
        print("| strategy | trained parameters (M) | train loss | val (%) | test (%) | moves | seeds |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for name, title in TITLES.items():
            run_name = chosen_percentage(name, task, lines) if name in ("A", "B") else name
            found = [line for line in rows if line["strategy"] == run_name]
            if not found:
                continue
            if name in ("A", "B"):
                title += f" {run_name[1:]} %"
            parameters = statistics.mean(line["trained_parameters"] for line in found) / 1e6
            cells = [f"{statistics.mean(line['train_loss'] for line in found):.3f}"]
            for split in ("validation_accuracy", "test_accuracy"):
                cells.append(mean_and_spread([line[split] for line in found]))
            moves = statistics.mean(line["moves"] for line in found)
            print(f"| {title} | {parameters:.3f} | {' | '.join(cells)} | {moves:.1f} | {len(found)} |")

    baseline = {(line["task"], line["seed"]): line for line in lines if line["strategy"] == "VPT baseline"}
    print(
        "\nsettings: difference from the VPT baseline with the same task and seed, mean ± standard error of the runs"
    )
    print("| setting | train loss | val (pp) | test (pp) | moves | runs |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in ("default", *ABLATIONS):
        pairs = [
            (line, baseline[line["task"], line["seed"]])
            for line in lines
            if line["strategy"] == name and (line["task"], line["seed"]) in baseline
        ]
        if len(pairs) < 2:
            continue
        cells = []
        for measure in ("train_loss", "validation_accuracy", "test_accuracy"):
            differences = [line[measure] - other[measure] for line, other in pairs]
            cells.append(mean_and_error(differences, "+.3f" if measure == "train_loss" else "+.1f"))
        moves = statistics.mean(line["moves"] for line, _ in pairs)
        title = name if name == "default" else f"default, {name}"
        print(f"| {title} | {' | '.join(cells)} | {moves:.1f} | {len(pairs)} |")


def main() -> None:
    parser = results_parser(
        __doc__, "strategies", checkpoint=True,
        epochs=10, train_images=320, validation_images=400, image_size=28, num_prompts=5, threads=2,
    )  # fmt: skip
    parser.add_argument(
        "--strategies", nargs="+", default=list(TITLES),
        help=f"which: {', '.join(TITLES)}, or a setting: {', '.join(RUNNABLE)} (default: all but the settings)",
    )  # fmt: skip
    parser.add_argument(
        "--tasks", nargs="+", default=["digits", "location"], help="names of tasks.py (default: digits location)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds (default: 0 1 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.report:
        report(finished(args))
        return
    unknown = set(args.strategies) - set(STRATEGIES) - {"A", "B"}
    if unknown:
        parser.error(f"unknown strategies {sorted(unknown)}, see --help")

    def missing(seed: int) -> list[tuple[str, str, int]]:
        lines = finished(args)
        done = {(line["strategy"], line["task"], line["seed"]) for line in lines}
        wanted = []
        for name in args.strategies:
            for task in args.tasks:
                if name not in ("A", "B"):
                    wanted.append((name, task, seed))
                elif seed == 0:
                    wanted += [(f"{name}{p}", task, seed) for p in PERCENTAGES]
                elif (best := chosen_percentage(name, task, lines)) is not None:
                    wanted.append((best, task, seed))
        return [key for key in wanted if key not in done]

    # Seed by seed: the other seeds of (A) and (B) run the percentage that the first one chose.
    for seed in args.seeds:
        for name, task, _ in tqdm(missing(seed), desc=f"seed {seed}"):
            append_lines(args.output, [run(name, task, seed, args)])
    report(finished(args))


if __name__ == "__main__":
    main()
