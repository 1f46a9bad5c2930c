"""What a moved prompt starts from: its vector and the optimizer's moments."""

import functools

import pytest
import schedulefree
import tiny
import torch
from made_up import Chooses, relocator_of, scores_with
from test_relocator import batches, mostly_idle, prompted, train_epoch

from provpt_peft import RelocationConfig, Relocator
from provpt_peft.relocation.placement import place


def move(model, optimizer, block, prompt=0):
    """Let the relocator move a prompt to a block."""
    made_up, relocator = relocator_of(model, optimizer, allocator=Chooses(block))
    made_up.set(scores_with(1.0, prompt, count=len(model.base_model.prompts())))
    (record,) = relocator.relocate()
    assert (record.prompt, record.block) == (prompt, block)


@pytest.mark.parametrize(
    ("optimizer_class", "settings", "first", "second"),
    [
        (torch.optim.AdamW, {}, {"exp_avg"}, {"exp_avg_sq"}),
        (torch.optim.AdamW, {"amsgrad": True}, {"exp_avg"}, {"exp_avg_sq", "max_exp_avg_sq"}),
        (torch.optim.Adamax, {}, {"exp_avg"}, {"exp_inf"}),
        (torch.optim.Adagrad, {}, set(), {"sum"}),
        (torch.optim.SGD, {"momentum": 0.9}, {"momentum_buffer"}, set()),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, {"momentum_buffer", "grad_avg"}, {"square_avg"}),
    ],
)
def test_a_moved_prompt_starts_from_the_mean_with_its_new_block_s_moments(optimizer_class, settings, first, second):
    model, optimizer = prompted(functools.partial(optimizer_class, **settings))
    train_epoch(model, optimizer)
    prompts = model.base_model.prompts()
    rows = prompts.detach().clone()
    state = {n: m for n, m in optimizer.state[prompts].items() if torch.is_tensor(m) and m.shape == prompts.shape}
    assert set(state) == first | second
    old = {name: moment.clone() for name, moment in state.items()}

    move(model, optimizer, block=4)
    assert model.base_model.prompts() is prompts
    torch.testing.assert_close(prompts[0], rows[9:12].mean(dim=0))
    assert torch.equal(prompts[1:], rows[1:])
    for name, before in old.items():
        if name in second:
            torch.testing.assert_close(state[name][0], before[9:12].mean(dim=0))
        else:
            assert not state[name][0].any()
        assert torch.equal(state[name][1:], before[1:])


def test_a_prompt_of_the_reserve_has_the_mean_moments_of_all_in_an_empty_block():
    model, optimizer = prompted(num_prompts=[6, 6, 0, 0], reserve=1)
    train_epoch(model, optimizer)
    squares = optimizer.state[model.base_model.prompts()]["exp_avg_sq"]
    before = squares.clone()
    place(model.base_model, "default", 12, 4, optimizer)
    assert not before[12].any()
    torch.testing.assert_close(squares[12], before[:12].mean(dim=0))
    assert torch.equal(squares[:12], before[:12])


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda trained: torch.optim.AdamW(trained, 0.1, weight_decay=0.5),
        lambda trained: torch.optim.SGD(trained, 0.1, momentum=0.9, weight_decay=0.5),
    ],
)
def test_weight_decay_of_the_reserve_does_not_matter(make_optimizer):
    """What no block sees has no gradient, but decays. Behind a norm that ignores its length, the gradient of a vector
    is the longer the shorter that is."""
    model = tiny.prompted(tiny.make("vit"), num_prompts=[3, 3, 3, 0], reserve=2, prompt_dropout=0.0)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    prompts, bound = model.base_model.prompts(), model.base_model.bank.bound
    for _ in range(60):
        train_epoch(model, optimizer)
    assert prompts[9:].abs().max() < 0.1 * bound
    made_up, relocator = relocator_of(model, optimizer, allocator=Chooses(4), adjust="add", prompts_per_relocation=2)
    made_up.set([-1.0] * 11)
    relocator.relocate()
    placed = prompts[9:].detach().clone()
    # Drawn as at the start: uniform, of standard deviation bound / sqrt(3), and each for itself.
    assert placed.abs().max() <= bound
    assert placed.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)
    assert not torch.equal(*placed)
    train_epoch(model, optimizer)
    assert prompts[9:].norm() < 3 * placed.norm()


def test_a_moved_prompt_steps_no_further_than_its_neighbours():
    """With a gradient of 1 Adam's step is the learning rate. The bias correction is the parameter's, so a row whose
    moments were both 0 would step by (1 - 0.9^t) / sqrt(1 - 0.999^t), up to 6.5 times as far."""
    model, _ = prompted()
    prompts = model.base_model.prompts()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, weight_decay=0.0)

    def change():
        before = prompts.detach().clone()
        optimizer.zero_grad()
        prompts.grad = torch.ones_like(prompts)
        optimizer.step()
        return (before - prompts.detach()).mean(dim=1)

    for _ in range(2000):
        change()
    move(model, optimizer, block=4)
    for step in range(1, 21):
        steps = change()
        torch.testing.assert_close(steps[1:], torch.full_like(steps[1:], 1e-3), atol=2e-6, rtol=0)
        assert steps[0].item() == pytest.approx((1 - 0.9**step) * 1e-3, abs=2e-6)


def test_optimizer_states_that_are_no_moments_are_left_alone():
    model, optimizer = prompted()
    train_epoch(model, optimizer)
    prompts = model.base_model.prompts()
    optimizer.state[prompts]["codes"] = torch.ones_like(prompts)
    move(model, optimizer, block=4)
    assert optimizer.state[prompts]["codes"].all()
    assert not optimizer.state[prompts]["exp_avg"][0].any()


def way_back(make_optimizer, steps=40):
    """How far a prompt that has moved goes back to its old vector in training, as a share of the way."""
    model, _ = prompted()
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if isinstance(optimizer, schedulefree.AdamWScheduleFree):
        optimizer.train()
    prompts = model.base_model.prompts()
    train_epoch(model, optimizer, steps=steps)
    old = prompts[0].detach().clone()
    undo = place(model.base_model, "default", 0, 4, optimizer)
    undo()
    assert torch.equal(prompts[0], old)
    place(model.base_model, "default", 0, 4, optimizer)
    start = prompts[0].detach().clone()
    train_epoch(model, optimizer, steps=steps)
    way = old - start
    return ((prompts[0].detach() - start) @ way / (way @ way)).item()


def test_a_moved_prompt_does_not_go_back_with_a_schedule_free_optimizer():
    """These keep a second copy of the weights, to which the first is drawn, by more than half of the way here."""
    assert abs(way_back(schedulefree.AdamWScheduleFree) - way_back(torch.optim.AdamW)) < 0.1


@pytest.mark.parametrize("distribution", [[3, 3, 3, 3], [6, 5, 1, 0]])
def test_the_copy_of_the_weights_has_a_moved_prompt_s_new_vector_if_it_got_one(distribution):
    model, _ = prompted(num_prompts=distribution)
    optimizer = schedulefree.AdamWScheduleFree([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer.train()
    train_epoch(model, optimizer)
    prompts = model.base_model.prompts()
    copy = optimizer.state[prompts]["z"]
    rows, before = prompts.detach().clone(), copy.clone()
    undo = place(model.base_model, "default", 0, 4, optimizer)
    assert torch.equal(copy[0], rows[9:].mean(dim=0) if distribution[3] else before[0])
    assert torch.equal(copy[1:], before[1:])
    undo()
    assert torch.equal(copy, before)


def test_what_evaluation_does_to_the_weights_does_not_change_the_moves():
    """Schedule-free optimizers put other weights into the model while it is evaluated."""

    def run(evaluate):
        model, _ = prompted()
        optimizer = schedulefree.AdamWScheduleFree([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        config = RelocationConfig(idleness=mostly_idle, check_moves=False, settle=0.0)
        relocator = Relocator(model, config, optimizer, score_batches=batches(1))
        for _ in range(4):
            relocator.relocate()
            optimizer.train()
            train_epoch(model, optimizer)
            if evaluate:
                optimizer.eval()
        relocator.relocate()
        return [vars(record) for record in relocator.history], model.base_model.prompts().detach()

    (plain, weights), (evaluated, same) = run(False), run(True)
    assert [(r["prompt"], r["block"]) for r in evaluated] == [(r["prompt"], r["block"]) for r in plain]
    torch.testing.assert_close(same, weights)


class Quantised(torch.Tensor):
    """As optimizers of 8 bits keep their moments: a tensor of another class, which cannot be indexed."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            raise NotImplementedError("select")
        return super().__torch_function__(function, types, args, kwargs)


def test_moments_of_other_classes_are_left_alone():
    model, optimizer = prompted()
    train_epoch(model, optimizer)
    prompts = model.base_model.prompts()
    state = optimizer.state[prompts]
    state["exp_avg"] = state["exp_avg"].as_subclass(Quantised)
    move(model, optimizer, block=4)
    assert not (state["exp_avg"].as_subclass(torch.Tensor)[0] == 0).any()


@pytest.mark.parametrize(("distribution", "block"), [([6, 5, 1, 0], 3), ([6, 5, 1, 0], 4), ([6, 5, 1, 0], 1)])
def test_a_moved_prompt_keeps_its_vector_where_there_is_no_mean_or_no_move(distribution, block):
    model, optimizer = prompted(num_prompts=distribution)
    rows = model.base_model.prompts().detach().clone()
    move(model, optimizer, block)
    assert torch.equal(model.base_model.prompts(), rows)


def test_prompts_that_come_to_a_block_together_do_not_start_alike():
    model, _ = prompted()
    rows = model.base_model.prompts().detach().clone()
    made_up, relocator = relocator_of(model, allocator=Chooses(4), prompts_per_relocation=2)
    made_up.set([2.0, 1.0] + [-1.0] * 10)
    first, second = relocator.relocate()
    assert (first.prompt, first.block, second.prompt, second.block) == (0, 4, 1, 4)
    torch.testing.assert_close(model.base_model.prompts()[:2], torch.stack([rows[9:].mean(dim=0), rows[1]]))


def test_a_prompt_that_is_taken_out_stays_as_it_is():
    model, optimizer = prompted(num_prompts=[3, 3, 3, 3], reserve=3)
    train_epoch(model, optimizer)
    rows = model.base_model.prompts().detach().clone()
    place(model.base_model, "default", 0, 0, optimizer)
    assert torch.equal(model.base_model.prompts(), rows)
    assert model.base_model.prompt_blocks()[0] == 0


def test_without_an_optimizer_only_the_vector_changes():
    model = tiny.prompted(tiny.make("vit"))
    rows = model.base_model.prompts().detach().clone()
    place(model.base_model, "default", 0, 2)
    torch.testing.assert_close(model.base_model.prompts()[0], rows[3:6].mean(dim=0))
