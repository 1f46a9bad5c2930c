import gc
import importlib
import os
import sys
from pathlib import Path

import pytest
import torch


# Nothing in the suite may ask the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# One thread here and in the processes that tests start: `-n 2` fills two cores, and more threads wait for each other.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_finish():
    """Full garbage collections, which accelerate asks for often, need not look at the modules again."""
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """Nor at what a file's tests have imported, compiled and kept."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Runs a script of examples/ or a research script, in this process, and returns what it printed.

    Most of a short run in a process of its own is imports.
    """
    monkeypatch.chdir(Path(__file__).parent.parent)

    def run(script, *arguments):
        module = f"examples.{script.removesuffix('.py')}" if script.endswith(".py") else f"examples.research.{script}"
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        importlib.import_module(module).main()
        return capsys.readouterr().out

    return run
