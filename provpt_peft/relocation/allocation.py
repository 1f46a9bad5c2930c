"""Policies that give a pruned prompt to a block (paper, Sec. 3.3 and Tab. 3).

This module takes tensors and a generator and knows nothing of models. Legend: L blocks, N prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .config import PPOConfig
from .ppo import PPO


# Added to the logits of what cannot be chosen. Finite, since the entropy multiplies it by a probability of 0.
_IMPOSSIBLE = -1e9


@dataclass
class Situation:
    """What a policy sees: the scores, and where the prompts are before one is moved.

    Args:
        scores: I_k in loss units, (N,). NaN where there is none.
        blocks: d_k before pruning, int64 (N,), 1 … L or 0.
        num_blocks: L.
        prompt: k*, the prompt to move. None if the policy has to choose a block to take one from.
    """

    scores: torch.Tensor
    blocks: torch.Tensor
    num_blocks: int
    prompt: int | None = None

    def sums(self) -> torch.Tensor:
        """Idleness of each block, the sum over its prompts, standardised over blocks: float64 (L,)."""
        sums = torch.zeros(self.num_blocks + 1, dtype=torch.float64)
        return _standardised(sums.index_add_(0, self.blocks, self.scores.double().nan_to_num())[1:])

    def counts(self) -> torch.Tensor:
        """D^-: prompts of each block without k*, float64 (L,)."""
        counts = torch.bincount(self.blocks, minlength=self.num_blocks + 1).double()
        if self.prompt is not None:
            counts[self.blocks[self.prompt]] -= 1
        return counts[1:]

    def worth(self) -> torch.Tensor:
        """What a prompt of each block earns on average now, without k*: the mean of -I_k, float64 (L,) in loss units.
        NaN for a block that has no prompt with a score."""
        known = self.scores.isfinite()
        if self.prompt is not None:
            known = known & (torch.arange(len(self.scores)) != self.prompt)
        sums = torch.zeros(self.num_blocks + 1, dtype=torch.float64)
        sums.index_add_(0, self.blocks[known], -self.scores[known].double())
        return (sums / torch.bincount(self.blocks[known], minlength=self.num_blocks + 1))[1:]

    def state(self) -> torch.Tensor:
        """The state s of Sec. 3.3: idleness of each block, D^- divided by its sum, one-hot of k*'s block.

        Standardised and divided, the state has the same scale whatever the loss and the budget. float32 (3L,), or
        (2L,) without a prompt.
        """
        counts = self.counts()
        parts = [self.sums(), counts / counts.sum().clamp(min=1)]
        if self.prompt is not None:
            one_hot = torch.zeros(self.num_blocks + 1, dtype=torch.float64)
            one_hot[self.blocks[self.prompt]] = 1
            parts.append(one_hot[1:])
        return torch.cat(parts).float()


@dataclass
class Choice:
    """A block chosen by a policy.

    Args:
        block: a, 1 … L.
        source: Block to take the prompt from, where the policy chose that as well.
        memory: What the policy needs when the reward comes; tensors and plain Python values.
    """

    block: int
    source: int | None = None
    memory: dict[str, Any] = field(default_factory=dict)


class Policy(Protocol):
    """Chooses a block, and learns from the reward."""

    chooses_source: bool

    def choose(self, situation: Situation) -> Choice:
        """Choose a block for the prompt of the situation."""

    def learn(self, choice: Choice, reward: float) -> dict[str, float]:
        """Take the reward of a choice in, in loss units. Returns diagnostics to log, if there are any."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain Python values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""


class Uniform:
    """Every block with the same probability. Learns nothing."""

    chooses_source = False

    def __init__(self, num_blocks: int, generator: torch.Generator) -> None:
        self.num_blocks = num_blocks
        self.generator = generator

    def choose(self, situation: Situation) -> Choice:
        return Choice(int(torch.randint(self.num_blocks, (1,), generator=self.generator)) + 1)

    def learn(self, choice: Choice, reward: float) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Greedy(Uniform):
    """The block whose prompts are worth most on average now, or an empty one; any block if no prompt has a score."""

    def choose(self, situation: Situation) -> Choice:
        worth = situation.worth()
        if worth.isnan().all():
            return super().choose(situation)
        # A block that is empty would never be tried again.
        return Choice(int(worth.nan_to_num(nan=torch.inf).argmax()) + 1)


class Thompson:
    """Thompson sampling, the paper's Alc1: a Beta posterior for each block, success if the reward is above 0."""

    chooses_source = False

    def __init__(self, num_blocks: int, generator: torch.Generator) -> None:
        self.generator = generator
        # Beta(1, 1), the uniform prior: successes + 1, failures + 1.
        self.counts = torch.ones(2, num_blocks, dtype=torch.int64)

    def choose(self, situation: Situation) -> Choice:
        successes, failures = ([self._gamma(int(count)) for count in row] for row in self.counts)
        samples = [s / (s + f) for s, f in zip(successes, failures, strict=True)]
        return Choice(samples.index(max(samples)) + 1)

    def _gamma(self, shape: int) -> float:
        """Gamma of integer shape, the sum of so many exponentials. X / (X + Y) of two of them is a Beta."""
        uniform = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return -(1 - uniform).log().sum().item()

    def learn(self, choice: Choice, reward: float) -> dict[str, float]:
        self.counts[0 if reward > 0 else 1, choice.block - 1] += 1
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"]


class PPOAllocation:
    """PPO over the L blocks, the paper's Alc2.

    The actor's logits are added to `worth_coef` times the standardised worth of each block, so the policy can begin
    near the greedy one and learn where that is wrong. 0 is the paper's.
    """

    chooses_source = False

    def __init__(self, num_blocks: int, config: PPOConfig, generator: torch.Generator) -> None:
        self.worth_coef = config.worth_coef
        self.ppo = PPO(3 * num_blocks, num_blocks, config, generator)

    def choose(self, situation: Situation) -> Choice:
        worth = situation.worth()
        known = worth.isfinite()
        offset = torch.zeros_like(worth)
        if known.any():
            offset[known] = self.worth_coef * _standardised(worth[known])
        action, memory = self.ppo.act(situation.state(), offset.float())
        return Choice(action + 1, memory=memory)

    def learn(self, choice: Choice, reward: float) -> dict[str, float]:
        return self.ppo.learn(choice.memory, reward)

    def state_dict(self) -> dict[str, Any]:
        return self.ppo.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ppo.load_state_dict(state)


class NaiveRL(PPOAllocation):
    """PPO over all L² pairs of source and target block, without a pruning step: strategy (C) of Tab. 3."""

    chooses_source = True

    def __init__(self, num_blocks: int, config: PPOConfig, generator: torch.Generator) -> None:
        self.num_blocks = num_blocks
        self.ppo = PPO(2 * num_blocks, num_blocks**2, config, generator)

    def choose(self, situation: Situation) -> Choice:
        empty = situation.counts() == 0
        offset = torch.where(empty, _IMPOSSIBLE, 0.0).repeat_interleave(self.num_blocks)
        action, memory = self.ppo.act(situation.state(), offset.float())
        source, block = divmod(action, self.num_blocks)
        return Choice(block + 1, source=source + 1, memory=memory)


def make_policy(name: str, num_blocks: int, config: PPOConfig, generator: torch.Generator) -> Policy:
    """The policy of a name.

    Args:
        name: One of `ppo`, `thompson`, `greedy`, `uniform`, `naive_rl`.
        num_blocks: L.
        config: Settings of PPO, for `ppo` and `naive_rl`.
        generator: Random generator for weights and choices.
    """
    if name == "ppo":
        return PPOAllocation(num_blocks, config, generator)
    if name == "naive_rl":
        return NaiveRL(num_blocks, config, generator)
    simple: dict[str, type[Thompson] | type[Uniform]] = {"thompson": Thompson, "greedy": Greedy, "uniform": Uniform}
    return simple[name](num_blocks, generator)


def _standardised(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / values.std(correction=0).clamp(min=1e-12)
