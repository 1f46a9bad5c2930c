"""Scores: the pure part by hand, the gates against finite differences and against exact removal."""

import math

import pytest
import tiny
import torch
from torch.nn import functional as F

from provpt_peft import RelocationConfig, Relocator, gates
from provpt_peft.backbone.attention import PromptedBlock
from provpt_peft.gates import Gates
from provpt_peft.relocation.idleness import Idleness, to_inactivity, to_second_order


NAN = math.nan


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


# ---- the pure part --------------------------------------------------------------------------------------------------


def test_mean_and_standard_error_by_hand():
    # One prompt, four images with scores 1, 2, 3, 6: mean 3; sample variance (4 + 1 + 0 + 9) / 3 = 14/3; standard
    # error sqrt(14/3 / 4) = sqrt(7/6).
    idleness = Idleness.mean_of(column(1, 2, 3, 6))
    assert idleness.score.tolist() == [3.0]
    assert idleness.stderr.item() == pytest.approx(math.sqrt(7 / 6))


def test_one_image_has_no_standard_error():
    idleness = Idleness.mean_of(column(2.0))
    assert idleness.score.tolist() == [2.0]
    assert idleness.stderr.isnan().all()


def test_second_order_by_hand():
    # Two images with derivatives 1 and 3. To second order their scores are 1 - 1/2 = 0.5 and 3 - 9/2 = -1.5: mean
    # -0.5, sample variance 2, standard error sqrt(2 / 2) = 1.
    idleness = Idleness.mean_of(to_second_order(column(1, 3)))
    assert idleness.score.item() == -0.5
    assert idleness.stderr.item() == 1.0


def test_inactivity_by_hand():
    # Two images, four prompts of which the last is in no block. Activities 1 and 3, 1 and 1, 0.02 and 0: on average 2,
    # 1 and 0.01, and 3.01 / 3 over the prompts. A twentieth of that is 0.0501667. Signs do not matter.
    idleness = Idleness.mean_of(to_inactivity(torch.tensor([[1, -1, 0.02, NAN], [3, 1, 0, NAN]]).double()))
    threshold = 3.01 / 60
    expected = torch.tensor([threshold - 2, threshold - 1, threshold - 0.01, NAN]).double()
    torch.testing.assert_close(idleness.score, expected, equal_nan=True)
    assert idleness.ranking() == [2, 1, 0]


def test_a_prompt_that_helps_some_images_and_harms_others_is_not_idle():
    # First order cancels to 0; second order is 0 - 1/2 and -0.02; the activity is 1.
    derivatives = column(1, -1)
    others = torch.full((2, 9), 0.2).double()
    scores = Idleness.mean_of(to_inactivity(torch.cat([derivatives, others], dim=1))).score
    assert scores[0] == pytest.approx(0.05 * 0.28 - 1)


def test_ranking_is_by_score_and_leaves_out_prompts_without_one():
    scores = torch.tensor([1.0, NAN, 3.0, 2.0, 3.0], dtype=torch.float64)
    assert Idleness(scores, torch.zeros(5)).ranking() == [2, 4, 3, 0]


# ---- the gates' gradient, out of a model's backward pass ------------------------------------------------------------


def relocator_of(model, inputs, targets, score="fisher", batches=1, **others):
    parts = zip(inputs.chunk(batches), targets.chunk(batches), strict=True)
    return Relocator(
        model,
        RelocationConfig(idleness=score),
        score_batches=[dict(pixel_values=x, labels=y, **others) for x, y in parts],
    )


def measured(*args, **kwargs):
    return relocator_of(*args, **kwargs).measure()[0]


def derivatives(measurement):
    """A score of the user's own: s itself, the mean over images of the first order."""
    return Idleness.mean_of(measurement.gate_gradients())


def partly_without(factors):
    """Attention whose output goes the straight way, by a factor for each prompt, from what it is (1) to what it is
    with the prompt's key left out of the softmax (0)."""

    def attend(block, query, key, value, attention_mask, scaling=None, **kwargs):
        logits = query @ key.transpose(2, 3) * scaling
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attention_mask, -math.inf)
        elif attention_mask is not None:
            logits = logits + attention_mask
        output = moved = logits.softmax(dim=-1) @ value
        count = len(factors[block])
        for position, factor in enumerate(factors[block]):
            left_out = logits.clone()
            left_out[..., logits.shape[-1] - count + position] = -math.inf
            moved = moved + (1 - factor) * (left_out.softmax(dim=-1) @ value - output)
        return moved.transpose(1, 2), None

    return attend


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *((family, name) for family in ("vit", "dinov2", "swin") for name in ("sdpa", "eager")),
        *((family, "sdpa") for family in ("dinov3", "siglip2", "beit", "data2vec")),
        *((family, "eager") for family in tiny.EAGER_ONLY),
    ],
)
def test_gate_is_the_derivative_along_the_removal(monkeypatch, family, implementation):
    monkeypatch.setattr(gates, "MOST_WEIGHT", 1.0)
    model = tiny.prompted(tiny.make(family, attn_implementation=implementation)).double().eval()
    tuner = model.base_model
    tuner.move_prompt(0, 2)
    inputs, targets = tiny.inputs(family, 3), tiny.labels(3)
    inputs["pixel_values"] = inputs["pixel_values"].double()
    others = {name: tensor for name, tensor in inputs.items() if name != "pixel_values"}
    gate = measured(model, inputs["pixel_values"], targets, derivatives, **others).score

    factors = {
        block: torch.ones(n).double() for block, n in zip(tuner.blocks, tuner.prompt_distribution(), strict=True)
    }
    monkeypatch.setattr(PromptedBlock, "attend", partly_without(factors))

    @torch.no_grad()
    def loss():
        return model(**inputs, labels=targets).loss.item()

    step, differences = 1e-5, torch.zeros(len(gate), dtype=torch.float64)
    for number, block in enumerate(tuner.blocks, start=1):
        for position, prompt in enumerate(tuner.bank.rows("default", number).tolist()):
            values = []
            for sign in (1, -1):
                factors[block][position] = 1 + sign * step
                values.append(loss())
            factors[block][position] = 1
            differences[prompt] = (values[0] - values[1]) / (2 * step)
    torch.testing.assert_close(gate, differences, atol=1e-7, rtol=1e-5)
    assert gate.abs().max() > 1e-3


def test_a_weight_above_the_bound_by_hand():
    # One image, head and query, a token and a prompt whose logits are 0 and log 9: weights 0.1 and 0.9. The values are
    # 0 and 1, the output 0.9. The weight counts as 0.7 in 1 - a, so for a gradient of 1 s = 0.9 / 0.3 (1 - 0.9) = 0.3.
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([0.0, math.log(9)]).view(1, 1, 2, 1)
    value = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)

    def attend(query, key, value):
        return ((query @ key.transpose(2, 3)).softmax(dim=-1) @ value).transpose(1, 2)

    of_prompts = Gates("output", "default", 1)
    output = attend(query, key, value).requires_grad_()
    passed = of_prompts.on_output(output, query, key, value, torch.tensor([0]), 1, 1.0, attend)
    assert torch.equal(passed, output)
    assert of_prompts.gradients(passed.sum()).item() == pytest.approx(0.3, abs=1e-6)


def test_one_number_for_each_image_and_prompt():
    model = tiny.prompted(tiny.make("vit")).eval()
    inputs, targets = tiny.images(6), tiny.labels(6)
    taken = []

    def keep(measurement):
        taken.append(measurement.gate_gradients())
        return Idleness.mean_of(taken[-1])

    measured(model, inputs, targets, keep)
    for image in range(6):
        measured(model, inputs[image : image + 1], targets[image : image + 1], keep)
    whole, *each = taken
    assert whole.shape == (6, 12)
    torch.testing.assert_close(whole, torch.cat(each), atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("batches", [2, 4, 8])
@pytest.mark.parametrize("score", ["activity", "fisher", "taylor"])
def test_how_the_images_are_batched_does_not_matter(score, batches):
    model = tiny.prompted(tiny.make("vit")).eval()
    inputs, targets = tiny.images(8), tiny.labels(8)
    whole = measured(model, inputs, targets, score)
    split = measured(model, inputs, targets, score, batches)
    torch.testing.assert_close(split.score, whole.score, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(split.stderr, whole.stderr, atol=1e-7, rtol=1e-4)


def test_the_loss_is_a_mean_over_images_of_batches_of_any_size():
    model = tiny.prompted(tiny.make("vit")).eval()
    inputs, targets = tiny.images(5), tiny.labels(5)
    batches = [dict(pixel_values=inputs[part], labels=targets[part]) for part in (slice(0, 4), slice(4, 5))]
    for score in ("activity", "exact"):
        _, loss = Relocator(model, RelocationConfig(idleness=score), score_batches=batches).measure()
        with torch.no_grad():
            expected = model(pixel_values=inputs, labels=targets).loss.item()
        assert loss == pytest.approx(expected, rel=1e-6)


def test_taylor_is_eq_6():
    # An epsilon that the norm does not ignore: with the usual ones, Eq. 6 is rounding noise.
    model = tiny.prompted(tiny.make("vit", layer_norm_eps=1e-2)).double().eval()
    inputs, targets = tiny.images(4).double(), tiny.labels(4)
    taylor = measured(model, inputs, targets, "taylor").score
    prompts = model.base_model.prompts()
    model(pixel_values=inputs, labels=targets).loss.backward()
    expected = (prompts.grad * prompts).sum(dim=1)
    torch.testing.assert_close(taylor, expected, atol=1e-8, rtol=1e-5)
    assert expected.abs().max() > 1e-4


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", ["vit", "swin"])
def test_checkpointed_blocks_score_the_same(family, use_reentrant):
    model = tiny.prompted(tiny.make(family)).train()
    inputs, targets = tiny.images(4), tiny.labels(4)
    plain = measured(model, inputs, targets)
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    recomputed = measured(model, inputs, targets)
    torch.testing.assert_close(recomputed.score, plain.score, atol=1e-7, rtol=1e-4)
    assert all(block.block.training for block in model.base_model.blocks)


def test_a_checkpointed_head_is_measured_without_its_dropout():
    """transformers has decoders that read their training flag for both."""

    class Noisy(torch.nn.Module):
        gradient_checkpointing = True

        def forward(self, hidden):
            return torch.nn.functional.dropout(hidden, 0.5, self.training)

    class Larger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vit, self.head = tiny.prompted(tiny.make("vit")), Noisy()

        def forward(self, pixel_values, labels):
            return torch.nn.functional.cross_entropy(self.head(self.vit(pixel_values=pixel_values).logits), labels)

    model, batch = Larger().train(), dict(pixel_values=tiny.images(4), labels=tiny.labels(4))
    model.vit.gradient_checkpointing_enable()
    relocator = Relocator(model, score_batches=[batch], compute_loss=lambda m, b: m(**b))
    _, loss = relocator.measure()
    assert model.head.training
    assert loss == pytest.approx(model.eval()(**batch).item(), abs=1e-6)


def test_prompts_that_the_loss_does_not_reach_score_0():
    """Eq. 4: without them the loss is the same. Prompts that are in no block have no score."""

    class SecondLast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny.prompted(tiny.make("vit"))

        def forward(self, pixel_values, labels):
            hidden = self.inner(pixel_values=pixel_values, output_hidden_states=True).hidden_states[-2]
            return hidden.square().mean()

    model = SecondLast()
    model.inner.base_model.move_prompt(0, 0)
    batch = dict(pixel_values=tiny.images(4), labels=tiny.labels(4))
    for score in ("fisher", "taylor", "exact"):
        relocator = Relocator(
            model, RelocationConfig(idleness=score), score_batches=[batch], compute_loss=lambda m, b: m(**b)
        )
        scores = relocator.measure()[0].score
        assert scores[0].isnan()
        assert scores[9:].tolist() == [0, 0, 0]
        assert scores[1:9].abs().min() > 0


def test_a_loss_that_reaches_no_prompt_is_an_error():
    model = tiny.prompted(tiny.make("vit"))
    batch = dict(pixel_values=tiny.images(), labels=tiny.labels())
    relocator = Relocator(model, score_batches=[batch], compute_loss=lambda model, batch: torch.zeros(()))
    with pytest.raises(
        ValueError, match="Scores need a loss that depends on the prompts, but it reached none of them"
    ):
        relocator.measure()


def test_a_loss_that_fails_while_a_prompt_is_out_leaves_it_where_it_was():
    model = tiny.prompted(tiny.make("vit"))
    tuner, passes = model.base_model, []

    def fails(model, batch):
        passes.append(tuner.prompt_blocks().tolist())
        if len(passes) == 4:
            raise RuntimeError("out of memory")
        return model(**batch).loss

    batch = dict(pixel_values=tiny.images(4), labels=tiny.labels(4))
    relocator = Relocator(model, RelocationConfig(idleness="exact"), score_batches=[batch], compute_loss=fails)
    before = tuner.prompt_blocks().tolist()
    with pytest.raises(RuntimeError, match="out of memory"):
        relocator.measure()
    assert passes[3] == [*before[:2], 0, *before[3:]]  # a pass with all prompts, then one without each
    assert tuner.prompt_blocks().tolist() == before


def test_passes_on_different_images_are_an_error():
    def twice(model, batch):
        return model(**batch).loss + model(**{name: tensor[:2] for name, tensor in batch.items()}).loss

    batch = dict(pixel_values=tiny.images(4), labels=tiny.labels(4))
    relocator = Relocator(tiny.prompted(tiny.make("vit")), score_batches=[batch], compute_loss=twice)
    with pytest.raises(ValueError, match="the same images in all passes of one loss, got 4 and then 2"):
        relocator.measure()


def test_sign_on_a_planted_case():
    """One prompt that hurts and one that helps, planted by training up and down the loss; exact removal agrees."""
    model = tiny.prompted(tiny.make("vit"), num_prompts=1).eval()
    tuner = model.base_model
    inputs, targets = tiny.images(16), tiny.labels(16)
    hurts, helps = 1, 2
    for _ in range(30):
        tuner.prompts().grad = None
        model(pixel_values=inputs, labels=targets).loss.backward()
        with torch.no_grad():
            direction = F.normalize(tuner.prompts().grad, dim=1)
            tuner.prompts()[hurts] += 0.1 * direction[hurts]
            tuner.prompts()[helps] -= 0.1 * direction[helps]

    @torch.no_grad()
    def loss():
        return model(pixel_values=inputs, labels=targets).loss.item()

    exact = []
    for prompt in range(4):
        tuner.move_prompt(prompt, 0)
        without = loss()
        tuner.move_prompt(prompt, prompt + 1)
        exact.append(loss() - without)
    assert exact[hurts] > 0 > exact[helps]
    scores = measured(model, inputs, targets).score
    assert scores[hurts] > 0 > scores[helps]
