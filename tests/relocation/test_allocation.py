"""Policies that choose blocks, by hand and in toy environments."""

import math

import pytest
import torch

from provpt_peft.relocation.allocation import (
    Choice,
    Greedy,
    NaiveRL,
    PPOAllocation,
    Situation,
    Thompson,
    Uniform,
    make_policy,
)
from provpt_peft.relocation.config import ALLOCATORS, PPOConfig
from provpt_peft.relocation.serialization import from_json, to_json


NAN = math.nan
# Prompt:            0    1    2    3    4    5
SCORES = torch.tensor([3.0, 1.0, NAN, -4.0, 9.0, -2.0])
BLOCKS = torch.tensor([1, 1, 1, 2, 0, 2])  # prompt 4 is in no block, block 3 is empty


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def situation(prompt=None, scores=SCORES, blocks=BLOCKS, num_blocks=3):
    return Situation(scores=scores, blocks=blocks, num_blocks=num_blocks, prompt=prompt)


def standardised(*values):
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / std for value in values]


def spread_out(worth):
    """Two prompts a block with scores of minus `worth`, the first of which is to be moved."""
    blocks = torch.arange(1, len(worth) + 1).repeat(2)
    return situation(0, -torch.tensor(worth).repeat(2), blocks, len(worth))


def test_sums_by_hand():
    # Sums of 3 + 1, -4 - 2 and nothing; k* still counts, the prompt in no block and the one without a score do not.
    expected = standardised(4.0, -6.0, 0.0)
    for prompt in (None, 0, 3):
        assert situation(prompt).sums().tolist() == pytest.approx(expected)
    assert situation().sums().dtype == torch.float64


def test_sums_of_equal_blocks_are_zero():
    assert situation(scores=torch.full((6,), NAN)).sums().tolist() == [0, 0, 0]


def test_counts_by_hand():
    assert situation().counts().tolist() == [3, 2, 0]
    assert situation(0).counts().tolist() == [2, 2, 0]
    assert situation(3).counts().tolist() == [3, 1, 0]
    assert situation(4).counts().tolist() == [3, 2, 0]


def test_worth_by_hand():
    # Block 1 has 3 and 1, block 2 has -4 and -2.
    worth = situation().worth()
    assert worth[:2].tolist() == [-2, 3]
    assert worth[2].isnan()
    assert situation(0).worth()[:2].tolist() == [-1, 3]
    assert situation(3).worth()[:2].tolist() == [-2, 2]
    assert situation(4).worth()[:2].tolist() == [-2, 3]


def test_worth_of_a_block_that_loses_its_only_score_is_unknown():
    worth = situation(0, torch.tensor([1.0, NAN, 2.0]), torch.tensor([1, 1, 2]), 2).worth()
    assert worth[0].isnan()
    assert worth[1] == -2


def test_state_by_hand():
    state = situation(3).state()
    assert state.dtype == torch.float32
    assert state.tolist() == pytest.approx([*standardised(4.0, -6.0, 0.0), 3 / 4, 1 / 4, 0, 0, 1, 0])


def test_state_without_a_prompt_has_no_one_hot():
    assert situation().state().tolist() == pytest.approx([*standardised(4.0, -6.0, 0.0), 3 / 5, 2 / 5, 0])


def test_state_of_a_prompt_in_no_block():
    assert situation(4).state().tolist() == pytest.approx([*standardised(4.0, -6.0, 0.0), 3 / 5, 2 / 5, 0, 0, 0, 0])


def test_state_of_empty_blocks_is_finite():
    state = situation(0, torch.tensor([NAN]), torch.tensor([2])).state()
    assert state.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0]


def test_state_does_not_depend_on_the_scale_of_the_loss():
    torch.testing.assert_close(situation(0, 1000 * SCORES).state(), situation(0).state())


def test_uniform_covers_all_blocks_evenly():
    policy = Uniform(3, generator())
    chosen = [policy.choose(situation(0)).block for _ in range(3000)]
    for block in (1, 2, 3):
        # Five standard deviations of a binomial: 5 * sqrt(3000 * 1/3 * 2/3) = 129.
        assert abs(chosen.count(block) - 1000) < 130
    assert set(chosen) == {1, 2, 3}


def test_greedy_takes_the_best_average():
    # The sum of block 1 is the larger, the mean of block 2 is.
    scores, blocks = torch.tensor([-1.0, -1.0, -1.0, -2.0, 0.0, 0.0]), torch.tensor([1, 1, 1, 2, 3, 3])
    assert Greedy(3, generator()).choose(situation(4, scores, blocks)).block == 2


def test_greedy_fills_an_empty_block():
    scores, blocks = torch.tensor([-1.0, -1.0, -9.0]), torch.tensor([1, 1, 3])
    assert Greedy(3, generator()).choose(situation(0, scores, blocks)).block == 2


def test_greedy_leaves_the_moved_prompt_out():
    # With prompt 0, block 1 would be best.
    scores, blocks = torch.tensor([-9.0, 0.0, -1.0]), torch.tensor([1, 1, 2])
    assert Greedy(2, generator()).choose(situation(0, scores, blocks, 2)).block == 2


def test_greedy_without_scores_takes_any_block():
    policy = Greedy(3, generator())
    assert {policy.choose(situation(0, torch.full((6,), NAN))).block for _ in range(60)} == {1, 2, 3}


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
    policy.learn(Choice(1), 1.0)
    chosen = [policy.choose(situation(0, num_blocks=2)).block for _ in range(5000)]
    assert chosen.count(1) / 5000 == pytest.approx(2 / 3, abs=0.035)


def test_thompson_counts_successes_and_failures():
    policy = Thompson(3, generator())
    for block, reward in [(1, 0.5), (1, 2.0), (1, -1.0), (3, 0.0)]:
        policy.learn(Choice(block), reward)
    assert policy.counts.tolist() == [[3, 1, 1], [2, 1, 2]]


@pytest.mark.parametrize("seed", range(3))
def test_thompson_finds_the_one_good_block(seed):
    policy = Thompson(6, generator(seed))
    rewards = generator(100 + seed)
    chosen = []
    for _ in range(300):
        choice = policy.choose(spread_out([0.0] * 6))
        good = torch.rand(1, generator=rewards).item() < (0.8 if choice.block == 4 else 0.2)
        policy.learn(choice, 1.0 if good else -1.0)
        chosen.append(choice.block)
    assert chosen[-100:].count(4) >= 75


def test_first_ppo_without_worth_is_nearly_uniform():
    policy = PPOAllocation(4, PPOConfig(worth_coef=0), generator())
    memory = policy.choose(spread_out([5.0, 0.0, 0.0, 0.0])).memory
    assert memory["offset"].tolist() == [0, 0, 0, 0]
    assert math.exp(memory["log_prob"]) == pytest.approx(1 / 4, abs=0.02)


def test_ppo_with_a_large_worth_coef_is_greedy():
    policy, greedy = PPOAllocation(4, PPOConfig(worth_coef=1000), generator()), Greedy(4, generator())
    worths = torch.randn(20, 4, generator=generator(1)).tolist()
    for worth in worths:
        assert policy.choose(spread_out(worth)).block == greedy.choose(spread_out(worth)).block


def test_offsets_of_worth_by_hand():
    policy = PPOAllocation(3, PPOConfig(worth_coef=2), generator())
    # Worths -1 and 3 of the blocks that have any are -1 and 1 standardised; an unknown one counts as their mean.
    memory = policy.choose(situation(0)).memory
    assert memory["offset"].tolist() == pytest.approx([-2, 2, 0])


def test_ppo_without_scores_has_no_offset():
    policy = PPOAllocation(3, PPOConfig(worth_coef=1000), generator())
    assert policy.choose(situation(0, torch.full((6,), NAN))).memory["offset"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("worth_coef", [0, 1])
def test_ppo_learns_the_one_good_block(worth_coef):
    """Block 3 gives reward 1, whatever the scores say."""
    policy = PPOAllocation(4, PPOConfig(worth_coef=worth_coef, actor_learning_rate=1e-3), generator())
    worths = torch.randn(300, 4, generator=generator(1)).tolist()
    chosen = []
    for worth in worths:
        choice = policy.choose(spread_out(worth))
        policy.learn(choice, float(choice.block == 3))
        chosen.append(choice.block)
    assert chosen[-50:].count(3) >= 35


def test_naive_rl_never_takes_from_an_empty_block():
    policy = NaiveRL(3, PPOConfig(), generator())
    choices = []
    for i in range(60):
        choice = policy.choose(situation())
        policy.learn(choice, float(i % 2))
        choices.append(choice)
    assert {choice.source for choice in choices} == {1, 2}
    assert {choice.block for choice in choices} == {1, 2, 3}


@pytest.mark.parametrize(("action", "source", "block"), [(0, 1, 1), (1, 1, 2), (3, 2, 1), (5, 2, 3), (8, 3, 3)])
def test_naive_rl_s_actions_are_pairs(action, source, block, monkeypatch):
    policy = NaiveRL(3, PPOConfig(), generator())
    monkeypatch.setattr(policy.ppo, "act", lambda state, offset: (action, {}))
    choice = policy.choose(situation())
    assert (choice.source, choice.block) == (source, block)


def test_naive_rl_s_mask_is_over_sources():
    memory = NaiveRL(3, PPOConfig(), generator()).choose(situation()).memory
    assert (memory["offset"] < -1e6).tolist() == [False] * 6 + [True] * 3
    assert memory["state"].shape == (6,)


def test_only_naive_rl_chooses_the_source():
    policies = {name: make_policy(name, 3, PPOConfig(), generator()) for name in ALLOCATORS}
    assert [name for name, policy in policies.items() if policy.chooses_source] == ["naive_rl"]
    kinds = (PPOAllocation, Thompson, Greedy, Uniform, NaiveRL)
    assert tuple(type(policy) for policy in policies.values()) == kinds


def play(policy, moves):
    """Choices and the rewards learned from them."""
    chosen = []
    for _ in range(moves):
        # Without scores the greedy policy draws too.
        scores = torch.full((6,), NAN) if isinstance(policy, Greedy) else SCORES
        choice = policy.choose(situation(None if policy.chooses_source else 0, scores))
        policy.learn(choice, float(choice.block) - 2)
        chosen.append((choice.source, choice.block))
    return chosen


@pytest.mark.parametrize("name", ALLOCATORS)
def test_restored_policy_goes_on_the_same(name):
    first = make_policy(name, 3, PPOConfig(), generator(1))
    play(first, 5)  # with PPO, one move is waiting for an update
    second = make_policy(name, 3, PPOConfig(), generator(2))
    second.load_state_dict(from_json(to_json(first.state_dict())))
    own_generator(second).set_state(own_generator(first).get_state())
    assert play(second, 7) == play(first, 7)


def own_generator(policy):
    return policy.ppo.generator if isinstance(policy, PPOAllocation) else policy.generator


@pytest.mark.parametrize("name", ALLOCATORS)
def test_draws_from_its_own_generator(name):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    play(make_policy(name, 3, PPOConfig(), generator()), 4)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_same_seed_gives_the_same_choices(name):
    runs = [play(make_policy(name, 3, PPOConfig(), generator(3)), 6) for _ in range(2)]
    assert runs[0] == runs[1]
