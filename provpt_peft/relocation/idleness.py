"""Idleness: how much better the loss would be without a prompt (Eqs. 3 to 6 of the paper).

This module takes tensors and knows nothing of models. Legend: N prompts, B images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Idleness:
    """Scores of all prompts over a window of training.

    Args:
        score: I_k in loss units, float64 of shape (N,): the loss with the prompt minus the loss without it, so above
            0 means idle. NaN for a prompt that no image has seen, because it is undistributed.
        stderr: Standard error of the score over images, float64 of shape (N,). NaN with fewer than two images.
        images: The number of images that the prompt has seen, float64 of shape (N,).
    """

    score: torch.Tensor
    stderr: torch.Tensor
    images: torch.Tensor

    def is_finite(self) -> bool:
        """Whether every prompt that has seen images has a finite score."""
        return bool(self.score[self.images > 0].isfinite().all())

    def most_idle(self) -> int:
        """k*: the index of the prompt with the highest score (Eq. 3)."""
        return int(torch.where(self.score.isnan(), -torch.inf, self.score).argmax())

    def stands_out(self, prompt: int, significance: float) -> bool:
        """Whether a prompt's score is above 0 by more than `significance` of its standard errors."""
        score = self.score[prompt].item()
        if significance == 0.0:
            return score > 0.0
        return score > significance * self.stderr[prompt].item()


class IdlenessWindow:
    """Collects the moments that the blocks report, one optimizer step at a time, and turns them into scores.

    Args:
        num_prompts: N.
    """

    def __init__(self, num_prompts: int) -> None:
        # Rows: sum, sum of squares, number, over all images since the last `clear`.
        self.sums = torch.zeros(3, num_prompts, dtype=torch.float64)

    def clear(self) -> None:
        """Forget everything collected so far."""
        self.sums.zero_()

    def add_step(self, moments: torch.Tensor) -> None:
        """Add one optimizer step.

        The step's loss is a mean over its B images, so an image's share of the gradient is 1/B of the derivative of
        its own loss. Multiplying by B puts the images of all steps on one scale, whatever the micro-batches.

        Args:
            moments: (3, N): for each prompt the sum over the step's images of the gradient, the sum of its square, and
                the number of images.
        """
        total, squares, images = moments.detach().to("cpu", torch.float64)
        self.sums += torch.stack([images * total, images.square() * squares, images])

    def scores(self, sums: torch.Tensor | None = None) -> Idleness:
        """The mean score over images and its standard error.

        Args:
            sums: Sums to use instead of this window's own, for example those of all processes added up.
        """
        total, squares, images = self.sums if sums is None else sums
        mean = total / images
        variance = (squares / images - mean.square()).clamp(min=0) * images / (images - 1)
        stderr = torch.where(images > 1, (variance / images).sqrt(), torch.nan)
        return Idleness(score=mean, stderr=stderr, images=images.clone())
