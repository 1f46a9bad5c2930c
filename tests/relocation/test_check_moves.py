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
    assert relocator.relocate() == []
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
    (record,) = relocator.relocate()
    assert (record.prompt, record.from_block, record.block) == (0, 1, 1)
    assert "undone" in record.note
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
    (record,) = relocator.relocate()
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
    assert [record.block for record in relocator.relocate()] == [4, 1, 1]
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
    relocator.relocate()
    assert model.base_model.prompt_distribution() == expected


def test_the_loss_is_computed_with_the_caller_s_default_device():
    seen = []
    model, _ = prompted()
    made_up, relocator = relocator_with(lambda counts: seen.append(torch.get_default_device().type) or 0.0, model)
    made_up.set(scores_with(0.5, prompt=0))
    with torch.device("meta"):
        relocator.relocate()
    assert seen == ["meta"]


def test_anything_but_a_boolean_is_refused():
    with pytest.raises(ValueError, match=r"`check_moves` must be True or False, got 'no'"):
        RelocationConfig(check_moves="no")
