"""Algo. 1 in a loop of one's own, with scores and losses made up where the numbers matter."""

import json
import math
from dataclasses import asdict

import pytest
import tiny
import torch
from accelerate import Accelerator
from training import Images

from provpt_peft import PPOConfig, ProVPTConfig, RelocationConfig, Relocator


def setup(optimizer_class=torch.optim.AdamW, config=None, **adapter):
    model = tiny.prompted(tiny.make("vit"), **adapter)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_class(parameters, lr=1e-2)
    return model, optimizer, Relocator(model, config or RelocationConfig(idleness="gate"), optimizer)


def report(relocator, scores, loss, images=4):
    """Make the blocks report these scores, the same for each image."""
    scores = torch.tensor(scores, dtype=torch.float32)
    shares = scores / images
    moments = torch.stack([*(images * shares**power for power in range(1, 5)), torch.full_like(scores, images)])
    relocator._observation.moments.grad = moments
    relocator.record_step(loss)


def train_epoch(model, optimizer, relocator, steps=3, batch=4):
    for step in range(steps):
        loss = model(pixel_values=tiny.images(batch, seed=step), labels=tiny.labels(batch, seed=step)).loss
        loss.backward()
        relocator.record_step(loss)
        optimizer.step()
        optimizer.zero_grad()


def scores_with(value, prompt, others=-1.0):
    scores = [others] * 12
    scores[prompt] = value
    return scores


def test_the_most_idle_prompt_moves_and_eq_8_rewards_it():
    model, _, relocator = setup()
    assert relocator.relocate() == []
    report(relocator, scores_with(0.25, prompt=7), loss=2.0)
    (move,) = relocator.relocate()
    assert (move.epoch, move.prompt, move.from_block) == (1, 7, 3)
    assert (move.idleness, move.idleness_stderr, move.loss_before) == (0.25, 0.0, 2.0)
    assert move.reward is None
    assert model.base_model.prompt_blocks()[7] == move.block

    report(relocator, scores_with(0.5, prompt=0), loss=1.5)
    (second,) = relocator.relocate()
    # Eq. 8: the loss before minus the loss after minus the score of the prompt that was moved.
    assert move.loss_after == 1.5
    assert move.reward == 2.0 - 1.5 - 0.25
    assert second.prompt == 0
    assert relocator.history == [move, second]

    report(relocator, [0.0] * 12, loss=1.0)
    relocator.finish()
    assert second.reward == 1.5 - 1.0 - 0.5
    assert len(relocator.history) == 2
    assert model.base_model.bank.observation is None


def test_nothing_moves_where_no_prompt_is_idle():
    model, _, relocator = setup()
    report(relocator, [-0.1] * 11 + [0.0], loss=1.0)
    before = model.base_model.prompt_blocks()
    assert relocator.relocate() == []
    assert torch.equal(model.base_model.prompt_blocks(), before)


def test_warm_up():
    _, _, relocator = setup(config=RelocationConfig(warmup_epochs=3))
    moved = []
    for _ in range(4):
        report(relocator, [1.0] * 12, loss=1.0)
        moved.append(len(relocator.relocate()))
    assert moved == [0, 0, 1, 1]


def test_loss_is_a_mean_over_steps():
    _, _, relocator = setup()
    relocator.record_loss(3.0, steps=1)
    relocator.record_loss(1.0, steps=3)
    relocator._observation.moments.grad = torch.ones(5, 12)
    relocator.record_step()
    (move,) = relocator.relocate()
    assert move.loss_before == 1.5


@pytest.mark.parametrize("what", ["loss", "score"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_moves_nothing_and_learns_nothing(what, value):
    model, _, relocator = setup(config=RelocationConfig(ppo=PPOConfig(moves_per_update=1)))
    report(relocator, [1.0] * 12, loss=1.0)
    (pending,) = relocator.relocate()
    weights = [p.clone() for p in relocator.policy.ppo.actor.parameters()]
    before = model.base_model.prompt_blocks()

    loss = value if what == "loss" else 1.0
    report(relocator, scores_with(value if what == "score" else 1.0, prompt=2), loss=loss)
    assert relocator.relocate() == []
    assert torch.equal(model.base_model.prompt_blocks(), before)
    assert pending.reward is None
    assert "not finite" in pending.note
    assert relocator.history[-1].prompt is None
    assert "not finite" in relocator.history[-1].note
    assert all(torch.equal(p, w) for p, w in zip(relocator.policy.ppo.actor.parameters(), weights, strict=True))

    report(relocator, [1.0] * 12, loss=1.0)
    assert len(relocator.relocate()) == 1


def test_relocating_without_a_loss_is_an_error():
    model, _, relocator = setup()
    model(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()
    relocator.record_step()
    with pytest.raises(RuntimeError, match=r"none was recorded. Call `record_step\(loss\)`"):
        relocator.relocate()


def test_model_without_adapter():
    with pytest.raises(ValueError, match="needs a model with a PROVPT adapter, got ViTForImageClassification"):
        Relocator(tiny.make("vit"))


def test_prompts_that_are_not_trained():
    model = tiny.prompted(tiny.make("vit"))
    head = torch.optim.SGD(model.base_model.model.classifier.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"those of the adapter 'default' are not in the optimizer\. Load an adapter"):
        Relocator(model, optimizer=head)
    model.base_model.prompts().requires_grad = False
    with pytest.raises(ValueError, match=r"those of the adapter 'default' are frozen\. Load an adapter with"):
        Relocator(model)


def test_steps_that_are_not_recorded_beside_score_batches(caplog):
    batches = [dict(pixel_values=tiny.images(), labels=tiny.labels())]
    model, optimizer, _ = setup()
    relocator = Relocator(model, RelocationConfig(), optimizer, batches)
    relocator.relocate()
    assert not caplog.records
    relocator.relocate()
    relocator.relocate()
    assert [record.getMessage()[:66] for record in caplog.records] == [
        "Nothing moves: `relocate` was called twice, but no training step w"
    ]


def test_accumulation_by_accelerate():
    """Its `accumulate` divides each loss and holds the optimizer back, so each micro-batch looks like a step."""

    def scores_and_loss(steps, batch):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        model = tiny.prompted(tiny.make("vit"))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        loader = torch.utils.data.DataLoader(Images(8), batch_size=batch)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        relocator = Relocator(model, RelocationConfig(), optimizer)
        for inputs in loader:
            with accelerator.accumulate(model):
                loss = model(**inputs).loss
                accelerator.backward(loss)
                relocator.record_step(loss)
                optimizer.step()
                optimizer.zero_grad()
        return relocator.window.scores(), relocator._loss

    (whole, loss), (accumulated, losses) = scores_and_loss(1, 8), scores_and_loss(4, 2)
    torch.testing.assert_close(accumulated.score, whole.score, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(accumulated.stderr, whole.stderr, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(losses[0] / losses[1], loss[0] / loss[1])


def force(relocator, block):
    """Let the policy choose a block."""
    choose = relocator.policy.choose

    def chosen(state):
        choice = choose(state)
        choice.block = block
        return choice

    relocator.policy.choose = chosen


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_a_moved_prompt_starts_from_the_mean_with_its_new_blocks_moments(optimizer_class):
    optimizer = (
        torch.optim.AdamW if optimizer_class is torch.optim.AdamW else lambda p, lr: torch.optim.SGD(p, lr, 0.9)
    )
    model, optimizer, relocator = setup(optimizer)
    train_epoch(model, optimizer, relocator)
    relocator.window.clear()
    relocator._loss.zero_()
    prompts = model.base_model.prompts()
    rows = prompts.detach().clone()
    state = {n: m for n, m in optimizer.state[prompts].items() if torch.is_tensor(m) and m.shape == prompts.shape}
    assert set(state) == ({"exp_avg", "exp_avg_sq"} if optimizer_class is torch.optim.AdamW else {"momentum_buffer"})
    old = {name: moment.clone() for name, moment in state.items()}

    force(relocator, 4)
    report(relocator, scores_with(1.0, prompt=0), loss=1.0)
    relocator.relocate()
    assert model.base_model.prompts() is prompts
    torch.testing.assert_close(prompts[0], rows[9:12].mean(dim=0))
    assert torch.equal(prompts[1:], rows[1:])
    for name, before in old.items():
        if name == "exp_avg_sq":
            torch.testing.assert_close(state[name][0], before[9:12].mean(dim=0))
        else:
            assert not state[name][0].any()
        assert torch.equal(state[name][1:], before[1:])


def test_a_prompt_of_the_reserve_has_the_mean_moments_of_all_in_an_empty_block():
    model, optimizer, relocator = setup(num_prompts=[6, 6, 0, 0], reserve=1)
    train_epoch(model, optimizer, relocator)
    prompts = model.base_model.prompts()
    squares = optimizer.state[prompts]["exp_avg_sq"]
    before = squares.clone()
    relocator.place(12, 4, relocator.window.scores())
    assert not before[12].any()
    torch.testing.assert_close(squares[12], before[:12].mean(dim=0))
    assert torch.equal(squares[:12], before[:12])


def test_steps_of_another_adapter_count_for_nothing():
    model, _, relocator = setup()
    report(relocator, [1.0] * 12, loss=2.0)
    model.add_adapter("other", ProVPTConfig(num_prompts=2))
    model.set_adapter("other")
    relocator.record_step(9.0)
    model.set_adapter("default")
    (move,) = relocator.relocate()
    assert move.loss_before == 2.0


def test_a_moved_prompt_steps_no_further_than_its_neighbours():
    """With a gradient of 1 Adam's step is the learning rate. The bias correction is the parameter's, so a row whose
    moments were both 0 would step by (1 - 0.9^t) / sqrt(1 - 0.999^t), up to 6.5 times as far."""
    model, optimizer, relocator = setup(lambda p, lr: torch.optim.AdamW(p, 1e-3, weight_decay=0.0))
    prompts = model.base_model.prompts()

    def change():
        before = prompts.detach().clone()
        optimizer.zero_grad()
        prompts.grad = torch.ones_like(prompts)
        optimizer.step()
        return (before - prompts.detach()).mean(dim=1)

    for _ in range(2000):
        change()
    force(relocator, 4)
    report(relocator, scores_with(1.0, prompt=0), loss=1.0)
    assert relocator.relocate()[0].block == 4
    for step in range(1, 21):
        steps = change()
        torch.testing.assert_close(steps[1:], torch.full_like(steps[1:], 1e-3), atol=2e-6, rtol=0)
        assert steps[0].item() == pytest.approx((1 - 0.9**step) * 1e-3, abs=2e-6)


def test_optimizer_states_that_are_no_moments_are_left_alone():
    model, optimizer, relocator = setup()
    train_epoch(model, optimizer, relocator)
    prompts = model.base_model.prompts()
    optimizer.state[prompts]["z"] = torch.ones_like(prompts)
    force(relocator, 4)
    report(relocator, scores_with(9.0, prompt=0), loss=1.0)
    (move,) = relocator.relocate()
    assert (move.prompt, move.block) == (0, 4)
    assert optimizer.state[prompts]["z"].all()
    assert not optimizer.state[prompts]["exp_avg"][0].any()


@pytest.mark.parametrize(("distribution", "block"), [([6, 5, 1, 0], 3), ([6, 5, 1, 0], 4), ([6, 5, 1, 0], 1)])
def test_a_moved_prompt_keeps_its_vector_where_there_is_no_mean_or_no_move(distribution, block):
    model, _, relocator = setup(num_prompts=distribution)
    rows = model.base_model.prompts().detach().clone()
    force(relocator, block)
    report(relocator, scores_with(1.0, prompt=0), loss=1.0)
    (move,) = relocator.relocate()
    assert move.block == block
    assert torch.equal(model.base_model.prompts(), rows)


def test_same_history_with_and_without_a_save_in_between():
    def run(save_at):
        torch.manual_seed(0)
        model, optimizer, relocator = setup()
        for epoch in range(6):
            if epoch == save_at:
                saved = json.loads(json.dumps(relocator.state_dict()))
                relocator = Relocator(model, RelocationConfig(idleness="gate", seed=99), optimizer)
                relocator.load_state_dict(saved)
            relocator.relocate()
            train_epoch(model, optimizer, relocator)
        relocator.finish()
        return [asdict(record) for record in relocator.history], model.base_model.prompts().detach()

    expected, prompts = run(save_at=None)
    assert len(expected) >= 3
    for save_at in (1, 3, 5):
        history, resumed = run(save_at)
        assert history == expected
        assert torch.equal(resumed, prompts)


def test_state_of_another_adapter_is_refused():
    _, _, relocator = setup()
    _, _, other = setup(num_prompts=2)
    with pytest.raises(ValueError, match="saved for 12 prompts in 4 blocks, but the model has 8 prompts in 4 blocks"):
        other.load_state_dict(relocator.state_dict())


def test_another_adapter_s_batches_are_not_observed():
    model, _, relocator = setup()
    model.add_adapter("other", ProVPTConfig(num_prompts=8, prompt_dropout=0.0))
    model.set_adapter("other")
    model(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()
    relocator.record_step(1.0)
    assert relocator.relocate() == []
    assert relocator.epoch == 0
    assert model.base_model.prompt_distribution() == [8, 8, 8, 8]


def test_metrics_are_plain_numbers():
    _, _, relocator = setup(config=RelocationConfig(ppo=PPOConfig(moves_per_update=1)))
    for _ in range(2):
        report(relocator, [1.0] * 12, loss=1.0)
        relocator.relocate()
    assert set(relocator.metrics) == {
        "moves", "prompt", "from_block", "to_block", "idleness", "reward",
        "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac",
    }  # fmt: skip
    assert all(type(value) in (int, float) for value in relocator.metrics.values())
