"""`check_moves`: a move stays only if the loss on the score images is no higher after it."""

import math

import pytest
import tiny
import torch
from made_up import Chooses, MadeUp, scores_with
from test_relocator import prompted, train_epoch

from provpt_peft import RelocationConfig, Relocator


def relocator_with(loss_of, model, optimizer=None, block=4, **settings):
    """A relocator whose loss is a function of the distribution, past its first epoch."""
    made_up = MadeUp()
    config = RelocationConfig(idleness=made_up, allocator=Chooses(block), **settings)

    def compute_loss(model, batch):
        return torch.tensor(loss_of(model.base_model.prompt_distribution()), device="cpu")

    relocator = Relocator(model, config, optimizer, score_batches=[{}], compute_loss=compute_loss)
    assert relocator.relocate(progress=0) == []
    return made_up, relocator


@pytest.mark.parametrize("after", [1.01, math.nan])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_move_that_raises_the_loss_leaves_no_trace(after, optimizer_class):
    model, optimizer = prompted(optimizer_class)
    train_epoch(model, optimizer)
    tuner = model.base_model
    state = optimizer.state[tuner.prompts()]
    before = [tensor.detach().clone() for tensor in (tuner.prompts(), tuner.prompt_blocks(), *state.values())]
    made_up, relocator = relocator_with(lambda counts: after if counts[3] > 3 else 1.0, model, optimizer)
    made_up.set(scores_with(0.5, prompt=0), loss=1.0)
    (record,) = relocator.relocate(progress=0)
    assert (record.prompt, record.from_block, record.block) == (0, 1, 1)
    assert "undone" in record.note
    assert relocator.metrics["moves"] == 0
    for now, then in zip((tuner.prompts(), tuner.prompt_blocks(), *state.values()), before, strict=True):
        assert torch.equal(now, then)
    relocator.finish()
    assert record.reward is None
    assert relocator.run().num_moves == 0


@pytest.mark.parametrize("after", [1.0, 0.9])
def test_a_move_that_does_not_stays_and_is_rewarded(after):
    model, _ = prompted()
    made_up, relocator = relocator_with(lambda counts: after, model)
    made_up.set(scores_with(0.5, prompt=0), loss=1.0)
    (record,) = relocator.relocate(progress=0)
    assert (record.block, record.note) == (4, None)
    assert model.base_model.prompt_distribution() == [2, 3, 3, 4]
    made_up.set([0.0] * 12, loss=0.25)
    relocator.finish()
    assert record.reward == 1.0 - 0.25 - 0.5


def test_each_move_is_compared_with_the_loss_after_the_one_before():
    model, _ = prompted()
    losses = {3: 1.0, 4: 0.8, 5: 0.9}
    made_up, relocator = relocator_with(lambda counts: losses[counts[3]], model, prompts_per_relocation=3)
    made_up.set([3.0, 2.0, 1.0] + [-1.0] * 9, loss=1.0)
    assert [record.block for record in relocator.relocate(progress=0)] == [4, 1, 1]
    assert model.base_model.prompt_distribution() == [2, 3, 3, 4]


@pytest.mark.parametrize(
    ("settings", "reserve", "expected"),
    [
        (dict(check_moves=False), 0, [2, 3, 3, 4]),
        (dict(adjust="prune", prune_share=1 / 12), 0, [2, 3, 3, 3]),
        (dict(adjust="add"), 1, [3, 3, 3, 4]),
    ],
)
def test_what_is_not_checked(settings, reserve, expected):
    """What is pruned for good or added is not moved from one block to another."""
    model = tiny.prompted(tiny.make("vit"), num_prompts=[3, 3, 3, 3], reserve=reserve)
    made_up, relocator = relocator_with(lambda counts: 9.0, model, **settings)
    made_up.set(scores_with(0.5, prompt=0, count=12 + reserve), loss=1.0)
    relocator.relocate(progress=0)
    assert model.base_model.prompt_distribution() == expected


@pytest.mark.parametrize(("loss", "distribution"), [(0.0, [2, 3, 3, 4]), (9.0, [3, 3, 3, 3])])
def test_the_loss_is_computed_with_the_caller_s_default_device(loss, distribution):
    """The move is made, and undone, on the CPU."""
    seen = []
    model, _ = prompted()
    made_up, relocator = relocator_with(lambda counts: seen.append(torch.empty(0).device.type) or loss, model)
    made_up.set(scores_with(0.5, prompt=0))
    seen.clear()
    with torch.device("meta"):
        relocator.relocate(progress=0)
    assert seen == ["meta"]
    assert model.base_model.prompt_distribution() == distribution


def test_anything_but_a_boolean_is_refused():
    with pytest.raises(ValueError, match=r"`check_moves` must be True or False, got 'no'"):
        RelocationConfig(check_moves="no")


def test_the_last_prompt_of_a_block_stays():
    model = tiny.prompted(tiny.make("vit"), num_prompts=[1, 2, 3, 1])
    made_up, relocator = relocator_with(lambda counts: 1.0, model, prompts_per_relocation=3)
    # Those of the first block and then, when the other of its block has gone, of the second.
    made_up.set([9.0, 8.0, 7.0, 6.0, -1.0, -1.0, 5.0], loss=1.0)
    assert [(record.prompt, record.block) for record in relocator.relocate(progress=0)] == [(1, 4), (3, 4), (6, 4)]
    assert model.base_model.prompt_distribution() == [1, 1, 2, 3]


def test_nothing_moves_where_each_block_has_one(caplog):
    model = tiny.prompted(tiny.make("vit"), num_prompts=1)
    made_up, relocator = relocator_with(lambda counts: 0.0, model)
    made_up.set([1.0] * 4, loss=1.0)
    assert relocator.relocate(progress=0) == []
    assert [(record.prompt, record.note) for record in relocator.history] == [(None, "There was no prompt to move.")]
    assert [record.getMessage()[:20] for record in caplog.records] == ["No prompt will move:"]


def test_a_move_that_cannot_be_checked_is_undone():
    """As where memory runs out: the model is as it was, and the error is the caller's."""
    model, _ = prompted()

    def loss_of(counts):
        if counts[3] > 3:
            raise MemoryError
        return 1.0

    made_up, relocator = relocator_with(loss_of, model)
    made_up.set(scores_with(0.5, prompt=0), loss=1.0)
    with pytest.raises(MemoryError):
        relocator.relocate(progress=0)
    assert model.base_model.prompt_distribution() == [3, 3, 3, 3]


def test_a_loss_that_needs_gradients_fails_before_training():
    def penalised(model, batch):
        loss = model(**batch).loss
        return loss + torch.autograd.grad(loss, model.base_model.prompts(), retain_graph=True)[0].square().sum()

    batch = {"pixel_values": tiny.images(4), "labels": tiny.labels(4)}
    relocator = Relocator(prompted()[0], RelocationConfig(), score_batches=[batch], compute_loss=penalised)
    with pytest.raises(RuntimeError, match="does not require grad"):
        relocator.try_out()


def test_the_default_moves_a_prompt_that_changes_nothing():
    """The loss of the second-last block's output does not depend on the prompts of the last one."""

    def second_last(model, batch):
        return model(**batch, output_hidden_states=True).hidden_states[-2].square().mean()

    batch = {"pixel_values": tiny.images(4), "labels": tiny.labels(4)}
    model, _ = prompted()
    relocator = Relocator(model, RelocationConfig(), score_batches=[batch], compute_loss=second_last)
    assert relocator.relocate(progress=0) == []
    (record,) = relocator.relocate(progress=0)
    assert record.prompt == 9
    assert record.from_block == 4
    # Its activity is 0, so the score is a twentieth of the mean one, of which the others' scores are that less theirs.
    mean = -sum(record.block_idleness) / 4 / 0.95
    assert record.idleness == pytest.approx(0.05 * mean)
    assert record.note is not None or model.base_model.prompt_distribution()[3] == 2


def test_batches_of_views_are_weighted_alike_before_and_after_a_move():
    """Batches of 4 and 1 images with two views each. Without a change of the model the loss is the same, whichever
    pass measures it."""
    generator = torch.Generator().manual_seed(0)
    batches = [{"views": torch.randn(2, n, 3, 32, 32, generator=generator), "labels": tiny.labels(n)} for n in (4, 1)]

    def of_views(model, batch):
        return model(pixel_values=batch["views"].flatten(0, 1), labels=batch["labels"].repeat(2)).loss

    relocator = Relocator(prompted()[0], RelocationConfig(), score_batches=batches, compute_loss=of_views)
    _, loss = relocator.measure()
    assert relocator._measurement().mean_loss() == pytest.approx(loss, rel=1e-6)
