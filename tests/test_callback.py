"""A real Trainer on a tiny ViT: when relocations happen, what a resumed run does, what is logged."""

import functools
import gc
import json
import weakref
from dataclasses import asdict

import datasets
import PIL.Image
import pytest
import tiny
import torch
import transformers
from peft import PeftModel
from torch.nn import functional as F
from training import (
    STEPS_AN_EPOCH,
    Images,
    assert_equal,
    every_epoch,
    make_trainer,
    moving,
    no_prompt_idle,
    outcome,
    trained,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

from provpt_peft import (
    ProVPTConfig,
    RelocationConfig,
    RelocationTrainerCallback,
    Relocator,
    create_provpt_optimizer,
)
from provpt_peft.evaluation import fixed_randomness
from provpt_peft.trainer.reporting import report_distribution


class ScoreBatches(TrainerCallback):
    """Keeps what scores are measured on, which the callback lets go of after training."""

    def __init__(self, callback):
        self.callback = callback

    def on_train_begin(self, args, state, control, **kwargs):
        self.batches = self.callback.relocator.score_batches


class Watch(TrainerCallback):
    """Notes the distribution at each event, with the step at which it came."""

    def __init__(self):
        self.events = []

    def _note(self, event):
        def on_event(args, state, control, model=None, **kwargs):
            self.events.append((event, state.global_step, model.base_model.prompt_blocks().tolist()))

        return on_event

    def __getattribute__(self, name):
        if name in ("on_step_begin", "on_evaluate", "on_save", "on_epoch_end"):
            return self._note(name)
        return super().__getattribute__(name)


# ---- when -----------------------------------------------------------------------------------------------------------


def test_moves_happen_at_the_start_of_epochs_after_the_first(tmp_path):
    watch = Watch()
    trainer, callback = trained(
        tmp_path, config=every_epoch(), callbacks=[watch], eval_strategy="epoch", save_strategy="epoch"
    )
    assert trainer.state.global_step == 4 * STEPS_AN_EPOCH
    assert [record.epoch for record in callback.history] == [1, 2, 3]
    blocks = {
        event: {step: b for e, step, b in watch.events if e == event}
        for event in ("on_step_begin", "on_evaluate", "on_save", "on_epoch_end")
    }
    steps = blocks["on_step_begin"]
    changed = [step for step in range(1, 24) if steps[step] != steps[step - 1]]
    # A policy may choose the block that the prompt is in.
    expected = [r.epoch * STEPS_AN_EPOCH for r in callback.history if r.block != r.from_block]
    assert changed == expected
    assert expected
    # What is evaluated and saved has been trained where it stands.
    for event in ("on_evaluate", "on_save"):
        assert list(blocks[event]) == [6, 12, 18, 24]
        for step, distribution in blocks[event].items():
            assert distribution == steps[step - 1]


def test_nothing_moves_in_the_second_half_by_default(tmp_path):
    _, callback = trained(tmp_path, num_train_epochs=6, config=moving(settle=RelocationConfig().settle))
    assert [record.epoch for record in callback.history] == [1, 2]
    _, callback = trained(tmp_path, num_train_epochs=6, config=moving(settle=0.5, warmup_epochs=2))
    assert [record.epoch for record in callback.history] == [2]


def test_the_last_reward_is_learned_without_a_further_move(tmp_path):
    trainer, callback = trained(tmp_path, config=every_epoch())
    assert len(callback.history) == 3
    assert all(record.reward is not None for record in callback.history)
    blocks = tiny.prompted(tiny.make("vit")).base_model.prompt_blocks()
    for record in callback.history:
        blocks[record.prompt] = record.block
    assert torch.equal(trainer.model.base_model.prompt_blocks(), blocks)


@pytest.mark.parametrize("never", [dict(warmup_epochs=99), dict(idleness=no_prompt_idle)])
def test_relocation_leaves_dropout_and_shuffling_as_they_were(tmp_path, never):
    """Where nothing moves, measured or not, training is what it is without the callback."""
    with_callback, callback = trained(tmp_path, config=every_epoch(**never))
    without, _ = trained(tmp_path, callback=False)
    assert [record for record in callback.history if record.prompt is not None] == []
    assert torch.equal(with_callback.model.base_model.prompts(), without.model.base_model.prompts())


def test_after_training_the_callback_holds_neither_model_nor_data(tmp_path):
    trainer, callback = trained(tmp_path, config=every_epoch())
    held = weakref.ref(trainer.model), weakref.ref(trainer.train_dataset), weakref.ref(trainer)
    state, history, distribution = callback.state(), callback.history, trainer.model.base_model.prompt_distribution()
    assert callback.relocator is None
    del trainer
    gc.collect()
    assert [reference() for reference in held] == [None, None, None]
    assert callback.run().distribution == distribution
    assert callback.run().epochs == 4
    assert callback.history is history
    assert len(history) == 3
    assert callback.state() == state


# ---- resume ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "restore"), [(4, False), (8, True), (12, False), (20, False)])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, step, restore):
    # Steps 4, 8 and 20 are inside an epoch; 12 ends one.
    settings = dict(
        config=every_epoch(), save_strategy="steps", save_steps=4, restore_callback_states_from_checkpoint=restore
    )
    expected = outcome(*trained(tmp_path, **settings))
    assert len(expected[0]) == 3
    trainer, _ = trained(tmp_path, resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"), **settings)
    # With `restore_callback_states_from_checkpoint` the Trainer makes an instance of its own.
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, RelocationTrainerCallback))
    assert_equal(outcome(trainer, callback), expected)


def test_resume_with_gradient_accumulation(tmp_path):
    settings = dict(config=every_epoch(), save_strategy="steps", save_steps=2, gradient_accumulation_steps=2)
    expected = outcome(*trained(tmp_path, **settings))
    resumed = trained(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-4"), **settings)
    assert_equal(outcome(*resumed), expected)


def test_resume_beyond_the_last_step(tmp_path):
    settings = dict(config=every_epoch(relocate_every=2), save_strategy="steps", save_steps=8)
    trained(tmp_path, **settings)
    _, callback = trained(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-8"), max_steps=7, **settings)
    assert callback.history[-1].epoch < 4  # nothing moves after the last step


class StopAt(TrainerCallback):
    """As a job's time limit does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def test_a_run_that_stopped_inside_an_epoch_resumes_exactly(tmp_path):
    # The Trainer ends the epoch that is broken off, and writes the epoch's checkpoint.
    settings = dict(config=every_epoch(), save_strategy="epoch")
    expected = outcome(*trained(tmp_path / "whole", **settings))
    assert len(expected[0]) == 3
    trained(tmp_path / "stopped", callbacks=[StopAt(8)], **settings)
    checkpoint = tmp_path / "stopped" / "checkpoint-8"
    assert_equal(outcome(*trained(tmp_path / "stopped", resume_from_checkpoint=str(checkpoint), **settings)), expected)


class SaveAt(TrainerCallback):
    """Write a checkpoint at an event, as the Trainer's `enable_jit_checkpoint` does when the job gets a signal."""

    def __init__(self, event, step):
        self.step = step
        setattr(self, event, self.save)

    def save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


@pytest.mark.parametrize(
    ("event", "every", "step"), [("on_epoch_begin", "epoch", 12), ("on_pre_optimizer_step", 5, 10)]
)
def test_a_checkpoint_beside_a_relocation_resumes_exactly(tmp_path, event, every, step):
    # Without dropout, whose random numbers have been drawn for the step already.
    models = (tiny.prompted(tiny.make("vit")) for _ in range(2))
    config = every_epoch(relocate_every=every)
    saving = SaveAt(event, step)
    saving.trainer, callback = make_trainer(tmp_path, config=config, model=next(models), callbacks=[saving])
    saving.trainer.train()
    expected = outcome(saving.trainer, callback)
    assert len(expected[0]) >= 3
    checkpoint = str(tmp_path / f"checkpoint-{step}")
    resumed = trained(tmp_path, config=config, model=next(models), resume_from_checkpoint=checkpoint)
    assert_equal(outcome(*resumed), expected)


def test_resume_from_a_best_checkpoint_inside_an_epoch(tmp_path):
    # The Trainer decides to save after it has evaluated and logged.
    settings = dict(
        config=every_epoch(), save_strategy="best", metric_for_best_model="loss", greater_is_better=True,
        eval_strategy="steps", eval_steps=4,
    )  # fmt: skip
    expected = outcome(*trained(tmp_path, model=tiny.prompted(tiny.make("vit")), **settings))
    checkpoint = tmp_path / "checkpoint-4"
    resumed = trained(
        tmp_path, resume_from_checkpoint=str(checkpoint), model=tiny.prompted(tiny.make("vit")), **settings
    )
    assert_equal(outcome(*resumed), expected)


def test_checkpoint_without_the_callback_starts_afresh_and_says_so(tmp_path, caplog):
    trained(tmp_path, callback=False, save_strategy="steps", save_steps=6)
    _, callback = trained(
        tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-6"), config=every_epoch(), save_strategy="steps",
        save_steps=6,
    )  # fmt: skip
    assert "written without RelocationTrainerCallback, so relocation starts afresh at step 6" in caplog.text
    assert [record.epoch for record in callback.history] == [1, 2]


def test_best_model_is_loaded_with_its_distribution(tmp_path):
    class WorseAndWorse(Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            metrics["eval_loss"] = float(self.state.global_step)
            return metrics

    trainer, callback = trained(
        tmp_path, config=moving(), trainer_class=WorseAndWorse, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-6")
    assert any(record.block != record.from_block for record in callback.history)
    assert trainer.model.base_model.prompt_distribution() == [3, 3, 3, 3]


def test_best_checkpoint_of_a_model_around_the_adapter(tmp_path):
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny.prompted(tiny.make("vit"))

        def forward(self, pixel_values, labels=None):
            return self.inner(pixel_values=pixel_values, labels=labels)

    trainer, callback = make_trainer(
        tmp_path, model=Around(), num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    assert callback.run().epochs == 2


def test_logs_of_a_trainer_s_own_are_not_taken_for_the_end(tmp_path):
    class Talkative(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            loss = super().compute_loss(model, inputs, **kwargs)
            self.log({"loss": 100.0, "train_loss": 100.0})
            return loss

    expected = outcome(*trained(tmp_path, config=every_epoch()))
    assert_equal(outcome(*trained(tmp_path, config=every_epoch(), trainer_class=Talkative)), expected)


@pytest.mark.parametrize("warmup_steps", [0, 2])
@pytest.mark.parametrize("own", [False, True])
def test_one_rate_for_prompts_and_head_is_said_once(tmp_path, caplog, own, warmup_steps):
    model = tiny.prompted(tiny.make("vit"))
    trainer, _ = make_trainer(tmp_path, model=model, num_train_epochs=1, warmup_steps=warmup_steps)
    if own:  # in groups of their own rates may be equal
        trainer.optimizer = create_provpt_optimizer(model, torch.optim.AdamW, lr=1e-2, head_lr=1e-2)
    trainer.train()
    assert caplog.text.count("Prompts and head are trained at one learning rate, 0.01") == (not own)


def test_prompts_alone_have_one_rate(tmp_path, caplog):
    trained(tmp_path, model=tiny.prompted(tiny.make("vit"), modules_to_save=None), num_train_epochs=1)
    assert "one learning rate" not in caplog.text


def test_a_training_step_of_a_trainer_s_own_is_said(tmp_path, caplog):
    class Mixes(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            return super().training_step(model, inputs, *args, **kwargs)

    for trainer_class, said in ((Trainer, False), (Mixes, True)):
        caplog.clear()
        trained(tmp_path, config=every_epoch(), trainer_class=trainer_class, num_train_epochs=1)
        assert ("Mixes overrides `training_step`" in caplog.text) == said


@pytest.mark.parametrize("moves", [False, True])
def test_an_attempt_that_ran_out_of_memory_is_not_in_the_record(tmp_path, moves):
    class RunsOut(Trainer):
        """In the first step with large batches, or after a move with them."""

        def training_step(self, model, *args, **kwargs):
            if self._train_batch_size > 4 and self.state.epoch >= moves:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(model, *args, **kwargs)

    trainer, callback = trained(
        tmp_path, config=moving(), trainer_class=RunsOut, auto_find_batch_size=True, per_device_train_batch_size=16
    )
    record = trainer.model.peft_config["default"].training
    run = callback.run()
    assert run.over_time()[0] == [3, 3, 3, 3]
    assert run.over_time()[-1] == trainer.model.base_model.prompt_distribution()
    if moves:
        # What moved has moved.
        assert callback.history[0].epoch == 1
    else:
        assert record["epochs"] == 4
        assert [move.epoch for move in callback.history] == [1, 2, 3]


def test_a_record_of_steps_is_not_one_of_epochs(tmp_path):
    trainer, _ = trained(tmp_path, config=moving(), num_train_epochs=2)
    again, callback = trained(tmp_path, config=moving(relocate_every=4), num_train_epochs=2, model=trainer.model)
    record = again.model.peft_config["default"].training
    assert record["epochs"] == 3
    assert [move.epoch for move in callback.history] == [1, 2]


def test_each_checkpoint_has_counted_its_own_epoch(tmp_path):
    trained(tmp_path, config=moving(), save_strategy="epoch")
    for epoch in range(1, 5):
        record = ProVPTConfig.from_pretrained(tmp_path / f"checkpoint-{STEPS_AN_EPOCH * epoch}").training
        assert record["epochs"] == epoch
        assert len(record["history"]) == epoch - 1


def test_training_again_goes_on_with_the_record(tmp_path):
    trainer, callback = trained(tmp_path, config=moving(), num_train_epochs=2)
    trainer.train()
    # Each run has its own epoch without a move.
    assert [record.epoch for record in callback.history] == [1, 3]
    record = trainer.model.peft_config["default"].training
    assert record["epochs"] == 4
    assert record["history"] == [asdict(move) for move in callback.history]
    over_time = callback.run().over_time()
    assert over_time[0] == [3, 3, 3, 3] != over_time[1] == over_time[2]
    assert over_time[3] == trainer.model.base_model.prompt_distribution()


def test_what_is_pruned_for_good_is_pruned_once_however_often_one_trains(tmp_path):
    config = every_epoch(adjust="prune", prune_share=0.5)
    trainer, _ = trained(tmp_path, config=config, num_train_epochs=2)
    pruned = trainer.model.base_model.prompt_distribution()
    assert sum(pruned) == 6
    trainer.train()
    assert trainer.model.base_model.prompt_distribution() == pruned
    # Nor by the next one who trains it.
    trainer.save_model(str(tmp_path / "adapter"))
    model = PeftModel.from_pretrained(tiny.make("vit"), tmp_path / "adapter", is_trainable=True)
    again, _ = trained(tmp_path, config=config, num_train_epochs=2, model=model)
    assert again.model.base_model.prompt_distribution() == pruned


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_trainer_without_an_adapter(tmp_path):
    trainer, _ = make_trainer(tmp_path, model=tiny.make("vit"))
    with pytest.raises(ValueError, match="needs a model with a PROVPT adapter"):
        trainer.train()


def test_nan_in_one_epoch_moves_nothing_and_goes_on(tmp_path):
    class Broken(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            loss = super().compute_loss(model, inputs, **kwargs)
            # At the relocation after the second epoch, which is measured in eval mode.
            broken = self.state.global_step == 12 and not model.training
            return loss * float("nan") if broken else loss

    trainer, callback = trained(tmp_path, config=every_epoch(), trainer_class=Broken)
    moved = [record.epoch for record in callback.history if record.prompt is not None]
    noted = [record for record in callback.history if record.note]
    assert moved == [1, 3]
    assert [record.epoch for record in noted] == [1, 2]
    assert noted[0].reward is None
    assert trainer.model.base_model.prompts().isfinite().all()


# ---- what is kept and logged ----------------------------------------------------------------------------------------


def test_state_and_history_are_json(tmp_path):
    _, callback = make_trainer(tmp_path)
    json.dumps(callback.state())
    _, callback = trained(tmp_path, config=every_epoch())
    assert len(callback.history) == 3
    assert json.loads(json.dumps(callback.state())) == callback.state()
    records = [asdict(record) for record in callback.history]
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_relocations_are_logged_through_the_trainer(tmp_path):
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append((state.global_step, dict(logs)))

    reporter = Reporter()
    trainer, callback = make_trainer(tmp_path, every_epoch())
    # Reporters come before callbacks.
    trainer.callback_handler.callbacks.insert(1, reporter)
    trainer.train()
    reported = [(step, logs) for step, logs in seen if any(key.startswith("relocation/") for key in logs)]
    assert [step for step, _ in reported] == [6, 12, 18, 24]
    first, second, third, last = (logs for _, logs in reported)
    assert first["relocation/from_block"] == callback.history[0].from_block
    assert first["relocation/to_block"] == callback.history[0].block
    assert first["relocation/idleness"] == callback.history[0].idleness
    assert "relocation/reward" not in first
    assert second["relocation/reward"] == callback.history[0].reward
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"):
        assert third[f"relocation/{name}"] == callback.history[1].policy[name]
    assert set(last) == {"relocation/reward", "epoch"}
    kept = [log for log in trainer.state.log_history if any(key.startswith("relocation/") for key in log)]
    assert kept == [{**logs, "step": step} for step, logs in reported]


@pytest.mark.parametrize("settings", [{}, dict(max_steps=14)])
def test_logs_of_the_trainer_stay_what_they_are(tmp_path, settings):
    def losses(**callback):
        trainer, _ = trained(tmp_path, logging_strategy="epoch", num_train_epochs=3, **settings, **callback)
        return [log["step"] for log in trainer.state.log_history if "loss" in log]

    assert losses(config=every_epoch()) == losses(callback=False) == [6, 12, settings.get("max_steps", 18)]


def test_a_run_that_stops_early_does_not_begin_another_report(tmp_path):
    trainer, callback = make_trainer(tmp_path, every_epoch(), report_to="tensorboard", callbacks=[StopAt(14)])
    trainer.train()
    (_,) = tmp_path.rglob("events.out.tfevents*")
    # The reward is learned and kept all the same.
    assert trainer.state.log_history[-1]["relocation/reward"] == callback.history[-1].reward
    assert trainer.state.log_history[-1]["step"] == 14


def test_a_training_without_steps(tmp_path):
    trainer, callback = make_trainer(tmp_path, every_epoch(relocate_every=2), num_train_epochs=0)
    trainer.train()
    assert callback.history == []


def test_tensorboard_gets_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(tmp_path, config=every_epoch(), report_to="tensorboard")
    (events,) = tmp_path.rglob("events.out.tfevents*")
    scalars = EventAccumulator(str(events)).Reload().Scalars("train/relocation/reward")
    assert [event.step for event in scalars] == [12, 18, 24]


def test_tensorboard_gets_the_distribution(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, callback = trained(tmp_path, config=every_epoch(), report_to="tensorboard")
    (events,) = tmp_path.rglob("events.out.tfevents*")
    (*_, last) = EventAccumulator(str(events)).Reload().Histograms("relocation/distribution")
    assert last.step == 24
    histogram = last.histogram_value
    edges, counts = list(histogram.bucket_limit), list(histogram.bucket)
    by_block = [sum(c for e, c in zip(edges, counts, strict=True) if b - 0.5 < e <= b + 0.5) for b in range(1, 5)]
    assert by_block == trainer.model.base_model.prompt_distribution()
    assert len(callback.history) == 3


def test_reporters_with_histograms_of_their_own():
    """As the packages of Weights & Biases 0.31 and Trackio 0.43 take them."""

    class Package:
        logged = []

        class Histogram:
            def __init__(self, np_histogram):
                self.np_histogram = np_histogram

        def log(self, values):
            self.logged.append(values)

    class WandbCallback:
        _wandb, _initialized = Package(), True

    class TrackioCallback:
        _trackio, _initialized = Package(), False

    report_distribution([WandbCallback(), TrackioCallback(), object()], [2, 0, 1], step=7)
    ((logged,),) = [WandbCallback._wandb.logged]
    assert logged["train/global_step"] == 7
    assert logged["relocation/distribution"].np_histogram == ([2, 0, 1], [0.5, 1.5, 2.5, 3.5])


def test_a_checkpoint_whose_prompts_were_not_loaded_is_refused(tmp_path):
    """As where a model around the adapter is saved under names that it does not load."""

    class Forgets(Trainer):
        def _load_from_checkpoint(self, *args, **kwargs):
            pass

    trained(tmp_path, config=moving(), save_strategy="epoch", num_train_epochs=2)
    checkpoint = str(tmp_path / f"checkpoint-{2 * STEPS_AN_EPOCH}")
    with pytest.raises(ValueError, match="must begin with the checkpoint's prompts, but they were not loaded"):
        trained(tmp_path, resume_from_checkpoint=checkpoint, config=moving(), trainer_class=Forgets)


class DetectorTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(pixel_values=inputs["pixel_values"])
        loss = output.logits.square().mean()
        return (loss, {"logits": output.logits}) if return_outputs else loss


def detector_trainer(folder, seed, keeps_names, **arguments):
    """A detector that transformers saves under names of earlier releases, with an adapter inside."""
    torch.manual_seed(seed)
    backbone = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        out_features=["stage1", "stage2"],
    )  # fmt: skip
    config = transformers.DeformableDetrConfig(
        backbone_config=backbone, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=5, num_feature_levels=2,
    )  # fmt: skip
    detector = transformers.DeformableDetrForObjectDetection(config)
    prompted = detector.model.backbone.model = tiny.prompted(detector.model.backbone.model, modules_to_save=None)
    if keeps_names:  # as docs/tasks.md says
        detector.save_pretrained = functools.partial(detector.save_pretrained, save_original_format=False)
    settings = dict(num_train_epochs=2, save_strategy="epoch", report_to="none", use_cpu=True, disable_tqdm=True)
    data = [{"pixel_values": image, "labels": 0} for image in tiny.images(2, size=32)]
    return prompted, DetectorTrainer(
        detector,
        TrainingArguments(str(folder), **settings | arguments),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[RelocationTrainerCallback(RelocationConfig())],
    )


@pytest.mark.parametrize("keeps_names", [False, True])
def test_a_detector_resumes_with_its_prompts_or_not_at_all(tmp_path, keeps_names):
    prompted, trainer = detector_trainer(tmp_path, 0, keeps_names)
    trainer.train()
    resumed, trainer = detector_trainer(tmp_path, 1, keeps_names)
    if keeps_names:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert torch.equal(resumed.base_model.prompts(), prompted.base_model.prompts())
    else:
        with pytest.raises(ValueError, match=r"they were not loaded.*save_original_format=False"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("keeps_names", [False, True])
def test_a_best_detector_without_its_prompts_is_said(tmp_path, caplog, keeps_names):
    settings = dict(load_best_model_at_end=True, eval_strategy="epoch", label_names=["labels"])
    detector_trainer(tmp_path, 0, keeps_names, **settings)[1].train()
    assert ("The best model's prompts were not loaded" in caplog.text) != keeps_names


def test_metrics_of_a_run_that_resumes_at_its_last_step(tmp_path):
    settings = dict(num_train_epochs=1, save_strategy="epoch", eval_strategy="epoch")
    trainer, _ = trained(tmp_path, **settings)
    metrics = trainer.model.peft_config["default"].training["metrics"]
    resumed, _ = trained(tmp_path, resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS_AN_EPOCH}"), **settings)
    assert resumed.model.peft_config["default"].training["metrics"] == metrics != {}


def test_a_score_of_one_s_own_cannot_be_restored_by_its_name(tmp_path):
    settings = dict(config=moving(), save_strategy="epoch")
    trained(tmp_path, **settings)
    checkpoint = str(tmp_path / f"checkpoint-{STEPS_AN_EPOCH}")
    with pytest.raises(ValueError, match=r"got 'every_prompt_idle'.*Leave `restore_callback_states_from"):
        trained(tmp_path, resume_from_checkpoint=checkpoint, restore_callback_states_from_checkpoint=True, **settings)
    trained(tmp_path, resume_from_checkpoint=checkpoint, **settings)


@pytest.mark.parametrize("name", ["default", "eyes"])
def test_the_last_model_in_place_of_the_best_is_said(tmp_path, caplog, name):
    model = tiny.prompted(tiny.make("vit"), adapter_name=name)
    settings = dict(load_best_model_at_end=True, save_strategy="epoch", eval_strategy="epoch", num_train_epochs=1)
    trained(tmp_path, model=model, **settings)
    assert ("at the end it keeps the last weights of 'eyes'" in caplog.text) == (name == "eyes")


def test_metrics_that_are_no_numbers_are_not_kept(tmp_path):
    def compute_metrics(prediction):
        return {"accuracy": 0.5, "accuracy_of_classes": [0.25, 0.75], "missing": None}

    trainer, _ = make_trainer(tmp_path, eval_strategy="epoch", num_train_epochs=1)
    trainer.compute_metrics = compute_metrics
    trainer.train()
    metrics = trainer.model.peft_config["default"].training["metrics"]
    assert metrics["eval_accuracy"] == 0.5
    assert set(metrics) == {"eval_accuracy", "eval_loss"}


def test_evaluation_does_not_touch_the_scores(tmp_path):
    # Without dropout: a data loader draws from the generator that dropout draws from.
    def run(**settings):
        trainer, callback = trained(tmp_path, config=every_epoch(), model=tiny.prompted(tiny.make("vit")), **settings)
        callback._saved["attributes"]["saved"]["metrics"] = {}
        return outcome(trainer, callback)

    assert_equal(run(eval_strategy="steps", eval_steps=2), run())


@pytest.mark.parametrize("max_grad_norm", [0.01, 0.0])
def test_clipping_does_not_matter_to_the_first_move(tmp_path, max_grad_norm):
    settings = dict(config=every_epoch(), num_train_epochs=2, learning_rate=0.0)
    _, plain = trained(tmp_path, **settings)
    _, clipped = trained(tmp_path, max_grad_norm=max_grad_norm, **settings)
    assert clipped.history == plain.history
    assert len(plain.history) == 1


# ---- what scores are measured on, and how often ---------------------------------------------------------------------


def test_scores_are_measured_on_the_first_training_images(tmp_path):
    seen = []

    class Recording(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            seen.append({name: value.clone() for name, value in inputs.items()})
            return super().training_step(model, inputs, *args, **kwargs)

    trainer, callback = make_trainer(
        tmp_path, moving(score_images=8, seed=5), trainer_class=Recording, num_train_epochs=2
    )
    trainer.train()
    with torch.no_grad():
        losses = [trainer.model.eval()(**batch).loss.item() for batch in seen[:2]]
    # The last reward is learned on the model as training leaves it.
    (move,) = callback.history
    assert move.loss_after == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert move.reward == pytest.approx(move.loss_before - move.loss_after - move.idleness, abs=1e-6)


@pytest.mark.parametrize(("step", "every", "restore"), [(8, "epoch", True), (8, 5, False), (10, 5, True)])
def test_resumed_run_with_measured_scores(tmp_path, step, every, restore):
    # Step 10 is the last one of a period of 5 steps: its relocation is due after the checkpoint.
    # By name: a score that is a function cannot be restored from a checkpoint.
    config = every_epoch(score_images=8, relocate_every=every, prompts_per_relocation=2, settle=0.1)
    settings = dict(
        config=config, save_strategy="steps", save_steps=2, restore_callback_states_from_checkpoint=restore
    )
    expected = outcome(*trained(tmp_path, **settings))
    assert len({record["epoch"] for record in expected[0]}) >= 3
    trainer, _ = trained(tmp_path, resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"), **settings)
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, RelocationTrainerCallback))
    assert_equal(outcome(trainer, callback), expected)


def test_relocations_every_so_many_steps_until_settling(tmp_path):
    watch = Watch()
    config = moving(score_images=8, relocate_every=5, settle=0.4, allocator="greedy")
    _, callback = trained(tmp_path, config=config, callbacks=[watch])
    # Steps 5 and 10 of 24; 15 and 20 are in the last 40 %.
    assert [record.epoch for record in callback.history] == [1, 2]
    steps = {step: blocks for event, step, blocks in watch.events if event == "on_step_begin"}
    changed = [step for step in range(1, 24) if steps[step] != steps[step - 1]]
    assert changed == [5 * record.epoch for record in callback.history if record.block != record.from_block]
    assert all(record.reward is not None for record in callback.history)


def test_columns_that_the_trainer_does_not_use(tmp_path):
    images = Images()
    columns = {"pixel_values": images.pixel_values.tolist(), "labels": images.labels.tolist()}
    with_more = datasets.Dataset.from_dict(columns | {"image": [PIL.Image.new("RGB", (4, 4))] * 24})
    with_more = with_more.cast_column("image", datasets.Image())
    histories = [
        trained(tmp_path, config=moving(score_images=6), train_dataset=given, num_train_epochs=2)[1].history
        for given in (images, with_more)
    ]
    assert histories[0] == histories[1] != []


# ---- other losses ---------------------------------------------------------------------------------------------------


class Targets(Images):
    """Images with targets of another kind than class numbers."""

    def __init__(self, targets, count=24):
        super().__init__(count)
        self.labels = targets(torch.randn(count, 3, generator=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize(
    ("problem_type", "targets", "loss"),
    [
        ("multi_label_classification", lambda x: (x > 0).float(), F.binary_cross_entropy_with_logits),
        ("regression", lambda x: x, F.mse_loss),
    ],
)
def test_heads_for_several_labels_and_for_numbers(tmp_path, problem_type, targets, loss):
    model = tiny.prompted(tiny.make("vit", problem_type=problem_type), prompt_dropout=0.0)
    trainer, callback = make_trainer(
        tmp_path, moving(score_images=8), model=model, train_dataset=Targets(targets), num_train_epochs=2,
        learning_rate=0.0,
    )  # fmt: skip
    trainer.add_callback(kept := ScoreBatches(callback))
    trainer.train()
    assert len(callback.history) == 1
    assert [len(batch["labels"]) for batch in kept.batches] == [4, 4]
    with torch.no_grad():
        losses = [loss(model.eval()(b["pixel_values"]).logits, b["labels"]).item() for b in kept.batches]
    assert callback.history[0].loss_after == pytest.approx(sum(losses) / 2, abs=1e-5)


def cubed(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits, labels) ** 3


def cubed_by_count(outputs, labels, num_items_in_batch=None):
    return (F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch) ** 3


class Cubed(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        return (cubed(outputs, labels), outputs) if return_outputs else cubed(outputs, labels)


@pytest.mark.parametrize("how", ["compute_loss_func", "by count", "subclass", "label smoothing"])
def test_scores_are_of_the_loss_that_is_trained(tmp_path, how):
    """At learning rate 0 the move's own loss is known: that of the model after it."""
    model = tiny.prompted(tiny.make("vit"), prompt_dropout=0.0)
    smoothing = 0.3 if how == "label smoothing" else 0.0
    trainer, callback = make_trainer(
        tmp_path, moving(score_images=8), model=model, trainer_class=Cubed if how == "subclass" else Trainer,
        compute_loss_func={"compute_loss_func": cubed, "by count": cubed_by_count}.get(how),
        num_train_epochs=2, learning_rate=0.0, label_smoothing_factor=smoothing,
    )  # fmt: skip
    trainer.add_callback(kept := ScoreBatches(callback))
    trainer.train()
    with torch.no_grad():
        plain = torch.stack(
            [
                F.cross_entropy(model.eval()(b["pixel_values"]).logits, b["labels"], label_smoothing=smoothing)
                for b in kept.batches
            ]
        )
    expected = plain if how == "label smoothing" else plain**3
    (record,) = callback.history
    assert record.loss_after == pytest.approx(expected.mean().item(), abs=1e-5)


def test_apple_s_generator_is_put_back(monkeypatch):
    """Without such a device: whatever `torch.manual_seed` does to its generator is undone."""
    states = ["trained"]
    monkeypatch.setattr("torch.mps.get_rng_state", lambda: states[-1])
    monkeypatch.setattr("torch.mps.set_rng_state", states.append)
    with fixed_randomness(torch.device("mps")):
        states.append("seeded")
    assert states == ["trained", "seeded", "trained"]


def test_only_generators_that_are_put_back_are_seeded(monkeypatch):
    seeded = []
    monkeypatch.setattr("torch.cuda.manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    with fixed_randomness(torch.device("cpu")):
        first = torch.rand(3)
    with fixed_randomness(torch.device("cpu")):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert seeded == []


def test_a_random_loss_is_the_same_each_time_and_leaves_the_generator_alone():
    model = tiny.prompted(tiny.make("vit")).eval()
    losses = []

    def noisy(model, batch):
        losses.append(model(**batch).loss + torch.randn(()))
        return losses[-1]

    batch = dict(pixel_values=tiny.images(), labels=tiny.labels())
    relocator = Relocator(model, RelocationConfig(idleness="exact"), score_batches=[batch], compute_loss=noisy)
    before = torch.get_rng_state()
    scores, _ = relocator.measure()
    assert torch.equal(torch.get_rng_state(), before)
    plain = Relocator(model, RelocationConfig(idleness="exact"), score_batches=[batch]).measure()[0]
    torch.testing.assert_close(scores.score, plain.score, atol=1e-5, rtol=0)
