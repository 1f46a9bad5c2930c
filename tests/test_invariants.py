"""The invariants of the design, over many seeds. Those of a real Trainer run are in test_callback.py."""

import copy
import json
from dataclasses import asdict

import pytest
import tiny
import torch
from training import every_prompt_idle

from examples.research.prepended import prepend_prompts
from provpt_peft import RelocationConfig, Relocator
from provpt_peft.relocation.idleness import Idleness


SEEDS = range(20)


def random_distribution(generator, num_blocks):
    counts = torch.randint(0, 5, (num_blocks,), generator=generator).tolist()
    return counts if sum(counts) else [1] * num_blocks


def move_at_random(tuner, generator, moves=10):
    for _ in range(moves):
        prompt = torch.randint(0, len(tuner.prompts()), (1,), generator=generator).item()
        block = torch.randint(0, tuner.num_blocks + 1, (1,), generator=generator).item()
        tuner.move_prompt(prompt, block)


def score_batches(size=8):
    """The same eight images, in batches of one size."""
    inputs, targets = tiny.images(8, 99), tiny.labels(8, 99)
    return [dict(pixel_values=x, labels=y) for x, y in zip(inputs.split(size), targets.split(size), strict=True)]


def train(model, relocator, optimizer, epochs=3, micro_batches=1, clip=None):
    for epoch in range(epochs):
        relocator.relocate(progress=0)
        for step in range(2):
            seed = 10 * epoch + step
            inputs, targets = tiny.images(8, seed), tiny.labels(8, seed)
            for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
                loss = model(pixel_values=x, labels=y).loss / micro_batches
                loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    relocator.finish()
    return relocator.history


def fresh(seed, lr=1e-2, score_size=8, **adapter):
    model = tiny.prompted(tiny.make("vit"), **adapter)
    config = RelocationConfig(idleness=every_prompt_idle, check_moves=False, seed=seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    return model, Relocator(model, config, score_batches=score_batches(score_size)), optimizer


def constant(model, batch):
    return torch.tensor(1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_1_the_budget_is_conserved(seed):
    generator = torch.Generator().manual_seed(seed)
    model = tiny.prompted(tiny.make("vit"), num_prompts=random_distribution(generator, 4))
    tuner = model.base_model
    budget = len(tuner.prompt_blocks())

    def at_random(measurement):
        scores = torch.randn(budget, generator=generator, dtype=torch.float64)
        scores[measurement.blocks() == 0] = torch.nan
        return Idleness(scores, torch.zeros(budget, dtype=torch.float64))

    relocator = Relocator(
        model,
        RelocationConfig(idleness=at_random, check_moves=False, seed=seed),
        score_batches=score_batches(),
        compute_loss=constant,
    )
    for _ in range(30):
        before = tuner.prompt_blocks()
        moves = relocator.relocate(progress=0)
        after = tuner.prompt_blocks()
        assert len(after) == budget
        assert after.min() >= 0
        assert after.max() <= 4
        assert sum(tuner.prompt_distribution()) == sum(b > 0 for b in before.tolist())
        changed = (before != after).nonzero()[:, 0].tolist()
        assert changed == [move.prompt for move in moves if move.block != move.from_block]
    assert len(relocator.history) >= 20


@pytest.mark.parametrize("seed", SEEDS)
def test_2_without_relocation_it_is_vpt_deep(seed):
    generator = torch.Generator().manual_seed(seed)
    base = tiny.make("vit")
    plain = copy.deepcopy(base)
    model = tiny.prompted(base, num_prompts=seed % 4 + 1).eval()
    with torch.no_grad():
        model.base_model.prompts().normal_(generator=generator)
        undo = prepend_prompts(tiny.blocks(plain), model.base_model.prompts(), model.base_model.prompt_blocks())
        expected = plain(pixel_values=tiny.images(2, seed)).logits
        undo()
        torch.testing.assert_close(model(pixel_values=tiny.images(2, seed)).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["vit", "dinov2", "swin"])
@pytest.mark.parametrize("seed", SEEDS)
def test_3_disabled_is_the_base_model_bit_for_bit(seed, family):
    base = tiny.make(family)
    with torch.no_grad():
        expected = base(pixel_values=tiny.images(2, seed)).logits
        model = tiny.prompted(base).eval()
        move_at_random(model.base_model, torch.Generator().manual_seed(seed))
        model.base_model.prompts().normal_()
        with model.disable_adapter():
            assert torch.equal(model(pixel_values=tiny.images(2, seed)).logits, expected)


@pytest.mark.parametrize("seed", range(5))
def test_4_same_seed_same_history(seed):
    histories = []
    for _ in range(2):
        torch.manual_seed(seed)
        model, relocator, optimizer = fresh(seed, prompt_dropout=0.1)
        histories.append(train(model, relocator, optimizer))
    assert histories[0] == histories[1]
    assert len(histories[0]) == 2


@pytest.mark.parametrize(("seed", "adjust"), [*((seed, "relocate") for seed in range(5)), (0, "naive_rl"), (0, "add")])
def test_5_relocation_draws_from_its_own_generator(seed, adjust):
    torch.manual_seed(seed)
    # Where a block is empty, a prompt from the reserve gets a new vector.
    model = tiny.prompted(tiny.make("vit"), num_prompts=[3, 3, 3, 0], reserve=6)
    torch.manual_seed(seed)
    expected = torch.rand(5)
    torch.manual_seed(seed)
    config = RelocationConfig(idleness=every_prompt_idle, check_moves=False, seed=seed, adjust=adjust)
    relocator = Relocator(model, config, score_batches=score_batches())
    for epoch in range(6):
        assert len(relocator.relocate(progress=0)) == (epoch > 0)
    relocator.finish()
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("score_size", "change"),
    [(4, dict(micro_batches=2)), (1, dict(micro_batches=8)), (8, dict(clip=0.01))],
)
def test_6_scores_spread_and_reward_do_not_depend_on_accumulation_or_clipping(seed, score_size, change):
    # A learning rate of 0, since clipping changes what is learned, and a policy that sees the same scores.
    torch.manual_seed(seed)
    plain = train(*fresh(seed, lr=0.0))
    torch.manual_seed(seed)
    changed = train(*fresh(seed, lr=0.0, score_size=score_size), **change)
    assert len(plain) == len(changed) == 2
    for one, other in zip(plain, changed, strict=True):
        assert (one.prompt, one.from_block, one.block) == (other.prompt, other.from_block, other.block)
        assert other.idleness == pytest.approx(one.idleness, abs=1e-5)
        assert other.idleness_stderr == pytest.approx(one.idleness_stderr, abs=1e-5)
        assert other.reward == pytest.approx(one.reward, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_7_history_and_state_are_json(seed):
    torch.manual_seed(seed)
    model, relocator, optimizer = fresh(seed)
    history = train(model, relocator, optimizer)
    json.dumps([asdict(record) for record in history], allow_nan=False)
    assert json.loads(json.dumps(relocator.state_dict())) == relocator.state_dict()


@pytest.mark.parametrize("seed", SEEDS)
def test_moving_there_and_back_changes_nothing(seed):
    model = tiny.prompted(tiny.make("vit")).eval()
    tuner = model.base_model
    with torch.no_grad():
        before = model(pixel_values=tiny.images()).logits
        blocks = tuner.prompt_blocks()
        move_at_random(tuner, torch.Generator().manual_seed(seed))
        for prompt, block in enumerate(blocks.tolist()):
            tuner.move_prompt(prompt, block)
        assert torch.equal(model(pixel_values=tiny.images()).logits, before)


def test_weight_averaging_that_writes_into_the_buffers():
    model = tiny.unlike_fresh(tiny.prompted(tiny.make("vit")).eval())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    with torch.no_grad():
        assert torch.equal(averaged(pixel_values=tiny.images()).logits, model(pixel_values=tiny.images()).logits)
        model.base_model.move_prompt(0, 4)
        averaged.update_parameters(model)
        # The weights are the same, so their mean is but for rounding.
        after = averaged(pixel_values=tiny.images()).logits
        torch.testing.assert_close(after, model(pixel_values=tiny.images()).logits, atol=1e-5, rtol=1e-5)
    assert averaged.module.base_model.prompt_distribution() == model.base_model.prompt_distribution()


@torch.no_grad()
def test_a_functional_call_with_other_blocks():
    model = tiny.prompted(tiny.make("vit")).eval()
    name = "base_model.bank.provpt_prompt_blocks.default"
    blocks = model.state_dict()[name].clone()
    blocks[0] = torch.tensor([0, 0, 0, 0, 1])
    inputs = {"pixel_values": tiny.images()}
    before = model(**inputs).logits
    moved = torch.func.functional_call(model, {name: blocks}, (), inputs).logits
    assert torch.equal(model(**inputs).logits, before)
    model.base_model.move_prompt(0, 4)
    assert torch.equal(model(**inputs).logits, moved)
    assert not torch.equal(before, moved)
