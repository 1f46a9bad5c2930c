"""`RelocationTrainerCallback`: relocation inside the Hugging Face Trainer.

It reads the clock and delegates to `Relocator`.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from peft.utils import CONFIG_NAME
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, ExportableState
from transformers.trainer_utils import SaveStrategy
from transformers.utils import is_datasets_available

from .config import ProVPTConfig
from .relocation import Relocation, RelocationConfig, Relocator
from .relocation.parallel import refuse_wrapper
from .reporting import report_distribution


logger = logging.getLogger(__name__)

# Ends of the names of what the Trainer measures of an evaluation's speed.
_SPEED = ("_runtime", "_per_second", "_preparation_time")

T = TypeVar("T")


class RelocationTrainerCallback(TrainerCallback, ExportableState):
    """Relocates prompts at the start of each epoch of a `transformers.Trainer`.

    Checkpoints carry the relocator, so a resumed run equals one that was never stopped. Each relocation is logged
    through the Trainer as `relocation/…` and kept in `history`.

    Args:
        config: When, which and where to; a dict of the same settings is accepted as well.
        score_dataset: Images to measure scores and losses on, for example a held-out part of the training images. By
            default `score_images` of the config is the number of training images that are taken.
        compute_loss: The mean loss of the model on a batch of them; by default the Trainer's own, with its
            `compute_loss_func`, label smoothing or whatever a subclass does.

    Raises:
        ValueError: When training begins, if the model has no PROVPT adapter, if the Trainer uses `nn.DataParallel`,
            DeepSpeed or FSDP version 1, or if there is nothing to measure scores on.

    Example:
        ```python
        >>> callback = RelocationTrainerCallback(RelocationConfig())
        >>> trainer = Trainer(model, args, train_dataset=train, eval_dataset=validation, callbacks=[callback])
        >>> trainer.train()
        >>> [(record.prompt, record.from_block, record.block) for record in callback.history]
        ```
    """

    def __init__(
        self,
        config: RelocationConfig | dict[str, Any] | None = None,
        score_dataset: Dataset | None = None,
        compute_loss: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None,
    ) -> None:
        self.config = RelocationConfig(**config) if isinstance(config, dict) else config or RelocationConfig()
        self.score_dataset = score_dataset
        self.compute_loss = compute_loss
        # The Trainer can make a callback anew from its checkpoint, but not with these two.
        self.given = [name for name in ("score_dataset", "compute_loss") if getattr(self, name) is not None]
        self.relocator: Relocator | None = None
        self._handler: CallbackHandler | None = None
        self._last_logged_step = 0
        self._evaluated_step: int | None = None
        self._inside_epoch = False
        self._due = False

    @property
    def history(self) -> list[Relocation]:
        """The records of all relocations, oldest first."""
        return self.relocator.history if self.relocator is not None else []

    @property
    def _running(self) -> Relocator:
        assert self.relocator is not None  # made when training begins
        return self.relocator

    # ---- events -----------------------------------------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        train_dataloader: DataLoader | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_wrappers(args)
        missing = [name for name in self.given if getattr(self, name) is None]
        if missing:
            raise ValueError(
                f"The run began with {missing}, which a checkpoint cannot hold, and "
                "`restore_callback_states_from_checkpoint=True` makes the callback anew without. Turn it off and pass "
                "the callback as before: its state is restored either way."
            )
        self._handler = _caller(CallbackHandler)
        compute_loss, trainer = self.compute_loss, _caller(Trainer)
        if compute_loss is None and trainer is not None:
            # As in its evaluation. It takes the labels out of the batch.
            def compute_loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
                count = trainer._get_num_items_in_batch([batch], args.device)
                return trainer.compute_loss(model, dict(batch), num_items_in_batch=count)

        batches = self._score_batches(args, train_dataloader, trainer)
        self.relocator = Relocator(model, self.config, optimizer, batches, compute_loss)
        self._last_logged_step = state.global_step
        self._inside_epoch = False
        self._due = False
        name = type(self).__name__
        if state.global_step > 0:
            saved = state.stateful_callbacks.get(name, {}).get("attributes", {}).get("saved")
            if saved is None:
                logger.warning(
                    "The checkpoint was written without %s, so relocation starts afresh at step %d.",
                    name,
                    state.global_step,
                )
            else:
                self.relocator.load_state_dict(saved["relocator"])
                # A checkpoint of an epoch's last step is written before the epoch ends.
                self._inside_epoch = saved["inside_epoch"] and state.epoch % 1 != 0
                self._due = saved["due"]
        # The Trainer fills in this entry when it saves, and expects it to be there.
        state.stateful_callbacks[name] = self.state()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Comes again when a run resumes inside an epoch, which has had its relocation.
        if not self._inside_epoch:
            self._inside_epoch = True
            if self.config.relocate_every == "epoch":
                self._relocate(args, state, control)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._due:
            self._due = False
            self._relocate(args, state, control)

    def _relocate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        self._running.relocate(progress=state.global_step / state.max_steps)
        self._log(args, state, control)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        # accelerate keeps the scaler of fp16 training on its optimizer. The loss of a step that the scaler skips stays
        # in the mean that the Trainer logs: it is finite, since only the gradients overflow.
        scaler = getattr(optimizer, "scaler", None)
        self._running.record_step(loss_scale=1.0 if scaler is None else scaler.get_scale())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        # The Trainer does not save its running loss, so what is not reported before a checkpoint is lost to a resume.
        # Its first process saves the state of the relocator, for all of them.
        if _may_save(args, control):
            control.should_log = True
            self._running.pool()
        if self.config.relocate_every != "epoch" and state.global_step % int(self.config.relocate_every) == 0:
            # The loss is reported after this event, so the relocation waits for the next step.
            control.should_log = self._due = True
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        self._inside_epoch = False
        # Makes the Trainer report the exact mean loss since its last report, before it evaluates and saves.
        control.should_log = True
        if _may_save(args, control):
            self._running.pool()
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        # Evaluation logs as well, but no `loss`.
        if "loss" in logs:
            self._running.record_loss(logs["loss"], state.global_step - self._last_logged_step)
            self._last_logged_step = state.global_step
        # The final summary. Reporters close their files at the next event, the end of training.
        if "train_loss" in logs:
            self._running.finish()
            self._log(args, state, control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # For the model card: numbers, not a list for each class, and not how fast this machine is.
        kept = {
            name: value
            for name, value in (metrics or {}).items()
            if name != "epoch"
            and not name.endswith(_SPEED)
            and isinstance(value, (int, float))
            and math.isfinite(value)
        }
        if not kept or self.relocator is None:
            return
        training = self._adapter_config.training or {}
        # Several data sets are evaluated one after the other.
        earlier = training.get("metrics", {}) if self._evaluated_step == state.global_step else {}
        self._adapter_config.training = training | {"metrics": earlier | kept}
        self._evaluated_step = state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The best model is an earlier one, and knows no later relocations.
        # transformers finds that of the adapter `default` only. A checkpoint of a model around ours has no config.
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        named = self._running.adapter_name == "default"
        if best is not None and named and os.path.isfile(os.path.join(best, CONFIG_NAME)):
            self._adapter_config.training = ProVPTConfig.from_pretrained(best).training

    @property
    def _adapter_config(self) -> ProVPTConfig:
        return self._running.tuner.peft_config[self._running.adapter_name]

    def _score_batches(
        self, args: TrainingArguments, train_dataloader: DataLoader | None, trainer: Trainer | None
    ) -> DataLoader | None:
        """What scores are measured on; None for the training steps themselves."""
        dataset: Any = self.score_dataset
        if trainer is not None and _is_of_datasets(dataset):
            # As it does with its own data sets.
            dataset = trainer._remove_unused_columns(dataset, "score")
        if dataset is None:
            if self.config.score_images == 0:
                return None
            dataset = getattr(train_dataloader, "dataset", None)
            if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
                raise ValueError(
                    f"Scores are measured on {self.config.score_images} training images, chosen by their index, but "
                    f"the data set is a stream, a {type(dataset).__name__}. Pass a `score_dataset` to the callback, "
                    "or set `score_images=0` to score in the training steps."
                )
            dataset = Subset(dataset, self.config.choose_score_images(len(dataset)))
        # A generator of its own, since iterating draws a number.
        return DataLoader(
            dataset,
            batch_size=args.eval_batch_size,
            collate_fn=getattr(train_dataloader, "collate_fn", None),
            generator=torch.Generator(),
        )

    # ---- state and logs ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Settings and the relocator's state, JSON-able. The Trainer writes it into its checkpoints."""
        attributes: dict[str, Any] = {}
        if self.relocator is not None:
            attributes["saved"] = {
                "relocator": self.relocator.state_dict(),
                "inside_epoch": self._inside_epoch,
                "due": self._due,
            }
        attributes["given"] = self.given
        return {"args": {"config": asdict(self.config)}, "attributes": attributes}

    def _log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Do what `Trainer.log` does. Callbacks have no reference to the Trainer, and reporters run before callbacks,
        so writing into the Trainer's own logs would not reach them."""
        if not self._running.metrics:
            return
        logs: dict[str, Any] = {f"relocation/{name}": value for name, value in self._running.metrics.items()}
        logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": state.global_step})
        if self._handler is not None:
            self._handler.on_log(args, state, control, logs)
            if state.is_world_process_zero:
                counts = self._running.tuner.prompt_distribution(self._running.adapter_name)
                report_distribution(self._handler.callbacks, counts, state.global_step)


def _may_save(args: TrainingArguments, control: TrainerControl) -> bool:
    """Whether a checkpoint may be written after this event. The best one is known once it has been evaluated."""
    return control.should_save or (control.should_evaluate and args.save_strategy == SaveStrategy.BEST)


def _is_of_datasets(dataset: Any) -> bool:
    if not is_datasets_available():
        return False
    import datasets

    return isinstance(dataset, datasets.Dataset)


def _refuse_wrappers(args: TrainingArguments) -> None:
    """Refuse what the Trainer is going to wrap the model in, which it does not show to callbacks."""
    if getattr(args, "deepspeed_plugin", None) is not None:
        refuse_wrapper("DeepSpeedEngine")
    if args.n_gpu > 1:
        refuse_wrapper("DataParallel")


def _caller(kind: type[T]) -> T | None:
    """The Trainer that is calling us, or its callback handler. No event passes them, so they are found on the call
    stack."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            return caller
        frame = frame.f_back
    return None
