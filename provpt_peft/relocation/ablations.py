"""Other ways to adjust the distribution, for ablations: the rows of the paper's Tab. 3, and adding from its appendix.

Each function takes the `Relocator` and its scores, and yields the prompts to move, each with the policy's action. The
relocator makes each move before it asks for the next one. Algo. 1 itself is `Relocator.most_idle`. Legend: L blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .config import PPOConfig
from .idleness import Idleness
from .policies import Action, PolicyState, PPOPolicy
from .ppo import PPO


Moves = Iterator[tuple[int, Action]]

# Added to the logits of impossible choices. Finite, since the entropy multiplies it by a probability of 0.
_IMPOSSIBLE = -1e9


def any_prompt(relocator: Any, idleness: Idleness) -> Moves:
    """Prune prompts at random, the paper's Prn1: strategies (D) and (E)."""
    ranking = idleness.ranking()
    order = torch.randperm(len(ranking), generator=relocator.generator).tolist()
    for index in order[: relocator.config.prompts_per_relocation]:
        yield ranking[index], relocator.choose_for(ranking[index])


def prune_for_good(relocator: Any, idleness: Idleness) -> Moves:
    """Remove the most idle prompts, a share `prune_share`, once and for good: strategies (A) and (B)."""
    if any(relocation.block == 0 for relocation in relocator.history):
        return
    ranking = idleness.ranking()
    for prompt in ranking[: min(round(relocator.config.prune_share * len(ranking)), len(ranking) - 1)]:
        yield prompt, Action(0)


def add_from_reserve(relocator: Any, idleness: Idleness) -> Moves:
    """Add prompts from the reserve (prompts in no block) to blocks, as in the variant in the paper's appendix."""
    reserve = (relocator.blocks() == 0).nonzero()[:, 0].tolist()
    for prompt in reserve[: relocator.config.prompts_per_relocation]:
        yield prompt, relocator.choose_for(prompt)


def pairs_of_blocks(relocator: Any, idleness: Idleness) -> Moves:
    """Let the policy choose the source block as well, and move a random prompt of that block: strategy (C)."""
    moved: set[int] = set()
    for _ in range(relocator.config.prompts_per_relocation):
        action = relocator.choose_for(None)
        residents = (relocator.blocks() == action.memory["source"]).nonzero()[:, 0].tolist()
        residents = [prompt for prompt in residents if prompt not in moved]
        if residents:
            drawn = residents[int(torch.randint(len(residents), (1,), generator=relocator.generator))]
            moved.add(drawn)
            yield drawn, action


ADJUSTMENTS: dict[str, Callable[[Any, Idleness], Moves]] = {
    "random": any_prompt,
    "prune": prune_for_good,
    "add": add_from_reserve,
    "naive_rl": pairs_of_blocks,
}


class NaiveRL(PPOPolicy):
    """PPO over all L² pairs of source and target block, without a pruning step."""

    def __init__(self, num_blocks: int, generator: torch.Generator, config: PPOConfig) -> None:
        super().__init__(num_blocks, generator)
        self.ppo = PPO(2 * num_blocks, num_blocks**2, config.gamma, generator)

    def choose(self, state: PolicyState) -> Action:
        empty = state.counts() == 0
        offset = torch.where(empty, _IMPOSSIBLE, 0.0).repeat_interleave(self.num_blocks)
        pair, memory = self.ppo.act(state.features(), offset.float())
        source, block = divmod(pair, self.num_blocks)
        return Action(block + 1, memory=memory | {"source": source + 1})
