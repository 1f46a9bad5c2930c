"""Scores: the pure part by hand, the gate against finite differences and against exact removal."""

import math

import pytest
import tiny
import torch
from torch.nn import functional as F

from provpt_peft import RelocationConfig, Relocator
from provpt_peft.attention import PromptedBlock
from provpt_peft.relocation.idleness import IdlenessWindow


# ---- the pure part --------------------------------------------------------------------------------------------------


def shares(gradients):
    """The moments (5, 1) of one prompt in one step, from the images' shares of its gradient."""
    gradients = torch.tensor(gradients, dtype=torch.float64)
    return torch.stack([*((gradients**power).sum() for power in range(1, 5)), torch.tensor(len(gradients))])[:, None]


def test_mean_and_standard_error_by_hand():
    # One prompt, one step of 4 images whose own scores are 1, 2, 3, 6. The loss is their mean, so each image's share
    # of the gradient is a quarter: 0.25, 0.5, 0.75, 1.5 with sum 3 and sum of squares 3.125.
    # Mean 3; sample variance (4 + 1 + 0 + 9) / 3 = 14/3; standard error sqrt(14/3 / 4) = sqrt(7/6).
    window = IdlenessWindow(1)
    window.add_step(shares([0.25, 0.5, 0.75, 1.5]))
    idleness = window.scores()
    assert idleness.score.tolist() == [3.0]
    assert idleness.stderr.item() == pytest.approx(math.sqrt(7 / 6))


def test_exact_scores_come_first_in_the_ranking():
    window = IdlenessWindow(4)
    window.add_step(torch.cat([shares([score]) for score in (1.0, 3.0, 2.0, 0.5)], dim=1))
    idleness = window.scores()
    assert idleness.ranking() == [1, 2, 0, 3]
    idleness.score[1], idleness.exact[1:3] = -1.0, True
    assert idleness.ranking() == [2, 1, 0, 3]


def test_second_order_by_hand():
    # One step of 2 images whose own derivatives are 1 and 3, so their shares are 0.5 and 1.5. To second order their
    # scores are 1 - 1/2 = 0.5 and 3 - 9/2 = -1.5: mean -0.5, sample variance 2, standard error sqrt(2 / 2) = 1.
    window = IdlenessWindow(1, curvature=0.5)
    window.add_step(shares([0.5, 1.5]))
    idleness = window.scores()
    assert idleness.score.item() == pytest.approx(-0.5)
    assert idleness.stderr.item() == pytest.approx(1.0)


def test_loss_scale_is_divided_out():
    plain, scaled = IdlenessWindow(1, curvature=0.5), IdlenessWindow(1, curvature=0.5)
    plain.add_step(shares([0.5, 1.5]))
    scaled.add_step(shares([4.0, 12.0]), loss_scale=8.0)
    torch.testing.assert_close(scaled.sums, plain.sums)


def test_images_of_small_and_large_steps_count_alike():
    # 3 images with score 1 in one step (shares 1/3), 1 image with score 5 in another: mean (3 + 5) / 4 = 2.
    window = IdlenessWindow(1)
    window.add_step(shares([1 / 3, 1 / 3, 1 / 3]))
    window.add_step(shares([5.0]))
    assert window.scores().score.item() == pytest.approx(2.0)


def test_undistributed_prompts_have_no_score():
    window = IdlenessWindow(2)
    window.add_step(torch.cat([shares([-0.5, -0.5]), torch.zeros(5, 1)], dim=1))
    idleness = window.scores()
    assert idleness.score[1].isnan()
    assert idleness.is_finite()
    assert idleness.ranking() == [0]


def test_not_a_number_is_noticed():
    window = IdlenessWindow(2)
    window.add_step(torch.cat([shares([math.nan]), shares([1.0])], dim=1))
    assert not window.scores().is_finite()


@pytest.mark.parametrize(("significance", "stands_out"), [(0.0, True), (1.0, True), (2.0, False)])
def test_significance_is_in_standard_errors(significance, stands_out):
    # Three images with scores 0, 0.5 and 1: mean 0.5, standard error 0.5 / sqrt(3) = 0.289.
    window = IdlenessWindow(1)
    window.add_step(shares([0.0, 0.5 / 3, 1.0 / 3]))
    idleness = window.scores()
    assert idleness.score.item() == pytest.approx(0.5)
    assert idleness.stderr.item() == pytest.approx(0.5 / math.sqrt(3))
    assert idleness.stands_out(0, significance) == stands_out


# ---- the gate's gradient, out of a model's backward -----------------------------------------------------------------


def observed(model, inputs, targets, score="gate", micro_batches=1, **others):
    """Scores of one optimizer step, from an ordinary training backward."""
    relocator = Relocator(model, RelocationConfig(idleness=score))
    for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        (model(pixel_values=x, labels=y, **others).loss / micro_batches).backward()
    relocator.record_step()
    model.base_model.bank.observation = None
    return relocator.window.scores()


def weighted_attention(factors):
    """Attention in which some prompt keys have a factor on their weight, written from the definition."""

    def attend(block, query, key, value, attention_mask, scaling=None, **kwargs):
        logits = query @ key.transpose(2, 3) * scaling
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attention_mask, -math.inf)
        elif attention_mask is not None:
            logits = logits + attention_mask
        factor = torch.ones(key.shape[2], dtype=key.dtype)
        factor[key.shape[2] - len(factors[block]) :] = factors[block]
        weights = logits.exp() * factor
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return (weights @ value).transpose(1, 2), None

    return attend


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *((family, name) for family in ("vit", "dinov2", "swin") for name in ("sdpa", "eager")),
        *((family, "sdpa") for family in ("dinov3", "siglip2", "beit", "data2vec")),
        *((family, "eager") for family in tiny.EAGER_ONLY),
    ],
)
def test_gate_is_the_derivative_in_the_key_s_weight(monkeypatch, family, implementation):
    model = tiny.prompted(tiny.make(family, attn_implementation=implementation)).double().eval()
    tuner = model.base_model
    tuner.move_prompt(0, 2)
    inputs, targets = tiny.inputs(family, 3), tiny.labels(3)
    inputs["pixel_values"] = inputs["pixel_values"].double()
    others = {name: tensor for name, tensor in inputs.items() if name != "pixel_values"}
    gate = observed(model, inputs["pixel_values"], targets, **others).score

    factors = {
        block: torch.ones(n).double() for block, n in zip(tuner.blocks, tuner.prompt_distribution(), strict=True)
    }
    monkeypatch.setattr(PromptedBlock, "attend", weighted_attention(factors))

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


def test_standard_error_is_over_images():
    model = tiny.prompted(tiny.make("vit")).eval()
    inputs, targets = tiny.images(6), tiny.labels(6)
    idleness = observed(model, inputs, targets)
    each = torch.stack([observed(model, inputs[i : i + 1], targets[i : i + 1]).score for i in range(6)])  # (6, N)
    torch.testing.assert_close(idleness.score, each.mean(dim=0), atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(idleness.stderr, each.std(dim=0) / math.sqrt(6), atol=1e-7, rtol=1e-3)


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize("score", ["gate", "taylor"])
def test_accumulation_does_not_matter(score, micro_batches):
    model = tiny.prompted(tiny.make("vit")).eval()
    inputs, targets = tiny.images(8), tiny.labels(8)
    whole = observed(model, inputs, targets, score)
    split = observed(model, inputs, targets, score, micro_batches)
    torch.testing.assert_close(split.score, whole.score, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(split.stderr, whole.stderr, atol=1e-7, rtol=1e-4)


def test_taylor_is_eq_6():
    # An epsilon that the norm does not ignore: with the usual ones, Eq. 6 is rounding noise.
    model = tiny.prompted(tiny.make("vit", layer_norm_eps=1e-2)).double().eval()
    inputs, targets = tiny.images(4).double(), tiny.labels(4)
    taylor = observed(model, inputs, targets, "taylor").score
    prompts = model.base_model.prompts()
    prompts.grad = None
    model(pixel_values=inputs, labels=targets).loss.backward()
    expected = (prompts.grad * prompts).sum(dim=1)
    torch.testing.assert_close(taylor, expected, atol=1e-8, rtol=1e-5)
    assert expected.abs().max() > 1e-4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_count_once(use_reentrant):
    model = tiny.prompted(tiny.make("vit")).train()
    inputs, targets = tiny.images(4), tiny.labels(4)
    plain = observed(model, inputs, targets)
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    recomputed = observed(model, inputs, targets)
    torch.testing.assert_close(recomputed.score, plain.score, atol=1e-7, rtol=1e-4)
    assert torch.equal(recomputed.images, plain.images)
    assert recomputed.images.tolist() == [4.0] * 12


def test_forward_without_backward_counts_for_nothing():
    model = tiny.prompted(tiny.make("vit"))
    relocator = Relocator(model)
    model(pixel_values=tiny.images(), labels=tiny.labels())
    relocator.record_step(1.0)
    assert relocator.relocate() == []
    assert relocator.epoch == 0


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
    gate = observed(model, inputs, targets)
    assert exact[hurts] > 0 > exact[helps]
    assert gate.score[hurts] > 0 > gate.score[helps]
