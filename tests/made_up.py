"""Scores and losses that a test makes up, handed to the relocator as a score of the user's own."""

import torch

from provpt_peft import RelocationConfig, Relocator
from provpt_peft.relocation.idleness import Idleness


class MadeUp:
    """A score with the numbers that were set last, 0 before. The order of the prompts is that of their indices."""

    def __init__(self):
        self.scores, self.loss = None, 0.0

    def set(self, scores, loss=1.0):
        self.scores, self.loss = torch.tensor(scores, dtype=torch.float64), loss

    def __call__(self, measurement):
        measurement.loss = self.loss
        blocks = measurement.blocks()
        scores = torch.zeros(len(blocks), dtype=torch.float64) if self.scores is None else self.scores.clone()
        scores[blocks == 0] = torch.nan
        return Idleness(scores, torch.zeros_like(scores))


def relocator_of(model, optimizer=None, **settings):
    """A relocator whose scores are made up, past its first epoch. Returns the scores and it."""
    made_up = MadeUp()
    config = RelocationConfig(**dict(check_moves=False, settle=0.0) | settings | dict(idleness=made_up))
    relocator = Relocator(model, config, optimizer, score_batches=[{}])
    assert relocator.relocate(progress=0) == []
    return made_up, relocator


def scores_with(value, prompt, others=-1.0, count=12):
    scores = [others] * count
    scores[prompt] = value
    return scores


class Chooses:
    """A policy that always chooses the same block."""

    def __init__(self, block):
        self.block = block

    def __call__(self, num_blocks, generator):
        from provpt_peft.relocation.policies import Action, Policy

        policy = Policy(num_blocks, generator)
        policy.choose = lambda state: Action(self.block)
        return policy
