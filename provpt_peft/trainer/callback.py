"""`RelocationTrainerCallback`: relocation inside the Hugging Face Trainer.

It reads the clock and delegates to `Relocator`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from peft.utils import CONFIG_NAME
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..config import ProVPTConfig
from ..records import Relocation, Run
from ..relocation import RelocationConfig, Relocator, first_batches
from ..relocation.parallel import refuse_wrapper
from .hosts import calling_trainer, training_loss
from .reporting import report_distribution


logger = logging.getLogger(__name__)

_OTHER_NAMES = (
    "transformers saves some models around an adapter under names of earlier releases, which the Trainer does not "
    "find again. Before training, set `model.save_pretrained = functools.partial(model.save_pretrained, "
    "save_original_format=False)`."
)
_SPEED = ("_runtime", "_per_second", "_preparation_time")  # suffixes of an evaluation's timings


class RelocationTrainerCallback(TrainerCallback, ExportableState):
    """Relocates prompts at the start of each epoch of a `transformers.Trainer`.

    Scores are measured with the Trainer's own loss on the first `score_images` images of the training loader, prepared
    as for training. The images are read once, before training, and training stays the same. Checkpoints contain the
    relocator's state, so a resumed run equals an uninterrupted one. Each relocation is logged through the Trainer as
    `relocation/…` and kept in `history`. If a run stops early, the reward of its last moves is only in `history` and
    in the Trainer's `log_history`, since reporters have ended by then.

    Args:
        config: When prompts move, which ones, and where to. A dict of the same settings is accepted too.

    Attributes:
        history: The records of all relocations, oldest first.

    Raises:
        ValueError: When training begins, if the model has no PROVPT adapter, if the Trainer uses `nn.DataParallel`,
            DeepSpeed or FSDP version 1, if it has two such callbacks, or if there is nothing to measure scores on.

    Example:
        ```python
        >>> callback = RelocationTrainerCallback(RelocationConfig())
        >>> trainer = Trainer(model, args, train_dataset=train, eval_dataset=validation, callbacks=[callback])
        >>> trainer.train()
        >>> [record.note or (record.prompt, record.from_block, record.block) for record in callback.history]
        ```
    """

    def __init__(self, config: RelocationConfig | dict[str, Any] | None = None) -> None:
        self.config = _from_dict(config) if isinstance(config, dict) else config or RelocationConfig()
        self.history: list[Relocation] = []
        self.relocator: Relocator | None = None
        self._trainer: Trainer | None = None
        self._inside_epoch = False
        self._relocated_at: int | None = None  # the step before which prompts were last relocated
        self._begun_with = 0  # number of records of earlier runs
        self._evaluated_step: int | None = None
        self._saved: dict[str, Any] | None = None
        self._run: Run | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._trainer = trainer = calling_trainer()
        _check(args, trainer)
        with _before_training(self.config, "read from the training loader"):
            batches = first_batches(kwargs["train_dataloader"], self.config.score_images)
        self._forget_attempt()
        compute_loss = partial(training_loss, trainer)
        self.relocator = Relocator(kwargs["model"], self.config, kwargs["optimizer"], batches, compute_loss)
        with _before_training(self.config, "scored by the Trainer's `compute_loss` in eval mode"):
            self.relocator.try_out()
        _warn_of_nothing(self.config, args, state, kwargs["train_dataloader"])
        _warn_of_inputs(trainer)
        _warn_of_one_rate(kwargs["optimizer"], self.relocator.tuner.prompts(self.relocator.adapter_name))
        _warn_of_the_last_model(args, self.relocator.adapter_name)
        self._inside_epoch, self._relocated_at, self._evaluated_step = False, None, None
        name = type(self).__name__
        if state.global_step > 0:
            saved = state.stateful_callbacks.get(name, {}).get("attributes", {}).get("saved")
            if saved is None:
                told = "The checkpoint was written without %s, so relocation starts afresh at step %d."
                logger.warning(told, name, state.global_step)
            else:
                _check_loaded(self.relocator, saved["prompt_blocks"])
                self.relocator.load_state_dict(saved["relocator"])
                # A checkpoint of an epoch's last step is written before the epoch ends.
                self._inside_epoch = saved["inside_epoch"] and state.epoch % 1 != 0
                self._relocated_at = saved["relocated_at"]
                # A run that resumes at its last step does not evaluate again.
                self._remember_metrics(saved["metrics"])
        self.history = self.relocator.history
        self._begun_with = len(self.history)
        # The Trainer fills in this entry when it saves, and expects it to be there.
        state.stateful_callbacks[name] = self.state()

    def _forget_attempt(self) -> None:
        """Keep what ended before the first relocation, as with `auto_find_batch_size`, out of the record."""
        if self.relocator is not None and len(self.relocator.history) == self._begun_with:
            config = self._adapter_config
            config.training = (config.training or {}) | {"epochs": self.relocator.first_epoch}

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # Called again when a run resumes inside an epoch, whose relocation is done already.
        if not self._inside_epoch:
            self._inside_epoch = True
            if self.config.relocate_every == "epoch":
                self._relocate(args, state, control)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.config.relocate_every != "epoch" and state.global_step % int(self.config.relocate_every) == 0:
            self._relocate(args, state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # A run that stops inside an epoch comes here too, and resumes inside it.
        self._inside_epoch = control.should_training_stop
        if state.global_step >= state.max_steps:
            self._running.finish()
            self._log(args, state, control)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        # For the model card: numbers only, without lists per class and without this machine's timings.
        numbers = {name: v for name, v in (metrics or {}).items() if isinstance(v, (int, float)) and math.isfinite(v)}
        kept = {name: v for name, v in numbers.items() if name != "epoch" and not name.endswith(_SPEED)}
        if not kept or self.relocator is None:
            return
        # Several data sets are evaluated one after the other.
        earlier = self._metrics() if self._evaluated_step == state.global_step else {}
        self._remember_metrics(earlier | kept)
        self._evaluated_step = state.global_step

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # For training that stopped before its last step. Once the best model is loaded, it is too late to measure.
        if not args.load_best_model_at_end:
            self._running.finish()
            self._log(args, state, control, report=False)
        # The best model is an earlier one, so its record has no later relocations. transformers finds the best
        # checkpoint of the adapter `default` only. A checkpoint of a model around ours has no config.
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is not None:
            _warn_of_the_best_model(self._running)
        named = self._running.adapter_name == "default"
        if best is not None and named and os.path.isfile(os.path.join(best, CONFIG_NAME)):
            self._adapter_config.training = ProVPTConfig.from_pretrained(best).training
        # Keeping the callback for its history must not keep model, optimizer and data in memory.
        self._saved, self._run = self.state(), self._running.run()
        self.relocator = self._trainer = None

    @property
    def _running(self) -> Relocator:
        assert self.relocator is not None  # made when training begins
        return self.relocator

    def _metrics(self) -> dict[str, float]:
        return (self._adapter_config.training or {}).get("metrics", {})

    def _remember_metrics(self, metrics: dict[str, float]) -> None:
        self._adapter_config.training = (self._adapter_config.training or {}) | {"metrics": metrics}

    @property
    def _adapter_config(self) -> ProVPTConfig:
        return self._running.tuner.peft_config[self._running.adapter_name]

    def _relocate(self, args: Any, state: TrainerState, control: Any) -> None:
        # A checkpoint may be written between a relocation and the step that follows, which is where a run resumes.
        if self._relocated_at == state.global_step:
            return
        self._relocated_at = state.global_step
        # A run that resumes with fewer steps may be beyond the last.
        self._running.relocate(progress=min(1.0, state.global_step / state.max_steps))
        self._log(args, state, control)

    def _log(self, args: Any, state: TrainerState, control: Any, report: bool = True) -> None:
        """Do what `Trainer.log` does, without the keys that it would add. Without `report`, only in `log_history`: at
        the end of training some reporters have ended their run, and would begin another."""
        if not self._running.metrics or self._trainer is None:
            return
        logs = {f"relocation/{name}": value for name, value in self._running.metrics.items()} | {"epoch": state.epoch}
        state.log_history.append({**logs, "step": state.global_step})
        if not report:
            return
        handler = self._trainer.callback_handler
        should_log = control.should_log
        handler.on_log(args, state, control, logs)
        control.should_log = should_log  # which `on_log` takes for done
        if state.is_world_process_zero:
            counts = self._running.tuner.prompt_distribution(self._running.adapter_name)
            report_distribution(handler.callbacks, counts, state.global_step)

    def state(self) -> dict[str, Any]:
        """Settings and the relocator's state, as JSON values. The Trainer writes them into its checkpoints."""
        if self.relocator is None and self._saved is not None:
            return self._saved
        attributes = {}
        if self.relocator is not None:
            attributes["saved"] = {
                "relocator": self.relocator.state_dict(),
                "prompt_blocks": self.relocator.blocks().tolist(),
                "inside_epoch": self._inside_epoch,
                "relocated_at": self._relocated_at,
                "metrics": self._metrics(),
            }
        return {"args": {"config": self.config.settings()}, "attributes": attributes}

    def run(self) -> Run:
        """The record of the run, finished or so far, for pictures. `ValueError` if training has not begun."""
        run = self.relocator.run() if self.relocator is not None else self._run
        if run is None:
            raise ValueError("The callback must have run, but training has not begun. Train first.")
        return run


def _from_dict(config: dict[str, Any]) -> RelocationConfig:
    try:
        return RelocationConfig(**config)
    except ValueError as error:
        raise ValueError(
            f"{error} If the settings come from a checkpoint, it has only the names of your own scores and policies. "
            "Leave `restore_callback_states_from_checkpoint` off: a run resumes exactly without it."
        ) from error


def _check(args: TrainingArguments, trainer: Trainer) -> None:
    """Refuse wrappers that the Trainer will put around the model, unseen by callbacks, and a second callback."""
    if getattr(args, "deepspeed_plugin", None) is not None:
        refuse_wrapper("DeepSpeedEngine")
    if args.n_gpu > 1:
        refuse_wrapper("DataParallel")
    ours = sum(isinstance(c, RelocationTrainerCallback) for c in trainer.callback_handler.callbacks)
    if ours > 1:
        raise ValueError(
            f"A Trainer may have only one RelocationTrainerCallback, got {ours}, whose saved states could not be told "
            "apart. Give one."
        )


def _check_loaded(relocator: Relocator, prompt_blocks: list[int]) -> None:
    """The Trainer loads a model around an adapter non-strictly: it silently skips tensors with other names."""
    if relocator.tuner.left_out or relocator.blocks().tolist() != prompt_blocks:
        raise ValueError(
            f"A resumed run must begin with the checkpoint's prompts, but they were not loaded. {_OTHER_NAMES}"
        )


def _warn_of_the_best_model(relocator: Relocator) -> None:
    if relocator.tuner.left_out:
        logger.warning("The best model's prompts were not loaded: the model has the last ones. %s", _OTHER_NAMES)


def _warn_of_the_last_model(args: TrainingArguments, adapter_name: str) -> None:
    """transformers loads the best model from the checkpoint's own folder, where PEFT puts only `default`."""
    if args.load_best_model_at_end and adapter_name != "default":
        logger.warning(
            "The Trainer finds the best checkpoint only if the adapter is named 'default': at the end it keeps the "
            "last weights of %r. Leave `adapter_name` out, or load the folder %r of the best checkpoint yourself.",
            adapter_name,
            adapter_name,
        )


def _warn_of_one_rate(optimizer: torch.optim.Optimizer, prompts: torch.nn.Parameter) -> None:
    group = next(group for group in optimizer.param_groups if any(p is prompts for p in group["params"]))
    if len(group["params"]) > 1:
        logger.warning(
            "Prompts and head are trained at one learning rate, %g. Separate rates are several points better "
            "(docs/experiments/recipes.md): optimizer = create_provpt_optimizer(model, torch.optim.AdamW), and "
            "Trainer(…, optimizers=(optimizer, None)).",
            group.get("initial_lr", group["lr"]),  # schedules may start at another rate than the given one
        )


def _warn_of_inputs(trainer: Trainer) -> None:
    if type(trainer).training_step is not Trainer.training_step:
        logger.warning(
            "%s overrides `training_step`, but scores are measured with `_prepare_inputs` and `compute_loss`. They do "
            "not include what the step itself does to inputs or loss. Move it to these methods if they should.",
            type(trainer).__name__,
        )


def _warn_of_nothing(config: RelocationConfig, args: TrainingArguments, state: TrainerState, loader: Any) -> None:
    """Warn if no prompt can move before the end."""
    every = config.relocate_every
    if every == "epoch" and state.num_train_epochs >= sys.maxsize:  # data of unknown length
        logger.warning(
            "Prompts move between epochs, but the length of an epoch is not known. Set `relocate_every` to a number "
            "of steps."
        )
        return
    steps = math.ceil(len(loader) / args.gradient_accumulation_steps) if every == "epoch" else int(every)
    period = steps / max(state.max_steps, 1)
    if config.warmup_epochs * period >= 1.0 - config.settle:
        logger.warning(
            "No prompt will move: the first relocation comes after %.0f %% of the training, and nothing moves in its "
            "last part (`settle=%g`). Train for more epochs, or lower `settle` or `relocate_every`.",
            *(100 * config.warmup_epochs * period, config.settle),
        )


@contextmanager
def _before_training(config: RelocationConfig, doing: str) -> Iterator[None]:
    """On an error, name the setting that asks for what failed."""
    try:
        yield
    except Exception as error:
        # The Trainer tries again with smaller batches (`auto_find_batch_size`).
        if should_reduce_batch_size(error):
            raise
        raise ValueError(
            f"Relocation measures scores on the first training images (`score_images={config.score_images}`). They "
            f"are {doing}, but that fails: {type(error).__name__}: {error}"
        ) from error
