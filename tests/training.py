"""Training a tiny ViT with the Trainer: what the tests of the callback share."""

from dataclasses import asdict

import tiny
import torch
from transformers import Trainer, TrainingArguments

from provpt_peft import RelocationConfig, RelocationTrainerCallback


STEPS_AN_EPOCH = 6


class Images(torch.utils.data.Dataset):
    def __init__(self, count=24, seed=3):
        self.pixel_values, self.labels = tiny.images(count, seed), tiny.labels(count, seed + 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixel_values[index], "labels": self.labels[index]}


def make_trainer(folder, config=None, callback=True, callbacks=(), model=None, **arguments):
    model = tiny.prompted(tiny.make("vit"), prompt_dropout=0.1) if model is None else model
    relocation = (
        [RelocationTrainerCallback(config or RelocationConfig(idleness="gate", score_images=0, settle=0.0))]
        if callback
        else []
    )
    defaults = dict(
        output_dir=str(folder), num_train_epochs=4, per_device_train_batch_size=4, learning_rate=1e-2,
        save_strategy="no", report_to="none", disable_tqdm=True, seed=0, dataloader_pin_memory=False, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model,
        TrainingArguments(**(defaults | arguments)),
        train_dataset=Images(),
        eval_dataset=Images(8, seed=5),
        callbacks=[*relocation, *callbacks],
    )
    return trainer, relocation[0] if callback else None


def trained(folder, resume_from_checkpoint=None, **settings):
    trainer, callback = make_trainer(folder, **settings)
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    return trainer, callback


def outcome(trainer, callback):
    """All that a resumed run has to share with an uninterrupted one."""
    tensors = {
        name: tensor
        for name, tensor in trainer.model.state_dict().items()
        if "provpt" in name or "modules_to_save" in name
    }
    policy = callback.relocator.policy.ppo
    networks = {**policy.actor.state_dict(), **{f"critic.{k}": v for k, v in policy.critic.state_dict().items()}}
    return [asdict(record) for record in callback.history], {**tensors, **networks}


def assert_equal(resumed, expected):
    assert resumed[0] == expected[0]
    assert resumed[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        assert torch.equal(resumed[1][name], tensor), name
