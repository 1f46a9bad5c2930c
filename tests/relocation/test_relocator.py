"""Algo. 1 in a custom loop, with scores and losses made up where the numbers matter."""

import json
import math
import random
from dataclasses import asdict

import numpy as np
import pytest
import tiny
import torch
from made_up import Chooses, MadeUp, relocator_of, scores_with

from provpt_peft import ProVPTConfig, RelocationConfig, Relocator, figures
from provpt_peft.relocation.config import ALLOCATORS
from provpt_peft.relocation.idleness import Idleness
from provpt_peft.relocation.policies import Action, Policy


def prompted(optimizer_class=torch.optim.AdamW, **adapter):
    model = tiny.prompted(tiny.make("vit"), **adapter)
    return model, optimizer_class([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def batches(count=2):
    return [{"pixel_values": tiny.images(4, seed=k), "labels": tiny.labels(4, seed=k)} for k in range(count)]


def train_epoch(model, optimizer, steps=3, batch=4):
    for step in range(steps):
        model(pixel_values=tiny.images(batch, seed=step), labels=tiny.labels(batch, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def mostly_idle(measurement):
    """Scores of the model with the sign that lets a prompt move each time."""
    idleness = Idleness.mean_of(measurement.gate_gradients())
    return Idleness(idleness.score.abs() + 1e-6, idleness.stderr)


# ---- Algo. 1 --------------------------------------------------------------------------------------------------------


def test_a_prompt_that_has_just_moved_does_not_count_in_its_new_block():
    """Its score, 10, is that of the old block: block 3 stays the one whose prompts are worth most."""
    made_up, relocator = relocator_of(prompted()[0], allocator="greedy", prompts_per_relocation=2)
    made_up.set([10.0, -1.0, -1.0, 9.0, -0.5, -0.5, -3.0, -3.0, -3.0, -2.0, -2.0, -2.0])
    assert [(record.prompt, record.block) for record in relocator.relocate(progress=0)] == [(0, 3), (3, 3)]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_policies_compute_on_the_cpu_whatever_the_default_device(allocator):
    made_up = MadeUp()
    made_up.set([1.0] * 12)
    config = RelocationConfig(idleness=made_up, allocator=allocator, check_moves=False, settle=0.0)
    model, _ = prompted()
    with torch.device("meta"):
        relocator = Relocator(model, config, score_batches=[{}])
        for _ in range(4):
            relocator.relocate(progress=0)
    assert [record.reward is not None for record in relocator.history] == [True, True, False]


def test_the_most_idle_prompt_moves_and_eq_8_rewards_it():
    model, optimizer = prompted()
    made_up, relocator = relocator_of(model, optimizer)
    made_up.set(scores_with(0.25, prompt=7), loss=2.0)
    (move,) = relocator.relocate()
    assert (move.epoch, move.prompt, move.from_block) == (1, 7, 3)
    assert (move.idleness, move.idleness_stderr, move.loss_before) == (0.25, 0.0, 2.0)
    assert move.reward is None
    assert move.block_idleness == [-1.0, -1.0, pytest.approx(-1.75 / 3), -1.0]
    assert model.base_model.prompt_blocks()[7] == move.block

    made_up.set(scores_with(0.5, prompt=0), loss=1.5)
    (second,) = relocator.relocate()
    # Eq. 8: the loss before minus the loss after minus the score of the prompt that was moved.
    assert move.loss_after == 1.5
    assert move.reward == 2.0 - 1.5 - 0.25
    assert (second.epoch, second.prompt) == (2, 0)
    assert relocator.history == [move, second]

    made_up.set([0.0] * 12, loss=1.0)
    relocator.finish()
    assert second.reward == 1.5 - 1.0 - 0.5
    assert len(relocator.history) == 2
    assert relocator.run().epochs == 3


def test_nothing_moves_where_no_prompt_is_idle():
    model, _ = prompted()
    made_up, relocator = relocator_of(model)
    made_up.set([-0.1] * 11 + [0.0])
    before = model.base_model.prompt_blocks()
    assert relocator.relocate() == []
    assert torch.equal(model.base_model.prompt_blocks(), before)


def test_several_move_where_several_are_idle():
    model, _ = prompted()
    made_up, relocator = relocator_of(model, prompts_per_relocation=3, allocator="uniform", seed=1)
    scores = [-1.0] * 12
    scores[3], scores[7] = 0.5, 0.75
    made_up.set(scores, loss=1.0)
    first, second = relocator.relocate()
    assert (first.prompt, second.prompt) == (7, 3)
    assert model.base_model.prompt_blocks()[[7, 3]].tolist() == [first.block, second.block]
    made_up.set([-1.0] * 12, loss=0.5)
    relocator.finish()
    assert (first.reward, second.reward) == (1.0 - 0.5 - 0.75, 1.0 - 0.5 - 0.5)


def test_the_record_of_the_training_costs_the_same_after_any_number_of_relocations():
    model, _ = prompted()
    made_up, relocator = relocator_of(model)
    for loss in (1.0, 0.5):
        made_up.set([1.0] * 12, loss=loss)
        relocator.relocate()
    relocator.finish()
    recorded = model.peft_config["default"].training["history"]
    # Not copies, which take longer with every relocation, and the rewards that came later are there.
    assert all(record is vars(relocation) for record, relocation in zip(recorded, relocator.history, strict=True))
    assert recorded[0]["reward"] is not None


def test_a_second_relocator_goes_on_with_the_record():
    model, _ = prompted()
    made_up, first = relocator_of(model)
    made_up.set([1.0] * 12)
    first.relocate()
    made_up, second = relocator_of(model, warmup_epochs=2)
    made_up.set([1.0] * 12)
    # Its own first epoch is over.
    assert [len(second.relocate()) for _ in range(2)] == [0, 1]
    assert [record.epoch for record in second.history] == [1, 4]
    assert model.peft_config["default"].training["epochs"] == 5


def test_several_prompted_models_in_one_are_refused():
    both = torch.nn.ModuleDict({"left": prompted()[0], "right": prompted()[0]})
    message = r"one PROVPT model, but the ModuleDict has several: left.base_model, right.base_model\. Use a custom"
    with pytest.raises(ValueError, match=message):
        Relocator(both, score_batches=[{}])
    # As the message says: one for each part.
    relocators = [relocator_of(part)[1] for part in both.values()]
    assert [relocator.tuner for relocator in relocators] == [part.base_model for part in both.values()]


def in_place(model, batch):
    """A loss that prepares its batch in place, which in training is another one each time."""
    batch["pixel_values"].sub_(1.0).div_(2.0)
    return model(**batch).loss


def test_a_loss_that_changes_its_batch_sees_the_same_one_each_time():
    model, _ = prompted()
    given = batches(1)
    kept = given[0]["pixel_values"].clone()
    relocator = Relocator(model, score_batches=given, compute_loss=in_place)
    first = relocator.measure()
    second = relocator.measure()
    assert torch.equal(given[0]["pixel_values"], kept)
    assert torch.equal(first[0].score, second[0].score)
    assert first[1] == second[1]


def test_trying_out_a_shuffled_loader_draws_no_random_numbers():
    model, _ = prompted()
    data = [{name: tensor[0] for name, tensor in batch.items()} for batch in batches(4)]
    relocator = Relocator(model, score_batches=torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
    state = torch.get_rng_state()
    relocator.relocate(progress=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_prompts_that_were_frozen_meanwhile_do_not_move():
    model, _ = prompted()
    made_up, relocator = relocator_of(model)
    made_up.set([1.0] * 12)
    prompts = model.base_model.prompts().requires_grad_(False)
    before, blocks = prompts.clone(), relocator.blocks()
    assert relocator.relocate() == []
    assert [record.note for record in relocator.history] == ["The prompts were frozen: none was moved."]
    assert torch.equal(prompts, before)
    assert torch.equal(relocator.blocks(), blocks)
    prompts.requires_grad_(True)
    assert len(relocator.relocate()) == 1


@pytest.mark.parametrize(
    ("compute_loss", "message"),
    [
        (lambda model, batch: None, "a tensor with one number, got None"),
        (lambda model, batch: 1.0, "a tensor with one number, got 1.0"),
        (lambda model, batch: model(**batch), "a tensor with one number, got ImageClassifierOutput"),
        (lambda model, batch: model(**batch).logits, r"a tensor with one number, got a tensor of shape \(4, 3\)"),
    ],
)
def test_a_loss_that_is_none_fails_before_the_first_step(compute_loss, message):
    relocator = Relocator(prompted()[0], score_batches=batches(1), compute_loss=compute_loss)
    with pytest.raises(ValueError, match=message):
        relocator.relocate(progress=0)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (torch.zeros(12), r"a tensor of shape \(12,\)"),
        (Idleness(torch.zeros(11), torch.zeros(12)), r"a tensor of shape \(11,\) and a tensor of shape \(12,\)"),
        (Idleness(torch.zeros(12), None), r"a tensor of shape \(12,\) and a NoneType"),
        (None, "a NoneType"),
    ],
)
def test_a_score_that_is_none_fails_before_the_first_step(returned, got):
    config = RelocationConfig(idleness=lambda measurement: returned)
    relocator = Relocator(prompted()[0], config, score_batches=batches(1))
    with pytest.raises(ValueError, match=rf"must return an `Idleness` .* of shape \(12,\).*, got {got}"):
        relocator.relocate(progress=0)


@pytest.mark.parametrize(
    ("chosen", "got"),
    [
        (Action(0), "block 0"),
        (Action(5), "block 5"),
        (Action(torch.tensor(-1)), r"block tensor\(-1\)"),
        (Action(2.0), r"block 2\.0"),
        (Action(torch.tensor(2.0)), r"block tensor\(2\.\)"),
        (Action(np.ones(2)), r"block array\("),
        (3, "a int"),
        (None, "a NoneType"),
    ],
)
def test_a_choice_that_is_no_block_moves_nothing(chosen, got):
    model, _ = prompted()
    made_up, relocator = relocator_of(model, allocator=Policy)
    relocator.policy.choose = lambda state: chosen
    made_up.set([1.0] * 12)
    with pytest.raises(ValueError, match=f"an `Action` with a block from 1 to 4, got {got}"):
        relocator.relocate()
    assert model.base_model.prompt_distribution() == [3, 3, 3, 3]
    assert relocator.history == []


@pytest.mark.parametrize("number", [int, np.int64, torch.tensor])
@pytest.mark.parametrize(
    ("learned", "kept"),
    [(None, {}), ({}, {}), ({"value": np.float32(0.5)}, {"value": 0.5}), ({"value": torch.tensor(2)}, {"value": 2.0})],
)
def test_numbers_of_other_libraries_can_be_saved(number, learned, kept):
    made_up, relocator = relocator_of(prompted()[0], allocator=Policy)
    relocator.policy.choose = lambda state: Action(number(2))
    relocator.policy.learn = lambda action, reward: learned
    for _ in range(2):
        made_up.set(scores_with(1.0, prompt=11))
        relocator.relocate()
    assert type(relocator.history[0].block) is int
    assert relocator.history[0].policy == kept
    json.dumps(relocator.state_dict())


@pytest.mark.parametrize("learned", [3, {"value": None}, {"value": torch.zeros(2)}])
def test_what_a_policy_learned_has_to_be_numbers(learned):
    made_up, relocator = relocator_of(prompted()[0], allocator=Policy)
    relocator.policy.choose = lambda state: Action(2)
    relocator.policy.learn = lambda action, reward: learned
    made_up.set(scores_with(1.0, prompt=11))
    relocator.relocate()
    with pytest.raises(ValueError, match="`learn` must return a dict of numbers"):
        relocator.relocate()


class WithNumPy(Policy):
    def state_dict(self):
        return {"values": np.zeros(self.num_blocks)}


def test_a_state_that_could_not_be_read_again_fails_before_the_first_step():
    relocator = Relocator(prompted()[0], RelocationConfig(allocator=WithNumPy), score_batches=batches(1))
    with pytest.raises(ValueError, match=r"tensors and plain Python values only, got numpy\..*_reconstruct\."):
        relocator.relocate(progress=0)


def test_progress_may_be_1():
    assert Relocator(prompted()[0], score_batches=batches(1)).relocate(1) == []


@pytest.mark.parametrize("progress", [None, 2, 12.5, -0.1, math.nan])
def test_progress_that_is_no_share_is_refused(progress):
    relocator = Relocator(prompted()[0], score_batches=batches(1))
    with pytest.raises(ValueError, match=r"share of training that is done, 0 … 1, got .*`settle=0\.5`"):
        relocator.relocate(progress)


def test_epochs_are_not_resumed_as_steps():
    epochs, steps = (
        Relocator(prompted()[0], RelocationConfig(relocate_every=every), score_batches=batches(1))
        for every in ("epoch", 2)
    )
    state = epochs.state_dict()
    with pytest.raises(ValueError, match="the same `relocate_every`, 2, got one for 'epoch'"):
        steps.load_state_dict(state)


@pytest.mark.parametrize("given", [batches(1)[0], torch.zeros(2, 3, 32, 32)])
def test_one_batch_is_no_list_of_batches(given):
    with pytest.raises(ValueError, match=r"must be a list of batches or a loader, got a \w+, which is a single batch"):
        Relocator(prompted()[0], score_batches=given)


def test_several_optimizers_are_refused():
    model, optimizer = prompted()
    with pytest.raises(ValueError, match="must be the one that steps the prompts, got a list"):
        Relocator(model, optimizer=[optimizer], score_batches=batches(1))


def test_a_state_of_another_policy_is_refused():
    model, _ = prompted()
    _, ppo = relocator_of(model)
    _, thompson = relocator_of(model, allocator="thompson")
    with pytest.raises(ValueError, match="for the same policy, Thompson, got one for PPOAllocation"):
        thompson.load_state_dict(ppo.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype_changes_nothing(dtype):
    def run():
        model, _ = prompted()
        made_up, relocator = relocator_of(model)
        for loss in (3.0, 2.0, 1.0):
            made_up.set([1.0] * 12, loss=loss)
            relocator.relocate()
        return [(record.prompt, record.block, record.reward) for record in relocator.history]

    expected = run()
    model, _ = prompted()
    torch.set_default_dtype(dtype)
    try:
        made_up, relocator = relocator_of(model)
        for loss in (3.0, 2.0, 1.0):
            made_up.set([1.0] * 12, loss=loss)
            relocator.relocate()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [(record.prompt, record.block, record.reward) for record in relocator.history] == expected


def test_warm_up():
    made_up, relocator = relocator_of(prompted()[0], warmup_epochs=3)
    made_up.set([1.0] * 12)
    assert [len(relocator.relocate()) for _ in range(4)] == [0, 0, 1, 1]


def test_nothing_moves_in_the_settling_phase_but_rewards_are_learned():
    made_up, relocator = relocator_of(prompted()[0], settle=0.5)
    made_up.set([1.0] * 12)
    moved = [len(relocator.relocate(progress=epoch / 4)) for epoch in (1, 2, 3)]
    assert moved == [1, 0, 0]
    assert relocator.history[0].reward is not None


def test_nothing_is_measured_where_neither_a_move_nor_a_reward_hangs_on_it():
    measured = []

    def score(measurement):
        measured.append(relocator.epoch)
        measurement.loss = 1.0
        return Idleness(torch.ones(12).double(), torch.zeros(12).double())

    config = RelocationConfig(idleness=score, check_moves=False, settle=0.5, warmup_epochs=2)
    relocator = Relocator(prompted()[0], config, score_batches=[{}])
    for epoch in range(8):
        relocator.relocate(progress=epoch / 8)
    relocator.finish()
    assert [record.epoch for record in relocator.history] == [2, 3]
    # Once to see that it works. The last reward is learned in the epoch after it.
    assert measured == [0, 2, 3, 4]


@pytest.mark.parametrize("what", ["loss", "score"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_moves_nothing_and_learns_nothing(what, value):
    model, _ = prompted()
    made_up, relocator = relocator_of(model)
    made_up.set([1.0] * 12)
    (pending,) = relocator.relocate()
    before = model.base_model.prompt_blocks()

    made_up.set(scores_with(value if what == "score" else 1.0, prompt=2), loss=value if what == "loss" else 1.0)
    assert relocator.relocate() == []
    assert torch.equal(model.base_model.prompt_blocks(), before)
    assert pending.reward is None
    assert "not finite" in pending.note
    assert relocator.history[-1].prompt is None
    assert "not finite" in relocator.history[-1].note
    assert relocator.policy.ppo.transitions == []

    made_up.set([1.0] * 12)
    assert len(relocator.relocate()) == 1
    json.dumps([asdict(record) for record in relocator.history], allow_nan=False)


def test_metrics_are_plain_numbers():
    made_up, relocator = relocator_of(prompted()[0])
    made_up.set([1.0] * 12)
    for _ in range(3):
        relocator.relocate()
    assert set(relocator.metrics) == {
        "moves", "prompt", "from_block", "to_block", "idleness", "reward",
        "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac",
    }  # fmt: skip
    assert all(type(value) in (int, float) for value in relocator.metrics.values())


def test_a_relocation_that_finds_nothing_to_move_says_what_it_saw():
    made_up, relocator = relocator_of(prompted()[0])
    made_up.set([-1.0, -2.0, -3.0] * 4)
    assert relocator.relocate() == []
    (record,) = relocator.history
    assert (record.epoch, record.prompt, record.note) == (1, None, "There was no prompt to move.")
    assert record.block_idleness == [-2.0] * 4
    assert record.loss_before == relocator.measure()[1]
    assert relocator.metrics == {"moves": 0}
    # Both pictures show it.
    assert figures.plot_distribution_over_time(relocator).axes[0].images[0].get_array().tolist() == [[3, 3]] * 4
    assert figures.plot_idleness(relocator).axes[0].images[0].get_array().tolist() == [[-2.0]] * 4


# ---- objects that are handed in -------------------------------------------------------------------------------------


def test_a_policy_of_the_user_s_own():
    made_up, relocator = relocator_of(prompted()[0], allocator=Chooses(4))
    made_up.set(scores_with(1.0, prompt=0))
    (move,) = relocator.relocate()
    assert move.block == 4


def test_objects_are_recorded_by_name():
    model, _ = prompted()
    relocator_of(model, allocator=Chooses(4))
    settings = model.peft_config["default"].training["relocation"]
    assert (settings["idleness"], settings["allocator"]) == ("MadeUp", "Chooses")
    json.dumps(settings)
    with pytest.raises(
        ValueError,
        match="`idleness` must be one of activity, fisher, taylor, exact, or a function that takes a Measurem",
    ):
        RelocationConfig(**settings)


# ---- the passes -----------------------------------------------------------------------------------------------------


def test_exact_is_the_change_of_the_loss_from_removal():
    model, optimizer = prompted()
    train_epoch(model, optimizer)
    relocator = Relocator(model, RelocationConfig(idleness="exact"), optimizer, score_batches=batches(3))
    tuner, expected = model.base_model, []
    model.eval()

    @torch.no_grad()
    def losses():
        return torch.tensor([model(**batch).loss.item() for batch in batches(3)], dtype=torch.float64)

    for prompt, block in enumerate(tuner.prompt_blocks().tolist()):
        before = losses()
        tuner.move_prompt(prompt, 0)
        expected.append(before - losses())
        tuner.move_prompt(prompt, block)
    model.train()
    expected = torch.stack(expected, dim=1)  # (batches, N)
    idleness, mean_loss = relocator.measure()
    torch.testing.assert_close(idleness.score, expected.mean(dim=0), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(idleness.stderr, expected.std(dim=0) / 3**0.5, atol=1e-6, rtol=1e-4)
    assert mean_loss == pytest.approx(losses().mean().item(), rel=1e-5)
    assert model.training


def test_exact_scores_take_a_pass_for_each_prompt_and_one_more():
    model, _ = prompted()
    passes = []

    def counted(model, batch):
        passes.append(None)
        return model(**batch).loss

    Relocator(model, RelocationConfig(idleness="exact"), score_batches=batches(1), compute_loss=counted).measure()
    assert len(passes) == 12 + 1


def test_measuring_leaves_gradients_modes_and_random_numbers_alone():
    model = tiny.prompted(tiny.make("vit"), prompt_dropout=0.5)
    relocator = Relocator(model, RelocationConfig(), score_batches=batches())
    model.train()
    model.base_model.model.classifier.eval()
    modes = [module.training for module in model.modules()]
    generator = torch.get_rng_state()
    relocator.measure()
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.base_model.bank.gates is None


def test_augmented_score_images_are_the_same_each_time_and_training_s_random_numbers_too():
    class Augmented:
        def __iter__(self):
            for batch in batches():
                shift = random.random() + np.random.rand() + torch.rand(1)
                yield batch | {"pixel_values": batch["pixel_values"] + shift}

    relocator = Relocator(prompted()[0], RelocationConfig(), score_batches=Augmented())
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    (first, loss), (second, again) = (relocator.measure() for _ in range(2))
    assert loss == again
    assert torch.equal(first.score, second.score)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_a_random_loss_is_the_same_each_time():
    model, _ = prompted()
    noise = []

    def noisy(model, batch):
        noise.append(torch.randn(()))
        return model(**batch).loss + noise[-1]

    config = RelocationConfig(idleness="exact")
    scores, _ = Relocator(model, config, score_batches=batches(1), compute_loss=noisy).measure()
    plain, _ = Relocator(model, config, score_batches=batches(1)).measure()
    assert len(set(map(float, noise))) == 1
    torch.testing.assert_close(scores.score, plain.score, atol=1e-5, rtol=0)


# ---- what cannot work -----------------------------------------------------------------------------------------------


def test_model_without_adapter():
    with pytest.raises(ValueError, match="needs a model with a PROVPT adapter, got ViTForImageClassification"):
        Relocator(tiny.make("vit"), score_batches=batches())


@pytest.mark.parametrize(
    ("given", "got"),
    [({}, "got none"), ({"score_batches": iter([])}, "got a list_iterator, which can be read only once")],
)
def test_without_score_batches(given, got):
    with pytest.raises(
        ValueError, match=rf"{got}\. Give some training images: score_batches=first_batches\(loader, 32"
    ):
        Relocator(prompted()[0], RelocationConfig(), **given)


def test_prompts_that_are_not_trained():
    model, _ = prompted()
    head = torch.optim.SGD(model.base_model.model.classifier.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"those of the adapter 'default' are not in the optimizer\. Load an adapter"):
        Relocator(model, optimizer=head, score_batches=batches())
    model.base_model.prompts().requires_grad = False
    with pytest.raises(ValueError, match=r"those of the adapter 'default' are frozen\. Load an adapter with"):
        Relocator(model, score_batches=batches())


def test_measuring_while_another_adapter_is_active():
    model, _ = prompted()
    relocator = Relocator(model, score_batches=batches())
    model.add_adapter("other", ProVPTConfig(num_prompts=2))
    model.set_adapter("other")
    with pytest.raises(ValueError, match=r"which must be 'default', got 'other'\. Activate it first"):
        relocator.measure()
    model.set_adapter("default")
    with model.disable_adapter(), pytest.raises(ValueError, match="which must be 'default', got None"):
        relocator.measure()


# ---- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [1, 3])
def test_same_history_with_and_without_a_save_in_between(several):
    settings = dict(idleness=mostly_idle, settle=0.0, prompts_per_relocation=several)

    def run(save_at):
        torch.manual_seed(0)
        model, optimizer = prompted()
        relocator = Relocator(model, RelocationConfig(**settings), optimizer, score_batches=batches())
        for epoch in range(6):
            if epoch == save_at:
                saved = json.loads(json.dumps(relocator.state_dict()))
                config = RelocationConfig(**settings, seed=99)
                relocator = Relocator(model, config, optimizer, score_batches=batches())
                relocator.load_state_dict(saved)
            relocator.relocate()
            train_epoch(model, optimizer)
        relocator.finish()
        return [asdict(record) for record in relocator.history], model.base_model.prompts().detach()

    expected, prompts = run(save_at=None)
    assert len(expected) == 5 * several
    for save_at in (1, 3, 5):
        history, resumed = run(save_at)
        assert history == expected
        assert torch.equal(resumed, prompts)


def test_state_of_another_adapter_is_refused():
    relocator = Relocator(prompted()[0], score_batches=batches())
    other = Relocator(prompted(num_prompts=2)[0], score_batches=batches())
    with pytest.raises(ValueError, match="saved for 12 prompts in 4 blocks, but the model has 8 prompts in 4 blocks"):
        other.load_state_dict(relocator.state_dict())
