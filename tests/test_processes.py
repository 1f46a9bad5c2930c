"""Two processes on a CPU, started as users start them. One launch trains all scenarios, see `process_worker.py`."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import process_worker
import pytest
import tiny
import torch
from peft import PeftModel
from training import make_trainer
from transformers import Trainer

from provpt_peft import Relocator


TESTS = Path(__file__).parent


def launch(folder, *scenarios):
    """Outcomes by scenario, of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        # With `--cpu` accelerate starts one process whatever `--num_processes` says; the script asks for the CPU.
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
        "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={port}",
        "process_worker.py", str(folder), *scenarios,
    ]  # fmt: skip
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    settings = dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    run = subprocess.run(command, cwd=TESTS, env=os.environ | settings, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return {s: [json.loads((folder / f"{s}-{rank}.json").read_text()) for rank in (0, 1)] for s in scenarios}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def outcomes(folder):
    return launch(folder, *process_worker.SCENARIOS)


def assert_close(history, expected):
    for record, other in zip(history, expected, strict=True):
        record, other = dict(record), dict(other)
        assert record.pop("note") == other.pop("note")
        assert record.pop("block_idleness") == pytest.approx(other.pop("block_idleness"), rel=0, abs=1e-6)
        assert record.pop("policy") == pytest.approx(other.pop("policy"), rel=0, abs=1e-4)
        assert {name for name, value in record.items() if value is None} == {n for n, v in other.items() if v is None}
        for name, value in other.items():
            assert value is None or record[name] == pytest.approx(value, rel=0, abs=1e-6), name


@pytest.mark.parametrize("scenario", [s for s in process_worker.SCENARIOS if s != "resumed"])
def test_processes_agree(outcomes, scenario):
    first, second = outcomes[scenario]
    assert first["world_size"] == second["world_size"] == 2
    for name in ("history", "prompt_blocks", "prompts", "state", "distributions", "score_images"):
        assert first[name] == second[name], name
    assert sorted({record["epoch"] for record in first["history"]}) == [1, 2, 3]
    assert all((record["reward"] is None) == ("undone" in (record["note"] or "")) for record in first["history"])
    assert any(record["block"] != record["from_block"] for record in first["history"])
    # The first process has read the images that scores are measured on, for both; each has seen its half of an epoch.
    images = sum(map(len, first["score_images"]))
    assert images == process_worker.SCENARIOS[scenario].get("relocation", {}).get("score_images", 24)
    assert first["seen_before"] == {24: 24, 6: 8}[images]
    assert second["seen_before"] == 0
    for epoch in range(4):
        halves = [outcome["seen"][12 * epoch : 12 * epoch + 12] for outcome in (first, second)]
        assert sorted(halves[0] + halves[1]) == list(range(24))


@pytest.mark.parametrize("scenario", ["frozen", "accumulated"])
def test_two_processes_give_the_history_of_one(outcomes, tmp_path, scenario):
    one, (two, _) = process_worker.train(scenario, tmp_path, batch_size=8), outcomes[scenario]
    assert two["prompt_blocks"] == one["prompt_blocks"]
    assert_close(two["history"], one["history"])


@pytest.mark.skipif(
    tiny.TORCH_2_6, reason="PyTorch 2.6 cannot restore an optimizer to the CPU of one of several processes"
)
def test_a_resumed_run_equals_one_that_was_never_stopped(outcomes):
    """The checkpoint is inside the second epoch, and the first process wrote it."""
    for resumed, whole in zip(outcomes["resumed"], outcomes["learning"], strict=True):
        assert len(resumed["seen"]) < len(whole["seen"])
        assert resumed["prompt_blocks"] == whole["prompt_blocks"]
        assert resumed["score_images"] == whole["score_images"]
        assert_close(resumed["history"], whole["history"])


def test_a_failure_of_the_first_process_leaves_no_other_waiting(outcomes, folder):
    told = [json.loads((folder / f"failure-{rank}.json").read_text()) for rank in (0, 1)]
    other = "ValueError: The first process could not read the first training images: OSError: no such disk"
    assert told == ["OSError: no such disk", other]


def test_a_block_without_prompts(outcomes):
    distributions = outcomes["empty_block"][0]["distributions"]
    assert distributions[0] == [6, 6, 0, 0]
    assert max(distributions[1][2:]) == 1
    assert all(sum(distribution) == 12 for distribution in distributions)


def test_checkpointing_changes_nothing(outcomes):
    checkpointed, plain = outcomes["checkpointed"][0], outcomes["plain"][0]
    assert checkpointed["history"] == plain["history"]
    assert checkpointed["prompts"] == plain["prompts"]


# ---- sharded --------------------------------------------------------------------------------------------------------

needs_fsdp_2 = pytest.mark.skipif(not process_worker.HAS_FSDP_2, reason="this accelerate shards on a GPU only")


@needs_fsdp_2
def test_sharding_changes_nothing(outcomes):
    """FSDP 2, with an evaluation before each move. Prompts and both of Adam's moments."""
    sharded, plain = outcomes["sharded"][0], outcomes["plain"][0]
    # The four blocks and the model at least; accelerate shards further parts by themselves.
    assert sharded["sharded_modules"] >= 5
    assert plain["sharded_modules"] == 0
    assert (sharded["local_shape"], plain["local_shape"]) == ([6, 32], [12, 32])
    assert sharded["prompt_blocks"] == plain["prompt_blocks"]
    undone = [record["note"] is not None for record in sharded["history"]]
    assert any(undone)
    assert not all(undone)
    assert_close(sharded["history"], plain["history"])
    assert len(sharded["prompts"]) == len(plain["prompts"]) == 3
    for tensor, expected in zip(sharded["prompts"], plain["prompts"], strict=True):
        torch.testing.assert_close(torch.tensor(tensor), torch.tensor(expected), rtol=0, atol=1e-6)


@needs_fsdp_2
def test_a_sharded_adapter_is_saved_whole(outcomes, folder):
    model = PeftModel.from_pretrained(tiny.make("vit"), folder / "sharded" / "adapter")
    assert model.base_model.prompt_blocks().tolist() == outcomes["sharded"][0]["prompt_blocks"]
    assert model.base_model.prompts().tolist() == outcomes["sharded"][0]["prompts"][0]


# ---- what cannot work -----------------------------------------------------------------------------------------------


class Begins(Trainer):
    """Does what the Trainer does when training begins, and wraps nothing."""

    def begin(self):
        self.callback_handler.model = self.model
        self.callback_handler.on_train_begin(self.args, self.state, self.control)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "_n_gpu",
            2,
            "got `DataParallel`, which loses the scores .* `accelerate launch`, or set CUDA_VISIBLE_DEVICES",
        ),
        ("deepspeed_plugin", object(), "got `DeepSpeedEngine`, .* Use `DistributedDataParallel` or FSDP version 2"),
    ],
)
def test_what_the_trainer_must_not_wrap_the_model_in(tmp_path, setting, value, message):
    trainer, _ = make_trainer(tmp_path, trainer_class=Begins)
    assert trainer.args.n_gpu <= 1
    setattr(trainer.args, setting, value)
    with pytest.raises(ValueError, match=message):
        trainer.begin()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("DataParallel", "`accelerate launch`"),
        ("FullyShardedDataParallel", r"`fully_shard`"),
        ("DeepSpeedEngine", r"`fully_shard`"),
    ],
)
def test_wrappers_that_are_refused(name, instead):
    wrapper = type(name, (torch.nn.Module,), {})()
    wrapper.module = tiny.prompted(tiny.make("vit"))
    with pytest.raises(ValueError, match=f"got `{name}`, which .*{instead}"):
        Relocator(wrapper, score_batches=[dict(pixel_values=tiny.images(), labels=tiny.labels())])
