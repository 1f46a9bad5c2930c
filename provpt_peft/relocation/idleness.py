"""Idleness: how well the model can do without a prompt (paper, Eqs. 3 to 6).

Legend: N prompts, B images (or score batches).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


# A prompt is idle if its activity is below this share of the mean activity.
IDLE_SHARE = 0.05


@dataclass
class Idleness:
    """Scores of all prompts.

    Args:
        score: I_k in loss units, float64 (N,); above 0 means idle. An estimate of Eq. 4, the loss with the prompt
            minus the loss without it, or of how far the prompt's influence is below a threshold. NaN for a prompt that
            is in no block.
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


def to_inactivity(derivatives: torch.Tensor) -> torch.Tensor:
    """`IDLE_SHARE` of the mean activity of all prompts, minus each prompt's activity on each image, in loss units.

    A prompt's activity on an image is |s|; its mean over images is the importance that Michel et al. (2019, Eq. 2)
    give an attention head. Gains and losses do not cancel in it, so the prompts above 0 hardly change the
    images' losses, on average, and the loss stays the same without them.

    Args:
        derivatives: s, the derivative of each image's loss with respect to each prompt's gate, (B, N). NaN for prompts
            in no block.
    """
    activity = derivatives.abs()
    return IDLE_SHARE * activity.nanmean() - activity


def to_second_order(derivatives: torch.Tensor) -> torch.Tensor:
    """Each image's loss minus its loss without a prompt, to second order: s - s²/2.

    The loss without the prompt is L - s + s²/2. The squared gradient of the image's own loss stands in for the second
    derivative, as in the empirical Fisher matrix.

    Args:
        derivatives: s, the derivative of each image's loss with respect to each prompt's gate, (B, N).
    """
    return derivatives - derivatives.square() / 2
