"""A batch whose images have adapters of their own: which prompts each image sees in each block.

Legend: B images, S prompts of all adapters of the batch in a block, n those of the adapter that has most there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .compiling import take_any_size


# PEFT's name for no adapter.
BASE = "__base__"


@dataclass(frozen=True)
class SeenPrompts:
    """What the images of a mixed batch see in a block."""

    adapters: dict[str, Tensor]  # that have prompts there, and the rows of these
    prompts: Tensor  # (S, D): those of all of them
    index: Tensor  # (B, n): each image's prompts among the S
    hidden: Tensor | None  # (B, n): those that only fill a row up; None if there are none


class MixedBatch:
    """What each image of a batch sees, while the batch is in the model.

    Args:
        names: The adapter of each image, or `"__base__"`.
        prompts: Those of each adapter, (N, D).
        rows: Of each adapter the prompts in each block, 0 … L, as indices (n,), or None.
    """

    def __init__(
        self, names: Sequence[str], prompts: Mapping[str, Tensor], rows: Mapping[str, Sequence[Tensor | None]]
    ) -> None:
        self.names = list(names)
        blocks = zip(*rows.values(), strict=True)
        self._blocks = [self._seen(dict(zip(rows, of_block, strict=True)), prompts) for of_block in blocks]

    def of_block(self, number: int) -> SeenPrompts | None:
        """What the images see in a block, 1 … L. None if there is no prompt for any of them."""
        return self._blocks[number] if self._blocks else None

    def _seen(self, rows: Mapping[str, Tensor | None], prompts: Mapping[str, Tensor]) -> SeenPrompts | None:
        there = {adapter: of for adapter, of in rows.items() if of is not None}
        if not there:
            return None
        counts = [len(of) for of in there.values()]
        firsts = dict(zip(there, itertools.accumulate(counts, initial=0), strict=False))
        count = torch.tensor([len(there.get(name, ())) for name in self.names])[:, None]  # (B, 1)
        first = torch.tensor([firsts.get(name, 0) for name in self.names])[:, None]
        places = torch.arange(max(counts))
        hidden = places >= count  # (B, n)
        index = first + torch.where(hidden, 0, places)
        of_all = torch.cat([prompts[adapter][of] for adapter, of in there.items()])
        index = index.to(of_all.device)
        seen = SeenPrompts(there, of_all, index, hidden.to(of_all.device) if hidden.any() else None)
        take_any_size(seen.prompts, 0)
        for of_images in (seen.index, seen.hidden):
            if of_images is not None:
                take_any_size(of_images, 1)
        return seen
