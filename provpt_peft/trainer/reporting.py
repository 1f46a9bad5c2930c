"""The distribution of prompts over blocks, for the Trainer's reporters that draw histograms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


NAME = "relocation/distribution"

# Reporters that take histograms as counts and edges, and the attribute with their package.
_PACKAGES = {"WandbCallback": "_wandb", "TrackioCallback": "_trackio"}


def report_distribution(reporters: Iterable[Any], counts: Sequence[int], step: int) -> None:
    """Send TensorBoard, Weights & Biases and Trackio a histogram of the prompts in each of the L blocks at a step.
    The Trainer's other callbacks are ignored."""
    edges = [block + 0.5 for block in range(len(counts) + 1)]
    for reporter in reporters:
        name = type(reporter).__name__
        if name == "TensorBoardCallback" and reporter.tb_writer is not None:
            blocks = torch.repeat_interleave(torch.arange(1, len(counts) + 1), torch.tensor(counts))
            reporter.tb_writer.add_histogram(NAME, blocks, step, bins=edges)
        elif name in _PACKAGES and reporter._initialized:
            package = getattr(reporter, _PACKAGES[name])
            histogram = package.Histogram(np_histogram=(list(counts), edges))
            package.log({NAME: histogram, "train/global_step": step})
