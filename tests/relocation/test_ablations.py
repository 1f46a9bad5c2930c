"""Every strategy by name, on a tiny model: what it moves, and what it keeps."""

import json
import math
from dataclasses import asdict

import pytest
import tiny
import torch
from made_up import relocator_of
from test_relocator import batches, mostly_idle, prompted, train_epoch

from provpt_peft import RelocationConfig, Relocator
from provpt_peft.relocation.config import ALLOCATORS, IDLENESS, PRESETS


def run(config, epochs=4, **adapter):
    """Train with a config. Returns the tuner and the relocator."""
    model, optimizer = prompted(**adapter)
    relocator = Relocator(model, config, optimizer, score_batches=batches())
    for epoch in range(epochs):
        relocator.relocate(progress=epoch / epochs)
        train_epoch(model, optimizer)
    relocator.finish()
    return model.base_model, relocator


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"A", "B", "adding"}))
def test_relocating_strategies_keep_the_budget(name):
    tuner, relocator = run(RelocationConfig.preset(name, idleness=mostly_idle, check_moves=False, settle=0.0))
    assert sum(tuner.prompt_distribution()) == 12
    moves = [record for record in relocator.history if record.prompt is not None]
    assert [record.epoch for record in moves] == [1, 2, 3]
    assert all(math.isfinite(record.reward) for record in moves)
    json.dumps([asdict(record) for record in relocator.history])


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_runs_as_it_is(name):
    adapter = dict(num_prompts=[2, 2, 2, 2], reserve=2) if name == "adding" else {}
    _, relocator = run(RelocationConfig.preset(name), **adapter)
    assert relocator.epoch == 4


@pytest.mark.parametrize(("name", "share", "kept"), [("A", 0.25, 9), ("B", 0.5, 6), ("A", 0.97, 1)])
def test_pruning_is_done_once_and_for_good(name, share, kept):
    tuner, relocator = run(RelocationConfig.preset(name, prune_share=share))
    assert sum(tuner.prompt_distribution()) == kept
    assert (tuner.prompt_blocks() == 0).sum() == 12 - kept
    assert [(record.epoch, record.block) for record in relocator.run().choices] == [(1, 0)] * (12 - kept)
    # The most idle ones, in order.
    idleness = [record.idleness for record in relocator.run().choices]
    assert idleness == sorted(idleness, reverse=True)
    assert all(record.reward is None for record in relocator.run().choices)


def test_adding_takes_prompts_from_the_reserve():
    tuner, relocator = run(RelocationConfig.preset("adding"), num_prompts=[2, 2, 2, 2], reserve=2)
    assert sum(tuner.prompt_distribution()) == 10
    added = relocator.run().choices
    assert [(record.epoch, record.prompt, record.from_block) for record in added] == [(1, 8, 0), (2, 9, 0)]
    assert all(record.idleness is None for record in added)
    # Nothing was pruned, so the reward is the loss before minus the loss after.
    assert [record.reward for record in added] == [record.loss_before - record.loss_after for record in added]


def test_adding_needs_a_reserve():
    model = tiny.prompted(tiny.make("vit"))
    with pytest.raises(ValueError, match=r"from a reserve to blocks, but the adapter has no reserve\. Create it with"):
        Relocator(model, RelocationConfig.preset("adding"), score_batches=batches())
    model.base_model.move_prompt(0, 0)
    Relocator(model, RelocationConfig.preset("adding"), score_batches=batches())


def test_naive_rl_moves_a_prompt_once_in_a_relocation():
    for seed in range(10):
        settings = {**PRESETS["C"], "prompts_per_relocation": 4, "seed": seed}
        made_up, relocator = relocator_of(prompted()[0], **settings)
        made_up.set([0.0] * 12)
        moved = [record.prompt for record in relocator.relocate()]
        assert len(moved) == len(set(moved)) >= 1


def test_naive_rl_takes_prompts_from_the_block_that_it_chose():
    model, _ = prompted()
    made_up, relocator = relocator_of(model, **PRESETS["C"])
    made_up.set([0.0] * 12)
    chosen = []
    choose = relocator.policy.choose
    relocator.policy.choose = lambda state: chosen.append(choose(state)) or chosen[-1]
    (record,) = relocator.relocate()
    assert (record.from_block, record.block) == (chosen[0].memory["source"], chosen[0].block)


def test_naive_rl_has_the_discount_of_the_config():
    for gamma in (0.0, 1.0):
        _, relocator = relocator_of(prompted()[0], adjust="naive_rl", ppo={"gamma": gamma})
        assert relocator.policy.ppo.gamma == gamma


def test_random_pruning_takes_any_prompt():
    pruned = set()
    for seed in range(40):
        made_up, relocator = relocator_of(prompted()[0], adjust="random", allocator="uniform", seed=seed)
        made_up.set([-5.0] * 11 + [5.0])
        (record,) = relocator.relocate()
        pruned.add(record.prompt)
    # 40 draws of 12 prompts: fewer than 8 different ones have a probability below 1e-6.
    assert len(pruned) >= 8


@pytest.mark.parametrize("idleness", IDLENESS)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_every_score_with_every_allocator(idleness, allocator):
    def score(measurement):
        from provpt_peft.relocation.measure import SCORES

        found = SCORES[idleness](measurement)
        found.score = found.score.abs() + 1e-6
        return found

    config = RelocationConfig(
        idleness=score, allocator=allocator, check_moves=False, prompts_per_relocation=2, settle=0.0
    )
    tuner, relocator = run(config, epochs=3)
    assert sum(tuner.prompt_distribution()) == 12
    assert len(relocator.history) == 4
    assert all(math.isfinite(record.reward) for record in relocator.history)


def test_pruning_for_good_keeps_what_is_worth_most():
    made_up, relocator = relocator_of(prompted()[0], adjust="prune", prune_share=0.5)
    made_up.set([float(prompt) for prompt in range(12)])
    pruned = [record.prompt for record in relocator.relocate()]
    assert pruned == [11, 10, 9, 8, 7, 6]
    assert relocator.relocate() == []
    assert torch.equal((relocator.blocks() == 0).nonzero()[:, 0], torch.arange(6, 12))


def test_pruning_leaves_a_prompt_whatever_the_share():
    made_up, relocator = relocator_of(prompted()[0], adjust="prune", prune_share=0.97)
    made_up.set([float(prompt) for prompt in range(12)])
    # 0.97 of 12 rounds to 12.
    assert [record.prompt for record in relocator.relocate()] == list(range(11, 0, -1))
    assert relocator.tuner.prompt_distribution() == [1, 0, 0, 0]
