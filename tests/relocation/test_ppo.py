"""PPO by hand, and in toy environments."""

import math

import pytest
import torch

from provpt_peft.relocation import ppo as ppo_module
from provpt_peft.relocation.ppo import (
    CLIP_COEF,
    ENT_COEF,
    PPO,
    TRANSITIONS_PER_UPDATE,
    UPDATE_EPOCHS,
    advantages_and_returns,
    clipped_policy_loss,
)
from provpt_peft.relocation.serialization import from_json, to_json


def make(num_blocks=12, seed=0, gamma=0.0):
    return PPO(3 * num_blocks, num_blocks, gamma, torch.Generator().manual_seed(seed))


def act(ppo, state):
    return ppo.act(state, torch.zeros(ppo.actor[-1].out_features))


def test_number_of_weights_is_the_paper_s():
    # 0.0136 M: actor 36 * 64 + 64 * 64 + 64 * 12 = 7168, critic 36 * 64 + 64 * 64 + 64 = 6464.
    ppo = make(12)
    weights = [p.numel() for net in (ppo.actor, ppo.critic) for p in net.parameters() if p.dim() == 2]
    assert sum(weights) == 13632


def test_settings_and_layers_are_the_paper_s():
    assert [group["lr"] for group in make().optimizer.param_groups] == [3e-4, 1e-3]
    assert (CLIP_COEF, ENT_COEF, UPDATE_EPOCHS, TRANSITIONS_PER_UPDATE) == (0.2, 0.01, 10, 2)
    for network in (make().actor, make().critic):
        assert [type(layer).__name__ for layer in network] == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]


def test_advantages_by_hand():
    # Two transitions, gamma 1: returns are 1 + 2 = 3 and 2; values 0.5 and 1; advantages 2.5 and 1.
    advantages, returns = advantages_and_returns(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0]), 1.0)
    assert advantages.tolist() == [2.5, 1.0]
    assert returns.tolist() == [3.0, 2.0]
    # Gamma 0.5: returns are 1 + 0.5 * 2 = 2 and 2.
    advantages, returns = advantages_and_returns(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0]), 0.5)
    assert advantages.tolist() == [1.5, 1.0]
    assert returns.tolist() == [2.0, 2.0]
    # Gamma 0: each by its own reward.
    assert advantages_and_returns(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0]), 0.0)[1].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.4),  # clipped at 1.2
        (0.5, 2.0, -1.0),  # the smaller one counts: not clipped
        (1.5, -2.0, 3.0),  # the smaller one counts: not clipped
        (0.5, -2.0, 1.6),  # clipped at 0.8
    ],
)
def test_clipped_loss_by_hand(ratio, advantage, loss):
    log_probs, old = torch.tensor([math.log(ratio)]), torch.tensor([0.0])
    assert clipped_policy_loss(log_probs, old, torch.tensor([advantage]), 0.2).item() == pytest.approx(loss, rel=1e-5)


def test_clipped_loss_is_a_mean_over_transitions():
    log_probs, old = torch.tensor([0.0, math.log(1.5)]), torch.zeros(2)
    assert clipped_policy_loss(log_probs, old, torch.tensor([1.0, 2.0]), 0.2).item() == pytest.approx(-1.7, rel=1e-5)


def test_no_gradient_beyond_the_clip():
    log_probs = torch.tensor([math.log(1.5)], requires_grad=True)
    clipped_policy_loss(log_probs, torch.zeros(1), torch.ones(1), 0.2).backward()
    assert log_probs.grad.item() == 0.0


def test_rewards_are_scaled_by_their_running_root_mean_square():
    # Root mean squares: 3; sqrt((9 + 16) / 2).
    ppo, state = make(3), torch.zeros(9)
    ppo.learn(act(ppo, state)[1], 3.0)
    assert ppo.transitions[0]["reward"] == 1.0
    scaled = []
    ppo._update = lambda: scaled.append(ppo.transitions[1]["reward"]) or {}
    ppo.learn(act(ppo, state)[1], -4.0)
    assert scaled == [pytest.approx(-4 / math.sqrt(12.5))]
    ppo = make(3)
    ppo.learn(act(ppo, state)[1], 0.0)
    assert ppo.transitions[0]["reward"] == 0.0


def test_update_comes_after_two_rewards():
    ppo = make(3)
    state = torch.zeros(9)
    assert ppo.learn(act(ppo, state)[1], 1.0) == {}
    metrics = ppo.learn(act(ppo, state)[1], -1.0)
    assert set(metrics) == {"policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"}
    assert all(type(value) is float for value in metrics.values())
    assert ppo.transitions == []


@pytest.fixture
def one_pass(monkeypatch):
    monkeypatch.setattr(ppo_module, "UPDATE_EPOCHS", 1)


OFFSET = torch.tensor([2.0, -1.0, 0.0])


def memory_of(ppo, ratio=1.0, value=None, action=0):
    """What `act` remembers of an action, if its probability was that of now over `ratio`."""
    state = torch.linspace(-1, 1, 9)
    log_probs = (ppo.actor(state) + OFFSET).log_softmax(dim=-1)
    value = ppo.critic(state).item() if value is None else value
    log_prob = log_probs[action].item() - math.log(ratio)
    return {"state": state, "offset": OFFSET, "action": action, "log_prob": log_prob, "value": value}


def test_a_first_pass_by_hand(one_pass):
    ppo = make(3)
    _, memory = ppo.act(torch.linspace(-1, 1, 9), OFFSET)
    value = ppo.critic(memory["state"]).item()
    assert memory["value"] == value
    probabilities = (ppo.actor(memory["state"]) + OFFSET).softmax(dim=-1).tolist()
    ppo.learn(memory, 2.0)
    metrics = ppo.learn(memory, -2.0)
    # Scaled rewards of 1 and -1, which are the returns; the probabilities are those of before, so all ratios are 1.
    assert metrics["policy_loss"] == pytest.approx(-((1 - value) + (-1 - value)) / 2, abs=1e-6)
    assert metrics["value_loss"] == pytest.approx(((value - 1) ** 2 + (value + 1) ** 2) / 4, rel=1e-5)
    assert metrics["entropy"] == pytest.approx(-sum(p * math.log(p) for p in probabilities), rel=1e-5)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clipfrac"] == 0


def test_how_far_the_policy_has_moved_by_hand(one_pass):
    ppo = make(3)
    ppo.learn(memory_of(ppo, ratio=1.5), 1.0)
    metrics = ppo.learn(memory_of(ppo, ratio=0.5), 1.0)
    # (1.5 - 1) - log 1.5 = 0.0945 and (0.5 - 1) - log 0.5 = 0.1931; both are beyond 0.2.
    assert metrics["approx_kl"] == pytest.approx((0.094535 + 0.193147) / 2, rel=1e-4)
    assert metrics["clipfrac"] == 1


def test_where_nothing_is_gained_the_policy_becomes_more_even(one_pass):
    ppo = make(3)
    state = memory_of(ppo)["state"]

    def likeliest():
        return (ppo.actor(state) + OFFSET).softmax(dim=-1).max().item()

    before = likeliest()
    for _ in range(2):
        ppo.learn(memory_of(ppo, value=1.0), 1.0)  # an advantage of 0
    assert likeliest() < before


def test_the_critic_learns_the_returns():
    ppo = make(3)
    for _ in range(100):
        ppo.learn(memory_of(ppo), 5.0)  # scaled to 1
    assert ppo.critic(memory_of(ppo)["state"]).item() == pytest.approx(1.0, abs=0.02)


def test_first_policy_is_nearly_uniform():
    ppo = make(12)
    state = torch.randn(36)
    probabilities = ppo.actor(state).softmax(dim=-1)
    torch.testing.assert_close(probabilities, torch.full((12,), 1 / 12), atol=0.01, rtol=0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_learns_the_one_good_block(seed):
    """Block 3 of 4 gives reward 1, the others 0, whatever the state."""
    ppo = make(4, seed=seed)
    states = torch.Generator().manual_seed(100 + seed)
    for _ in range(600):
        state = torch.randn(12, generator=states)
        action, memory = act(ppo, state)
        ppo.learn(memory, float(action == 2))
    chosen = [act(ppo, torch.randn(12, generator=states))[0] for _ in range(100)]
    assert chosen.count(2) >= 80


def test_learning_raises_the_probability_of_what_was_rewarded():
    ppo = make(3)
    state = torch.zeros(9)
    before = ppo.actor(state).softmax(dim=-1)[1].item()
    value = ppo.critic(state).item()
    memory = {
        "state": state, "offset": torch.zeros(3), "action": 1, "log_prob": math.log(before), "value": value
    }  # fmt: skip
    for _ in range(2):
        ppo.learn(memory, 1.0)
    assert ppo.actor(state).softmax(dim=-1)[1].item() > before


def test_offsets_are_added_to_the_logits():
    ppo = make(3)
    offset = torch.tensor([0.0, -1e9, 50.0])
    assert {ppo.act(torch.zeros(9), offset)[0] for _ in range(20)} == {2}
    for _ in range(2):
        metrics = ppo.learn(ppo.act(torch.zeros(9), offset)[1], 1.0)
    assert all(math.isfinite(value) for value in metrics.values())


def test_draws_from_its_own_generator():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    ppo = make()
    state = torch.zeros(36)
    for _ in range(4):
        ppo.learn(act(ppo, state)[1], 1.0)
    assert torch.equal(torch.rand(3), expected)


def test_restored_policy_goes_on_the_same():
    def play(ppo, count):
        actions = []
        for _ in range(count):
            action, memory = act(ppo, torch.ones(36))
            ppo.learn(memory, float(action))
            actions.append(action)
        return actions

    first = make(seed=1)
    play(first, 5)  # one transition is waiting for an update
    second = make(seed=2)
    second.load_state_dict(from_json(to_json(first.state_dict())))
    second.generator.set_state(first.generator.get_state())
    assert play(second, 7) == play(first, 7)
    for mine, theirs in zip(second.actor.parameters(), first.actor.parameters(), strict=True):
        assert torch.equal(mine, theirs)
