"""Policies that choose blocks, by hand and in toy environments."""

import math

import pytest
import torch

from provpt_peft.relocation import ppo
from provpt_peft.relocation.ablations import NaiveRL
from provpt_peft.relocation.config import ALLOCATORS, PPOConfig
from provpt_peft.relocation.policies import (
    Action,
    Greedy,
    PolicyState,
    PPOAllocation,
    Thompson,
    Uniform,
    make_policy,
)
from provpt_peft.relocation.serialization import from_json, to_json


NAN = math.nan
# Prompt:            0    1    2    3    4    5
SCORES = torch.tensor([3.0, 1.0, NAN, -4.0, 9.0, -2.0])
BLOCKS = torch.tensor([1, 1, 1, 2, 0, 2])  # prompt 4 is in no block, block 3 is empty


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def state_of(prompt=None, scores=SCORES, blocks=BLOCKS, num_blocks=3):
    return PolicyState(scores=scores, blocks=blocks, num_blocks=num_blocks, prompt=prompt)


def standardised(*values):
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / std for value in values]


def spread_out(worth):
    """Two prompts per block with scores of minus `worth`, the first of which is to be moved."""
    blocks = torch.arange(1, len(worth) + 1).repeat(2)
    return state_of(0, -torch.tensor(worth).repeat(2), blocks, len(worth))


def test_sums_by_hand():
    # Sums of 3 + 1, -4 - 2 and nothing; k* still counts, the prompt in no block and the one without a score do not.
    expected = standardised(4.0, -6.0, 0.0)
    for prompt in (None, 0, 3):
        assert state_of(prompt).sums().tolist() == pytest.approx(expected)
    assert state_of().sums().dtype == torch.float64


def test_sums_of_equal_blocks_are_zero():
    assert state_of(scores=torch.full((6,), NAN)).sums().tolist() == [0, 0, 0]


def test_counts_by_hand():
    assert state_of().counts().tolist() == [3, 2, 0]
    assert state_of(0).counts().tolist() == [2, 2, 0]
    assert state_of(3).counts().tolist() == [3, 1, 0]
    assert state_of(4).counts().tolist() == [3, 2, 0]


def test_worth_by_hand():
    # Block 1 has 3 and 1, block 2 has -4 and -2.
    worth = state_of().worth()
    assert worth[:2].tolist() == [-2, 3]
    assert worth[2].isnan()
    assert state_of(0).worth()[:2].tolist() == [-1, 3]
    assert state_of(3).worth()[:2].tolist() == [-2, 2]
    assert state_of(4).worth()[:2].tolist() == [-2, 3]


def test_worth_of_a_block_that_loses_its_only_score_is_unknown():
    worth = state_of(0, torch.tensor([1.0, NAN, 2.0]), torch.tensor([1, 1, 2]), 2).worth()
    assert worth[0].isnan()
    assert worth[1] == -2


def test_state_by_hand():
    state = state_of(3).features()
    assert state.dtype == torch.float32
    assert state.tolist() == pytest.approx([*standardised(4.0, -6.0, 0.0), 3 / 4, 1 / 4, 0, 0, 1, 0])


def test_state_without_a_prompt_has_no_one_hot():
    assert state_of().features().tolist() == pytest.approx([*standardised(4.0, -6.0, 0.0), 3 / 5, 2 / 5, 0])


def test_state_of_a_prompt_in_no_block():
    assert state_of(4).features().tolist() == pytest.approx([*standardised(4.0, -6.0, 0.0), 3 / 5, 2 / 5, 0, 0, 0, 0])


def test_state_of_empty_blocks_is_finite():
    state = state_of(0, torch.tensor([NAN]), torch.tensor([2])).features()
    assert state.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0]


def test_state_does_not_depend_on_the_scale_of_the_loss():
    torch.testing.assert_close(state_of(0, 1000 * SCORES).features(), state_of(0).features())


def test_uniform_covers_all_blocks_evenly():
    policy = Uniform(3, generator())
    chosen = [policy.choose(state_of(0)).block for _ in range(3000)]
    for block in (1, 2, 3):
        # Five standard deviations of a binomial: 5 * sqrt(3000 * 1/3 * 2/3) = 129.
        assert abs(chosen.count(block) - 1000) < 130
    assert set(chosen) == {1, 2, 3}


def test_greedy_takes_the_best_average():
    # The sum of block 1 is the larger, the mean of block 2 is.
    scores, blocks = torch.tensor([-1.0, -1.0, -1.0, -2.0, 0.0, 0.0]), torch.tensor([1, 1, 1, 2, 3, 3])
    assert Greedy(3, generator()).choose(state_of(4, scores, blocks)).block == 2


def test_greedy_fills_an_empty_block():
    scores, blocks = torch.tensor([-1.0, -1.0, -9.0]), torch.tensor([1, 1, 3])
    assert Greedy(3, generator()).choose(state_of(0, scores, blocks)).block == 2


def emptied():
    """Block 1 with a prompt of worth 1, block 2 with the idle one, -2, that is to be moved, block 3 empty as ever."""
    return PolicyState(torch.tensor([-1.0, 2.0]), torch.tensor([1, 2]), 3, prompt=1)


def test_greedy_does_not_try_again_what_has_disappointed():
    policy = Greedy(3, generator())
    # An empty block of which nothing is known is tried first.
    assert policy.choose(emptied()).block == 3
    # It earns less than nothing, so its prompt goes to the best one, not to one that was left because it was bad.
    there = PolicyState(torch.tensor([-1.0, 0.5]), torch.tensor([1, 3]), 3, prompt=1)
    assert policy.choose(there).block == 1
    both_in_one = PolicyState(torch.tensor([-1.0, 0.5]), torch.tensor([1, 1]), 3, prompt=1)
    assert policy.choose(both_in_one).block == 1
    assert policy.last_worth.values.tolist() == [0.25, -2.0, -0.5]
    # As many choices later as there are blocks, nothing is known of block 2, which has been empty for one choice more.
    assert policy.choose(both_in_one).block == 1
    assert policy.choose(both_in_one).block == 2


def test_ppo_does_not_take_what_has_disappointed_for_the_mean():
    policy = PPOAllocation(3, generator(), PPOConfig(worth_coef=1.0))
    offset = policy.choose(emptied()).memory["offset"]
    # Known are 1 and -2; never seen is block 3.
    torch.testing.assert_close(offset, torch.tensor([*standardised(1.0, -2.0), 0.0]))
    there = PolicyState(torch.tensor([-1.0, 0.5]), torch.tensor([1, 3]), 3, prompt=1)
    torch.testing.assert_close(policy.choose(there).memory["offset"], torch.tensor(standardised(1.0, -2.0, -0.5)))


def test_greedy_leaves_the_moved_prompt_out():
    # With prompt 0, block 1 would be best.
    scores, blocks = torch.tensor([-9.0, 0.0, -1.0]), torch.tensor([1, 1, 2])
    assert Greedy(2, generator()).choose(state_of(0, scores, blocks, 2)).block == 2


def test_greedy_without_scores_takes_any_block():
    policy = Greedy(3, generator())
    assert {policy.choose(state_of(0, torch.full((6,), NAN))).block for _ in range(60)} == {1, 2, 3}


@pytest.mark.parametrize("shape", [1, 2, 7])
def test_gamma_has_the_mean_and_the_variance_of_its_shape(shape):
    policy = Thompson(1, generator())
    samples = torch.tensor([policy._gamma(shape) for _ in range(20000)], dtype=torch.float64)
    assert samples.min() >= 0
    assert samples.mean().item() == pytest.approx(shape, rel=0.03)
    assert samples.var().item() == pytest.approx(shape, rel=0.1)


def test_thompson_s_samples_are_betas():
    # Beta(a, b) has mean a / (a + b) and variance a b / ((a + b)^2 (a + b + 1)).
    policy = Thompson(1, generator())
    pairs = [(policy._gamma(3), policy._gamma(2)) for _ in range(20000)]
    samples = torch.tensor([a / (a + b) for a, b in pairs], dtype=torch.float64)
    assert samples.mean().item() == pytest.approx(3 / 5, abs=0.01)
    assert samples.var().item() == pytest.approx(6 / (25 * 6), rel=0.05)


def test_thompson_chooses_as_often_as_the_posterior_says():
    # P(Beta(2, 1) > Beta(1, 1)) = E[X] of X ~ Beta(2, 1) = 2/3.
    policy = Thompson(2, generator())
    policy.learn(Action(1), 1.0)
    chosen = [policy.choose(state_of(0, num_blocks=2)).block for _ in range(5000)]
    assert chosen.count(1) / 5000 == pytest.approx(2 / 3, abs=0.035)


def test_thompson_counts_successes_and_failures():
    policy = Thompson(3, generator())
    for block, reward in [(1, 0.5), (1, 2.0), (1, -1.0), (3, 0.0)]:
        policy.learn(Action(block), reward)
    assert policy.counts.tolist() == [[3, 1, 1], [2, 1, 2]]


@pytest.mark.parametrize("seed", range(3))
def test_thompson_finds_the_one_good_block(seed):
    policy = Thompson(6, generator(seed))
    rewards = generator(100 + seed)
    chosen = []
    for _ in range(300):
        action = policy.choose(spread_out([0.0] * 6))
        good = torch.rand(1, generator=rewards).item() < (0.8 if action.block == 4 else 0.2)
        policy.learn(action, 1.0 if good else -1.0)
        chosen.append(action.block)
    assert chosen[-100:].count(4) >= 75


def test_first_ppo_without_worth_is_nearly_uniform():
    policy = PPOAllocation(4, generator(), PPOConfig(worth_coef=0))
    memory = policy.choose(spread_out([5.0, 0.0, 0.0, 0.0])).memory
    assert memory["offset"].tolist() == [0, 0, 0, 0]
    assert math.exp(memory["log_prob"]) == pytest.approx(1 / 4, abs=0.02)


def test_ppo_with_a_large_worth_coef_is_greedy():
    policy, greedy = PPOAllocation(4, generator(), PPOConfig(worth_coef=1000)), Greedy(4, generator())
    worths = torch.randn(20, 4, generator=generator(1)).tolist()
    for worth in worths:
        assert policy.choose(spread_out(worth)).block == greedy.choose(spread_out(worth)).block


def test_offsets_of_worth_by_hand():
    policy = PPOAllocation(3, generator(), PPOConfig(worth_coef=2))
    # Worths -1 and 3 of the blocks that have any are -1 and 1 standardised; an unknown one counts as their mean.
    memory = policy.choose(state_of(0)).memory
    assert memory["offset"].tolist() == pytest.approx([-2, 2, 0])


def test_ppo_without_scores_has_no_offset():
    policy = PPOAllocation(3, generator(), PPOConfig(worth_coef=1000))
    assert policy.choose(state_of(0, torch.full((6,), NAN))).memory["offset"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("worth_coef", [0, 1])
def test_ppo_learns_the_one_good_block(worth_coef, monkeypatch):
    """Block 3 gives reward 1, whatever the scores say."""
    monkeypatch.setattr(ppo, "ACTOR_LEARNING_RATE", 1e-3)
    policy = PPOAllocation(4, generator(), PPOConfig(worth_coef=worth_coef))
    worths = torch.randn(300, 4, generator=generator(1)).tolist()
    chosen = []
    for worth in worths:
        action = policy.choose(spread_out(worth))
        policy.learn(action, float(action.block == 3))
        chosen.append(action.block)
    assert chosen[-50:].count(3) >= 35


def test_naive_rl_never_takes_from_an_empty_block():
    policy = NaiveRL(3, generator(), PPOConfig())
    actions = []
    for i in range(60):
        action = policy.choose(state_of())
        policy.learn(action, float(i % 2))
        actions.append(action)
    assert {action.memory["source"] for action in actions} == {1, 2}
    assert {action.block for action in actions} == {1, 2, 3}


@pytest.mark.parametrize(("action", "source", "block"), [(0, 1, 1), (1, 1, 2), (3, 2, 1), (5, 2, 3), (8, 3, 3)])
def test_naive_rl_s_actions_are_pairs(action, source, block, monkeypatch):
    policy = NaiveRL(3, generator(), PPOConfig())
    monkeypatch.setattr(policy.ppo, "act", lambda state, offset: (action, {}))
    action = policy.choose(state_of())
    assert (action.memory["source"], action.block) == (source, block)


def test_naive_rl_s_mask_is_over_sources():
    memory = NaiveRL(3, generator(), PPOConfig()).choose(state_of()).memory
    assert (memory["offset"] < -1e6).tolist() == [False] * 6 + [True] * 3
    assert memory["state"].shape == (6,)


@pytest.mark.parametrize("policy_class", [PPOAllocation, NaiveRL])
def test_ppo_sees_the_state(policy_class):
    state = state_of(None if policy_class is NaiveRL else 0)
    assert torch.equal(policy_class(3, generator(), PPOConfig()).choose(state).memory["state"], state.features())


def test_policies_by_name_and_by_class():
    policies = {name: make_policy(name, 3, PPOConfig(), generator()) for name in ALLOCATORS}
    assert tuple(type(policy) for policy in policies.values()) == (PPOAllocation, Thompson, Greedy, Uniform)
    assert type(make_policy(Greedy, 3, PPOConfig(), generator())) is Greedy


def play(policy, moves):
    """Actions and the rewards learned from them. Block 2 is empty in all moves but the first three of five: then it
    counts by what it was worth. In the last one nothing has a score, so the greedy policy draws too."""
    chosen = []
    for move in range(moves):
        blocks = torch.tensor([1, 1, 2, 2, 3, 3] if moves == 5 and move < 3 else [1, 1, 1, 1, 3, 3])
        scores = torch.tensor([3.0, 1.0, -1.0, -1.0, -4.0, -2.0]) if move < 6 else torch.full((6,), NAN)
        action = policy.choose(state_of(0, scores, blocks))
        policy.learn(action, float(action.block) - 2)
        chosen.append(action.block)
    return chosen


@pytest.mark.parametrize("name", ALLOCATORS)
def test_restored_policy_goes_on_the_same(name):
    first = make_policy(name, 3, PPOConfig(), generator(1))
    play(first, 5)  # with PPO, one move is waiting for an update
    second = make_policy(name, 3, PPOConfig(), generator(2))
    second.load_state_dict(from_json(to_json(first.state_dict())))
    second.generator.set_state(first.generator.get_state())
    assert play(second, 7) == play(first, 7)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_draws_from_its_own_generator(name):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    play(make_policy(name, 3, PPOConfig(), generator()), 4)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_same_seed_gives_the_same_actions(name):
    runs = [play(make_policy(name, 3, PPOConfig(), generator(3)), 6) for _ in range(2)]
    assert runs[0] == runs[1]
