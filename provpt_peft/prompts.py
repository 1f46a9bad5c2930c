"""The prompt bank: all prompts of an adapter in one parameter, their blocks in one buffer.

Legend: N prompts, D width of the widest block, L blocks, B images.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch._dynamo.decorators import mark_unbacked
from torch.autograd import forward_ad


logger = logging.getLogger(__name__)


def init_bound(patch_size: int | Sequence[int], hidden_size: int) -> float:
    """The bound of VPT's uniform initialisation, sqrt(6 / (3 * patch area + d)).

    Args:
        patch_size: Side of a patch in pixels, or height and width.
        hidden_size: Width d of the prompts.
    """
    height, width = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    return math.sqrt(6.0 / (3 * height * width + hidden_size))


def _transformed() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@dataclass
class KeptKeys:
    """Keys and values of a block's prompts that are kept from one evaluation to the next.

    Args:
        state: Addresses and versions of all that they depend on.
        key, value: (1, H, n, d).
        storages: The memory of what they depend on, so that nothing else gets an address of it.
    """

    state: tuple[Any, ...]
    key: torch.Tensor
    value: torch.Tensor
    storages: list[torch.UntypedStorage]


class PromptBank(nn.Module, BaseTunerLayer):
    """All prompts of all PROVPT adapters of a model.

    An adapter has one parameter of shape (N, D) and one int64 buffer of shape (N,) that holds the block of each
    prompt, 1 … L, or 0 for undistributed (paper, Sec. 3.1). A move writes one number into the buffer, rows stay where
    they are, so an optimizer keeps the same parameter and checkpoints keep their shapes.

    Args:
        widths: Hidden size of each block, in forward order. A prompt in a block of width D_i uses the first D_i
            entries of its row.
        bound: Bound of the uniform initialisation.
        reference: A module of the frozen backbone. Prompts that were loaded onto the meta device follow its device.
    """

    # PEFT finds an adapter's tensors in these containers, which are keyed by adapter name.
    adapter_layer_names = ("provpt_prompts",)
    other_param_names = ("provpt_prompt_blocks",)

    # `BaseTunerLayer` looks these up on the layer it wraps; the bank wraps none.
    weight = None
    bias = None

    def __init__(self, widths: Sequence[int], bound: float, reference: nn.Module) -> None:
        super().__init__()
        self.widths = list(widths)
        self.bound = bound
        self.provpt_prompts = nn.ParameterDict()
        self.provpt_prompt_blocks = BufferDict(persistent=True)
        self.dropout: dict[str, float] = {}
        # Names of the adapters whose prompts enter at the first block only, as tokens.
        self.shallow: set[str] = set()
        # A tuple hides the module from `nn.Module`, which would make it a child of the bank.
        self._reference = (reference,)
        self._rows: dict[str, list[torch.Tensor | None]] = {}
        # The buffer that an adapter's `_rows` were read from, and PyTorch's count of its changes then.
        self._read: dict[str, tuple[int, int | None]] = {}
        # By adapter and block.
        self.kept: dict[tuple[str, int], KeptKeys] = {}
        self.observation: Observation | None = None
        self.register_load_state_dict_post_hook(PromptBank._index_all)

    @property
    def num_blocks(self) -> int:
        """L, the number of blocks."""
        return len(self.widths)

    def add_adapter(
        self,
        adapter_name: str,
        distribution: Sequence[int],
        reserve: int,
        dropout: float,
        shallow: bool,
    ) -> None:
        """Make the prompts of a new adapter.

        Args:
            adapter_name: Name of the adapter.
            distribution: Prompts in each of the L blocks.
            reserve: Prompts beyond those, in no block. They are the last rows.
            dropout: Dropout on the prompts in training.
            shallow: Whether the prompts enter as tokens at the first block, where all of them are and stay.
        """
        device, dtype = self._device_and_dtype()
        start = [block for block, count in enumerate(distribution, start=1) for _ in range(count)] + [0] * reserve
        blocks = torch.tensor(start, dtype=torch.int64)  # (N,)
        prompts = torch.empty(len(blocks), max(self.widths), device=device, dtype=dtype).uniform_(
            -self.bound, self.bound
        )
        self.provpt_prompts[adapter_name] = nn.Parameter(prompts)
        self.provpt_prompt_blocks[adapter_name] = blocks.to(device)
        self.dropout[adapter_name] = dropout
        if shallow:
            self.shallow.add(adapter_name)
        self._index(adapter_name)

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter's prompts; the next adapter becomes active if this one was."""
        super().delete_adapter(adapter_name)
        self.dropout.pop(adapter_name, None)
        self.shallow.discard(adapter_name)
        self._rows.pop(adapter_name, None)
        self._read.pop(adapter_name, None)
        self.kept.clear()
        if self.observation is not None and self.observation.adapter_name == adapter_name:
            self.observation = None

    @property
    def enabled_adapter(self) -> str | None:
        """Name of the adapter whose prompts the blocks see now, or None."""
        active: Any = self.active_adapters
        return active[0] if active and not self.disable_adapters else None

    def rows(self, adapter_name: str, block: int) -> torch.Tensor | None:
        """Indices of the prompts in a block (0 … L), int64 of shape (n,), in ascending order. None if it has none."""
        # Weight averaging, for one, writes into all buffers of a copy of the model.
        readable = not (torch.compiler.is_compiling() or _transformed())
        if readable and self._read[adapter_name] != self._state_of_buffer(adapter_name):
            self._index(adapter_name)
        return self._rows[adapter_name][block]

    def keeps(self) -> bool:
        """Whether keys and values of this forward pass may be kept for the next ones.

        A pass with gradients, after which a step of an optimizer is to be expected, drops those that were. Nothing is
        kept where passes are recorded or transformed, and in several processes, where FSDP gives changed weights old
        addresses and versions.
        """
        if torch.compiler.is_compiling():
            return False
        if torch.is_grad_enabled():
            self.kept.clear()
            return False
        captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        transformed = _transformed() or forward_ad._current_level >= 0
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return not (self.training or torch.jit.is_tracing() or captured or transformed or distributed)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles begin without what is kept."""
        return self.__dict__ | {"kept": {}}

    def train(self, mode: bool = True) -> PromptBank:
        """Set training mode, and forget keys and values that were kept."""
        self.kept.clear()
        return super().train(mode)

    def _index(self, adapter_name: str) -> None:
        """Read an adapter's buffer into `rows`. Only done after a change of the buffer, so that a forward pass neither
        synchronises with the device nor has a shape that depends on data."""
        self.kept.clear()
        buffer = self.provpt_prompt_blocks[adapter_name]
        self._read[adapter_name] = self._state_of_buffer(adapter_name)
        if buffer.device.type == "meta":
            return
        by_block: list[list[int]] = [[] for _ in range(self.num_blocks + 1)]
        for prompt, block in enumerate(buffer.tolist()):
            by_block[block].append(prompt)
        self._rows[adapter_name] = [
            torch.tensor(rows, dtype=torch.int64, device=buffer.device) if rows else None for rows in by_block
        ]
        # One compiled graph for any number of prompts but 0.
        for rows in self._rows[adapter_name]:
            if rows is not None:
                mark_unbacked(rows, 0, min=1)

    def _state_of_buffer(self, adapter_name: str) -> tuple[int, int | None]:
        """Which buffer it is, and how often it was written to where PyTorch counts it."""
        buffer = self.provpt_prompt_blocks[adapter_name]
        return id(buffer), None if buffer.is_inference() else buffer._version

    def _index_all(self, *args: object) -> None:
        for adapter_name in self.provpt_prompt_blocks:
            self._index(adapter_name)

    def move(self, adapter_name: str, prompt: int, block: int) -> None:
        """Give a prompt to a block. Only the buffer changes.

        Args:
            adapter_name: Name of the adapter.
            prompt: Index of the prompt, 0 … N-1.
            block: Its new block, 1 … L, or 0 for undistributed.

        Raises:
            IndexError: If there is no such prompt.
            ValueError: If there is no such block, or if the adapter is shallow.
        """
        buffer = self.provpt_prompt_blocks[adapter_name]
        if not 0 <= prompt < len(buffer):
            raise IndexError(
                f"`prompt` must be in 0 … {len(buffer) - 1}, got {prompt}. The adapter has {len(buffer)} prompts."
            )
        if not 0 <= block <= self.num_blocks:
            raise ValueError(
                f"`block` must be in 0 … {self.num_blocks}, got {block}. Blocks are counted from 1; "
                "0 leaves the prompt undistributed."
            )
        if adapter_name in self.shallow:
            raise ValueError(
                f"Prompts of VPT-Shallow stay at the first block, so prompt {prompt} of {adapter_name!r} cannot move "
                f"to block {block}. Make the adapter with `shallow=False` to relocate its prompts."
            )
        buffer[prompt] = block
        self._index(adapter_name)

    def check(self, adapter_name: str, prompts: torch.Tensor | None, blocks: torch.Tensor | None) -> None:
        """Check tensors that are to become, or are to be saved as, an adapter's prompts and their blocks.

        Args:
            adapter_name: Name of the adapter, which the bank has already.
            prompts: Should be floating point of the bank's own shape, (N, D).
            blocks: Should be int64 of shape (N,), each in 0 … L, and 1 for a shallow adapter.

        Raises:
            ValueError: If they are not.
        """
        shape = (len(self.provpt_prompt_blocks[adapter_name]), max(self.widths))
        made_for = "An adapter only fits the backbone and `num_prompts` it was made with."
        if prompts is None or blocks is None:
            missing = "prompts" if prompts is None else "the prompts' blocks"
            raise ValueError(
                f"An adapter consists of prompts and their blocks, but {missing} are missing. Save it anew."
            )
        if tuple(prompts.shape) != shape or not prompts.is_floating_point():
            raise ValueError(
                f"The prompts must be floating point of shape {shape} ({self.num_blocks} blocks), got {prompts.dtype} "
                f"of shape {tuple(prompts.shape)}. {made_for}"
            )
        if tuple(blocks.shape) != shape[:1] or blocks.dtype != torch.int64:
            raise ValueError(
                f"The prompts' blocks must be int64 of shape {shape[:1]}, got {blocks.dtype} of shape "
                f"{tuple(blocks.shape)}. {made_for}"
            )
        first, last = (1, 1) if adapter_name in self.shallow else (0, self.num_blocks)
        if blocks.min() < first or blocks.max() > last:
            raise ValueError(
                f"The prompts' blocks must be in {first} … {last}, got {blocks.min()} … {blocks.max()}. {made_for}"
            )

    def _device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        parameter = next(self._reference[0].parameters())
        return parameter.device, parameter.dtype

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        if device is None:
            device, _ = self._device_and_dtype()
        prompts = self.provpt_prompts[adapter_name]
        if prompts.device.type != "meta":
            prompts.data = prompts.data.to(device)
        self.provpt_prompt_blocks[adapter_name] = self.provpt_prompt_blocks[adapter_name].to(device)
        self._index(adapter_name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PromptBank:
        super()._apply(fn, recurse)
        self._index_all()
        return self


# Powers of a score that are summed. The 3rd and 4th are for the spread of a score to second order.
POWERS = 4


def moments_of(scores: torch.Tensor) -> torch.Tensor:
    """Scores of images (B, n) to the sums of their 1st to 4th power and the number of images, (5, n)."""
    count = torch.full_like(scores[0], scores.shape[0])
    return torch.stack([*((scores**power).sum(dim=0) for power in range(1, POWERS + 1)), count])


class Observation:
    """What the blocks report of each prompt in the backward pass: a first-order score for each image.

    The scores arrive as the "gradient" of a tensor `moments` of shape (5, N). A block passes its columns through an
    autograd function (see `attention.py`) whose backward returns, for each prompt, the sums over the images of the
    score and of its 2nd to 4th power, and the number of images. So micro-batches add up by themselves, a forward
    without a backward counts for nothing, activation checkpointing counts once, and gradient clipping, which sees
    parameters only, has no part in it.

    Args:
        score: `"gate"`, the derivative with respect to the weight of a prompt's key in the attention, `"fisher"`, that
            with respect to the prompt's share in the attention's output, or `"taylor"`, Eq. 6 of the paper.
        adapter_name: The adapter whose prompts are observed, while it is the enabled one.
        num_prompts: N.
    """

    # Batches that may report without anybody reading it, before a warning says so.
    UNREAD_BATCHES = 100

    def __init__(self, score: str, adapter_name: str, num_prompts: int) -> None:
        self.score = score
        self.adapter_name = adapter_name
        self.moments = torch.zeros(POWERS + 1, num_prompts, requires_grad=True)
        self._unread = 0

    def count_batch(self) -> None:
        """Notice a training batch; warn once if nobody reads what many of them report."""
        self._unread += 1
        if self._unread == self.UNREAD_BATCHES:
            logger.warning(
                "Relocation is set up but was not stepped in the last %d batches. Unless you accumulate the gradients "
                "of as many, no prompt is going to move: call `Relocator.record_step(loss)` before each step of the "
                "optimizer, or use `RelocationTrainerCallback`.",
                self.UNREAD_BATCHES,
            )

    def columns(self, rows: torch.Tensor) -> torch.Tensor:
        """The moments of some prompts, (5, n), on the device of their indices."""
        if self.moments.device != rows.device:
            self.moments = torch.zeros_like(self.moments, device=rows.device, requires_grad=True)
        return self.moments[:, rows]

    def take(self) -> torch.Tensor | None:
        """The moments since the last call, (5, N) float32, or None if no backward pass reported any."""
        self._unread = 0
        moments, self.moments.grad = self.moments.grad, None
        return moments
