"""Scores in half precision against those in float32, and gradient scalers."""

import contextlib

import pytest
import tiny
import torch
from peft import PeftModel, get_peft_model
from training import STEPS_AN_EPOCH, every_epoch, make_trainer, moving
from transformers import Trainer, TrainerCallback

from provpt_peft import ProVPTConfig, RelocationConfig, Relocator, create_provpt_optimizer
from provpt_peft.relocation.idleness import Idleness


# The loss's factor in training in float16, where small gradients would vanish.
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
            # Drawn in float32: a tensor in bfloat16 has drawn other numbers in older releases of PyTorch.
            std = 0.5 if parameter is model.base_model.prompts() else 0.3
            parameter.copy_(std * torch.randn(parameter.shape))
    assert model.base_model.prompts().dtype == torch.float32
    return model.to(dtype) if prompts_too else model


def scores(model, kind="fisher", autocast=None, dtype=torch.float32):
    def compute_loss(model, batch):
        with torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext():
            return model(**batch).loss

    batches = [dict(pixel_values=tiny.images(8, seed).to(dtype), labels=tiny.labels(8, seed)) for seed in range(3)]
    relocator = Relocator(model, RelocationConfig(idleness=kind), score_batches=batches, compute_loss=compute_loss)
    return relocator.measure()[0]


def spearman(first, second):
    ranks = torch.stack([values.argsort().argsort().double() for values in (first, second)])
    return torch.corrcoef(ranks)[0, 1].item()


PRECISIONS = {
    "bf16 autocast": lambda family, kind: scores(prompted(family), kind, torch.bfloat16),
    "fp16 autocast": lambda family, kind: scores(prompted(family), kind, torch.float16),
    "bf16 backbone": lambda family, kind: scores(prompted(family, torch.bfloat16), kind, dtype=torch.bfloat16),
    "all bf16": lambda family, kind: scores(prompted(family, torch.bfloat16, True), kind, dtype=torch.bfloat16),
}


def assert_alike(half, full):
    # Measured over all cases: correlations from 0.998, deviations up to 2.7 % of the largest score, 5.1 % of a stderr.
    assert half.score.dtype == half.stderr.dtype == torch.float64
    assert half.score.isfinite().all()
    assert half.stderr.isfinite().all()
    assert spearman(half.score, full.score) >= 0.99
    assert (half.score - full.score).abs().max() <= 0.05 * full.score.abs().max()
    torch.testing.assert_close(half.stderr, full.stderr, rtol=0.1, atol=0.0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_fisher_scores(family, precision):
    assert_alike(PRECISIONS[precision](family, "fisher"), scores(prompted(family)))


@pytest.mark.parametrize("precision", ["bf16 autocast", "fp16 autocast"])
# ViT and DeiT have so small an epsilon in their norms that g.p is rounding noise even in float32.
@pytest.mark.parametrize("family", ["dinov2", "dinov2_registers", "swin"])
def test_taylor_scores(family, precision):
    assert_alike(PRECISIONS[precision](family, "taylor"), scores(prompted(family), "taylor"))


@pytest.mark.parametrize("precision", ["bf16 backbone", "all bf16"])
def test_taylor_scores_of_a_bf16_backbone_are_finite(precision):
    # No more than that: its norms round to 8 bits, and g.p is a small difference of large terms.
    assert PRECISIONS[precision]("dinov2", "taylor").score.isfinite().all()


@pytest.mark.parametrize("family", ["vit", "swin", "swinv2", "beit", "data2vec", "maskformer_swin", "dinov3"])
def test_scoring_attends_in_the_dtypes_of_the_forward_pass(family, monkeypatch):
    """Kernels of GPUs take masks of the queries' dtype only. Outside of autocast nothing makes them so."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def strict(query, key, value, attn_mask=None, **kwargs):
        if not torch.is_autocast_enabled("cpu"):
            masks = [] if attn_mask is None or attn_mask.dtype == torch.bool else [attn_mask]
            assert {tensor.dtype for tensor in (query, key, value, *masks)} == {query.dtype}
        return attention(query, key, value, attn_mask=attn_mask, **kwargs)

    def compute_loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**batch).loss

    batch = dict(tiny.inputs(family, 4), labels=tiny.labels(4))
    full = Relocator(prompted(family), RelocationConfig(idleness="fisher"), score_batches=[batch]).measure()[0]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", strict)
    config = RelocationConfig(idleness="fisher")
    half = Relocator(prompted(family), config, score_batches=[batch], compute_loss=compute_loss).measure()[0]
    assert spearman(half.score, full.score) >= 0.98
    assert (half.score - full.score).abs().max() <= 0.1 * full.score.abs().max()


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
    """Notes which steps were skipped."""

    def __init__(self):
        self.skipped = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.scale = optimizer.scaler.get_scale()

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.skipped.append(optimizer.scaler.get_scale() < self.scale)


def train_fp16(folder, init_scale, **arguments):
    trainer, callback = make_trainer(
        folder, moving(), model=prompted(), trainer_class=type("Fp16", (Fp16Trainer,), {"init_scale": init_scale}),
        callbacks=[watch := Watch()], num_train_epochs=3, max_grad_norm=0.0, **arguments,
    )  # fmt: skip
    trainer.train()
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
    assert [record.epoch for record in callback.history] == [1, 2]
    assert [record.note for record in callback.history] == [None, None]
    assert all(record.reward is not None for record in callback.history)


def test_trainer_in_bf16(tmp_path):
    trainer, callback = make_trainer(tmp_path, every_epoch(), bf16=True, model=prompted())
    scored = set()

    def note(module, inputs, output):
        if not trainer.model.training:
            scored.add(output.dtype)

    trainer.model.base_model.model.vit.layers[0].attention.q_proj.register_forward_hook(note)
    trainer.train()
    assert scored == {torch.bfloat16}  # under the Trainer's autocast, as in training
    assert [record.epoch for record in callback.history] == [1, 2, 3]
    assert all(record.note is None and record.reward is not None for record in callback.history)


@pytest.mark.parametrize("autocast", [True, False])
def test_resuming_and_loading_keep_the_precision_that_an_adapter_was_made_with(tmp_path, autocast):
    def make():
        base = tiny.make("vit").bfloat16()
        return get_peft_model(base, ProVPTConfig(num_prompts=2), autocast_adapter_dtype=autocast)

    settings = dict(num_train_epochs=2, save_strategy="epoch", save_total_limit=None)
    whole, _ = make_trainer(tmp_path / "whole", callback=False, model=make(), **settings)
    whole.train()
    expected = torch.float32 if autocast else torch.bfloat16
    assert whole.model.base_model.prompts().dtype == expected
    resumed, _ = make_trainer(tmp_path / "resumed", callback=False, model=make(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{STEPS_AN_EPOCH}"))
    assert resumed.model.base_model.prompts().dtype == expected
    assert torch.equal(resumed.model.base_model.prompts(), whole.model.base_model.prompts())
    # Another adapter is what it is asked to be.
    resumed.model.load_adapter(
        tmp_path / "whole" / f"checkpoint-{STEPS_AN_EPOCH}", "other", autocast_adapter_dtype=not autocast
    )
    assert resumed.model.base_model.prompts("other").dtype == (torch.bfloat16 if autocast else torch.float32)


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_what_is_loaded_frozen_stays_frozen_in_any_precision(tmp_path, saved, dtype, autocast, low_cpu_mem_usage):
    tiny.prompted(tiny.make("vit")).to(saved).save_pretrained(tmp_path)
    how = dict(autocast_adapter_dtype=autocast, low_cpu_mem_usage=low_cpu_mem_usage)
    model = PeftModel.from_pretrained(tiny.make("vit").to(dtype), tmp_path, **how)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == []
    model.load_adapter(tmp_path, "second", **how)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == []
    model.load_adapter(tmp_path, "third", is_trainable=True, **how)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert [name for name in trainable if "provpt_" in name] == ["base_model.bank.provpt_prompts.third"]
    for name in ("default", "second", "third"):
        assert model.base_model.prompts(name).dtype == (torch.float32 if autocast else dtype)
    # Only the active adapter's prompts are trained, at the rate of their number.
    model = tiny.prompted(tiny.make("vit").to(dtype))
    model.add_adapter("other", ProVPTConfig(num_prompts=100))
    assert not model.base_model.prompts("other").requires_grad


def test_loading_into_an_adapter_keeps_its_parameter_and_precision(tmp_path):
    """An optimizer that was made before trains what was loaded, as when a run is resumed."""

    def run(folder, **resume):
        model = prompted(dtype=torch.bfloat16, prompts_too=True)
        optimizer = create_provpt_optimizer(model, torch.optim.AdamW)
        trainer, _ = make_trainer(folder, callback=False, model=model, num_train_epochs=2, save_strategy="epoch")
        trainer.optimizer = optimizer
        prompts = model.base_model.prompts()
        trainer.train(**resume)
        assert model.base_model.prompts() is prompts
        assert prompts.dtype == torch.bfloat16
        return prompts

    whole = run(tmp_path / "whole")
    checkpoint = tmp_path / "whole" / f"checkpoint-{STEPS_AN_EPOCH}"
    assert not torch.equal(PeftModel.from_pretrained(tiny.make("vit"), checkpoint).base_model.prompts(), whole.float())
    assert torch.equal(run(tmp_path / "resumed", resume_from_checkpoint=str(checkpoint)), whole)


def test_scores_of_a_small_loss_do_not_vanish_in_float16():
    """As at the end of training, where the Trainer has its loss scale."""
    model = tiny.prompted(tiny.make("vit"))
    batch = dict(pixel_values=tiny.images(8), labels=tiny.labels(8))

    def small(model, batch):
        return 1e-4 * model(**batch).loss

    def of(compute_loss):
        config = RelocationConfig(idleness=lambda measurement: Idleness.mean_of(measurement.gate_gradients()))
        return Relocator(model, config, score_batches=[batch], compute_loss=compute_loss).measure()[0].score

    expected = of(small)
    with torch.autocast("cpu", dtype=torch.float16):
        found = of(small)
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()
