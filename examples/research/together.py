"""Adapters of one backbone that are trained together: their images share a batch, which halves the time. And what the
studies with such runs have in common."""

from __future__ import annotations

import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoConfig, PreTrainedModel

from provpt_peft import ProVPTConfig
from provpt_peft.optimizer import prompts_lr

from ..dinov2_small import prepare
from . import tasks
from .common import Mover, fit, images_of, results_parser
from .methods import PROMPTS, Recipe


TASKS = ("location", "count", "distance", "digits")


def uniform_counts(budget: int, num_blocks: int) -> list[int]:
    """Prompts in each block, spread evenly: 6 prompts in 12 blocks are in every second one."""
    blocks = torch.arange(budget) * num_blocks // budget
    return torch.bincount(blocks, minlength=num_blocks).tolist()


def rate_of(counts: Sequence[int]) -> float:
    """The learning rate of a distribution's prompts, by their number per block that has any."""
    return prompts_lr(sum(counts) / sum(map(bool, counts)))


def protocol(args: Namespace) -> dict[str, Any]:
    """What all runs have in common."""
    model = str(args.model_name_or_path or "DINOv2-S")
    return {"model": model, "epochs": args.epochs, **images_of(args), **PROMPTS.settings()}


def study_parser(description: str | None, results: str, budgets: Sequence[int]) -> ArgumentParser:
    """A parser with the options of a study with these runs. See `parse_study`.

    Args:
        description, results: As for `results_parser`.
        budgets: Prompts in all, by default.
    """
    parser = results_parser(
        description or "", results, checkpoint=True, epochs=15, train_images=400, validation_images=500,
        image_size=28, threads=1,
    )  # fmt: skip
    parser.add_argument(
        "--tasks", nargs="+", default=list(TASKS), choices=tasks.TASKS, help=f"default: {' '.join(TASKS)}"
    )
    numbers = " ".join(map(str, budgets))
    parser.add_argument(
        "--budgets", nargs="+", type=int, default=list(budgets), help=f"prompts in all (default: {numbers})"
    )
    return parser


def parse_study(parser: ArgumentParser) -> Namespace:
    """The arguments, with `num_blocks` of the backbone. Sets the number of threads."""
    args = parser.parse_args()
    args.num_blocks = AutoConfig.from_pretrained(args.model_name_or_path or prepare()).num_hidden_layers
    torch.set_num_threads(args.threads)
    return args


class Together(torch.nn.Module):
    """Several adapters of one backbone, trained on the same batches, each with its own prompts and head.

    The loss is the sum of theirs, no trained tensor belongs to two of them, and gradients are clipped adapter by
    adapter. So each is trained as if it were alone.

    Args:
        base: The backbone with a new head. It must have no dropout: it stays in eval mode.
        counts: Prompts in each block, for each adapter. All adapters draw theirs with the same seed.
        seed: That seed.
    """

    def __init__(self, base: PreTrainedModel, counts: Sequence[Sequence[int]], seed: int) -> None:
        super().__init__()
        self.names = [f"adapter{number}" for number in range(len(counts))]
        for name, of_adapter in zip(self.names, counts, strict=True):
            torch.manual_seed(seed)
            config = ProVPTConfig(num_prompts=list(of_adapter), modules_to_save=["classifier"])
            if name == self.names[0]:
                self.model = get_peft_model(base, config, adapter_name=name)
            else:
                self.model.add_adapter(name, config)
        parameters = {tuple(name.split(".")): parameter for name, parameter in self.model.named_parameters()}
        self.trained = {name: [p for path, p in parameters.items() if name in path] for name in self.names}
        self.train_all()
        self.eval()

    def train_all(self) -> None:
        """Let all adapters take gradients. PEFT trains the active one only."""
        for parameter in itertools.chain(*self.trained.values()):
            parameter.requires_grad_(True)

    def train(self, mode: bool = True) -> Together:
        """Stay in eval mode, as batches of several adapters have to be."""
        return super().train(False)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """The sum of all adapters' mean losses, as `loss`."""
        images = pixel_values.repeat(len(self.names), 1, 1, 1)
        adapters = [name for name in self.names for _ in labels]
        logits = self.model(pixel_values=images, adapter_names=adapters).logits
        loss = torch.nn.functional.cross_entropy(logits, labels.repeat(len(self.names)), reduction="sum")
        return SimpleNamespace(loss=loss / len(labels))

    @contextmanager
    def active(self, adapter: str) -> Iterator[None]:
        """Make one adapter the model's active one, for as long as it is looked at."""
        self.model.set_adapter(adapter)
        yield
        self.train_all()

    def evaluate(self, adapter: str, split: tasks.Split) -> tuple[float, float]:
        """Mean cross entropy and share of right answers, 0 … 1, of one adapter."""
        with self.active(adapter):
            return tasks.evaluate(self.model, split)

    def results(self, adapter: str, task: tasks.Task) -> dict[str, float]:
        """What a run's line says of a trained adapter: losses, and accuracies in percent."""
        splits = (task.train, task.validation, task.test)
        (train_loss, _), (validation_loss, validation), (_, test) = [self.evaluate(adapter, split) for split in splits]
        return {
            "train_loss": train_loss, "validation_loss": validation_loss,
            "validation_accuracy": 100 * validation, "test_accuracy": 100 * test,
        }  # fmt: skip

    def clip_gradients(self, max_norm: float) -> None:
        """Clip the gradients of each adapter to a norm."""
        for parameters in self.trained.values():
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def fit(
        self,
        train: tasks.Split,
        epochs: int,
        seed: int,
        learning_rates: float | Sequence[float],
        recipe: Recipe = PROMPTS,
        movers: Callable[[torch.optim.Optimizer], Mapping[str, Mover]] | None = None,
        after_epoch: Callable[[int], None] | None = None,
    ) -> None:
        """Train by a recipe.

        Args:
            train, epochs, seed, after_epoch: As for `fit`.
            learning_rates: Of the prompts, those of all adapters or of each.
            recipe: All else that it says.
            movers: Function of the optimizer that makes what moves prompts, by adapter.
        """
        rates = [learning_rates] * len(self.names) if isinstance(learning_rates, float) else learning_rates
        groups: list[dict[str, Any]] = []
        for name, rate in zip(self.names, rates, strict=True):
            prompts = self.model.base_model.prompts(name)
            head = [p for p in self.trained[name] if p is not prompts]
            groups += [{"params": [prompts], "lr": rate}, {"params": head, "lr": recipe.head_learning_rate or rate}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        schedule = recipe.schedule()
        if (max_grad_norm := schedule.pop("max_grad_norm")) is not None:
            optimizer.register_step_pre_hook(lambda *_: self.clip_gradients(max_grad_norm))
        mover = None if movers is None else _Movers(self, movers(optimizer))
        fit(self, optimizer, train, epochs, seed, mover, **schedule, after_epoch=after_epoch)


class _Movers:
    """What moves the prompts of several adapters, as one."""

    def __init__(self, together: Together, movers: Mapping[str, Mover]) -> None:
        self.together = together
        self.movers = movers

    def relocate(self, progress: float) -> None:
        for adapter, mover in self.movers.items():
            with self.together.active(adapter):
                mover.relocate(progress)

    def finish(self) -> None:
        for adapter, mover in self.movers.items():
            with self.together.active(adapter):
                mover.finish()
