"""The process that test_kill_and_resume.py kills: trains a tiny model, resuming from what is in the folder.

Usage: python kill_worker.py FOLDER SETTINGS PAUSE, where SETTINGS are the Trainer's as JSON and PAUSE is in seconds.
It sleeps for PAUSE in each step and after each file of a checkpoint, and prints `saving` when it begins to write one.
"""

import json
import sys
import time
from pathlib import Path

import torch
from training import every_epoch, outcome, trained
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME


def newest_complete_checkpoint(folder):
    """The newest checkpoint whose `trainer_state.json` can be read, or None.

    `get_last_checkpoint` of transformers goes by the folder's name, so it also finds one that was being written when
    the process was killed. The Trainer writes `trainer_state.json` last, and not in one stroke.
    """
    checkpoints = sorted(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    for checkpoint in reversed(checkpoints):
        try:
            json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        return str(checkpoint)
    return None


def resume(folder, settings, callbacks=()):
    """Train to the end from the newest complete checkpoint in the folder, and return what has to be equal."""
    checkpoint = newest_complete_checkpoint(folder)
    trainer_and_callback = trained(
        folder, resume_from_checkpoint=checkpoint, config=every_epoch(), callbacks=callbacks, **settings
    )
    return outcome(*trainer_and_callback)


class Slow(TrainerCallback):
    def __init__(self, pause):
        self.pause = pause

    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(self.pause)


def slow_down_saving(pause):
    """Make the Trainer announce a checkpoint and sleep after each of its files but the last."""

    def slowed(original, announce):
        def save(*args, **kwargs):
            if announce:
                print("saving", flush=True)
            original(*args, **kwargs)
            time.sleep(pause)

        return save

    Trainer.save_model = slowed(Trainer.save_model, announce=True)
    Trainer._save_optimizer_and_scheduler = slowed(Trainer._save_optimizer_and_scheduler, announce=False)
    Trainer._save_rng_state = slowed(Trainer._save_rng_state, announce=False)


def main():
    folder, settings, pause = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
    # As in conftest.py: the order of sums, so the last bit, may depend on the number of threads.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    slow_down_saving(pause)
    resume(folder, settings, callbacks=[Slow(pause)])


if __name__ == "__main__":
    main()
