"""`Relocator`: the paper's Algo. 1 around a training loop. Observe, reward, prune, allocate."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel, send_to_device
from torch import nn

from ..model import ProVPTModel
from ..modes import fixed_randomness, in_eval_mode
from ..prompts import Observation, moments_of
from .allocation import Choice, Situation, make_policy
from .config import RelocationConfig
from .idleness import Idleness, IdlenessWindow
from .parallel import agreed, num_processes, refuse_wrapper, reshard, summed, whole, write_row
from .serialization import from_json, to_json


logger = logging.getLogger(__name__)

# Optimizer states that are running averages of gradients, and those of their squares or sizes. Others (iterates, step
# sizes, quantised codes) mean something else by 0 or by a mean.
_FIRST_MOMENTS = frozenset(("exp_avg", "momentum_buffer", "grad_avg"))
_SECOND_MOMENTS = frozenset(("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "sum"))


@dataclass
class Relocation:
    """The record of one relocation, plain Python values.

    Args:
        epoch: Epochs (or periods of `relocate_every` steps) observed before the move.
        prompt: k*, index of the prompt that moved. None if nothing could be decided, see `note`.
        from_block: Block it was pruned from, 1 … L, or 0 if it came from the reserve.
        block: a*, block it was given to, 1 … L, or 0 if it was pruned for good.
        idleness: Its score when it was pruned, in loss units. None for a prompt from the reserve.
        idleness_stderr: Standard error of that score over images, or of an exact score over batches. None where there
            are fewer than two.
        block_idleness: Mean score of each block's prompts at that time, L numbers; None where there are none.
        loss_before: Mean loss of the epoch before the move, on training images or on the score batches.
        loss_after: The same of the epoch after the move; None until it is known.
        reward: What the policy learned from the move, in loss units; None until it is known.
        policy: Diagnostics of the policy's update that this reward set off, if it did.
        note: Why nothing was decided or learned, if so.
    """

    epoch: int
    prompt: int | None = None
    from_block: int | None = None
    block: int | None = None
    idleness: float | None = None
    idleness_stderr: float | None = None
    block_idleness: list[float | None] = field(default_factory=list)
    loss_before: float | None = None
    loss_after: float | None = None
    reward: float | None = None
    policy: dict[str, float] = field(default_factory=dict)
    note: str | None = None


@dataclass
class _Pending:
    """A move whose reward is not known yet."""

    relocation: Relocation
    choice: Choice


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no number for what is not finite."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class Relocator:
    """Relocates the prompts of a PROVPT model while it trains, in a training loop of one's own.

    With the Hugging Face Trainer use [`~provpt_peft.RelocationTrainerCallback`], which calls this class.

    Args:
        model: A model with a PROVPT adapter, as `get_peft_model` returned it, or a wrapper of it. The adapter that is
            active now is the one whose prompts move.
        config: When, which and where to.
        optimizer: The optimizer of the prompts. Given, the moments of a prompt that moves become those of a prompt
            that is new in its block, where they are those of PyTorch's own optimizers.
        score_batches: Batches to measure scores and losses on, in eval mode before each relocation, in place of the
            training steps; for example held-out images. They are iterated over each time.
        compute_loss: The mean loss of the model on a score batch; by default `model(**batch).loss`.

    Raises:
        ValueError: If the model has no PROVPT adapter, or is wrapped for several devices in a way that hides its
            prompts or scores. DistributedDataParallel and FSDP version 2 are supported. If its prompts are not
            trained. Or if the config asks for exact scores and there are no score batches, or for prompts of a reserve
            and there is none.

    Example:
        ```python
        >>> relocator = Relocator(model, RelocationConfig(), optimizer)
        >>> for epoch in range(epochs):
        ...     relocator.relocate(progress=epoch / epochs)
        ...     for batch in loader:
        ...         loss = model(**batch).loss
        ...         loss.backward()
        ...         relocator.record_step(loss)
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
        score_batches: Iterable[dict[str, Any]] | None = None,
        compute_loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    ) -> None:
        tuner = next((module for module in model.modules() if isinstance(module, ProVPTModel)), None)
        if tuner is None:
            raise ValueError(
                f"Relocation needs a model with a PROVPT adapter, got {type(model).__name__}. "
                "Wrap it first: get_peft_model(model, ProVPTConfig(...))."
            )
        if tuner.bank.shallow.intersection(tuner.active_adapters):
            raise ValueError(
                "Relocation needs prompts that can move, but those of VPT-Shallow stay at the first block. Make the "
                "adapter with `shallow=False`."
            )
        for module in model.modules():
            refuse_wrapper(type(module).__name__)
        self.model = model
        self.tuner = tuner
        self.config = config if config is not None else RelocationConfig()
        if score_batches is None and (self.config.idleness == "exact" or self.config.screen):
            raise ValueError(
                '`idleness="exact"` and `screen` measure exact scores on batches of their own, but none were given. '
                "Pass `score_batches` to the `Relocator`; for the callback, set `score_images` above 0 or pass "
                "`score_dataset`."
            )
        self.optimizer = optimizer
        self.score_batches = score_batches
        self.compute_loss = compute_loss or (lambda model, batch: model(**batch).loss)
        self.adapter_name = tuner.active_adapters[0]
        self._check_adapter()
        self.history: list[Relocation] = []
        self.metrics: dict[str, float] = {}
        self.epoch = 0
        self.generator = torch.Generator().manual_seed(self.config.seed)
        self.policy = make_policy(self.config.allocator, tuner.num_blocks, self.config.ppo, self.generator)
        num_prompts = len(self.tuner.prompts(self.adapter_name))
        # Norms and random numbers only choose the prompt; the score beside them is the default one.
        observed = self.config.idleness if self.config.idleness in ("gate", "taylor") else "fisher"
        self._observation = Observation(observed, self.adapter_name, num_prompts)
        self.window = IdlenessWindow(num_prompts, curvature=0.5 if observed == "fisher" else 0.0)
        # Sum of the steps' losses, number of steps.
        self._loss = torch.zeros(2, dtype=torch.float64)
        self._pending: list[_Pending] = []
        # Steps since the last relocation.
        self._step = 0
        self._turns_without_steps = 0
        self._observe_next_step()

    def _check_adapter(self) -> None:
        prompts = self.tuner.prompts(self.adapter_name)
        stepped = any(parameter is prompts for parameter in self._stepped_parameters())
        if not (prompts.requires_grad and stepped):
            where = "are not in the optimizer" if prompts.requires_grad else "are frozen"
            raise ValueError(
                f"Relocation needs prompts that are trained, but those of the adapter {self.adapter_name!r} {where}. "
                "Load an adapter with `is_trainable=True`, and make the optimizer after it, of all parameters with "
                "`requires_grad`."
            )
        distributed = (self.tuner.prompt_blocks(self.adapter_name) != 0).all()
        if self.config.adjust == "add" and distributed and not self.tuner.peft_config[self.adapter_name].reserve:
            raise ValueError(
                '`adjust="add"` gives the prompts of a reserve to blocks, but the adapter has none. Make it with '
                "`ProVPTConfig(num_prompts=…, reserve=…)`."
            )

    def _stepped_parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps, or all parameters where it was not given."""
        groups = [{"params": self.tuner.parameters()}] if self.optimizer is None else self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    # ---- while training ---------------------------------------------------------------------------------------------

    def record_step(self, loss: torch.Tensor | float | None = None, *, loss_scale: float = 1.0) -> None:
        """Take in what the backward passes of one optimizer step have reported. Call it before `optimizer.step()`.

        Moves nothing. Gradient accumulation, clipping and `zero_grad` do not matter to it. A step that a gradient
        scaler is about to skip because of an overflow counts for nothing, nor does one of another adapter. While
        accelerate's `accumulate` holds the optimizer back, only the loss is taken in.

        Args:
            loss: The step's loss, the mean over its images, not scaled. Without it, call `record_loss`.
            loss_scale: The factor the loss was multiplied by before backward, e.g. `scaler.get_scale()`. 1.0 stands
                for no scaler: what is not finite is then noted in `history`.
        """
        if self.tuner.bank.enabled_adapter != self.adapter_name:
            return
        accumulation = getattr(self.optimizer, "gradient_state", None)
        held_back = accumulation is not None and not accumulation.sync_gradients
        if not held_back and not self._take_moments(loss_scale):
            return
        if loss is not None:
            self.record_loss(loss.item() if isinstance(loss, torch.Tensor) else loss, steps=1)

    def _take_moments(self, loss_scale: float) -> bool:
        """Take in the moments of an optimizer step, unless a scaler skips it. Returns whether it is made."""
        moments = self._observation.take()
        self._step += 1
        self._observe_next_step()
        if loss_scale != 1.0 and self._overflowed(moments):
            return False
        if moments is not None:
            self.window.add_step(moments, loss_scale)
        return True

    def _observe_next_step(self) -> None:
        """Let the blocks report in the next optimizer step, or not."""
        scored = self.score_batches is None and self._step % self.config.score_every == 0
        self.tuner.bank.observation = self._observation if scored else None

    def _overflowed(self, moments: torch.Tensor | None) -> bool:
        """Whether a scaler skips the step. It asks the gradients, and so has this: an overflow in the head or in
        another process leaves the moments of this process finite. Where the moments alone overflow, the step is made
        but cannot be scored."""
        gradients = [parameter.grad for parameter in self._stepped_parameters()]
        # The moments last: they differ between processes, which have to gather the same gradients.
        return any(tensor is not None and not whole(tensor.isfinite().all()) for tensor in (*gradients, moments))

    def record_loss(self, loss: float, steps: int) -> None:
        """Take in the mean training loss of some optimizer steps."""
        self._loss += torch.tensor([loss * steps, steps], dtype=torch.float64)

    def relocate(self, progress: float = 0.0) -> list[Relocation]:
        """Reward the last moves, prune the most idle prompts and allocate them. Call it before each epoch.

        Args:
            progress: The share of training that is done, 0 … 1. Only `settle` looks at it.

        Returns:
            The records of the moves made, empty where nothing moved. `history` keeps them all.
        """
        return self._turn(move=progress < 1.0 - self.config.settle)

    def finish(self) -> None:
        """Learn the reward of the last moves, without a further one, and stop observing. Call it after training."""
        self._turn(move=False)
        if self.tuner.bank.observation is self._observation:
            self.tuner.bank.observation = None

    # ---- Algo. 1 ----------------------------------------------------------------------------------------------------

    def _turn(self, move: bool) -> list[Relocation]:
        self.metrics = {}
        sums = self._gather()
        if sums is None:
            return []
        self.epoch += 1
        moves = self._observe_and_move(sums, move)
        self._remember()
        return moves

    def _observe_and_move(self, sums: torch.Tensor, move: bool) -> list[Relocation]:
        # Pruning for good, strategies (A) and (B) of Tab. 3, is done once.
        done = self.config.adjust == "prune" and any(relocation.block == 0 for relocation in self.history)
        move = move and self.epoch >= self.config.warmup_epochs and not done
        if not (move or self._pending):
            return []
        idleness, loss = self._scores(sums) if self.score_batches is None else self.measure(self.score_batches)
        if not (idleness.is_finite() and math.isfinite(loss)):
            self._note_not_finite()
            return []
        self._reward(idleness, loss)
        means = self._block_means(idleness)
        moves = []
        if move:
            moves = self._prune(idleness, loss) if self.config.adjust == "prune" else self._relocate(idleness, loss)
        for record in moves:
            record.block_idleness = means
        self.history += moves
        if moves:
            first = moves[0]
            details = {
                "prompt": first.prompt,
                "from_block": first.from_block,
                "to_block": first.block,
                "idleness": first.idleness,
            }
            self.metrics |= {"moves": len(moves)} | {k: v for k, v in details.items() if v is not None}
        return moves

    def _block_means(self, idleness: Idleness) -> list[float | None]:
        blocks = self.tuner.prompt_blocks(self.adapter_name).cpu()
        means = [idleness.score[blocks == block].mean().item() for block in range(1, self.tuner.num_blocks + 1)]
        return [None if math.isnan(mean) else mean for mean in means]

    def _remember(self) -> None:
        """Leave a record of the training in the adapter's config, which is saved with it."""
        config = self.tuner.peft_config[self.adapter_name]
        config.training = (config.training or {}) | {
            "relocation": asdict(self.config),
            "epochs": self.epoch,
            "history": [_finite(asdict(relocation)) for relocation in self.history],
        }

    def _gather(self) -> torch.Tensor | None:
        """The moments and the loss of the steps since the last call, summed over all processes: the moments'
        elements, the losses' sum, the number of steps. None if nothing was trained."""
        sums = self._summed()
        trained = self._step > 0
        self.window.clear()
        self._loss.zero_()
        self._step = 0
        self._observe_next_step()
        scored, steps = sums[:-2].view_as(self.window.sums)[-1].any(), sums[-1].item()
        if self.score_batches is not None:
            if trained or steps:
                return sums
            self._warn_without_steps()
            return None
        if not scored:
            return None
        if not steps:
            raise RuntimeError(
                "Relocation needs the training loss beside the scores, but none was recorded. "
                "Call `record_step(loss)`, or `record_loss` before `relocate`."
            )
        return sums

    def _summed(self) -> torch.Tensor:
        """The moments' elements and the losses' sum and number, of all processes together."""
        return summed(torch.cat([self.window.sums.flatten(), self._loss]), self._device)

    def _warn_without_steps(self) -> None:
        """The first `relocate` comes before the first step. Scores of training steps have a warning of their own."""
        self._turns_without_steps += 1
        if self._turns_without_steps == 2 and self.epoch == 0:
            logger.warning(
                "Nothing moves: `relocate` was called twice, but no training step was recorded. Call "
                "`record_step(loss)` after each `loss.backward()`."
            )

    def pool(self) -> None:
        """Give each process the mean of what all have recorded since the last relocation.

        The sums over processes stay as they are, and `state_dict` is the same in all of them then, so that what the
        first one saves fits each. All processes have to call this.
        """
        mean = self._summed() / num_processes()
        self.window.sums.copy_(mean[:-2].view_as(self.window.sums))
        self._loss.copy_(mean[-2:])

    def _scores(self, sums: torch.Tensor) -> tuple[Idleness, float]:
        """Scores and mean loss of training steps."""
        moments, (loss_sum, steps) = sums[:-2].view_as(self.window.sums), sums[-2:].tolist()
        # A prompt that was undistributed by hand since it was scored is in no block that it could be pruned from.
        moments[:, self.tuner.prompt_blocks(self.adapter_name).cpu() == 0] = 0.0
        return self.window.scores(moments), loss_sum / steps

    def measure(self, batches: Iterable[dict[str, Any]]) -> tuple[Idleness, float]:
        """Scores and mean loss on batches, in eval mode, the same in all processes."""
        # Without a wrapper, which would wait for a backward pass, and not compiled for eval mode.
        model = extract_model_from_parallel(self.model, keep_torch_compile=False)
        num_prompts = len(self.tuner.prompts(self.adapter_name))
        window, exact = IdlenessWindow(num_prompts, self.window.curvature), IdlenessWindow(num_prompts)
        try:
            with in_eval_mode(model):
                if self.config.idleness == "exact":
                    removed = (self.tuner.prompt_blocks(self.adapter_name) != 0).nonzero()[:, 0].tolist()
                    loss = self._evaluate(batches, lambda batch: self._remove_each(model, batch, removed, exact))
                    return self._exact(exact), loss
                loss = self._evaluate(batches, lambda batch: self._differentiate(model, batch, window))
                idleness = window.scores(agreed(window.sums, self._device))
                if self.config.screen and idleness.is_finite():
                    removed = self.ranking(idleness)[: self.config.screen]
                    self._evaluate(batches, lambda batch: self._remove_each(model, batch, removed, exact))
                    measured = self._exact(exact)
                    idleness.score[removed] = measured.score[removed]
                    idleness.stderr[removed] = measured.stderr[removed]
                    idleness.exact[removed] = True
                return idleness, loss
        finally:
            self.tuner.bank.observation = None

    def _exact(self, window: IdlenessWindow) -> Idleness:
        """Scores of prompts that were removed. Their standard errors are over batches."""
        scores = window.scores(agreed(window.sums, self._device))
        asked = self.config.significance > 0.0 and self.config.trigger != "always"
        if asked and scores.images.max() < 2:
            raise ValueError(
                f"`significance={self.config.significance:g}` asks for standard errors, which exact scores have over "
                "batches, but there is one batch. Give at least two score batches (the callback takes "
                "`per_device_eval_batch_size` images for one), or set `significance=0.0`."
            )
        return scores

    def _evaluate(self, batches: Iterable[dict[str, Any]], loss_of: Callable[[dict[str, Any]], float]) -> float:
        """The mean over batches of a function that returns a batch's loss."""
        # Augmented images are the same each time, and those of training are what they were.
        with fixed_randomness(self._device):
            losses = [loss_of(send_to_device(batch, self._device)) for batch in batches]
        if not losses:
            raise ValueError("Scores are measured on the score batches, but there are none. Give at least one batch.")
        return agreed(torch.tensor([sum(losses) / len(losses)], dtype=torch.float64), self._device).item()

    @property
    def _device(self) -> torch.device:
        return self.tuner.prompts(self.adapter_name).device

    def _loss_on(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """The loss on a score batch. One that is random, such as Mask2Former's on sampled points, is the same each
        time, so that it can be compared, and leaves the generators of training alone."""
        with fixed_randomness(self._device):
            return self.compute_loss(model, batch)

    def _differentiate(self, model: nn.Module, batch: dict[str, Any], window: IdlenessWindow) -> float:
        """Add a batch's first-order scores to the window, without touching the parameters' gradients."""
        self.tuner.bank.observation = self._observation
        with torch.enable_grad():
            loss = self._loss_on(model, batch)
            self._observation.take()
            (moments,) = torch.autograd.grad(loss, [self._observation.moments])
        window.add_step(moments)
        return loss.item()

    @torch.no_grad()
    def _remove_each(
        self, model: nn.Module, batch: dict[str, Any], prompts: list[int], window: IdlenessWindow
    ) -> float:
        """Add the exact scores, Eq. 4, of some prompts on a batch to the window: a forward pass for each, and one with
        all prompts. Their spread is over batches, since only the mean loss of a batch is known."""
        loss = self._loss_on(model, batch).item()
        blocks = self.tuner.prompt_blocks(self.adapter_name).tolist()
        scores = []
        for prompt in prompts:
            self.tuner.move_prompt(prompt, 0, self.adapter_name)
            try:
                scores.append(loss - self._loss_on(model, batch).item())
            finally:
                self.tuner.move_prompt(prompt, blocks[prompt], self.adapter_name)
        moments = torch.zeros_like(window.sums)
        moments[:, prompts] = moments_of(torch.tensor([scores], dtype=torch.float64))
        window.add_step(moments)
        return loss

    def _note_not_finite(self) -> None:
        note = "The training loss or its gradient was not finite: no prompt was moved and no reward was learned."
        logger.warning("%s (epoch %d)", note, self.epoch)
        for pending in self._pending:
            pending.relocation.note = note
        self._pending = []
        self.history.append(Relocation(epoch=self.epoch, note=note))

    def _reward(self, idleness: Idleness, loss: float) -> None:
        """Let the policy learn from the last moves."""
        rewards = []
        for pending in self._pending:
            relocation = pending.relocation
            assert relocation.prompt is not None
            assert relocation.loss_before is not None
            relocation.loss_after = loss
            if self.config.reward == "paper":
                # Eq. 8, with the score of the prompt that was moved.
                reward = relocation.loss_before - loss - (relocation.idleness or 0.0)
            else:
                # The loss without the moved prompt minus the loss with it.
                reward = -idleness.score[relocation.prompt].item()
            if math.isnan(reward):
                relocation.note = "The moved prompt has no score at its new block: no reward was learned."
                continue
            relocation.reward = reward
            relocation.policy = self.policy.learn(pending.choice, reward)
            rewards.append(reward)
            self.metrics |= relocation.policy
        self._pending = []
        if rewards:
            self.metrics["reward"] = sum(rewards) / len(rewards)

    def _relocate(self, idleness: Idleness, loss: float) -> list[Relocation]:
        """Move up to `prompts_per_relocation` prompts, each with its own state and choice."""
        scores = idleness.score.clone()
        moves: list[Relocation] = []
        newcomers: set[int] = set()
        for candidate in self._candidates(idleness):
            blocks = self.tuner.prompt_blocks(self.adapter_name).cpu()
            situation = Situation(scores, blocks, self.tuner.num_blocks, candidate)
            choice = self.policy.choose(situation)
            prompt = candidate
            if prompt is None:
                assert choice.source is not None
                residents = set((blocks == choice.source).nonzero()[:, 0].tolist()) - {move.prompt for move in moves}
                if not residents:
                    continue
                drawn = torch.randint(len(residents), (1,), generator=self.generator)
                prompt = sorted(residents)[int(drawn)]
            # A prompt of the reserve earns nothing where it is.
            elif (
                self.config.trigger == "opportunity"
                and blocks[prompt] != 0
                and not self._pays(prompt, choice.block, situation, idleness)
            ):
                continue
            moves.append(self._move(prompt, choice, blocks, idleness, loss, newcomers))
            if choice.block != blocks[prompt]:
                scores[prompt] = math.nan  # of another block
                newcomers.add(prompt)
        return moves

    def _candidates(self, idleness: Idleness) -> Sequence[int | None]:
        """The prompts that may move now; None leaves the choice to the policy."""
        count = self.config.prompts_per_relocation
        if self.config.adjust == "add":
            blocks = self.tuner.prompt_blocks(self.adapter_name).tolist()
            return [prompt for prompt, block in enumerate(blocks) if block == 0][:count]
        if self.policy.chooses_source:
            return [None] * count
        candidates = []
        # Norms and random numbers have no sign to decide by.
        asks = self.config.trigger == "positive" and self.config.idleness not in ("norm", "random")
        for prompt in self.ranking(idleness)[:count]:
            if asks and not idleness.stands_out(prompt, self.config.significance):
                break
            candidates.append(prompt)
        return candidates

    def ranking(self, idleness: Idleness) -> list[int]:
        """The distributed prompts, those to prune first."""
        ranking = idleness.ranking()
        if self.config.idleness == "norm":
            norms = whole(self.tuner.prompts(self.adapter_name)).detach().norm(dim=1).tolist()
            return sorted(ranking, key=norms.__getitem__)
        if self.config.idleness == "random":
            return [ranking[k] for k in torch.randperm(len(ranking), generator=self.generator).tolist()]
        return ranking

    def _pays(self, prompt: int, block: int, situation: Situation, idleness: Idleness) -> bool:
        """Whether the prompts of a block earn more on average than a prompt does where it is, by `significance`
        standard errors of the latter. For a block without prompts, the average of all blocks stands in."""
        worth = situation.worth()
        expected = worth[block - 1] if worth[block - 1].isfinite() else worth.nanmean()
        return idleness.stands_out(prompt, self.config.significance, elsewhere=expected.item())

    def _move(
        self,
        prompt: int,
        choice: Choice,
        blocks: torch.Tensor,
        idleness: Idleness,
        loss: float,
        newcomers: Iterable[int],
    ) -> Relocation:
        """Give a prompt to the block that was chosen."""
        relocation = self._record(prompt, int(blocks[prompt]), choice.block, idleness, loss)
        if choice.block != relocation.from_block:
            self.place(prompt, choice.block, idleness, newcomers)
        self._pending.append(_Pending(relocation, choice))
        return relocation

    def _prune(self, idleness: Idleness, loss: float) -> list[Relocation]:
        """Take the most idle prompts out, for good."""
        ranking = self.ranking(idleness)
        blocks = self.tuner.prompt_blocks(self.adapter_name).tolist()
        pruned = ranking[: round(self.config.prune_share * len(ranking))]
        for prompt in pruned:
            self.tuner.move_prompt(prompt, 0, self.adapter_name)
        return [self._record(prompt, blocks[prompt], 0, idleness, loss) for prompt in pruned]

    def _record(self, prompt: int, source: int, block: int, idleness: Idleness, loss: float) -> Relocation:
        scored = source != 0
        stderr = idleness.stderr[prompt].item()
        return Relocation(
            epoch=self.epoch,
            prompt=prompt,
            from_block=source,
            block=block,
            idleness=idleness.score[prompt].item() if scored else None,
            idleness_stderr=stderr if scored and not math.isnan(stderr) else None,
            loss_before=loss,
        )

    @torch.no_grad()
    def place(self, prompt: int, block: int, idleness: Idleness, newcomers: Iterable[int] = ()) -> None:
        """Move a prompt and let it start from the config's `start`. `relocate` does this with what it chooses.

        The mean of the residents changes the loss less than the median prompt's removal does, and learns at its
        neighbours' rate (see docs/relocation.md for the measurement). The reference code scales the vector by 1e-3
        instead, which LayerNorm undoes. Where there is nothing to copy, the prompt keeps its vector, and so it does
        where it would be the mean of one or start as another that has just come to the block, since copies would stay
        alike. The optimizer's moments for the row belong to the old place: first moments become 0, second ones the
        mean of the residents', or of all prompts in blocks where there are none. Were they 0 as well, Adam would step
        up to 6.5 times too far, since its bias correction counts the steps of all rows alike.

        Args:
            prompt: k*.
            block: a*, another block than the prompt's.
            idleness: The scores, which tell the block's best prompt.
            newcomers: Prompts that have moved since the last training step.
        """
        reshard(self.model)
        prompts = self.tuner.prompts(self.adapter_name)
        blocks = self.tuner.prompt_blocks(self.adapter_name).cpu()
        residents = (blocks == block).nonzero()[:, 0]
        distributed = (blocks != 0).nonzero()[:, 0]
        first = not set(newcomers).intersection(residents.tolist())
        self.tuner.move_prompt(prompt, block, self.adapter_name)
        start = self.config.start
        rows = whole(prompts)
        if start == "mean" and first and len(residents) >= 2:
            write_row(prompts, prompt, rows[residents.to(rows.device)].mean(dim=0))
        elif start == "best" and first and len(residents) >= 1:
            best = residents[idleness.score[residents].nan_to_num(nan=torch.inf).argmin()]
            write_row(prompts, prompt, rows[best].clone())
        elif start == "fresh":
            bound = self.tuner.bank.bound
            fresh = torch.empty(rows.shape[1]).uniform_(-bound, bound, generator=self.generator)
            write_row(prompts, prompt, fresh.to(rows))
        if self.optimizer is None:
            return
        for name, moment in self.optimizer.state.get(prompts, {}).items():
            if name not in _FIRST_MOMENTS | _SECOND_MOMENTS or moment.shape != prompts.shape:
                continue
            rows = whole(moment)
            if name in _FIRST_MOMENTS:
                write_row(moment, prompt, torch.zeros_like(rows[prompt]))
            elif len(peers := residents if len(residents) else distributed):
                write_row(moment, prompt, rows[peers.to(rows.device)].mean(dim=0))

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, JSON-able: policy, scores so far, pending move, history, generator.

        With several processes of which one saves, call `pool` in all of them before.
        """
        return to_json(
            {
                "num_prompts": self.window.sums.shape[1],
                "num_blocks": self.tuner.num_blocks,
                "epoch": self.epoch,
                "window": self.window.sums,
                "loss": self._loss,
                "history": [asdict(relocation) for relocation in self.history],
                "pending": [
                    {"relocation": self.history.index(pending.relocation), "choice": asdict(pending.choice)}
                    for pending in self._pending
                ],
                "step": self._step,
                "policy": self.policy.state_dict(),
                "generator": self.generator.get_state(),
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            ValueError: If the state belongs to an adapter with another number of prompts or blocks.
        """
        state = from_json(state)
        saved = state["num_prompts"], state["num_blocks"]
        present = self.window.sums.shape[1], self.tuner.num_blocks
        if saved != present:
            raise ValueError(
                f"The relocator's state was saved for {saved[0]} prompts in {saved[1]} blocks, but the model has "
                f"{present[0]} prompts in {present[1]} blocks. Resume with the config that the run began with."
            )
        self.epoch = state["epoch"]
        self.window.sums.copy_(state["window"])
        self._loss.copy_(state["loss"])
        self.history = [Relocation(**record) for record in state["history"]]
        self._pending = [
            _Pending(self.history[pending["relocation"]], Choice(**pending["choice"])) for pending in state["pending"]
        ]
        self._step = state["step"]
        self._observe_next_step()
        self.policy.load_state_dict(state["policy"])
        self.generator.set_state(state["generator"])
        self._remember()
