"""Trains in each of the scenarios asked for and writes what came out, one JSON file a process.

Run by `test_processes.py` through `accelerate launch`, and in one process by importing `train`.
"""

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import accelerate
import tiny
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from packaging import version
from training import every_prompt_idle, idle_without_gradients, readable
from transformers import Trainer, TrainerCallback, TrainingArguments

from provpt_peft import ProVPTModel, RelocationTrainerCallback
from provpt_peft.relocation import first_batches
from provpt_peft.relocation.policies import Action, Policy


CHECKED = dict(check_moves=True, prompts_per_relocation=6, idleness=idle_without_gradients, seed=1)
SCENARIOS = {
    "learning": dict(adapter=dict(prompt_dropout=0.1)),
    # Nothing but the placement of prompts and the policy changes.
    "frozen": dict(arguments=dict(learning_rate=0.0)),
    "accumulated": dict(arguments=dict(learning_rate=0.0, gradient_accumulation_steps=2)),
    # The greedy policy tries a block that is empty.
    "empty_block": dict(adapter=dict(num_prompts=[6, 6, 0, 0]), relocation=dict(allocator="greedy")),
    # These two are to come out alike, and `sharded`. Some of their moves are undone.
    "plain": dict(arguments=dict(eval_strategy="epoch"), relocation=CHECKED),
    "checkpointed": dict(
        arguments=dict(
            eval_strategy="epoch",
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": True},
        ),
        relocation=CHECKED,
    ),
}
# The release that this was run with; the FSDP plugin of 1.7 asks for a GPU.
HAS_FSDP_2 = version.parse(accelerate.__version__) >= version.parse("1.15")
if not tiny.TORCH_2_6:  # it cannot restore an optimizer to the CPU of one of several processes
    # As `learning`, from a checkpoint of its first process in the middle of the second epoch.
    SCENARIOS["resumed"] = dict(adapter=dict(prompt_dropout=0.1), resume_from=4)
# Six images are a whole batch of the first process and a part of another.
MEASURED = dict(score_images=6, prompts_per_relocation=2)
SCENARIOS["measured"] = dict(relocation=MEASURED)
# As if each process augmented its images in its own way.
SCENARIOS["own_images"] = dict(relocation=dict(score_images=6), own_images=True)


class ChoosesByProcess(Policy):
    """As if processors rounded so differently that each process chose a block of its own."""

    def choose(self, state):
        return Action(1 + PartialState().process_index)


SCENARIOS["own_choices"] = dict(relocation=dict(allocator=ChoosesByProcess))
if HAS_FSDP_2:
    FSDP = dict(eval_strategy="epoch", fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["ViTLayer"]})
    SCENARIOS["sharded"] = dict(arguments=FSDP, relocation=CHECKED)
    SCENARIOS["sharded_measured"] = dict(arguments=FSDP, relocation=MEASURED)


class Images(torch.utils.data.Dataset):
    """Notes which images this process has asked for."""

    def __init__(self, count=24, brighter=0):
        self.pixel_values, self.labels = tiny.images(count, seed=3) + brighter, tiny.labels(count, seed=4)
        self.seen = []

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        self.seen.append(index)
        return {"pixel_values": self.pixel_values[index], "labels": self.labels[index]}


class Epochs(TrainerCallback):
    """Notes the images that scores are measured on, and the distribution with which each epoch was trained."""

    def __init__(self, callback, data):
        self.callback, self.data = callback, data
        self.distributions = []

    def on_train_begin(self, args, state, control, **kwargs):
        batches = self.callback.relocator.score_batches
        self.score_images = [batch["pixel_values"].flatten(1).sum(1).tolist() for batch in batches]
        self.seen_before = len(self.data.seen)

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        self.distributions.append(model.base_model.prompt_distribution())


def make(scenario, folder, batch_size, **arguments):
    """A trainer of four epochs of 24 images, its callback, and what notes what it did."""
    settings = SCENARIOS[scenario]
    model = tiny.prompted(tiny.make("vit"), **settings.get("adapter", {}))
    data = Images(brighter=PartialState().process_index if settings.get("own_images") else 0)
    # A prompt is moved for certain, and the scores are those of all images, unless the scenario says otherwise.
    relocation = dict(idleness=every_prompt_idle, check_moves=False, settle=0.0) | settings.get("relocation", {})
    callback = RelocationTrainerCallback(relocation)
    epochs = Epochs(callback, data)
    defaults = dict(num_train_epochs=4, learning_rate=1e-2, ddp_find_unused_parameters=False, save_strategy="no")
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=batch_size, report_to="none", disable_tqdm=True,
        seed=0, dataloader_pin_memory=False, use_cpu=True, **(defaults | settings.get("arguments", {}) | arguments),
    )  # fmt: skip
    with fsdp_on_cpu():
        trainer = Trainer(model, args, train_dataset=data, eval_dataset=Images(4), callbacks=[callback, epochs])
    return trainer, callback, data, epochs


def train(scenario, folder, batch_size):
    """Train in a scenario. The outcome is JSON-able."""
    step, checkpoint = SCENARIOS[scenario].get("resume_from"), None
    if step is not None:
        make(scenario, folder, batch_size, save_strategy="steps", save_steps=step)[0].train()
        checkpoint = str(folder / f"checkpoint-{step}")
        PartialState().wait_for_everyone()
    trainer, callback, data, epochs = make(scenario, folder, batch_size)
    trainer.train(resume_from_checkpoint=checkpoint)
    # The last evaluation leaves gathered copies.
    sharded = [module for module in trainer.model.modules() if hasattr(type(module), "reshard")]
    for module in sharded:
        module.reshard()
    trainer.save_model(str(folder / "adapter"))
    tuner = next(module for module in trainer.model.modules() if isinstance(module, ProVPTModel))
    prompts = tuner.prompts()
    moments = [prompts, *(m for m in trainer.optimizer.state[prompts].values() if m.shape == prompts.shape)]
    return {
        "world_size": trainer.args.world_size,
        "sharded_modules": len(sharded),
        "local_shape": list((prompts.to_local() if sharded else prompts).shape),
        "score_images": epochs.score_images,
        "seen_before": epochs.seen_before,
        "seen": data.seen[epochs.seen_before :],
        "history": [asdict(record) for record in callback.history],
        "prompt_blocks": tuner.prompt_blocks().tolist(),
        "prompts": [(m.full_tensor() if sharded else m).tolist() for m in moments],
        "state": readable(callback.state()),
        "distributions": epochs.distributions,
    }


@contextmanager
def fsdp_on_cpu():
    """accelerate heeds FSDP settings on accelerators only, and takes DDP on a CPU; PyTorch itself can shard there."""
    init = AcceleratorState.__init__

    def init_with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init_with_fsdp
    try:
        yield
    finally:
        AcceleratorState.__init__ = init


class UnreadableByTheFirst(Images):
    def __getitem__(self, index):
        if PartialState().is_main_process:
            raise OSError("no such disk")
        return super().__getitem__(index)


def failure_of_reading():
    """What each process is told where the first one cannot read the images for scores."""
    try:
        first_batches(torch.utils.data.DataLoader(UnreadableByTheFirst(), batch_size=4), 8)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main():
    folder, scenarios = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    for scenario in scenarios:
        outcome = train(scenario, folder / scenario, batch_size=4)
        (folder / f"{scenario}-{torch.distributed.get_rank()}.json").write_text(json.dumps(outcome))
    (folder / f"failure-{torch.distributed.get_rank()}.json").write_text(json.dumps(failure_of_reading()))
    # A process that ends while another one still receives may take that down.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
