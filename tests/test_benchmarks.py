"""The statistics of the benchmarks, by hand."""

import pytest
import torch
from adjustments import variance_components


def test_variance_components():
    # Three blocks differ by 1, repeats by a constant: all of it is the blocks', and their variance is 1.
    assert variance_components(torch.tensor([[1.0, 2, 3], [5, 6, 7]])) == (1.0, 0.0)
    # The same difference with its sign turned: nothing is the blocks'. MS_rest = (1 + 0 + 1) * 2 / 2.
    assert variance_components(torch.tensor([[1.0, 2, 3], [3, 2, 1]])) == (0.0, 2.0)
    # Effects -1, 0, 1 and residuals ±0.5 in two of the blocks: MS_block = 2 * 2 / 2, MS_rest = 4 * 0.25 / 2.
    block, rest = variance_components(torch.tensor([[-1.5, 0.5, 1], [-0.5, -0.5, 1]]))
    assert (block, rest) == (pytest.approx((2 - 0.5) / 2), pytest.approx(0.5))
