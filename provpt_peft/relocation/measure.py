"""The scores, and the passes over the score batches that they are computed from.

A score is a function that takes a [`Measurement`] and returns an [`Idleness`]. Add one here, with its name in `SCORES`
and in the config's `IDLENESS`, or pass it to `RelocationConfig(idleness=…)`.

Legend: N prompts, B images of all score batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from accelerate.utils import extract_model_from_parallel, send_to_device
from torch import nn

from ..evaluation import copy_of, fixed_randomness, images_in, in_eval_mode
from ..gates import Gates
from ..model import ProVPTModel
from .idleness import Idleness, to_inactivity, to_second_order
from .parallel import broadcast, reshard


T = TypeVar("T")
ComputeLoss = Callable[[nn.Module, Any], torch.Tensor]


class Measurement:
    """Measures the current model on the score batches, in eval mode. All processes get the same numbers.

    Parameters, their gradients and the random numbers of training stay the same. A random loss, such as Mask2Former's
    on sampled points, has the same value each time.

    Attributes:
        model, tuner, adapter_name: The unwrapped model, its tuner, and the adapter that is measured.
        batches: The score batches.
        compute_loss: The mean loss of the model on a batch.
        loss: The mean loss, None before the first pass.
    """

    def __init__(
        self,
        model: nn.Module,
        tuner: ProVPTModel,
        adapter_name: str,
        batches: Iterable[Any],
        compute_loss: ComputeLoss,
    ) -> None:
        # Unwrapped: a wrapper would wait for a backward pass, and a compiled model would compile again for eval mode.
        self.model = extract_model_from_parallel(model, keep_torch_compile=False)
        self.tuner = tuner
        self.adapter_name = adapter_name
        self.batches = batches
        self.compute_loss = compute_loss
        self.device = tuner.prompts(adapter_name).device
        self.loss: float | None = None

    def blocks(self) -> torch.Tensor:
        """d_k: the block of each prompt, int64 (N,) on the CPU."""
        return self.tuner.prompt_blocks(self.adapter_name).cpu()

    def gate_gradients(self, on: Literal["output", "vector"] = "output") -> torch.Tensor:
        """s: the derivative of each image's loss with respect to each prompt's gate, float64 (B, N).

        One forward and one backward pass. NaN for prompts that are in no block. See `gates.py`.
        """
        bank, num_prompts = self.tuner.bank, len(self.blocks())

        def of_batch(batch: Any) -> tuple[torch.Tensor, float, int]:
            bank.gates = gates = Gates(on, self.adapter_name, num_prompts)
            try:
                with torch.enable_grad():
                    loss = self._loss(batch)
                    return gates.gradients(loss).to("cpu", torch.float64), loss.item(), images_in(batch)
            finally:
                bank.gates = None

        gradients, losses, sizes = zip(*self._over_batches(of_batch), strict=True)
        self._take_loss(losses, sizes)
        found = broadcast(torch.cat(gradients), self.device)
        found[:, self.blocks() == 0] = torch.nan
        return found

    @torch.no_grad()
    def losses(self) -> torch.Tensor:
        """The loss on each score batch, float64 (batches,). One forward pass."""

        def of_batch(batch: Any) -> tuple[float, int]:
            return self._loss(batch).item(), images_in(batch)

        losses, sizes = zip(*self._over_batches(of_batch), strict=True)
        self._take_loss(losses, sizes)
        return broadcast(torch.tensor(losses, dtype=torch.float64, device="cpu"), self.device)

    def mean_loss(self) -> float:
        """The mean loss over the images of all score batches. One forward pass."""
        self.losses()
        assert self.loss is not None
        return self.loss

    def _over_batches(self, function: Callable[[Any], T]) -> list[T]:
        """The results of a function on each batch, in eval mode. Random augmentation is the same each time."""
        try:
            with in_eval_mode(self.model, self.tuner.checkpointing.modules), fixed_randomness(self.device):
                # Copies: a loss may change its batch in place, and these batches are used again.
                found = [function(send_to_device(copy_of(batch), self.device)) for batch in self.batches]
        finally:
            reshard(self.model)
        if not found:
            raise ValueError("Scores are measured on the score batches, but there are none. Give at least one batch.")
        return found

    def _loss(self, batch: Any) -> torch.Tensor:
        with fixed_randomness(self.device):
            loss: Any = self.compute_loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{loss!r:.80}"
            raise ValueError(
                f"`compute_loss` must return the mean loss of a batch, a tensor with one number, got {got}. The "
                "default, `model(**batch).loss`, is None if the batch has no labels."
            )
        return loss

    def _take_loss(self, losses: Sequence[float], sizes: Sequence[int]) -> None:
        """Set `loss` to the mean over images."""
        total = sum(loss * size for loss, size in zip(losses, sizes, strict=True))
        mean = torch.tensor(total / sum(sizes), dtype=torch.float64, device="cpu")
        self.loss = broadcast(mean, self.device).item()


Score = Callable[[Measurement], Idleness]


def activity(measurement: Measurement) -> Idleness:
    """How far below a small share of the mean activity a prompt's own is."""
    return Idleness.mean_of(to_inactivity(measurement.gate_gradients()))


def fisher(measurement: Measurement) -> Idleness:
    """Eq. 4 to second order in the prompt's contribution to its block's output."""
    return Idleness.mean_of(to_second_order(measurement.gate_gradients()))


def taylor(measurement: Measurement) -> Idleness:
    """Eq. 6 of the paper as printed: the product of a prompt's vector and its gradient."""
    return Idleness.mean_of(measurement.gate_gradients("vector"))


def exact(measurement: Measurement) -> Idleness:
    """Eq. 4 itself: the loss minus the loss without each prompt. N + 1 forward passes; errors over batches."""
    tuner, name, blocks = measurement.tuner, measurement.adapter_name, measurement.blocks()
    with_all, mean_loss = measurement.losses(), measurement.loss
    scores = torch.full((len(with_all), len(blocks)), torch.nan, dtype=torch.float64, device="cpu")
    for prompt in (blocks != 0).nonzero()[:, 0].tolist():
        tuner.move_prompt(prompt, 0, name)
        try:
            scores[:, prompt] = with_all - measurement.losses()
        finally:
            tuner.move_prompt(prompt, int(blocks[prompt]), name)
    measurement.loss = mean_loss  # of the model with all prompts
    return Idleness.mean_of(scores)


SCORES: dict[str, Score] = {"activity": activity, "fisher": fisher, "taylor": taylor, "exact": exact}
