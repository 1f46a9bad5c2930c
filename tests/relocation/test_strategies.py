"""Every strategy by name, on a tiny model: what it moves, and what it keeps."""

import json
import math
import random
from dataclasses import asdict, replace

import numpy as np
import pytest
import tiny
import torch
from test_relocator import report, scores_with, setup, train_epoch

from provpt_peft import PPOConfig, RelocationConfig, Relocator
from provpt_peft.relocation.config import ALLOCATORS, IDLENESS, PRESETS


def batches(count=2):
    return [{"pixel_values": tiny.images(4, seed=k), "labels": tiny.labels(4, seed=k)} for k in range(count)]


def run(config, epochs=4, **adapter):
    """Train with a config. Returns the tuner and the relocator."""
    torch.manual_seed(0)
    model = tiny.prompted(tiny.make("vit"), **adapter)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    relocator = Relocator(model, config, optimizer, score_batches=batches() if config.score_images else None)
    for epoch in range(epochs):
        relocator.relocate(progress=epoch / epochs)
        train_epoch(model, optimizer, relocator)
    relocator.finish()
    return model.base_model, relocator


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"A", "B", "adding"}))
def test_relocating_strategies_keep_the_budget(name):
    tuner, relocator = run(RelocationConfig.preset(name, trigger="always", settle=0.0))
    assert sum(tuner.prompt_distribution()) == 12
    moves = [record for record in relocator.history if record.prompt is not None]
    assert [record.epoch for record in moves] == [1, 2, 3]
    assert all(math.isfinite(record.reward) for record in moves)
    json.dumps([asdict(record) for record in relocator.history])


@pytest.mark.parametrize(("name", "share", "kept"), [("A", 0.25, 9), ("B", 0.5, 6)])
def test_pruning_strategies_take_their_share_once(name, share, kept):
    tuner, relocator = run(RelocationConfig.preset(name, prune_share=share))
    assert sum(tuner.prompt_distribution()) == kept
    assert (tuner.prompt_blocks() == 0).sum() == 12 - kept
    assert [(record.epoch, record.block) for record in relocator.history] == [(1, 0)] * (12 - kept)
    # The most idle ones, in order.
    idleness = [record.idleness for record in relocator.history]
    assert idleness == sorted(idleness, reverse=True)


def test_pruning_takes_its_share_of_all_prompts_when_some_are_removed_exactly():
    tuner, _ = run(RelocationConfig.preset("A", prune_share=0.5, screen=2))
    assert sum(tuner.prompt_distribution()) == 6


def test_a_prompt_of_the_reserve_is_an_opportunity():
    config = RelocationConfig.preset("adding", trigger="opportunity")
    tuner, relocator = run(config, num_prompts=[2, 2, 2, 2], reserve=2)
    assert sum(tuner.prompt_distribution()) == 10
    assert [record.prompt for record in relocator.history] == [8, 9]


def test_naive_rl_moves_a_prompt_once_in_a_relocation():
    config = RelocationConfig.preset("C", prompts_per_relocation=4)
    for seed in range(10):
        _, _, relocator = setup(config=replace(config, idleness="gate", score_images=0, seed=seed))
        report(relocator, [0.0] * 12, loss=1.0)
        moved = [record.prompt for record in relocator.relocate()]
        assert len(moved) == len(set(moved)) >= 1


def test_score_batches_need_no_recorded_loss():
    model, optimizer, _ = setup()
    relocator = Relocator(model, RelocationConfig(trigger="always"), optimizer, score_batches=batches())
    assert relocator.relocate() == []
    relocator.record_step()
    with torch.no_grad():
        losses = [model.eval()(**batch).loss.item() for batch in batches()]
    (move,) = relocator.relocate()
    assert move.loss_before == pytest.approx(sum(losses) / 2)


def test_augmented_score_images_are_the_same_each_time_and_training_s_random_numbers_too():
    class Augmented:
        def __iter__(self):
            for batch in batches():
                shift = random.random() + np.random.rand() + torch.rand(1)
                yield batch | {"pixel_values": batch["pixel_values"] + shift}

    model, _, _ = setup()
    relocator = Relocator(model, RelocationConfig(screen=2), score_batches=Augmented())
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    (first, loss), (second, again) = (relocator.measure(relocator.score_batches) for _ in range(2))
    assert loss == again
    assert torch.equal(first.score, second.score)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_adding_takes_prompts_from_the_reserve():
    tuner, relocator = run(RelocationConfig.preset("adding"), num_prompts=[2, 2, 2, 2], reserve=2)
    assert sum(tuner.prompt_distribution()) == 10
    added = relocator.history
    assert [(record.epoch, record.prompt, record.from_block) for record in added] == [(1, 8, 0), (2, 9, 0)]
    # Nothing was pruned, so the reward is the loss before minus the loss after.
    assert [record.reward for record in added] == [record.loss_before - record.loss_after for record in added]


@pytest.mark.parametrize("idleness", sorted(IDLENESS))
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_every_score_with_every_allocator_and_both_rewards(idleness, allocator):
    for reward in ("paper", "counterfactual"):
        config = RelocationConfig(
            idleness=idleness, allocator=allocator, reward=reward, trigger="always", prompts_per_relocation=2,
            settle=0.0,
        )  # fmt: skip
        tuner, relocator = run(config, epochs=3)
        assert sum(tuner.prompt_distribution()) == 12
        assert len(relocator.history) == 4
        assert all(math.isfinite(record.reward) for record in relocator.history)


def test_several_moves_have_records_and_rewards_of_their_own():
    config = RelocationConfig(
        idleness="gate", reward="counterfactual", prompts_per_relocation=2, allocator="uniform", seed=1
    )
    model, _, relocator = setup(config=config)
    scores = [-1.0] * 12
    scores[3], scores[7], scores[9] = 0.5, 0.75, 0.25
    report(relocator, scores, loss=1.0)
    first, second = relocator.relocate()
    assert (first.prompt, second.prompt) == (7, 3)
    assert model.base_model.prompt_blocks()[[7, 3]].tolist() == [first.block, second.block]
    # What each earns at its new block is minus its next score.
    scores[3], scores[7] = -0.125, -0.5
    report(relocator, scores, loss=5.0)
    relocator.finish()
    assert (first.reward, second.reward) == (0.5, 0.125)


def test_always_moves_the_most_idle_though_none_is_idle():
    _, _, relocator = setup(config=RelocationConfig(idleness="gate", trigger="always"))
    report(relocator, scores_with(-0.25, prompt=4), loss=1.0)
    (move,) = relocator.relocate()
    assert (move.prompt, move.idleness) == (4, -0.25)


@pytest.mark.parametrize(("earns", "moves"), [(0.9, 1), (1.1, 0)])
def test_opportunity_compares_what_the_prompt_earns_here_and_there(earns, moves):
    # The greedy policy chooses block 4, whose prompts earn 1.0 on average; the prompt is the least useful elsewhere.
    config = RelocationConfig(idleness="gate", trigger="opportunity", allocator="greedy")
    model, _, relocator = setup(config=config, num_prompts=[1, 0, 0, 3])
    report(relocator, [-earns, -1.5, -1.5, 0.0][: len(model.base_model.prompts())], loss=1.0)
    relocator.ranking = lambda idleness: [0]  # the only one elsewhere
    assert len(relocator.relocate()) == moves


def test_nothing_moves_in_the_settling_phase_but_rewards_are_learned():
    _, relocator = run(RelocationConfig(trigger="always", settle=0.5), epochs=4)
    assert [record.epoch for record in relocator.history] == [1]
    assert relocator.history[0].reward is not None


def test_nothing_is_measured_where_neither_a_move_nor_a_reward_hangs_on_it():
    model, optimizer, relocator = setup(config=RelocationConfig(trigger="always", settle=0.5, warmup_epochs=2))
    measured = []
    relocator.score_batches = batches()
    relocator.measure = lambda batches: measured.append(relocator.epoch) or Relocator.measure(relocator, batches)
    for epoch in range(8):
        relocator.relocate(progress=epoch / 8)
        train_epoch(model, optimizer, relocator)
    relocator.finish()
    assert [record.epoch for record in relocator.history] == [2, 3]
    # The last reward is learned in the epoch after it.
    assert measured == [2, 3, 4]


def test_pruning_for_good_measures_once():
    model, optimizer, relocator = setup(config=RelocationConfig(adjust="prune", settle=0.0))
    measured = []
    relocator.score_batches = batches()
    relocator.measure = lambda batches: measured.append(relocator.epoch) or Relocator.measure(relocator, batches)
    for _ in range(3):
        relocator.relocate()
        train_epoch(model, optimizer, relocator)
    relocator.finish()
    assert measured == [1]


def test_exact_is_the_change_of_the_loss_from_removal():
    config = RelocationConfig(idleness="exact", trigger="always", settle=0.0)
    model, optimizer, _ = setup()
    relocator = Relocator(model, config, optimizer, score_batches=batches(3))
    train_epoch(model, optimizer, relocator)
    tuner, expected = model.base_model, []
    model.eval()

    @torch.no_grad()
    def loss():
        return sum(model(**batch).loss.item() for batch in batches(3)) / 3

    for prompt, block in enumerate(tuner.prompt_blocks().tolist()):
        before = loss()
        tuner.move_prompt(prompt, 0)
        expected.append(before - loss())
        tuner.move_prompt(prompt, block)
    model.train()
    idleness, mean_loss = relocator.measure(batches(3))
    torch.testing.assert_close(idleness.score, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-4)
    assert mean_loss == pytest.approx(loss(), rel=1e-5)
    assert model.training


def test_measuring_leaves_gradients_modes_and_random_numbers_alone():
    torch.manual_seed(0)
    model = tiny.prompted(tiny.make("vit"), prompt_dropout=0.5)
    relocator = Relocator(model, RelocationConfig(), score_batches=batches())
    model.train()
    model.base_model.model.classifier.eval()
    modes = [module.training for module in model.modules()]
    relocator.record_loss(1.0, steps=1)
    generator = torch.get_rng_state()
    relocator.relocate()
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.base_model.bank.observation is None


def test_standard_errors_of_exact_scores_are_over_batches():
    model, optimizer, _ = setup()
    relocator = Relocator(model, RelocationConfig(idleness="exact", significance=2.0), score_batches=batches(3))
    train_epoch(model, optimizer, relocator)
    of_each_batch = [
        Relocator(model, RelocationConfig(idleness="exact"), score_batches=[batch]).measure([batch])[0].score
        for batch in batches(3)
    ]
    expected = torch.stack(of_each_batch).std(dim=0) / 3**0.5
    torch.testing.assert_close(relocator.measure(batches(3))[0].stderr, expected, atol=1e-7, rtol=1e-4)
    relocator.config = RelocationConfig(screen=2, significance=2.0)
    screened, _ = relocator.measure(batches(3))
    torch.testing.assert_close(screened.stderr[screened.exact], expected[screened.exact], atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("config", [dict(idleness="exact"), dict(screen=2)])
def test_one_batch_has_no_standard_errors_of_exact_scores(config):
    model, optimizer, _ = setup()
    config = RelocationConfig(**config, significance=2.0)
    relocator = Relocator(model, config, optimizer, score_batches=batches(1))
    train_epoch(model, optimizer, relocator)
    with pytest.raises(ValueError, match=r"there is one batch\. Give at least two score batches"):
        relocator.relocate()


@pytest.mark.parametrize("config", [dict(idleness="exact"), dict(screen=2)])
def test_exact_needs_batches(config):
    with pytest.raises(ValueError, match="Pass `score_batches` to the `Relocator`; for the callback, set `score_imag"):
        Relocator(tiny.prompted(tiny.make("vit")), RelocationConfig(**config))


def test_adding_needs_a_reserve():
    model = tiny.prompted(tiny.make("vit"))
    with pytest.raises(ValueError, match=r"prompts of a reserve to blocks, but the adapter has none\. Make it with"):
        Relocator(model, RelocationConfig.preset("adding"))
    model.base_model.move_prompt(0, 0)
    Relocator(model, RelocationConfig.preset("adding"))


def test_no_batches_at_all():
    relocator = Relocator(tiny.prompted(tiny.make("vit")), score_batches=[])
    relocator.record_loss(1.0, steps=1)
    with pytest.raises(ValueError, match="Give at least one batch"):
        relocator.relocate()


def test_scores_in_a_part_of_the_steps():
    model, optimizer, relocator = setup(config=RelocationConfig(idleness="gate", score_every=2))
    train_epoch(model, optimizer, relocator, steps=5, batch=4)
    # Steps 1, 3 and 5.
    assert relocator.window.sums[-1].tolist() == [12.0] * 12
    relocator.relocate()
    train_epoch(model, optimizer, relocator, steps=1, batch=4)
    assert relocator.window.sums[-1].tolist() == [4.0] * 12


@pytest.mark.parametrize(
    ("start", "expected"),
    [("own", lambda rows: rows[0]), ("best", lambda rows: rows[10]), ("mean", lambda rows: rows[9:].mean(dim=0))],
)
def test_what_a_moved_prompt_starts_from(start, expected):
    model, _, relocator = setup(config=RelocationConfig(idleness="gate", start=start, allocator="greedy"))
    rows = model.base_model.prompts().detach().clone()
    report(relocator, [1.0] + [0.0] * 8 + [-1.0, -3.0, -2.0], loss=1.0)
    (move,) = relocator.relocate()
    assert move.block == 4
    torch.testing.assert_close(model.base_model.prompts()[0], expected(rows))


@pytest.mark.parametrize("start", ["best", "mean"])
def test_prompts_that_come_to_a_block_together_do_not_start_alike(start):
    config = RelocationConfig(idleness="gate", start=start, allocator="greedy", prompts_per_relocation=2)
    model, _, relocator = setup(config=config)
    rows = model.base_model.prompts().detach().clone()
    report(relocator, [2.0, 1.0] + [0.0] * 7 + [-1.0, -3.0, -2.0], loss=1.0)
    first, second = relocator.relocate()
    assert (first.prompt, first.block, second.prompt, second.block) == (0, 4, 1, 4)
    expected = rows[10] if start == "best" else rows[9:].mean(dim=0)
    torch.testing.assert_close(model.base_model.prompts()[:2], torch.stack([expected, rows[1]]))


def test_a_fresh_start_is_within_the_bound_of_the_initialisation():
    model, _, relocator = setup(config=RelocationConfig(idleness="gate", start="fresh", allocator="greedy"))
    rows = model.base_model.prompts().detach().clone()
    report(relocator, [1.0] + [0.0] * 8 + [-1.0, -3.0, -2.0], loss=1.0)
    relocator.relocate()
    fresh, bound = model.base_model.prompts()[0], model.base_model.bank.bound
    assert not torch.isclose(fresh, rows[0]).any()
    assert bound / 2 < fresh.abs().max() <= bound


def test_same_history_with_a_save_between_several_moves():
    config = dict(trigger="always", prompts_per_relocation=3, ppo=PPOConfig(moves_per_update=4))

    def history(save_at):
        torch.manual_seed(0)
        model, optimizer, _ = setup()
        relocator = Relocator(model, RelocationConfig(**config), optimizer, score_batches=batches())
        for epoch in range(5):
            if epoch == save_at:
                saved = json.loads(json.dumps(relocator.state_dict()))
                relocator = Relocator(model, RelocationConfig(**config, seed=9), optimizer, score_batches=batches())
                relocator.load_state_dict(saved)
            relocator.relocate()
            train_epoch(model, optimizer, relocator)
        relocator.finish()
        return [asdict(record) for record in relocator.history]

    expected = history(save_at=None)
    assert len(expected) == 12
    assert history(save_at=2) == history(save_at=4) == expected


def test_screening_decides_by_the_exact_scores_of_the_candidates():
    def scores(**config):
        model, optimizer, _ = setup()
        relocator = Relocator(model, RelocationConfig(**config), optimizer, score_batches=batches(1))
        train_epoch(model, optimizer, relocator)
        return relocator.measure(batches(1))[0]

    torch.manual_seed(0)
    screened = scores(screen=3)
    torch.manual_seed(0)
    first_order = scores()
    torch.manual_seed(0)
    exact = scores(idleness="exact")
    candidates = first_order.ranking()[:3]
    assert screened.exact.nonzero()[:, 0].tolist() == sorted(candidates)
    by_exact_score = sorted(candidates, key=lambda k: -exact.score[k])
    assert screened.ranking() == by_exact_score + first_order.ranking()[3:]
    torch.testing.assert_close(screened.score[candidates], exact.score[candidates])
    others = ~screened.exact
    assert torch.equal(screened.score[others], first_order.score[others])
