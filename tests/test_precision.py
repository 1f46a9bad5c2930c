"""Scores in half precision against those in float32, and gradient scalers."""

import contextlib

import pytest
import tiny
import torch
from test_callback import Images, make_trainer
from transformers import Trainer, TrainerCallback, TrainingArguments

from provpt_peft import RelocationConfig, RelocationTrainerCallback, Relocator


# The loss's factor in float16, where small gradients would vanish.
LOSS_SCALE = 2.0**10
# A factor with which gradients are above float16's range.
OVERFLOWS = 2.0**22


def grad_scaler(init_scale):
    # Backs off so far that it skips one step at most.
    return torch.amp.GradScaler("cpu", init_scale=init_scale, backoff_factor=LOSS_SCALE / OVERFLOWS)


def prompted(family="vit", dtype=torch.float32, prompts_too=False):
    """A model that looks trained: prompts are as large as tokens, and the head tells classes apart."""
    model = tiny.prompted(tiny.make(family).to(dtype), num_prompts=6)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad and p.dim() == 2):
            parameter.normal_(std=0.5 if parameter is model.base_model.prompts() else 0.3)
    assert model.base_model.prompts().dtype == torch.float32
    return model.to(dtype) if prompts_too else model


def scores(model, kind="gate", autocast=None, loss_scale=1.0, dtype=torch.float32):
    relocator = Relocator(model, RelocationConfig(idleness=kind))
    for step in range(3):
        precision = torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext()
        with precision:
            loss = model(pixel_values=tiny.images(8, step).to(dtype), labels=tiny.labels(8, step)).loss
        (loss * loss_scale).backward()
        relocator.record_step(loss, loss_scale=loss_scale)
        model.zero_grad()
    return relocator.window.scores()


def spearman(first, second):
    ranks = torch.stack([values.argsort().argsort().double() for values in (first, second)])
    return torch.corrcoef(ranks)[0, 1].item()


PRECISIONS = {
    "bf16 autocast": lambda family, kind: scores(prompted(family), kind, torch.bfloat16),
    "fp16 autocast": lambda family, kind: scores(prompted(family), kind, torch.float16, LOSS_SCALE),
    "bf16 backbone": lambda family, kind: scores(prompted(family, torch.bfloat16), kind, dtype=torch.bfloat16),
    "all bf16": lambda family, kind: scores(prompted(family, torch.bfloat16, True), kind, dtype=torch.bfloat16),
}


def assert_alike(half, full):
    # Measured over all cases: correlations from 0.997, deviations up to 2.8 % of the largest score, 5.3 % of a stderr.
    assert half.score.isfinite().all()
    assert half.stderr.isfinite().all()
    assert spearman(half.score, full.score) >= 0.99
    assert (half.score - full.score).abs().max() <= 0.05 * full.score.abs().max()
    torch.testing.assert_close(half.stderr, full.stderr, rtol=0.1, atol=0.0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gate_scores(family, precision):
    assert_alike(PRECISIONS[precision](family, "gate"), scores(prompted(family)))


@pytest.mark.parametrize("precision", ["bf16 autocast", "fp16 autocast"])
# ViT and DeiT have so small an epsilon in their norms that g.p is rounding noise even in float32.
@pytest.mark.parametrize("family", ["dinov2", "dinov2_registers", "swin"])
def test_taylor_scores(family, precision):
    assert_alike(PRECISIONS[precision](family, "taylor"), scores(prompted(family), "taylor"))


@pytest.mark.parametrize("precision", ["bf16 backbone", "all bf16"])
def test_taylor_scores_of_a_bf16_backbone_are_finite(precision):
    # No more than that: its norms round to 8 bits, and g.p is a small difference of large terms.
    assert PRECISIONS[precision]("dinov2", "taylor").score.isfinite().all()


# ---- loss scaling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gate", "taylor"])
def test_the_loss_scale_is_divided_out(kind):
    model = prompted()
    plain, scaled = scores(model, kind), scores(model, kind, loss_scale=LOSS_SCALE)
    # Exact, since the scale is a power of two.
    assert torch.equal(scaled.score, plain.score)
    assert torch.equal(scaled.stderr, plain.stderr)
    assert torch.equal(scaled.images, plain.images)


def train(init_scale, batches):
    """Steps in float16 with a scaler. Also gives the batches whose step it skipped."""
    model = prompted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scaler = grad_scaler(init_scale)
    relocator, skipped = Relocator(model, RelocationConfig(), optimizer), []
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(pixel_values=tiny.images(4, batch), labels=tiny.labels(4, batch)).loss
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        relocator.record_step(loss, loss_scale=scale)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() < scale:
            skipped.append(batch)
    return relocator, skipped


def test_a_step_that_the_scaler_skips_counts_for_nothing():
    relocator, skipped = train(OVERFLOWS, range(6))
    assert skipped == [0]
    expected, none_skipped = train(LOSS_SCALE, range(1, 6))
    assert none_skipped == []
    assert torch.equal(relocator.window.sums, expected.window.sums)
    assert torch.equal(relocator._loss, expected._loss)
    assert relocator.window.sums[-1].tolist() == [4.0 * 5] * 24
    relocator.relocate()
    assert [record.note for record in relocator.history] == [None]


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("where", ["scores", "gradient", "nowhere"])
def test_which_steps_count(where, with_optimizer):
    model = prompted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    relocator = Relocator(model, optimizer=optimizer if with_optimizer else None)

    def step(loss_scale):
        moments = torch.ones(5, 24)
        head = model.base_model.model.classifier.modules_to_save["default"].weight
        head.grad = torch.zeros_like(head)
        if where != "nowhere":
            (moments if where == "scores" else head.grad)[0, 0] = torch.inf
        relocator._observation.moments.grad = moments
        relocator.record_step(2.0, loss_scale=loss_scale)

    step(loss_scale=4.0)
    counted = where == "nowhere"
    assert relocator.window.sums[:, 1].tolist() == ([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1.0] if counted else [0.0] * 5)
    assert relocator._loss.tolist() == ([2.0, 1.0] if counted else [0.0, 0.0])
    assert relocator._observation.moments.grad is None
    # Without a scaler such a step is made, and has to be noticed.
    step(loss_scale=1.0)
    relocator.relocate()
    notes = [record.note for record in relocator.history]
    assert [note is not None and "not finite" in note for note in notes] == [where == "scores"]


# ---- Trainer --------------------------------------------------------------------------------------------------------


class Fp16Trainer(Trainer):
    """accelerate refuses fp16 on a CPU, so this does what it does on a GPU."""

    init_scale = LOSS_SCALE

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = grad_scaler(self.init_scale)

    def compute_loss_context_manager(self):
        stack = super().compute_loss_context_manager()
        stack.enter_context(torch.autocast("cpu", dtype=torch.float16))
        return stack


class Watch(TrainerCallback):
    """Notes which steps were skipped, and the images that each epoch's scores come from."""

    def __init__(self, callback):
        self.callback, self.skipped, self.images = callback, [], []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.scale = optimizer.scaler.get_scale()

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.skipped.append(optimizer.scaler.get_scale() < self.scale)

    def on_epoch_end(self, args, state, control, **kwargs):
        self.images.append(self.callback.relocator.window.sums[-1].tolist())


def train_fp16(folder, init_scale, **arguments):
    callback = RelocationTrainerCallback(RelocationConfig(idleness="gate", score_images=0, settle=0.0))
    watch = Watch(callback)
    args = TrainingArguments(
        str(folder), num_train_epochs=3, per_device_train_batch_size=4, save_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False, use_cpu=True, max_grad_norm=0.0, **arguments,
    )  # fmt: skip
    trainer_class = type("Fp16", (Fp16Trainer,), {"init_scale": init_scale})
    trainer_class(prompted(), args, train_dataset=Images(), callbacks=[callback, watch]).train()
    return callback, watch


def test_trainer_scores_do_not_depend_on_the_scale(tmp_path):
    runs = [train_fp16(tmp_path, scale, learning_rate=0.0) for scale in (1.0, LOSS_SCALE)]
    for callback, watch in runs:
        assert not any(watch.skipped)
        assert len(callback.history) == 2
    (plain, _), (scaled, _) = runs
    assert scaled.history[0].prompt == plain.history[0].prompt
    assert scaled.history[0].idleness == pytest.approx(plain.history[0].idleness, rel=1e-2)
    assert scaled.history[0].idleness_stderr == pytest.approx(plain.history[0].idleness_stderr, rel=1e-2)


def test_trainer_step_that_is_skipped(tmp_path):
    callback, watch = train_fp16(tmp_path, OVERFLOWS, learning_rate=1e-3)
    assert watch.skipped == [True] + [False] * 17
    assert watch.images == [[20.0] * 24, [24.0] * 24, [24.0] * 24]
    assert [record.epoch for record in callback.history] == [1, 2]
    assert [record.note for record in callback.history] == [None, None]


def test_trainer_in_bf16(tmp_path):
    trainer, callback = make_trainer(tmp_path, bf16=True, model=prompted())
    trainer.train()
    assert [record.epoch for record in callback.history] == [1, 2, 3]
    assert all(record.note is None and record.reward is not None for record in callback.history)
