"""A run that is killed at any moment and resumed equals one that was never stopped, bit for bit."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import kill_worker
import pytest
from training import assert_equal, every_epoch, outcome, trained
from transformers import TrainerState
from transformers.trainer_utils import get_last_checkpoint


WORKER = Path(kill_worker.__file__)
# Seconds that the worker sleeps in each step and after each of three files of a checkpoint.
PAUSE = 0.05

# A run has 24 optimizer steps, or 12 with accumulation; an epoch has 6, or 3.
EVERY_2_STEPS = dict(save_strategy="steps", save_steps=2)
EVERY_3_STEPS = dict(save_strategy="steps", save_steps=3)
ACCUMULATED = dict(save_strategy="steps", save_steps=2, gradient_accumulation_steps=2)


def slept(settings):
    """Seconds that the worker sleeps in a whole run, so a lower bound of its duration."""
    steps = 24 // settings.get("gradient_accumulation_steps", 1)
    return PAUSE * (steps + 3 * steps // settings["save_steps"])


def start(folder, settings):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(WORKER), str(folder), json.dumps(settings), str(PAUSE)]
    with open(folder / "errors.txt", "w") as errors:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)


def kill_after(folder, settings, delay):
    """Kill a run some seconds after it began to write a checkpoint for the first time.

    Returns:
        Whether it left a half-written checkpoint behind.
    """
    with start(folder, settings) as worker:
        announced = next((line for line in worker.stdout if line == "saving\n"), None)
        time.sleep(delay)
        worker.send_signal(signal.SIGKILL)
    assert announced is not None, (folder / "errors.txt").read_text()
    assert worker.returncode == -signal.SIGKILL
    return get_last_checkpoint(folder) != kill_worker.newest_complete_checkpoint(folder)


def check(folder, settings, kills, seed):
    """Kill a run `kills` times, end it in this process, and hold it against one that was never stopped."""
    expected = outcome(*trained(folder / "expected", config=every_epoch(), **settings))
    assert len(expected[0]) == 3
    chance = random.Random(seed)
    # Each resumed run gets at least to its first checkpoint, and together they do not get to the end.
    longest = slept(settings) * (1 / kills - 0.14)
    half_written = [kill_after(folder / "killed", settings, chance.uniform(0.0, longest)) for _ in range(kills)]
    print(f"killed {kills} times, {sum(half_written)} of them while a checkpoint was written")
    assert_equal(kill_worker.resume(folder / "killed", settings), expected)


def test_killed_run_resumes_exactly(tmp_path):
    check(tmp_path, EVERY_3_STEPS, kills=1, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "kills", "seed"),
    [
        (EVERY_3_STEPS, 1, 1),
        (EVERY_3_STEPS, 3, 2),
        (EVERY_2_STEPS, 2, 3),
        (ACCUMULATED, 1, 4),
        (ACCUMULATED, 3, 5),
    ],
)
def test_killed_runs_resume_exactly(tmp_path, settings, kills, seed):
    check(tmp_path, settings, kills, seed)


# ---- a checkpoint that was being written ----------------------------------------------------------------------------


# In the order in which the Trainer writes them.
FILES = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, outcome(*trained(folder, config=every_epoch(), **EVERY_3_STEPS))


def test_trainer_state_is_written_last(tmp_path, monkeypatch):
    before = []
    save = TrainerState.save_to_json

    def watched(self, path):
        before.append({file.name for file in Path(path).parent.iterdir()})
        save(self, path)

    monkeypatch.setattr(TrainerState, "save_to_json", watched)
    trained(tmp_path, num_train_epochs=1, save_strategy="epoch")
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert [{*names, "trainer_state.json"} for names in before] == [{file.name for file in checkpoint.iterdir()}]
    assert "trainer_state.json" not in before[0]
    assert before[0] > set(FILES[:-1])


@pytest.mark.parametrize("written", [FILES[0], FILES[3], FILES[4]])
def test_half_written_checkpoint_is_passed_over(tmp_path, uninterrupted, written):
    """The file that was being written is cut in half, and those that would have come later are not there."""
    folder, expected = uninterrupted
    for step in (9, 12):
        shutil.copytree(folder / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    newest = tmp_path / "checkpoint-12"
    content = (newest / written).read_bytes()
    (newest / written).write_bytes(content[: len(content) // 2])
    for later in FILES[FILES.index(written) + 1 :]:
        (newest / later).unlink()
    assert get_last_checkpoint(tmp_path) == str(newest)
    assert kill_worker.newest_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
    assert_equal(kill_worker.resume(tmp_path, EVERY_3_STEPS), expected)


def test_without_a_complete_checkpoint_it_starts_afresh(tmp_path, uninterrupted):
    folder, expected = uninterrupted
    shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    assert kill_worker.newest_complete_checkpoint(tmp_path) is None
    assert_equal(kill_worker.resume(tmp_path, EVERY_3_STEPS), expected)


def test_trainer_refuses_a_checkpoint_without_its_state(tmp_path, uninterrupted):
    folder, _ = uninterrupted
    shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"trainer_state\.json"):
        trained(tmp_path, resume_from_checkpoint=True, **EVERY_3_STEPS)
