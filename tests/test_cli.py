"""The command `provpt`."""

import re
import runpy
import subprocess
import sys

import pytest
import tiny
from PIL import Image
from training import make_trainer, moving

import provpt_cli
import provpt_peft


@pytest.fixture
def adapter(tmp_path):
    model = tiny.prompted(tiny.make("vit"), num_prompts=3, reserve=2, id2label={0: "daisy", 1: "rose", 2: "tulip"})
    model.base_model.move_prompt(0, 4)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_show(adapter, capsys):
    assert provpt_cli.main(["show", str(adapter)]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line[:12].strip(): line[13:].strip() for line in lines[:6]}
    assert found["labels"] == "3: daisy, rose, tulip"
    assert found["prompts"] == "12 in 4 blocks, 2 in none"
    # Prompts 14 * 32, head 32 * 3 + 3.
    assert found["parameters"] == "547 that were trained"
    assert found["relocations"] == "none recorded"
    bars = [line for line in lines if line.startswith("block")]
    assert [line.count("█") for line in bars] == [2, 3, 3, 4]
    assert [line.split()[-1] for line in bars] == ["2", "3", "3", "4"]


def test_bars_fit_the_terminal(tmp_path, capsys):
    tiny.prompted(tiny.make("vit"), num_prompts=[200, 100, 0, 50]).save_pretrained(tmp_path)
    provpt_cli.main(["show", str(tmp_path)])
    bars = [line for line in capsys.readouterr().out.splitlines() if line.startswith("block")]
    assert [line.count("█") for line in bars] == [40, 20, 0, 10]
    assert max(map(len, bars)) < 80


def test_after_training(tmp_path, capsys):
    trainer, callback = make_trainer(tmp_path, moving(score_images=8), eval_strategy="epoch")
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "adapter")
    assert provpt_cli.main(["show", str(tmp_path / "adapter")]) == 0
    shown = capsys.readouterr().out
    moved = sum(record.block != record.from_block for record in callback.history)
    assert f"{moved} moves in 4 epochs" in shown
    assert "eval_loss" in shown
    for kind in ("auto", "blocks", "time", "idleness"):
        picture = tmp_path / f"{kind}.png"
        assert provpt_cli.main(["plot", str(tmp_path / "adapter"), "-o", str(picture), "--kind", kind]) == 0
        with Image.open(picture) as image:
            assert image.width > 500
    assert (tmp_path / "auto.png").read_bytes() == (tmp_path / "time.png").read_bytes()
    # The card has the picture too.
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "![Prompts in each block](distribution.png)" in card
    assert f"{moved} moves in 4 epochs" in card
    assert '`"idleness": "every_prompt_idle", "check_moves": false, "settle": 0.0, "score_images": 8`' in card
    assert "| `loss` |" in card
    assert (tmp_path / "adapter" / "distribution.png").is_file()


def test_plot_without_history_draws_blocks(adapter, tmp_path, capsys):
    assert provpt_cli.main(["plot", str(adapter), "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"The picture is in {tmp_path / 'out.png'}.\n"
    assert (tmp_path / "out.png").is_file()
    assert provpt_cli.main(["plot", str(adapter), "-o", str(tmp_path / "out.png"), "--kind", "time"]) == 1
    assert "must have a history of relocations" in capsys.readouterr().err


def test_check(adapter, capsys, monkeypatch):
    assert provpt_cli.main(["check", str(adapter)]) == 0
    assert capsys.readouterr().out == f"{adapter}: nothing is wrong.\n"
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(sys, "argv", ["provpt", "check", str(adapter)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("provpt_cli", run_name="__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"provpt check: {path}: the file must be complete safetensors")


@pytest.mark.parametrize("command", ["show", "check", "plot"])
def test_where_there_is_no_adapter(tmp_path, capsys, command):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("checkpoint-6", "checkpoint-12"):
        tiny.prompted(tiny.make("vit")).save_pretrained(tmp_path / "runs" / name)
    for name, message in {
        "nowhere": "{}: an adapter is a folder, but nothing has this name. Check the path; ",
        "file": "{}: an adapter is a folder, got a file. Give the folder that `save_pretrained` wrote.",
        "empty": "{}/adapter_config.json: an adapter's folder must have this file, got none. Give the one",
        "runs": "{}/adapter_config.json: .* Give one of its sub-folders that have one: checkpoint-12, checkpoint-6.",
    }.items():
        options = ["-o", str(tmp_path / "out.png")] if command == "plot" else []
        assert provpt_cli.main([command, str(tmp_path / name), *options]) == 1
        shown = capsys.readouterr().err
        assert re.match(f"provpt {command}: " + message.format(re.escape(str(tmp_path / name))), shown), shown


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_what_needs_no_adapter_imports_no_package(option):
    code = (
        "import provpt_cli, sys\n"
        "try: provpt_cli.main(sys.argv[1:])\n"
        "finally: print({'provpt_peft', 'peft', 'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=True)
    *shown, imported = done.stdout.splitlines()
    assert imported == "set()"
    if option == "--version":
        assert shown == [f"provpt_peft {provpt_peft.__version__}"]


def test_the_command_is_installed_with_the_package():
    settings = (tiny.FOLDER.parent / "pyproject.toml").read_text()
    assert '\nprovpt = "provpt_cli:main"\n' in settings
    assert '\npy-modules = ["provpt_cli"]\n' in settings


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        provpt_cli.main(["--help"])
    assert stopped.value.code == 0
    assert "provpt plot ADAPTER" in capsys.readouterr().out


def test_a_reader_that_has_enough(adapter):
    command = [sys.executable, "-W", "ignore", "-m", "provpt_cli", "show", str(adapter)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)
    process.stderr.close()
