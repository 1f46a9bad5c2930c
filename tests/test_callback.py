"""A real Trainer on a tiny ViT: when relocations happen, what a resumed run does, what is logged."""

import json
import math
from dataclasses import asdict

import datasets
import PIL.Image
import pytest
import tiny
import torch
from torch.nn import functional as F
from training import STEPS_AN_EPOCH, Images, assert_equal, make_trainer, outcome, trained
from transformers import Trainer, TrainerCallback, TrainingArguments

from provpt_peft import RelocationConfig, RelocationTrainerCallback, Relocator
from provpt_peft.modes import fixed_randomness
from provpt_peft.reporting import report_distribution


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
    trainer, callback = trained(tmp_path, callbacks=[watch], eval_strategy="epoch", save_strategy="epoch")
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
    assert len(expected) >= 2
    # What is evaluated and saved has been trained where it stands.
    for event in ("on_evaluate", "on_save"):
        assert list(blocks[event]) == [6, 12, 18, 24]
        for step, distribution in blocks[event].items():
            assert distribution == steps[step - 1]


def test_the_last_reward_is_learned_without_a_further_move(tmp_path):
    trainer, callback = trained(tmp_path)
    assert all(record.reward is not None for record in callback.history)
    blocks = tiny.prompted(tiny.make("vit")).base_model.prompt_blocks()
    for record in callback.history:
        blocks[record.prompt] = record.block
    assert torch.equal(trainer.model.base_model.prompt_blocks(), blocks)


def test_loss_is_the_trainer_s_exact_mean(tmp_path):
    losses = []

    class Recording(Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    model = tiny.prompted(tiny.make("vit"))
    callback = RelocationTrainerCallback(RelocationConfig(idleness="gate", score_images=0, settle=0.0))
    args = TrainingArguments(
        str(tmp_path), num_train_epochs=3, per_device_train_batch_size=4, logging_steps=4, report_to="none",
        disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, use_cpu=True,
    )  # fmt: skip
    Recording(model, args, train_dataset=Images(), callbacks=[callback]).train()
    means = [sum(losses[i : i + 6]) / 6 for i in (0, 6, 12)]
    for record, before, after in zip(callback.history, means[:-1], means[1:], strict=True):
        assert record.loss_before == pytest.approx(before, rel=1e-6)
        assert record.loss_after == pytest.approx(after, rel=1e-6)
        assert record.reward == pytest.approx(before - after - record.idleness, abs=1e-6)


def test_relocation_leaves_dropout_and_shuffling_as_they_were(tmp_path):
    """With a score that never stands out nothing moves, and training is what it is without the callback."""
    never = RelocationConfig(significance=1e9)
    with_callback, callback = trained(tmp_path, config=never)
    without, _ = trained(tmp_path, callback=False)
    assert callback.history == []
    assert torch.equal(with_callback.model.base_model.prompts(), without.model.base_model.prompts())


# ---- resume ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("step", [4, 8, 12, 20])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, step, restore):
    # Steps 4, 8 and 20 are inside an epoch; 12 ends one.
    settings = dict(save_strategy="steps", save_steps=4, restore_callback_states_from_checkpoint=restore)
    expected = outcome(*trained(tmp_path, **settings))
    trainer, _ = trained(tmp_path, resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"), **settings)
    # With `restore_callback_states_from_checkpoint` the Trainer makes an instance of its own.
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, RelocationTrainerCallback))
    assert_equal(outcome(trainer, callback), expected)


def test_resume_with_gradient_accumulation(tmp_path):
    settings = dict(save_strategy="steps", save_steps=2, gradient_accumulation_steps=2)
    expected = outcome(*trained(tmp_path, **settings))
    resumed = trained(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-4"), **settings)
    assert_equal(outcome(*resumed), expected)


def test_resume_from_a_best_checkpoint_inside_an_epoch(tmp_path):
    # The Trainer decides to save after it has evaluated and logged.
    settings = dict(
        save_strategy="best", metric_for_best_model="loss", greater_is_better=True, eval_strategy="steps", eval_steps=4
    )
    expected = outcome(*trained(tmp_path, model=tiny.prompted(tiny.make("vit")), **settings))
    checkpoint = tmp_path / "checkpoint-4"
    resumed = trained(
        tmp_path, resume_from_checkpoint=str(checkpoint), model=tiny.prompted(tiny.make("vit")), **settings
    )
    assert_equal(outcome(*resumed), expected)


def test_checkpoint_without_the_callback_starts_afresh_and_says_so(tmp_path, caplog):
    trained(tmp_path, callback=False, save_strategy="steps", save_steps=6)
    _, callback = trained(
        tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-6"), save_strategy="steps", save_steps=6
    )
    assert "written without RelocationTrainerCallback, so relocation starts afresh at step 6" in caplog.text
    assert [record.epoch for record in callback.history] == [1, 2]


def test_best_model_is_loaded_with_its_distribution(tmp_path):
    class WorseAndWorse(Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            metrics["eval_loss"] = float(self.state.global_step)
            return metrics

    watch = Watch()
    model = tiny.prompted(tiny.make("vit"))
    callback = RelocationTrainerCallback(RelocationConfig(settle=0.0, trigger="always"))
    args = TrainingArguments(
        str(tmp_path), num_train_epochs=4, per_device_train_batch_size=4, learning_rate=1e-2, eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="loss", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False, use_cpu=True,
    )  # fmt: skip
    trainer = WorseAndWorse(
        model, args, train_dataset=Images(), eval_dataset=Images(8, 5), callbacks=[callback, watch]
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-6")
    assert any(record.block != record.from_block for record in callback.history)
    assert model.base_model.prompt_distribution() == [3, 3, 3, 3]


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
    assert callback.relocator.epoch == 2


def test_training_again_starts_afresh(tmp_path):
    trainer, callback = trained(tmp_path, num_train_epochs=2)
    first = callback.history
    trainer.train()
    assert callback.history is not first
    assert [record.epoch for record in callback.history] == [1]


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_trainer_without_an_adapter(tmp_path):
    trainer, _ = make_trainer(tmp_path, model=tiny.make("vit"))
    with pytest.raises(ValueError, match="needs a model with a PROVPT adapter"):
        trainer.train()


def test_nan_in_one_epoch_moves_nothing_and_goes_on(tmp_path):
    class Broken(Images):
        calls = 0

        def __getitem__(self, index):
            item = super().__getitem__(index)
            Broken.calls += 1
            # The second epoch's batches; the prompts' own gradients are kept out of it below.
            if 24 < Broken.calls <= 48:
                item["pixel_values"] = item["pixel_values"] * math.nan
            return item

    class SkipsBadSteps(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for parameter in model.parameters():
                if parameter.grad is not None and not parameter.grad.isfinite().all():
                    parameter.grad = None

    trainer, callback = make_trainer(tmp_path, callbacks=[SkipsBadSteps()])
    trainer.train_dataset = Broken()
    trainer.train()
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
    _, callback = trained(tmp_path)
    assert json.loads(json.dumps(callback.state())) == callback.state()
    records = [asdict(record) for record in callback.history]
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_relocations_are_logged_through_the_trainer(tmp_path):
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append((state.global_step, dict(logs)))

    reporter = Reporter()
    trainer, callback = make_trainer(tmp_path)
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


def test_tensorboard_gets_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(tmp_path, report_to="tensorboard")
    (events,) = tmp_path.rglob("events.out.tfevents*")
    scalars = EventAccumulator(str(events)).Reload().Scalars("train/relocation/reward")
    assert [event.step for event in scalars] == [12, 18, 24]


def test_tensorboard_gets_the_distribution(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, callback = trained(tmp_path, report_to="tensorboard")
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
        return outcome(*trained(tmp_path, model=tiny.prompted(tiny.make("vit")), **settings))

    assert_equal(run(eval_strategy="steps", eval_steps=2), run())


@pytest.mark.parametrize("max_grad_norm", [0.01, 0.0])
def test_clipping_does_not_matter_to_the_first_move(tmp_path, max_grad_norm):
    _, plain = trained(tmp_path, num_train_epochs=2, learning_rate=0.0)
    _, clipped = trained(tmp_path, num_train_epochs=2, learning_rate=0.0, max_grad_norm=max_grad_norm)
    assert clipped.history == plain.history
    assert len(plain.history) == 1


# ---- what scores are measured on, and how often ---------------------------------------------------------------------

ALWAYS = dict(trigger="always", score_images=8)


def test_scores_are_measured_on_the_training_images_that_the_seed_chooses(tmp_path):
    trainer, callback = make_trainer(
        tmp_path, config=RelocationConfig(**ALWAYS, settle=0.0, seed=5), num_train_epochs=2
    )
    trainer.train()
    chosen = torch.randperm(24, generator=torch.Generator().manual_seed(5))[:8]
    images = Images()
    batch = {"pixel_values": images.pixel_values[chosen], "labels": images.labels[chosen]}
    with torch.no_grad():
        loss = trainer.model.eval()(**batch).loss.item()
    # The last reward is learned on the model as training leaves it.
    (move,) = callback.history
    assert move.loss_after == pytest.approx(loss, rel=1e-5)
    assert move.reward == pytest.approx(move.loss_before - loss - move.idleness, abs=1e-6)


def test_measuring_leaves_dropout_and_shuffling_as_they_were(tmp_path):
    with_callback, callback = trained(tmp_path, config=RelocationConfig(significance=1e9, score_images=8))
    without, _ = trained(tmp_path, callback=False)
    assert callback.history == []
    assert torch.equal(with_callback.model.base_model.prompts(), without.model.base_model.prompts())


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("every", ["epoch", 5])
@pytest.mark.parametrize("step", [8, 10])
def test_resumed_run_with_measured_scores(tmp_path, step, every, restore):
    # Step 10 is the last one of a period of 5 steps: its relocation is due after the checkpoint.
    config = RelocationConfig(**ALWAYS, relocate_every=every, prompts_per_relocation=2, screen=2, settle=0.1)
    settings = dict(
        config=config, save_strategy="steps", save_steps=2, restore_callback_states_from_checkpoint=restore
    )
    expected = outcome(*trained(tmp_path, **settings))
    trainer, _ = trained(tmp_path, resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"), **settings)
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, RelocationTrainerCallback))
    assert_equal(outcome(trainer, callback), expected)


def test_relocations_every_so_many_steps_until_settling(tmp_path):
    watch = Watch()
    config = RelocationConfig(**ALWAYS, relocate_every=5, settle=0.4, allocator="greedy", start="own")
    _, callback = trained(tmp_path, config=config, callbacks=[watch])
    # Steps 5 and 10 of 24; 15 and 20 are in the last 40 %.
    assert [record.epoch for record in callback.history] == [1, 2]
    steps = {step: blocks for event, step, blocks in watch.events if event == "on_step_begin"}
    changed = [step for step in range(1, 24) if steps[step] != steps[step - 1]]
    assert changed == [5 * record.epoch for record in callback.history if record.block != record.from_block]
    assert all(record.reward is not None for record in callback.history)


def test_a_score_dataset_is_used_in_place_of_training_images(tmp_path):
    held_out = Images(6, seed=9)
    trainer, _ = make_trainer(tmp_path, callback=False, num_train_epochs=2)
    callback = RelocationTrainerCallback(
        RelocationConfig(idleness="exact", trigger="always", settle=0.0), score_dataset=held_out
    )
    trainer.add_callback(callback)
    trainer.train()
    with torch.no_grad():
        loss = trainer.model.eval()(pixel_values=held_out.pixel_values, labels=held_out.labels).loss.item()
    assert callback.history[0].loss_after == pytest.approx(loss, rel=1e-5)


def test_a_score_dataset_loses_the_columns_that_the_trainer_does_not_use(tmp_path):
    images = Images(6, seed=9)
    columns = {"pixel_values": images.pixel_values.tolist(), "labels": images.labels.tolist()}
    score_dataset = datasets.Dataset.from_dict(columns | {"image": [PIL.Image.new("RGB", (4, 4))] * 6})
    score_dataset = score_dataset.cast_column("image", datasets.Image())
    config = RelocationConfig(trigger="always", settle=0.0)
    histories = []
    for given in (images, score_dataset):
        trainer, _ = make_trainer(tmp_path, callback=False, num_train_epochs=2)
        callback = RelocationTrainerCallback(config, score_dataset=given)
        trainer.add_callback(callback)
        trainer.train()
        histories.append(callback.history)
    assert histories[0] == histories[1] != []


def test_a_score_dataset_cannot_be_restored_and_the_error_says_so(tmp_path):
    settings = dict(callback=False, save_strategy="steps", save_steps=6, restore_callback_states_from_checkpoint=True)

    def make():
        trainer, _ = make_trainer(tmp_path, **settings)
        trainer.add_callback(RelocationTrainerCallback(RelocationConfig(), score_dataset=Images(6, seed=9)))
        return trainer

    make().train()
    with pytest.raises(ValueError, match="which a checkpoint cannot hold"):
        make().train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


@pytest.mark.parametrize("with_length", [False, True])
def test_training_images_that_are_a_stream(tmp_path, with_length):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return (Images()[k] for k in range(24))

    if with_length:
        Stream.__len__ = lambda self: 24
    trainer, _ = make_trainer(tmp_path, config=RelocationConfig(), max_steps=6)
    trainer.train_dataset = Stream()
    with pytest.raises(ValueError, match="Pass a `score_dataset` to the callback, or set `score_images=0`"):
        trainer.train()


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
    config = RelocationConfig(trigger="always", score_images=8, settle=0.0)
    trainer, callback = make_trainer(tmp_path, config, model=model, num_train_epochs=2, learning_rate=0.0)
    trainer.train_dataset = Targets(targets)
    trainer.train()
    assert len(callback.history) == 1
    chosen = config.choose_score_images(24)
    with torch.no_grad():
        data = trainer.train_dataset
        expected = loss(model.eval()(pixel_values=data.pixel_values[chosen]).logits, data.labels[chosen])
    assert callback.history[0].loss_after == pytest.approx(expected.item(), abs=1e-5)


def cubed(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits, labels) ** 3


def cubed_by_count(outputs, labels, num_items_in_batch=None):
    return (F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch) ** 3


class Cubed(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        return (cubed(outputs, labels), outputs) if return_outputs else cubed(outputs, labels)


@pytest.mark.parametrize("how", ["compute_loss_func", "by count", "subclass", "label smoothing", "given"])
def test_scores_are_of_the_loss_that_is_trained(tmp_path, how):
    """At learning rate 0 the move's own loss is known: that of the model after it."""
    model = tiny.prompted(tiny.make("vit"), prompt_dropout=0.0)
    config = RelocationConfig(trigger="always", score_images=8, settle=0.0)
    given = (lambda model, batch: cubed(model(batch["pixel_values"]), batch["labels"])) if "given" in how else None
    callback = RelocationTrainerCallback(config, compute_loss=given)
    smoothing = 0.3 if how == "label smoothing" else 0.0
    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.0, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
        label_smoothing_factor=smoothing,
    )  # fmt: skip
    trainer = (Cubed if how == "subclass" else Trainer)(
        model, arguments, train_dataset=Images(), callbacks=[callback],
        compute_loss_func={"compute_loss_func": cubed, "by count": cubed_by_count}.get(how),
    )  # fmt: skip
    trainer.train()
    data, chosen = Images(), config.choose_score_images(24)
    with torch.no_grad():
        output = model.eval()(pixel_values=data.pixel_values[chosen])
        labels = data.labels[chosen]
        plain = F.cross_entropy(output.logits, labels, label_smoothing=smoothing)
    expected = plain if how == "label smoothing" else plain**3
    (record,) = callback.history
    assert record.loss_after == pytest.approx(expected.item(), abs=1e-5)


def test_apple_s_generator_is_put_back(monkeypatch):
    """Without such a device: whatever `torch.manual_seed` does to its generator is undone."""
    states = ["trained"]
    monkeypatch.setattr("torch.mps.get_rng_state", lambda: states[-1])
    monkeypatch.setattr("torch.mps.set_rng_state", states.append)
    with fixed_randomness(torch.device("mps")):
        states.append("seeded")
    assert states == ["trained", "seeded", "trained"]


def test_a_random_loss_is_the_same_each_time_and_leaves_the_generator_alone():
    model = tiny.prompted(tiny.make("vit")).eval()
    losses = []

    def noisy(model, batch):
        losses.append(model(**batch).loss + torch.randn(()))
        return losses[-1]

    batch = dict(pixel_values=tiny.images(), labels=tiny.labels())
    relocator = Relocator(model, RelocationConfig(idleness="exact"), score_batches=[batch], compute_loss=noisy)
    before = torch.get_rng_state()
    scores, _ = relocator.measure([batch])
    assert torch.equal(torch.get_rng_state(), before)
    plain = Relocator(model, RelocationConfig(idleness="exact"), score_batches=[batch]).measure([batch])[0]
    torch.testing.assert_close(scores.score, plain.score, atol=1e-5, rtol=0)
