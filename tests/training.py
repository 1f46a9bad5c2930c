"""Training a tiny ViT with the Trainer: what the tests of the callback share."""

from dataclasses import asdict

import tiny
import torch
from transformers import Trainer, TrainingArguments

from provpt_peft import RelocationConfig, RelocationTrainerCallback
from provpt_peft.relocation.idleness import Idleness
from provpt_peft.relocation.measure import fisher
from provpt_peft.relocation.serialization import from_json


STEPS_AN_EPOCH = 6


def every_prompt_idle(measurement):
    """A score that is above 0 for all prompts: a relocation always moves one."""
    idleness = fisher(measurement)
    return Idleness(idleness.score.abs() + 1e-3, idleness.stderr)


def idle_without_gradients(measurement):
    """The same scores, with a pass without gradients at the end."""
    idleness = every_prompt_idle(measurement)
    measurement.losses()
    return idleness


def no_prompt_idle(measurement):
    idleness = fisher(measurement)
    return Idleness(-idleness.score.abs() - 1e-3, idleness.stderr)


def every_epoch(**settings):
    """A score that finds idle prompts in a tiny model, no last part in which nothing moves, and no move undone."""
    return RelocationConfig(**(dict(idleness="fisher", check_moves=False, settle=0.0) | settings))


def moving(**settings):
    """Settings with which a prompt is given to a block before each epoch but the first, whatever the scores."""
    return RelocationConfig(**(dict(idleness=every_prompt_idle, check_moves=False, settle=0.0) | settings))


class Images(torch.utils.data.Dataset):
    def __init__(self, count=24, seed=3):
        self.pixel_values, self.labels = tiny.images(count, seed), tiny.labels(count, seed + 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixel_values[index], "labels": self.labels[index]}


def make_trainer(
    folder,
    config=None,
    callback=True,
    callbacks=(),
    model=None,
    trainer_class=Trainer,
    train_dataset=None,
    data_collator=None,
    compute_loss_func=None,
    **arguments,
):
    """A Trainer of four epochs, and its callback with the settings that users get."""
    model = tiny.prompted(tiny.make("vit"), prompt_dropout=0.1) if model is None else model
    relocation = [RelocationTrainerCallback(config or RelocationConfig())] if callback else []
    defaults = dict(
        output_dir=str(folder), num_train_epochs=4, per_device_train_batch_size=4, learning_rate=1e-2,
        save_strategy="no", report_to="none", disable_tqdm=True, seed=0, dataloader_pin_memory=False, use_cpu=True,
    )  # fmt: skip
    trainer = trainer_class(
        model,
        TrainingArguments(**(defaults | arguments)),
        train_dataset=Images() if train_dataset is None else train_dataset,
        eval_dataset=Images(8, seed=5),
        data_collator=data_collator,
        compute_loss_func=compute_loss_func,
        callbacks=[*relocation, *callbacks],
    )
    return trainer, relocation[0] if callback else None


def trained(folder, resume_from_checkpoint=None, **settings):
    trainer, callback = make_trainer(folder, **settings)
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    return trainer, callback


def decoded(state):
    """A relocator's state with numbers in place of text that stands for tensors. JSON-able."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {str(name): plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return plain(state | {"tensors": from_json(state["tensors"])})


def readable(state):
    """A callback's state with the relocator's decoded."""
    saved = state["attributes"]["saved"]
    return {**state, "attributes": saved | {"relocator": decoded(saved["relocator"])}}


def outcome(trainer, callback):
    """All that a resumed run has to share with an uninterrupted one: records, weights, policy and generator."""
    tensors = {
        name: tensor
        for name, tensor in trainer.model.state_dict().items()
        if "provpt" in name or "modules_to_save" in name
    }
    return [asdict(record) for record in callback.history], tensors, readable(callback.state())


def assert_equal(resumed, expected):
    assert resumed[0] == expected[0]
    assert resumed[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        assert torch.equal(resumed[1][name], tensor), name
    assert resumed[2] == expected[2]
