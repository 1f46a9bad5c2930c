"""Idleness: how much better the loss would be without a prompt (Eqs. 3 to 6 of the paper).

This module takes tensors and knows nothing of models. Legend: N prompts, B images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..prompts import POWERS


@dataclass
class Idleness:
    """Scores of all prompts over a window of training.

    Args:
        score: I_k in loss units, float64 of shape (N,): the loss with the prompt minus the loss without it, so above
            0 means idle. NaN for a prompt that no image has seen, because it is undistributed.
        stderr: Standard error of the score over images, float64 of shape (N,). NaN with fewer than two images.
        images: The number of images that the prompt has seen, float64 of shape (N,).
        exact: Whether the score is that of removing the prompt, bool of shape (N,). If it is for some, they are the
            ones that were estimated as the most idle, and come before the others.
    """

    score: torch.Tensor
    stderr: torch.Tensor
    images: torch.Tensor
    exact: torch.Tensor

    def is_finite(self) -> bool:
        """Whether every prompt that has seen images has a finite score."""
        return bool(self.score[self.images > 0].isfinite().all())

    def ranking(self) -> list[int]:
        """The prompts that have a score, the most idle one (k* of Eq. 3) first."""
        order = self.score.argsort(descending=True, stable=True)
        order = order[self.images[order] > 0]
        exact = self.exact[order]
        return torch.cat([order[exact], order[~exact]]).tolist()

    def stands_out(self, prompt: int, significance: float, elsewhere: float = 0.0) -> bool:
        """Whether a prompt's score is above 0 by more than `significance` of its standard errors.

        Args:
            prompt: Index of the prompt.
            significance: Standard errors; with 0.0 they are not asked for.
            elsewhere: What the prompt would earn elsewhere, in loss units. Added to the score: what a move gains.
        """
        score = self.score[prompt].item() + elsewhere
        if significance == 0.0:
            return score > 0.0
        return score > significance * self.stderr[prompt].item()


class IdlenessWindow:
    """Collects the moments that the blocks report, one optimizer step at a time, and turns them into scores.

    Args:
        num_prompts: N.
        curvature: Weight of the square of an image's score in its score to second order: 0.5 where the derivative is
            that of the loss with respect to the prompt's share in the block's output, 0.0 to first order. The loss of
            an image without the prompt is then L - s + s²/2 for a derivative s, with the squared gradient of the
            image's loss in the place of the second derivative, as in the empirical Fisher matrix.
    """

    def __init__(self, num_prompts: int, curvature: float = 0.0) -> None:
        self.curvature = curvature
        # Rows: sums of the 1st to 4th power, number, over all images since the last `clear`.
        self.sums = torch.zeros(POWERS + 1, num_prompts, dtype=torch.float64)

    def clear(self) -> None:
        """Forget everything collected so far."""
        self.sums.zero_()

    def add_step(self, moments: torch.Tensor, loss_scale: float = 1.0) -> None:
        """Add one optimizer step.

        The step's loss is a mean over its B images, so an image's share of the gradient is 1/B of the derivative of
        its own loss. Multiplying by B puts the images of all steps on one scale, whatever the micro-batches.

        Args:
            moments: (5, N): for each prompt the sums over the step's images of the gradient and of its 2nd to 4th
                power, and the number of images.
            loss_scale: The factor that the loss was multiplied by before backward.
        """
        *sums, images = moments.detach().to("cpu", torch.float64)
        scaled = [(images / loss_scale) ** power * total for power, total in enumerate(sums, start=1)]
        self.sums += torch.stack([*scaled, images])

    def scores(self, sums: torch.Tensor | None = None) -> Idleness:
        """The mean score over images and its standard error.

        Args:
            sums: Sums to use instead of this window's own, for example those of all processes added up.
        """
        *totals, images = self.sums if sums is None else sums
        first, second, third, fourth = (total / images for total in totals)
        mean = first - self.curvature * second
        mean_square = second - 2 * self.curvature * third + self.curvature**2 * fourth
        variance = (mean_square - mean.square()).clamp(min=0) * images / (images - 1)
        stderr = torch.where(images > 1, (variance / images).sqrt(), torch.nan)
        return Idleness(mean, stderr, images.clone(), exact=torch.zeros(len(mean), dtype=torch.bool))
