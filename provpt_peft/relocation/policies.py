"""Policies that give a pruned prompt to a block (paper, Sec. 3.3 and Tab. 3).

This module takes tensors and a generator and knows nothing about models. Add a policy here, with its name in
`make_policy` and in the config's `ALLOCATORS`, or pass its class to `RelocationConfig(allocator=…)`.

Legend: L blocks, N prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .config import PPOConfig
from .ppo import PPO


@dataclass
class PolicyState:
    """What a policy sees: the scores, and where the prompts are before one is moved."""

    scores: torch.Tensor  # I_k in loss units, (N,), NaN where there is none
    blocks: torch.Tensor  # d_k before pruning, int64 (N,), 1 … L or 0
    num_blocks: int  # L
    prompt: int | None = None  # k*, the prompt to move; None if the policy chooses the source block

    def sums(self) -> torch.Tensor:
        """Idleness of each block, the sum over its prompts, standardised over blocks: float64 (L,)."""
        sums = torch.zeros(self.num_blocks + 1, dtype=torch.float64)
        return standardised(sums.index_add_(0, self.blocks, self.scores.double().nan_to_num())[1:])

    def counts(self) -> torch.Tensor:
        """D^-: the number of prompts in each block without k*, float64 (L,)."""
        counts = torch.bincount(self.blocks, minlength=self.num_blocks + 1).double()
        if self.prompt is not None:
            counts[self.blocks[self.prompt]] -= 1
        return counts[1:]

    def worth(self, with_prompt: bool = False) -> torch.Tensor:
        """The worth of each block's prompts on average now, with or without k*: the mean of -I_k, float64 (L,), in
        loss units. How much they lower the loss where I_k estimates Eq. 4, else how much they change it. NaN for a
        block that has no prompt with a score."""
        known = self.scores.isfinite()
        if self.prompt is not None and not with_prompt:
            known = known & (torch.arange(len(self.scores)) != self.prompt)
        sums = torch.zeros(self.num_blocks + 1, dtype=torch.float64)
        sums.index_add_(0, self.blocks[known], -self.scores[known].double())
        return (sums / torch.bincount(self.blocks[known], minlength=self.num_blocks + 1))[1:]

    def features(self) -> torch.Tensor:
        """The state s of Sec. 3.3: idleness of each block, D^- divided by its sum, k*'s block as one-hot. Its scale
        does not depend on the loss or the number of prompts. float32 (3L,), or (2L,) without a prompt."""
        counts = self.counts()
        parts = [self.sums(), counts / counts.sum().clamp(min=1)]
        if self.prompt is not None:
            one_hot = torch.zeros(self.num_blocks + 1, dtype=torch.float64)
            one_hot[self.blocks[self.prompt]] = 1
            parts.append(one_hot[1:])
        return torch.cat(parts).float()


@dataclass
class Action:
    """A block chosen by a policy."""

    block: int  # a, 1 … L
    # What the policy needs to learn from the reward; tensors and plain Python values.
    memory: dict[str, Any] = field(default_factory=dict)


class Policy:
    """Chooses a block and learns from the reward. The base class learns nothing. All random numbers, for weights and
    actions, come from the generator."""

    def __init__(self, num_blocks: int, generator: torch.Generator) -> None:
        self.num_blocks = num_blocks
        self.generator = generator

    def choose(self, state: PolicyState) -> Action:
        """Choose a block for the prompt of the state."""
        raise NotImplementedError

    def learn(self, action: Action, reward: float) -> dict[str, float]:
        """Learn from the reward of an action, in loss units. Returns diagnostics to log, if there are any."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain Python values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""


class Uniform(Policy):
    """Every block with the same probability."""

    def choose(self, state: PolicyState) -> Action:
        return Action(int(torch.randint(self.num_blocks, (1,), generator=self.generator)) + 1)


class LastWorth:
    """The worth of each block (`PolicyState.worth`), or its last known worth if it is empty now.

    So a block that did badly and was emptied does not count as unknown at once. It does so after L choices, since what
    a block needs changes while the model learns.
    """

    def __init__(self, num_blocks: int) -> None:
        self.values = torch.full((num_blocks,), torch.inf, dtype=torch.float64)  # in loss units
        self.ages = torch.zeros(num_blocks, dtype=torch.int64)  # choices since the value was known

    def of(self, state: PolicyState) -> torch.Tensor:
        """The worth of each block without k*, float64 (L,). Infinite for a block about which nothing is known."""
        now, with_prompt = state.worth(), state.worth(with_prompt=True)
        seen = with_prompt.isfinite()
        self.values = torch.where(seen, with_prompt, self.values)
        self.ages = torch.where(seen, 0, self.ages + 1)
        self.values[self.ages > len(self.values)] = torch.inf
        return torch.where(now.isnan(), self.values, now)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"values": self.values, "ages": self.ages}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.values, self.ages = state["values"], state["ages"]


class Greedy(Uniform):
    """The block worth most, where a block of unknown worth comes first. A random block if all are unknown."""

    def __init__(self, num_blocks: int, generator: torch.Generator) -> None:
        super().__init__(num_blocks, generator)
        self.last_worth = LastWorth(num_blocks)

    def choose(self, state: PolicyState) -> Action:
        worth = self.last_worth.of(state)
        if worth.isinf().all():
            return super().choose(state)
        return Action(int(worth.argmax()) + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"worth": self.last_worth.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_worth.load_state_dict(state["worth"])


class Thompson(Policy):
    """Thompson sampling, the paper's Alc1: a Beta posterior for each block, success if the reward is above 0."""

    def __init__(self, num_blocks: int, generator: torch.Generator) -> None:
        super().__init__(num_blocks, generator)
        # Beta(1, 1), the uniform prior: successes + 1, failures + 1.
        self.counts = torch.ones(2, num_blocks, dtype=torch.int64)

    def choose(self, state: PolicyState) -> Action:
        successes, failures = ([self._gamma(int(count)) for count in row] for row in self.counts)
        samples = [s / (s + f) for s, f in zip(successes, failures, strict=True)]
        return Action(samples.index(max(samples)) + 1)

    def _gamma(self, shape: int) -> float:
        """A Gamma sample of integer shape: the sum of that many exponentials. X / (X + Y) of two samples is Beta."""
        uniform = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return -(1 - uniform).log().sum().item()

    def learn(self, action: Action, reward: float) -> dict[str, float]:
        self.counts[0 if reward > 0 else 1, action.block - 1] += 1
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"]


class PPOPolicy(Policy):
    """A policy that acts and learns with PPO."""

    ppo: PPO

    def learn(self, action: Action, reward: float) -> dict[str, float]:
        return self.ppo.learn(action.memory, reward)

    def state_dict(self) -> dict[str, Any]:
        return self.ppo.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ppo.load_state_dict(state)


class PPOAllocation(PPOPolicy):
    """PPO over the L blocks, the paper's Alc2.

    `worth_coef` times the standardised worth of each block is added to the actor's logits. So the policy can start
    near the greedy one and learn where that is wrong. The paper's value is 0.
    """

    def __init__(self, num_blocks: int, generator: torch.Generator, config: PPOConfig) -> None:
        super().__init__(num_blocks, generator)
        self.worth_coef = config.worth_coef
        self.last_worth = LastWorth(num_blocks)
        self.ppo = PPO(3 * num_blocks, num_blocks, config.gamma, generator)

    def choose(self, state: PolicyState) -> Action:
        worth = self.last_worth.of(state)
        known = worth.isfinite()
        offset = torch.zeros_like(worth)
        if known.any():
            offset[known] = self.worth_coef * standardised(worth[known])
        action, memory = self.ppo.act(state.features(), offset.float())
        return Action(action + 1, memory=memory)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"worth": self.last_worth.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.last_worth.load_state_dict(state["worth"])


MakePolicy = Callable[[int, torch.Generator], Policy]


def make_policy(allocator: str | MakePolicy, num_blocks: int, config: PPOConfig, generator: torch.Generator) -> Policy:
    """The policy for L blocks, from its name or from the user's own class."""
    simple: dict[str, MakePolicy] = {"thompson": Thompson, "greedy": Greedy, "uniform": Uniform}
    if allocator == "ppo":
        return PPOAllocation(num_blocks, generator, config)
    return (simple[allocator] if isinstance(allocator, str) else allocator)(num_blocks, generator)


def standardised(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / values.std(correction=0).clamp(min=1e-12)
