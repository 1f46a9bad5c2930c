"""`Relocator`: the paper's Algo. 1 around a training loop. Measure, reward, prune, allocate."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..evaluation import fixed_randomness
from ..records import Relocation, Run, run_of
from .ablations import ADJUSTMENTS, Moves, NaiveRL
from .checks import check_action, check_diagnostics, check_idleness, check_reserve, check_trained, tuner_of
from .config import RelocationConfig
from .idleness import Idleness
from .measure import SCORES, ComputeLoss, Measurement
from .parallel import broadcast_objects
from .placement import place
from .policies import Action, PolicyState, make_policy
from .serialization import from_json, to_json


logger = logging.getLogger(__name__)

# For what the policy and a move do, whatever the caller's default device is. Losses are computed on that.
_ON_CPU = torch.device("cpu")
_FROZEN = "The prompts were frozen: none was moved."
_NOTHING = (
    "No prompt will move: no block has more than one, and the last prompt of a block stays. Use more prompts, or "
    "`check_moves=False`."
)
_NONE = "There was no prompt to move."
_UNDONE = "The loss was higher after this move: it was undone."
_NOT_FINITE = "The loss or a score was not finite: no prompt was moved and no reward was learned."


class Relocator:
    """Relocates the prompts of a PROVPT model while it trains, in a custom training loop.

    With the Hugging Face Trainer use [`RelocationTrainerCallback`][provpt_peft.RelocationTrainerCallback], which calls
    this class.

    Args:
        model: A model with a PROVPT adapter, or a wrapper of one. The prompts of the currently active adapter move.
        config: When prompts move, which ones, and where to.
        optimizer: The optimizer of the prompts. If given, the moments of a moved prompt are replaced to suit its new
            block (see `placement.py`). This works for the state of PyTorch's own optimizers.
        score_batches: A list or a loader of batches, iterated over to measure scores and losses in eval mode: before
            each relocation, and again after each move if moves are checked, so they must be the same images each time.
            Give some of the training images, see
            [`first_batches`][provpt_peft.relocation.batches.first_batches], or held-out ones.
        compute_loss: Function of the model and a score batch that returns the mean loss; by default
            `model(**batch).loss`.

    Raises:
        ValueError: If the model has no PROVPT adapter, if its prompts are not trained, if there are no score batches
            or they can be read only once, or if the model has a wrapper for several devices that hides prompts or
            scores. DistributedDataParallel and FSDP version 2 are supported.

    Example:
        ```python
        >>> relocator = Relocator(model, RelocationConfig(), optimizer, score_batches=first_batches(loader, 32))
        >>> for epoch in range(epochs):
        ...     relocator.relocate(progress=epoch / epochs)
        ...     for batch in loader:
        ...         model(**batch).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> relocator.finish()
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        config: RelocationConfig | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        score_batches: Iterable[Any] | None = None,
        compute_loss: ComputeLoss | None = None,
    ) -> None:
        self.config = config if config is not None else RelocationConfig()
        self.tuner = tuner_of(model)
        self.adapter_name = self.tuner.active_adapters[0]
        if score_batches is None or isinstance(score_batches, (Iterator, Mapping, torch.Tensor)):
            what = "which can be read only once" if isinstance(score_batches, Iterator) else "which is a single batch"
            raise ValueError(
                "Scores are measured on `score_batches`, which must be a list of batches or a loader, got "
                f"{'none' if score_batches is None else f'a {type(score_batches).__name__}, {what}'}. "
                f"Give some training images: score_batches=first_batches(loader, {self.config.score_images})."
            )
        check_trained(self.tuner, self.adapter_name, optimizer)
        check_reserve(self.tuner, self.adapter_name, self.config)
        if self.config.check_moves and self.config.adjust == "relocate" and max(self._counts()) < 2:
            logger.warning(_NOTHING)
        self.model = model
        self.optimizer = optimizer
        self.score_batches = score_batches
        self.compute_loss: ComputeLoss = compute_loss or (lambda model, batch: model(**batch).loss)
        self.metrics: dict[str, float] = {}
        # An adapter that was relocated before continues its record, as it continues its distribution. But epochs and
        # steps are not counted together.
        earlier = self.run()
        if earlier.settings.get("relocate_every", self.config.relocate_every) != self.config.relocate_every:
            earlier = Run(earlier.distribution)
        self.history: list[Relocation] = earlier.history
        self.epoch = earlier.epochs  # epochs (or periods) that have begun
        self.first_epoch = self.epoch  # where this relocator starts
        self.generator = torch.Generator().manual_seed(self.config.seed)
        ppo, naive = self.config.ppo, self.config.adjust == "naive_rl"
        allocator = partial(NaiveRL, config=ppo) if naive else self.config.allocator
        with _ON_CPU:
            self.policy = make_policy(allocator, self.tuner.num_blocks, ppo, self.generator)
        self._tried = False
        # Moves whose reward is not known yet.
        self._pending: list[tuple[Relocation, Action]] = []
        # Within a relocation: the scores, NaN for prompts that have moved to another block.
        self._scores = torch.empty(0)

    def relocate(self, progress: float | None = None) -> list[Relocation]:
        """Reward the last moves, prune the most idle prompts and allocate them.

        Call it before each epoch, including the first. The first `warmup_epochs` calls move nothing. An optimizer that
        has a `train` method, as schedule-free ones do, is put into training mode.

        Args:
            progress: The share of training that is done, 0 … 1. Required unless `settle` is 0, which alone uses it.

        Returns:
            The records of the moves, those that were undone too; empty if there was nothing to move. `history` keeps
            them, and a record with a `note` for each relocation that found nothing to move.

        Raises:
            ValueError: If the progress is missing or not in 0 … 1, or if a score or a policy of your own returns
                something else than it must.
        """
        done = 0.0 if progress is None and self.config.settle == 0 else progress
        if done is None or not 0.0 <= done <= 1.0:
            raise ValueError(
                f"`progress` must be the share of training that is done, 0 … 1, got {progress}. Call "
                "`relocate(progress=epoch / epochs)`, so that nothing moves in the last part of training "
                f"(`settle={self.config.settle}`)."
            )
        self.try_out()
        # Schedule-free optimizers have other weights in the model while it is evaluated.
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        move = self.epoch - self.first_epoch >= self.config.warmup_epochs and done < 1.0 - self.config.settle
        moves = self._turn(move)
        self.epoch += 1
        self._remember()
        return moves

    def finish(self) -> None:
        """Learn the reward of the last moves, without moving anything. Call it after training."""
        self._turn(move=False)
        self._remember()

    def try_out(self) -> None:
        """Measure one score batch, once, so that errors show up before the first training step, as does a policy's
        state that could not be saved. `relocate` does this too."""
        if not self._tried:
            with fixed_randomness(self.tuner.prompts(self.adapter_name).device):
                first = list(islice(self.score_batches, 1))
            self.measure(first)
            if self.config.check_moves:
                self._measurement(first).mean_loss()
            self.state_dict()
            self._tried = True

    def measure(self, batches: Iterable[Any] | None = None) -> tuple[Idleness, float]:
        """Scores and mean loss of the current model, the same in all processes.

        Args:
            batches: What to measure on, by default the score batches.

        Raises:
            ValueError: If another adapter is active, or none is enabled.
        """
        enabled = self.tuner.bank.enabled_adapter
        if enabled != self.adapter_name:
            raise ValueError(
                f"Scores are those of the enabled adapter, which must be {self.adapter_name!r}, got {enabled!r}. "
                f"Activate it first: model.set_adapter({self.adapter_name!r}). If it was deleted, make a "
                "new `Relocator` for another."
            )
        measurement = self._measurement(batches)
        score = SCORES[self.config.idleness] if isinstance(self.config.idleness, str) else self.config.idleness
        idleness = check_idleness(score(measurement), len(self.blocks()))
        return idleness, measurement.loss if measurement.loss is not None else measurement.mean_loss()

    def _measurement(self, batches: Iterable[Any] | None = None) -> Measurement:
        batches = self.score_batches if batches is None else batches
        return Measurement(self.model, self.tuner, self.adapter_name, batches, self.compute_loss)

    def run(self) -> Run:
        """The record of the run so far, for pictures and the model card."""
        training = self.tuner.peft_config[self.adapter_name].training
        return run_of(training, self.tuner.prompt_distribution(self.adapter_name))

    # ---- Algo. 1 ----------------------------------------------------------------------------------------------------

    def _turn(self, move: bool) -> list[Relocation]:
        self.metrics = {}
        if move and not self.tuner.prompts(self.adapter_name).requires_grad:
            self.history.append(Relocation(epoch=self.epoch, note=_FROZEN))
            move = False
        if not (move or self._pending):
            return []
        idleness, loss = self.measure()
        if not (idleness.score[self.blocks() != 0].isfinite().all() and math.isfinite(loss)):
            logger.warning("%s (epoch %d)", _NOT_FINITE, self.epoch)
            self.history.append(Relocation(epoch=self.epoch))
            for record in (*(relocation for relocation, _ in self._pending), self.history[-1]):
                record.note = _NOT_FINITE
            self._pending = []
            return []
        with _ON_CPU:
            self._reward(loss)
        return self._adjust(idleness, loss) if move else []

    def _reward(self, loss: float) -> None:
        """Let the policy learn from the last moves: Eq. 8, with the score of the prompt that was moved."""
        rewards = []
        for relocation, action in self._pending:
            assert relocation.loss_before is not None
            relocation.loss_after = loss
            relocation.reward = relocation.loss_before - loss - (relocation.idleness or 0.0)
            relocation.policy = check_diagnostics(self.policy.learn(action, relocation.reward))
            rewards.append(relocation.reward)
            self.metrics |= relocation.policy
        self._pending = []
        if rewards:
            self.metrics["reward"] = sum(rewards) / len(rewards)

    def _adjust(self, idleness: Idleness, loss: float) -> list[Relocation]:
        """Move prompts, and record each move."""
        adjust = Relocator.most_idle if self.config.adjust == "relocate" else ADJUSTMENTS[self.config.adjust]
        blocks = self.blocks()
        means = [_known(idleness.score[blocks == block].mean()) for block in range(1, self.tuner.num_blocks + 1)]
        self._scores = idleness.score.clone()
        moves: list[Relocation] = []
        newcomers: set[int] = set()
        for prompt, action in _each_on_cpu(adjust(self, idleness)):
            relocation = Relocation(
                epoch=self.epoch,
                prompt=prompt,
                from_block=int(blocks[prompt]),
                block=action.block,
                idleness=_known(idleness.score[prompt]),
                idleness_stderr=_known(idleness.stderr[prompt]),
                block_idleness=means,
                loss_before=loss,
            )
            if action.block != relocation.from_block:
                loss = self._move(relocation, loss, newcomers)
            # A prompt that was removed for good, or a move that was undone, has no reward.
            if action.block and relocation.note is None:
                self._pending.append((relocation, action))
            moves.append(relocation)
        records = moves or [Relocation(epoch=self.epoch, block_idleness=means, loss_before=loss, note=_NONE)]
        self.history += records
        first = asdict(records[0])
        names = {"prompt": "prompt", "from_block": "from_block", "to_block": "block", "idleness": "idleness"}
        details = {name: first[of] for name, of in names.items() if first[of] is not None}
        self.metrics |= {"moves": sum(move.block != move.from_block for move in moves)} | details
        return moves

    def _move(self, relocation: Relocation, loss: float, newcomers: set[int]) -> float:
        """Make the move of a record, and undo it if `check_moves` finds that the loss has risen. Returns the loss."""
        prompt, block = relocation.prompt, relocation.block
        assert prompt is not None
        assert block is not None
        with _ON_CPU:
            undo = place(self.tuner, self.adapter_name, prompt, block, self.optimizer, newcomers, self.generator)
        if self.config.check_moves and relocation.from_block and block:
            after = math.nan
            try:
                after = self._measurement().mean_loss()
            finally:
                if not after <= loss:  # nor if it is not a number, or could not be measured
                    with _ON_CPU:
                        undo()
                    relocation.block, relocation.note = relocation.from_block, _UNDONE
            if relocation.note is not None:
                return loss
            loss = after
        self._scores[prompt] = math.nan  # the score was for the old block
        newcomers.add(prompt)
        return loss

    def most_idle(self, idleness: Idleness) -> Moves:
        """Algo. 1: the most idle prompts whose score is above 0, each with the block that the policy chooses. With
        `check_moves` the last prompt of a block stays."""
        idle = (prompt for prompt in idleness.ranking() if idleness.score[prompt] > 0)
        for _ in range(self.config.prompts_per_relocation):
            prompt = next((k for k in idle if not (self.config.check_moves and self._alone(k))), None)
            if prompt is None:
                return
            yield prompt, self.choose_for(prompt)

    def _alone(self, prompt: int) -> bool:
        block = int(self.blocks()[prompt])
        return block > 0 and self._counts()[block - 1] == 1

    def _counts(self) -> list[int]:
        return self.tuner.prompt_distribution(self.adapter_name)

    def choose_for(self, prompt: int | None) -> Action:
        """The policy's action for a prompt, given the current distribution; all processes use that of the first. With
        None the policy also chooses the source block."""
        action = self.policy.choose(PolicyState(self._scores, self.blocks(), self.tuner.num_blocks, prompt))
        # Networks round differently on another kind of processor.
        return check_action(broadcast_objects([action])[0], self.tuner.num_blocks)

    def blocks(self) -> torch.Tensor:
        """d_k: the block of each prompt, int64 (N,) on the CPU."""
        return self.tuner.prompt_blocks(self.adapter_name).cpu()

    def _remember(self) -> None:
        """Record the training in the adapter's config, which is saved with the adapter."""
        config = self.tuner.peft_config[self.adapter_name]
        config.training = (config.training or {}) | {
            "relocation": self.config.settings(),
            "epochs": self.epoch,
            # The records' own dicts, since rewards are added later. Copying them all would take longer each time.
            "history": [vars(relocation) for relocation in self.history],
        }

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as JSON values: policy, pending moves, history, generator."""
        pending = [(self.history.index(relocation), asdict(action)) for relocation, action in self._pending]
        tensors = {"pending": pending, "policy": self.policy.state_dict(), "generator": self.generator.get_state()}
        return {
            "num_prompts": len(self.blocks()),
            "num_blocks": self.tuner.num_blocks,
            "epoch": self.epoch,
            "first_epoch": self.first_epoch,
            "policy": type(self.policy).__name__,
            "relocate_every": self.config.relocate_every,
            "history": [asdict(relocation) for relocation in self.history],
            "tensors": to_json(tensors),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; `ValueError` if the numbers of prompts or blocks, the policy or
        `relocate_every` differ."""
        saved = state["num_prompts"], state["num_blocks"]
        present = len(self.blocks()), self.tuner.num_blocks
        if saved != present:
            was, now = (f"{prompts} prompts in {blocks} blocks" for prompts, blocks in (saved, present))
            raise ValueError(
                f"The relocator's state was saved for {was}, but the model has {now}. Resume with the config that the "
                "run began with."
            )
        if state["policy"] != type(self.policy).__name__:
            raise ValueError(
                f"The relocator's state must be for the same policy, {type(self.policy).__name__}, got one for "
                f"{state['policy']}. Resume with the settings that the run began with."
            )
        # Epochs and steps are not counted together.
        if (every := state["relocate_every"]) != self.config.relocate_every:
            raise ValueError(
                f"The relocator's state must be for the same `relocate_every`, {self.config.relocate_every!r}, got "
                f"one for {every!r}. Resume with the settings that the run began with."
            )
        self.epoch, self.first_epoch = state["epoch"], state["first_epoch"]
        self.history = [Relocation(**record) for record in state["history"]]
        tensors = from_json(state["tensors"])
        self._pending = [(self.history[index], Action(**action)) for index, action in tensors["pending"]]
        self.policy.load_state_dict(tensors["policy"])
        self.generator.set_state(tensors["generator"])
        self._remember()


def _each_on_cpu(moves: Moves) -> Moves:
    while True:
        with _ON_CPU:
            move = next(moves, None)
        if move is None:
            return
        yield move


def _known(value: torch.Tensor) -> float | None:
    return value.item() if value.isfinite() else None
