"""Idleness: how much lower the loss would be without a prompt (paper, Eqs. 3 to 6).

Legend: N prompts, B images (or score batches).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Idleness:
    """Scores of all prompts.

    Args:
        score: I_k in loss units, float64 (N,): the loss with the prompt minus the loss without it, so above 0 means
            idle. NaN for a prompt that is in no block.
        stderr: The score's standard error over images, float64 (N,). NaN for fewer than two images.
    """

    score: torch.Tensor
    stderr: torch.Tensor

    @classmethod
    def mean_of(cls, scores: torch.Tensor) -> Idleness:
        """The mean over images of scores (B, N), and its standard error."""
        stderr = scores.std(dim=0, correction=1) / len(scores) ** 0.5 if len(scores) > 1 else scores[0] * torch.nan
        return cls(scores.mean(dim=0), stderr)

    def ranking(self) -> list[int]:
        """The prompts that have a score, the most idle one (k* of Eq. 3) first."""
        order = self.score.argsort(descending=True, stable=True)
        return order[self.score[order].isfinite()].tolist()


def to_second_order(derivatives: torch.Tensor) -> torch.Tensor:
    """Each image's loss minus its loss without a prompt, to second order: s - s²/2.

    The loss without the prompt is L - s + s²/2. The squared gradient of the image's own loss stands in for the second
    derivative, as in the empirical Fisher matrix.

    Args:
        derivatives: s, the derivative of each image's loss with respect to each prompt's gate, (B, N).
    """
    return derivatives - derivatives.square() / 2
