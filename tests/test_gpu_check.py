"""The script for whoever has a GPU, run to its end on a CPU."""

import sys

import pytest
import tiny

from examples.research import gpu_check


def rows(monkeypatch, capsys, *only):
    """The exit status, and the rows of the table but for its head."""
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--shape", "tiny", "--only", *only])
    with pytest.raises(SystemExit) as exit:
        gpu_check.main()
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    return exit.value.code, [
        dict(zip(gpu_check.Row._fields, line.strip("| ").split(" | "), strict=False)) for line in table[2:]
    ]


def test_it_runs_to_its_end_on_a_cpu(monkeypatch, capsys):
    status, found = rows(monkeypatch, capsys, "parity", "scores", "cost")
    settings = [f"{dtype}, {attention}" for dtype in ("fp32", "bf16", "fp16") for attention in ("eager", "sdpa")]
    assert [row["setting"] for row in found if row["check"] == "parity, gradients"] == settings
    assert [row["verdict"] for row in found if row["check"] != "cost"] == ["holds"] * 16
    assert status == 0


@pytest.mark.slow
@tiny.needs_compile
def test_compiled_on_a_cpu(monkeypatch, capsys):
    status, (row,) = rows(monkeypatch, capsys, "compiled")
    # One graph, and one for a block without prompts.
    assert (row["setting"], row["verdict"], status) == ("aot_eager, 3 moves, 2 graphs", "holds", 0)


@pytest.mark.slow
def test_several_devices_on_a_cpu(monkeypatch, capsys):
    status, found = rows(monkeypatch, capsys, "devices")
    assert [(row["setting"], row["verdict"]) for row in found] == [
        ("DDP, 2 processes", "holds"), ("FSDP 2, 2 processes", "holds"),
    ]  # fmt: skip
    assert status == 0


@pytest.mark.slow
def test_cost_on_a_cpu():
    found = [*gpu_check.check_cost("vit-small", "cpu", batch_size=1, rounds=1)]
    assert [(row.check, row.verdict) for row in found] == 2 * [
        *[("cost, step", "measured")] * 2, *[("cost, peak memory", "measured")] * 2,
    ]  # fmt: skip
    assert all(0.1 < float(row.figure) < 10 for row in found)


def test_it_finds_a_wrong_function(monkeypatch, capsys):
    right = gpu_check.prompted

    def wrong(base, shape):
        model = right(base, shape)
        model.base_model.move_prompt(0, 4)
        return model

    # What is checked has a prompt in another block than what it is checked against.
    made = iter([right, *[wrong] * 6])
    monkeypatch.setattr(gpu_check, "prompted", lambda base, shape: next(made)(base, shape))
    status, found = rows(monkeypatch, capsys, "parity")
    assert [row["verdict"] for row in found if row["setting"].startswith("fp32")] == ["fails"] * 4
    assert status == 1
