"""Mixed batches, in which each image has its own adapter: which prompts each image sees in each block.

Legend: B images, S prompts in a block of all adapters in the batch, n prompts of the adapter with most of these.
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
    """The prompts that the images of a mixed batch see in one block."""

    adapters: dict[str, Tensor]  # adapters with prompts in the block, and the rows of these prompts
    prompts: Tensor  # (S, D): the prompts of all these adapters
    index: Tensor  # (B, n): each image's prompts among the S
    hidden: Tensor | None  # (B, n): True where a row of `index` is only padded; None if nowhere


class MixedBatch:
    """The prompts that each image of a batch sees, during one forward pass.

    Args:
        names: The adapter of each image, or `"__base__"`.
        prompts: The prompts of each adapter, (N, D).
        rows: For each adapter and block, 0 … L, the indices (n,) of its prompts there, or None.
    """

    def __init__(
        self, names: Sequence[str], prompts: Mapping[str, Tensor], rows: Mapping[str, Sequence[Tensor | None]]
    ) -> None:
        self.names = list(names)
        # What a windowed block last saw in this pass. Its own count is that of any thread.
        self.images = len(self.names)
        blocks = zip(*rows.values(), strict=True)
        self._blocks = [self._seen(dict(zip(rows, of_block, strict=True)), prompts) for of_block in blocks]

    @torch.compiler.disable  # a graph that compares the number of images is for that number only
    def check(self, images: int) -> None:
        """Raise a ValueError if the vision model sees another number of images than there are names."""
        if images != len(self.names):
            raise ValueError(
                "`adapter_names` must name an adapter for each image that the vision model sees, got "
                f"{len(self.names)} names for {images} images. If a sample has several images, repeat its name."
            )

    def of_block(self, number: int) -> SeenPrompts | None:
        """The prompts that the images see in a block, 1 … L. None if no image sees any."""
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
