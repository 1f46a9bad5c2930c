"""Regret of the policies that give pruned prompts to blocks, in a simulated world.

    python -m examples.research.allocator_regret

The world has L blocks. The n prompts of a block with need q earn q (1 - exp(-n / c)) - p n together, in loss units:
needs shrink as they are served, and a prompt in a block that does not need it does harm (p > 0). Needs drift. In each
move the prompt with the highest score is pruned, the policy chooses a block for it from the scores, and learns from a
reward. The regret of a move is what the prompt would earn at the best block minus what it earns at the chosen one,
without noise. Each policy plays its own course of the same needs.

Scores and rewards are noisy. The noise levels are in units of the spread: the standard deviation over blocks of what
one more prompt would earn, at the start. The defaults are guesses. `--fit` takes them from measured moves:

    python -m examples.research.allocator_regret --fit examples/research/results/adjustments.jsonl

The spread is then that of the measured rewards over blocks without their noise, the noise of rewards what blocks do
not explain of them, and the noise of scores the median standard error.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from provpt_peft import PPOConfig
from provpt_peft.relocation.policies import Policy, PolicyState, make_policy

from .adjustments import cells_of, rewards_of
from .common import read_lines, variance_components
from .pictures import BLACK, GREEN, ORANGE, SKY, VERMILLION, plt, save


CONTENDERS: dict[str, tuple[str, PPOConfig]] = {
    "uniform": ("uniform", PPOConfig()),
    "thompson": ("thompson", PPOConfig()),
    "ppo (paper)": ("ppo", PPOConfig(gamma=1.0, worth_coef=0.0)),
    "ppo (default)": ("ppo", PPOConfig()),
    "greedy": ("greedy", PPOConfig()),
}
STYLES = {
    "uniform": (BLACK, ":"),
    "thompson": (ORANGE, "-."),
    "ppo (paper)": (SKY, "--"),
    "ppo (default)": (VERMILLION, "-"),
    "greedy": (GREEN, (0, (6, 1, 1, 1, 1, 1))),
}


class World:
    """Blocks with needs, and prompts in them.

    Args:
        args: `blocks`, `prompts_per_block`, `need_spread`, `drift`, `saturation`, `cost`, `score_noise`, `score_bias`,
            `reward_noise`, `reward`, `progress`, as on the command line.
        seed: Seed of needs and noise. The needs of a seed are the same whatever is chosen.
    """

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self.args = args
        self.needs_rng, self.noise_rng = (np.random.default_rng([seed, stream]) for stream in range(2))
        self.blocks = np.repeat(np.arange(args.blocks), args.prompts_per_block)  # (N,), from 0 on
        self.log_needs = args.need_spread * self.needs_rng.standard_normal(args.blocks)
        self.price = 0.0
        self.price = args.cost * self.gain(self.counts()).mean()
        self.spread = self.gain(self.counts()).std()
        self.bias = args.score_bias * self.spread * self.needs_rng.standard_normal(args.blocks)
        self.time = 0

    def counts(self) -> np.ndarray:
        """Prompts of each block, (L,)."""
        return np.bincount(self.blocks, minlength=self.args.blocks)

    def gain(self, counts: np.ndarray) -> np.ndarray:
        """What one more prompt earns in a block that has `counts` (L,): (L,) in loss units."""
        saturation = self.args.saturation
        share = np.exp(-counts / saturation) - np.exp(-(counts + 1) / saturation)
        return np.exp(self.log_needs) * share - self.price

    def scores(self) -> np.ndarray:
        """I_k as measured, (N,) in loss units: minus what a prompt earns as the last one of its block, and noise."""
        true = (self.gain(self.counts() - 1) + self.bias)[self.blocks]
        return -true + self.args.score_noise * self.spread * self.noise_rng.standard_normal(len(self.blocks))

    def drift(self) -> None:
        """Let the needs walk. Their logarithms are pulled to 0, so that their spread over blocks stays as it is."""
        rate = self.args.drift
        steps = rate * self.args.need_spread * self.needs_rng.standard_normal(self.args.blocks)
        self.log_needs = math.sqrt(1 - rate**2) * self.log_needs + steps
        self.time += 1

    def reward_of(self, gain: float) -> float:
        """What the policy learns from, for a prompt that earns `gain`; loss units."""
        noise = self.args.reward_noise * self.spread * self.noise_rng.standard_normal()
        if self.args.reward == "counterfactual":
            return gain + noise
        progress = self.args.progress * self.spread * math.exp(-5 * self.time / self.args.moves)
        return gain + progress + self.args.progress * noise


def play(policy: Policy, world: World, moves: int) -> np.ndarray:
    """Regret of each move, (moves,) in units of the world's spread."""
    regrets = np.empty(moves)
    for move in range(moves):
        scores = world.scores()
        prompt = int(scores.argmax())
        state = PolicyState(
            scores=torch.from_numpy(scores),
            blocks=torch.from_numpy(world.blocks) + 1,
            num_blocks=world.args.blocks,
            prompt=prompt,
        )
        action = policy.choose(state)
        world.blocks[prompt] = world.args.blocks  # counted beyond the last block, which is in none
        gains = world.gain(world.counts()[: world.args.blocks])
        world.blocks[prompt] = action.block - 1
        regrets[move] = (gains.max() - gains[action.block - 1]) / world.spread
        world.drift()
        policy.learn(action, world.reward_of(gains[action.block - 1]))
    return regrets


def simulate(args: argparse.Namespace, contenders: dict[str, tuple[str, PPOConfig]]) -> dict[str, np.ndarray]:
    """Cumulative regret of each contender over moves, (seeds, moves) in units of the spread."""
    regrets: dict[str, list[np.ndarray]] = {name: [] for name in contenders}
    for seed in tqdm(range(args.first_seed, args.first_seed + args.seeds), desc="seeds"):
        for name, (policy, config) in contenders.items():
            generator = torch.Generator().manual_seed(seed)
            regrets[name].append(
                play(make_policy(policy, args.blocks, config, generator), World(args, seed), args.moves)
            )
    return {name: np.stack(values).cumsum(axis=1) for name, values in regrets.items()}


def fitted_noise(path: Path) -> tuple[float, float]:
    """Noise of scores and of counterfactual rewards in the moves of `adjustments.py`, in spreads over blocks."""
    lines = [line for line in read_lines(path) if line["adjustment"] == "move"]
    components = [
        variance_components(rewards_of(cell, "counterfactual")) for cell in cells_of(lines).values() if len(cell) >= 2
    ]
    of_blocks, _, rest = np.mean(components, axis=0)
    if of_blocks == 0.0:
        raise ValueError(f"The blocks explain nothing of the rewards in {path}, so noise has no scale there.")
    stderr = np.concatenate([line["idleness_stderr"] for line in lines])
    return float(np.nanmedian(stderr) / math.sqrt(of_blocks)), math.sqrt(rest / of_blocks)


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over seeds, of (seeds, …)."""
    return values.mean(axis=0), values.std(axis=0, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def print_table(curves: dict[str, np.ndarray], milestones: list[int]) -> None:
    print(f"{'':16}" + "".join(f"{f'after {moves} moves':>22}{'/ uniform':>11}" for moves in milestones))
    for name, curve in curves.items():
        line = f"{name:16}"
        for moves in milestones:
            mean, error = mean_and_error(curve[:, moves - 1])
            ratio = mean / curves["uniform"][:, moves - 1].mean()
            line += f"{f'{mean:.1f} ± {error:.1f}':>22}{ratio:11.2f}"
        print(line)


def draw(curves: dict[str, np.ndarray], milestones: list[int], output: Path) -> None:
    """Cumulative regret over moves, one panel a milestone; bands are standard errors over seeds."""
    plt.rcParams.update({"font.size": 11})
    figure, axes = plt.subplots(
        1, len(milestones), figsize=(4 * len(milestones), 3.6), layout="constrained", squeeze=False
    )
    for axis, moves in zip(axes[0], milestones, strict=True):
        for name, curve in curves.items():
            mean, error = mean_and_error(curve[:, :moves])
            x = np.arange(1, moves + 1)
            colour, line = STYLES[name]
            axis.plot(x, mean, color=colour, linestyle=line, linewidth=2, label=name)
            axis.fill_between(x, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
        axis.set_xlabel("moves")
        axis.set_xlim(0, moves)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("cumulative regret (spreads of blocks)")
    axes[0][0].legend(fontsize=10)
    save(figure, output, dpi=150)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable = parser.add_argument
    add("--seeds", type=int, default=20, help="worlds (default: 20)")
    add("--first_seed", type=int, default=0, help="seed of the first world (default: 0)")
    add("--moves", type=int, default=1000, help="moves in a world (default: 1000)")
    add("--blocks", type=int, default=12, help="L (default: 12)")
    add("--prompts_per_block", type=int, default=5, help="prompts of each block at the start (default: 5)")
    add("--need_spread", type=float, default=1.0, help="standard deviation of log needs over blocks (default: 1)")
    add("--drift", type=float, default=0.05, help="a move's drift of log needs over --need_spread (default: 0.05)")
    add("--saturation", type=float, default=5.0, help="c, prompts that serve most of a need (default: 5)")
    add("--cost", type=float, default=1.0, help="p over what a prompt earns on average at the start (default: 1)")
    add("--score_noise", type=float, default=1.0, help="noise of a prompt's score, in spreads (default: 1)")
    add("--score_bias", type=float, default=0.0, help="lasting error of a block's scores, in spreads (default: 0)")
    add("--reward_noise", type=float, default=1.0, help="noise of a reward, in spreads (default: 1)")
    add(
        "--reward",
        choices=("counterfactual", "paper"),
        default="counterfactual",
        help="what is learned from: the moved prompt's own earnings, or those and an epoch's progress, which fades "
        "over the moves, with --progress times the noise (default: counterfactual)",
    )
    add("--progress", type=float, default=5.0, help="progress of the first epoch, in spreads (default: 5)")
    add("--fit", type=Path, help="results of adjustments.py to fit --score_noise and --reward_noise to")
    add("--output", type=Path, default=Path("docs/images/allocator_regret.png"), help="picture (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.fit:
        args.score_noise, args.reward_noise = fitted_noise(args.fit)
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    curves = simulate(args, CONTENDERS)
    milestones = [moves for moves in (100, 1000) if moves <= args.moves] or [args.moves]
    print(
        f"Cumulative regret in spreads of blocks, mean ± standard error of {args.seeds} seeds; L = {args.blocks}, "
        f"N = {args.blocks * args.prompts_per_block}, {args.reward} reward, noise of scores {args.score_noise:.2f} "
        f"and rewards {args.reward_noise:.2f} spreads, bias of scores {args.score_bias:.2f}"
    )
    print_table(curves, milestones)
    draw(curves, milestones, args.output)


if __name__ == "__main__":
    main()
