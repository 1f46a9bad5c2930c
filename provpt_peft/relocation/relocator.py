"""`Relocator`: the paper's Algo. 1 around a training loop. Observe, reward, prune, allocate."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ..model import ProVPTModel
from ..prompts import Observation
from .config import RelocationConfig
from .idleness import Idleness, IdlenessWindow
from .parallel import refuse_wrapper, reshard, whole, write_row
from .ppo import PPO, Choice, allocation_state
from .serialization import from_json, to_json


logger = logging.getLogger(__name__)

# Optimizer states that are running averages of gradients, and 0 at the start. Others (iterates, step sizes, quantised
# codes) mean something else by 0.
_MOMENTS = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum")
)


@dataclass
class Relocation:
    """The record of one relocation, plain Python values.

    Args:
        epoch: Epochs observed before the move.
        prompt: k*, index of the prompt that moved. None if nothing could be decided, see `note`.
        from_block: Block it was pruned from, 1 … L.
        block: a*, block it was given to, 1 … L.
        idleness: Its score when it was pruned, in loss units.
        idleness_stderr: Standard error of that score over images.
        loss_before: Mean training loss of the epoch before the move.
        loss_after: Mean training loss of the epoch after the move; None until it is known.
        reward: Eq. 8; None until it is known.
        policy: Diagnostics of the policy's update that this reward set off, if it did.
        note: Why nothing was decided or learned, if so.
    """

    epoch: int
    prompt: int | None = None
    from_block: int | None = None
    block: int | None = None
    idleness: float | None = None
    idleness_stderr: float | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    reward: float | None = None
    policy: dict[str, float] = field(default_factory=dict)
    note: str | None = None


@dataclass
class _Pending:
    """A move whose reward is not known yet."""

    relocation: Relocation
    state: torch.Tensor
    choice: Choice


class Relocator:
    """Relocates the prompts of a PROVPT model while it trains, in a training loop of one's own.

    With the Hugging Face Trainer use [`~provpt_peft.RelocationTrainerCallback`], which calls this class.

    Args:
        model: A model with a PROVPT adapter, as `get_peft_model` returned it, or a wrapper of it. The adapter that is
            active now is the one whose prompts move.
        config: When, which and where to.
        optimizer: The optimizer of the prompts. Given, the moments of a prompt that moves are reset, where they are
            those of PyTorch's own optimizers.

    Raises:
        ValueError: If the model has no PROVPT adapter, or is wrapped for several devices in a way that hides its
            prompts or scores. DistributedDataParallel and FSDP version 2 are supported.

    Example:
        ```python
        >>> relocator = Relocator(model, RelocationConfig(), optimizer)
        >>> for epoch in range(epochs):
        ...     relocator.relocate()
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
    ) -> None:
        tuner = next((module for module in model.modules() if isinstance(module, ProVPTModel)), None)
        if tuner is None:
            raise ValueError(
                f"Relocation needs a model with a PROVPT adapter, got {type(model).__name__}. "
                "Wrap it first: get_peft_model(model, ProVPTConfig(...))."
            )
        for module in model.modules():
            refuse_wrapper(type(module).__name__)
        self.model = model
        self.tuner = tuner
        self.config = config if config is not None else RelocationConfig()
        self.optimizer = optimizer
        self.adapter_name = tuner.active_adapters[0]
        self.history: list[Relocation] = []
        self.metrics: dict[str, float] = {}
        self.epoch = 0
        self.generator = torch.Generator().manual_seed(self.config.seed)
        self.policy = PPO(tuner.num_blocks, self.config.ppo, self.generator)
        num_prompts = len(self.tuner.prompts(self.adapter_name))
        self._window = IdlenessWindow(num_prompts)
        # Sum of the steps' losses, number of steps.
        self._loss = torch.zeros(2, dtype=torch.float64)
        self._pending: _Pending | None = None
        self._observation = Observation(self.config.idleness, self.adapter_name, num_prompts)
        tuner.bank.observation = self._observation

    # ---- while training ---------------------------------------------------------------------------------------------

    def record_step(self, loss: torch.Tensor | float | None = None, *, loss_scale: float = 1.0) -> None:
        """Take in what the backward passes of one optimizer step have reported. Call it before `optimizer.step()`.

        Moves nothing. Gradient accumulation, clipping and `zero_grad` do not matter to it. A step that a gradient
        scaler is about to skip because of an overflow counts for nothing.

        Args:
            loss: The step's loss, the mean over its images, not scaled. Without it, call `record_loss`.
            loss_scale: The factor the loss was multiplied by before backward, e.g. `scaler.get_scale()`. 1.0 stands
                for no scaler: what is not finite is then noted in `history`.
        """
        moments = self._observation.take()
        if loss_scale != 1.0:
            if self._overflowed(moments):
                return
            if moments is not None:
                # Sums of scores, of their squares, and numbers of images.
                powers = torch.tensor([[loss_scale], [loss_scale**2], [1.0]], dtype=torch.float64)
                moments = moments.to("cpu", torch.float64) / powers
        if moments is not None:
            self._window.add_step(moments)
        if loss is not None:
            self.record_loss(loss.item() if isinstance(loss, torch.Tensor) else loss, steps=1)

    def _overflowed(self, moments: torch.Tensor | None) -> bool:
        """Whether a scaler skips the step. It asks the gradients, and so has this: an overflow in the head or in
        another process leaves the moments of this process finite. Where the moments alone overflow, the step is made
        but cannot be scored."""
        groups = [{"params": self.tuner.parameters()}] if self.optimizer is None else self.optimizer.param_groups
        gradients = [parameter.grad for group in groups for parameter in group["params"]]
        # The moments last: they differ between processes, which have to gather the same gradients.
        return any(tensor is not None and not whole(tensor.isfinite().all()) for tensor in (*gradients, moments))

    def record_loss(self, loss: float, steps: int) -> None:
        """Take in the mean training loss of some optimizer steps."""
        self._loss += torch.tensor([loss * steps, steps], dtype=torch.float64)

    def relocate(self) -> list[Relocation]:
        """Reward the last move, prune the most idle prompt and allocate it. Call it before each epoch.

        Returns:
            The records of the moves made, empty where nothing moved. `history` keeps them all.
        """
        return self._turn(move=True)

    def finish(self) -> None:
        """Learn the reward of the last move, without a further one, and stop observing. Call it after training."""
        self._turn(move=False)
        if self.tuner.bank.observation is self._observation:
            self.tuner.bank.observation = None

    # ---- Algo. 1 ----------------------------------------------------------------------------------------------------

    def _turn(self, move: bool) -> list[Relocation]:
        self.metrics = {}
        idleness, loss = self._gather()
        if idleness is None:
            return []
        self.epoch += 1
        if not (idleness.is_finite() and math.isfinite(loss)):
            self._note_not_finite()
            return []
        self._reward(loss)
        if not move or self.epoch < self.config.warmup_epochs:
            return []
        prompt = idleness.most_idle()
        if not idleness.stands_out(prompt, self.config.significance):
            return []
        return [self._move(prompt, idleness, loss)]

    def _gather(self) -> tuple[Idleness | None, float]:
        """Scores and mean loss since the last call, over all processes. No scores if nothing was trained."""
        sums = torch.cat([self._window.sums.flatten(), self._loss])
        self._window.clear()
        self._loss.zero_()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            on_device = sums.to(self.tuner.prompts(self.adapter_name).device)
            torch.distributed.all_reduce(on_device)
            sums = on_device.cpu()
        moments, (loss_sum, steps) = sums[:-2].view(3, -1), sums[-2:].tolist()
        if not moments[2].any():
            return None, math.nan
        if not steps:
            raise RuntimeError(
                "Relocation needs the training loss beside the scores, but none was recorded. "
                "Call `record_step(loss)`, or `record_loss` before `relocate`."
            )
        # A prompt that was undistributed by hand since it was scored is in no block that it could be pruned from.
        moments[:, self.tuner.prompt_blocks(self.adapter_name).cpu() == 0] = 0.0
        return self._window.scores(moments), loss_sum / steps

    def _note_not_finite(self) -> None:
        note = "The training loss or its gradient was not finite: no prompt was moved and no reward was learned."
        logger.warning("%s (epoch %d)", note, self.epoch)
        if self._pending is not None:
            self._pending.relocation.note = note
            self._pending = None
        self.history.append(Relocation(epoch=self.epoch, note=note))

    def _reward(self, loss: float) -> None:
        """Eq. 8 for the last move: the loss before it minus the loss after it minus the score of the moved prompt."""
        if self._pending is None:
            return
        relocation, state, choice = self._pending.relocation, self._pending.state, self._pending.choice
        self._pending = None
        assert relocation.loss_before is not None
        assert relocation.idleness is not None
        relocation.loss_after = loss
        relocation.reward = relocation.loss_before - loss - relocation.idleness
        relocation.policy = self.policy.learn(state, choice, relocation.reward)
        self.metrics |= {"reward": relocation.reward, **relocation.policy}

    def _move(self, prompt: int, idleness: Idleness, loss: float) -> Relocation:
        """Prune a prompt and allocate it to the block that the policy chooses."""
        blocks = self.tuner.prompt_blocks(self.adapter_name).cpu()
        source = int(blocks[prompt])
        state = allocation_state(idleness.score, blocks, source, self.tuner.num_blocks)
        choice = self.policy.choose(state)
        relocation = Relocation(
            epoch=self.epoch,
            prompt=prompt,
            from_block=source,
            block=choice.block,
            idleness=idleness.score[prompt].item(),
            idleness_stderr=idleness.stderr[prompt].item(),
            loss_before=loss,
        )
        if choice.block != source:
            self._place(prompt, choice.block, residents=(blocks == choice.block).nonzero()[:, 0])
        self._pending = _Pending(relocation, state, choice)
        self.history.append(relocation)
        self.metrics |= {
            "prompt": prompt,
            "from_block": source,
            "to_block": choice.block,
            "idleness": idleness.score[prompt].item(),
        }
        return relocation

    @torch.no_grad()
    def _place(self, prompt: int, block: int, residents: torch.Tensor) -> None:
        """Move a prompt and let it start from the mean of the prompts that are there.

        The mean changes the loss less than the median prompt's removal does, and learns at its neighbours' rate (see
        docs/relocation.md for the measurement). The reference code scales the vector by 1e-3 instead, which LayerNorm
        undoes. With fewer than two residents the prompt keeps its vector, since a copy would stay one. The optimizer's
        moments for the row belong to the old place and are reset.

        Args:
            prompt: k*.
            block: a*, another block than the prompt's.
            residents: Indices of the prompts in that block.
        """
        reshard(self.model)
        prompts = self.tuner.prompts(self.adapter_name)
        self.tuner.move_prompt(prompt, block, self.adapter_name)
        if len(residents) >= 2:
            rows = whole(prompts)
            write_row(prompts, prompt, rows[residents.to(rows.device)].mean(dim=0))
        if self.optimizer is not None:
            for name, moment in self.optimizer.state.get(prompts, {}).items():
                if name in _MOMENTS and moment.is_floating_point() and moment.shape == prompts.shape:
                    write_row(moment, prompt, torch.zeros_like(whole(moment)[prompt]))

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, JSON-able: policy, scores so far, pending move, history, generator."""
        return to_json(
            {
                "num_prompts": self._window.sums.shape[1],
                "num_blocks": self.tuner.num_blocks,
                "epoch": self.epoch,
                "window": self._window.sums,
                "loss": self._loss,
                "history": [asdict(relocation) for relocation in self.history],
                "pending": self._pending and {"state": self._pending.state, "choice": asdict(self._pending.choice)},
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
        present = self._window.sums.shape[1], self.tuner.num_blocks
        if saved != present:
            raise ValueError(
                f"The relocator's state was saved for {saved[0]} prompts in {saved[1]} blocks, but the model has "
                f"{present[0]} prompts in {present[1]} blocks. Resume with the config that the run began with."
            )
        self.epoch = state["epoch"]
        self._window.sums.copy_(state["window"])
        self._loss.copy_(state["loss"])
        self.history = [Relocation(**record) for record in state["history"]]
        self._pending = None
        if state["pending"] is not None:
            pending = state["pending"]
            self._pending = _Pending(self.history[-1], pending["state"], Choice(**pending["choice"]))
        self.policy.load_state_dict(state["policy"])
        self.generator.set_state(state["generator"])
