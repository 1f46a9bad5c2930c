"""The prompt bank: all prompts of an adapter in one parameter, their blocks in one buffer.

Legend: N prompts, D width of the widest block, L blocks, B images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked

from .gates import Gates


def init_bound(patch_size: int | Sequence[int], hidden_size: int) -> float:
    """The bound of VPT's uniform initialisation, sqrt(6 / (3 * patch area + d)), for patches of a side, or height and
    width, in pixels and prompts of width d."""
    height, width = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    return math.sqrt(6.0 / (3 * height * width + hidden_size))


def _transformed() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def check_prompts(
    prompts: Tensor | None, blocks: Tensor | None, shape: tuple[int, int | None], num_blocks: int, shallow: bool
) -> None:
    """Check the tensors of an adapter.

    Args:
        prompts: Floating point of the shape (N, D); a D of None stands for any width.
        blocks: Int64 of shape (N,), each in 0 … L, and 1 for a shallow adapter.

    Raises:
        ValueError: If they are not.
    """
    if prompts is None or blocks is None:
        missing = "prompts" if prompts is None else "the prompts' blocks"
        raise ValueError(f"An adapter consists of prompts and their blocks, but {missing} are missing. Save it anew.")
    count, width = shape
    first, last = (1, 1) if shallow else (0, num_blocks)
    fits = prompts.dim() == 2 and len(prompts) == count and prompts.shape[1] == (width or prompts.shape[1]) > 0
    if not (fits and prompts.is_floating_point()):
        rule = f"The prompts must be floating point of shape ({count}, {width or 'width'})"
        got = f"{prompts.dtype} of shape {tuple(prompts.shape)}"
    elif tuple(blocks.shape) != (count,) or blocks.dtype != torch.int64:
        rule = f"The prompts' blocks must be int64 of shape ({count},)"
        got = f"{blocks.dtype} of shape {tuple(blocks.shape)}"
    elif blocks.min() < first or blocks.max() > last:
        rule, got = f"The prompts' blocks must be in {first} … {last}", f"{blocks.min()} … {blocks.max()}"
    else:
        return
    raise ValueError(f"{rule}, got {got}. An adapter only fits the backbone and `num_prompts` it was made with.")


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
    weight = bias = None

    def __init__(self, widths: Sequence[int], bound: float, reference: nn.Module) -> None:
        super().__init__()
        self.widths = list(widths)
        self.num_blocks = len(widths)  # L
        self.bound = bound
        self.provpt_prompts = nn.ParameterDict()
        self.provpt_prompt_blocks = BufferDict(persistent=True)
        self.dropout: dict[str, float] = {}
        # Names of the adapters whose prompts enter at the first block only, as tokens.
        self.shallow: set[str] = set()
        # A tuple hides the module from `nn.Module`, which would make it a child of the bank.
        self._reference = (reference,)
        self._rows: dict[str, list[Tensor | None]] = {}
        # The buffer that an adapter's `_rows` were read from, and PyTorch's count of its changes then.
        self._read: dict[str, tuple[int, int | None]] = {}
        # While scores are measured: what the blocks pass their prompts through.
        self.gates: Gates | None = None
        # Within `keep`: keys and values by adapter, block, dtype and device.
        self._kept: dict[tuple[Any, ...], tuple[Tensor, Tensor]] | None = None
        self.register_load_state_dict_post_hook(PromptBank._index_all)

    def add_adapter(
        self, adapter_name: str, distribution: Sequence[int], reserve: int, dropout: float, shallow: bool
    ) -> None:
        """Make the prompts of a new adapter: those in each of the L blocks first, the reserve, in no block, last. A
        shallow adapter's enter as tokens at the first block, where all of them are and stay."""
        like = self._parameter()
        start = [block for block, count in enumerate(distribution, start=1) for _ in range(count)] + [0] * reserve
        prompts = torch.empty(len(start), max(self.widths), device=like.device, dtype=like.dtype)  # (N, D)
        self.provpt_prompts[adapter_name] = nn.Parameter(prompts.uniform_(-self.bound, self.bound))
        self.provpt_prompt_blocks[adapter_name] = torch.tensor(start, dtype=torch.int64, device=like.device)  # (N,)
        self.dropout[adapter_name] = dropout
        if shallow:
            self.shallow.add(adapter_name)
        self._index(adapter_name)

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter's prompts; the next adapter becomes active if this one was."""
        super().delete_adapter(adapter_name)
        self.shallow.discard(adapter_name)
        for of_adapters in (self.dropout, self._rows, self._read):
            of_adapters.pop(adapter_name, None)
        self._forget()

    @property
    def enabled_adapter(self) -> str | None:
        """Name of the adapter whose prompts the blocks see now, or None."""
        active: Any = self.active_adapters
        return active[0] if active and not self.disable_adapters else None

    def rows(self, adapter_name: str, block: int) -> Tensor | None:
        """Indices of the prompts in a block (0 … L), int64 of shape (n,), in ascending order. None if it has none."""
        # Weight averaging, for one, writes into all buffers of a copy of the model.
        readable = not (torch.compiler.is_compiling() or _transformed())
        if readable and self._read[adapter_name] != self._state_of_buffer(adapter_name):
            self._index(adapter_name)
        return self._rows[adapter_name][block]

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Keep keys and values from one forward pass to the next. Contexts within each other share what they keep."""
        before, self._kept = self._kept, {} if self._kept is None else self._kept
        try:
            yield
        finally:
            self._kept = before

    def kept(self) -> dict[tuple[Any, ...], tuple[Tensor, Tensor]] | None:
        """Where this forward pass finds the keys and values that are kept, and leaves its own. None if it has to make
        them anew: outside of `keep`, with gradients or dropout, and where passes are recorded or transformed."""
        if self._kept is None or torch.is_grad_enabled() or self.training or torch.compiler.is_compiling():
            return None
        return None if torch.jit.is_tracing() or _transformed() else self._kept

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles keep nothing."""
        return self.__dict__ | {"_kept": None, "gates": None}

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.clear()

    def _index(self, adapter_name: str) -> None:
        """Read an adapter's buffer into `rows`. Only done after a change of the buffer, so that a forward pass neither
        synchronises with the device nor has a shape that depends on data."""
        self._forget()
        buffer = self.provpt_prompt_blocks[adapter_name]
        self._read[adapter_name] = self._state_of_buffer(adapter_name)
        if buffer.device.type == "meta":
            return
        by_block: list[list[int]] = [[] for _ in range(self.num_blocks + 1)]
        for prompt, block in enumerate(buffer.tolist()):
            by_block[block].append(prompt)
        self._rows[adapter_name] = [torch.tensor(rows, device=buffer.device) if rows else None for rows in by_block]
        for rows in self._rows[adapter_name]:
            if rows is not None:
                mark_unbacked(rows, 0, min=1)  # one compiled graph for any number of prompts but 0

    def _state_of_buffer(self, adapter_name: str) -> tuple[int, int | None]:
        """Which buffer it is, and how often it was written to where PyTorch counts it."""
        buffer = self.provpt_prompt_blocks[adapter_name]
        return id(buffer), None if buffer.is_inference() else buffer._version

    def _index_all(self, *args: object) -> None:
        for adapter_name in self.provpt_prompt_blocks:
            self._index(adapter_name)

    def move(self, adapter_name: str, prompt: int, block: int) -> None:
        """Give a prompt, 0 … N-1, to a block, 1 … L or 0 for undistributed. Only the buffer changes.

        Raises:
            IndexError: If there is no such prompt.
            ValueError: If there is no such block, or if the adapter is shallow.
        """
        buffer = self.provpt_prompt_blocks[adapter_name]
        count = len(buffer)
        if not 0 <= prompt < count:
            raise IndexError(f"`prompt` must be in 0 … {count - 1}, got {prompt}. The adapter has {count} prompts.")
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

    def check(self, adapter_name: str, tensors: Mapping[str, Tensor]) -> None:
        """Check an adapter's tensors on their way to or from a file, before any of them is written anywhere."""
        prompts, blocks = (
            next((tensor for key, tensor in tensors.items() if key.endswith(f".{container}.{adapter_name}")), None)
            for container in (*self.adapter_layer_names, *self.other_param_names)
        )
        shape = (len(self.provpt_prompt_blocks[adapter_name]), max(self.widths))
        check_prompts(prompts, blocks, shape, self.num_blocks, adapter_name in self.shallow)

    def _parameter(self) -> Tensor:
        """One of the frozen backbone's, whose device and dtype prompts take."""
        return next(self._reference[0].parameters())

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        device = self._parameter().device if device is None else device
        prompts = self.provpt_prompts[adapter_name]
        if prompts.device.type != "meta":
            prompts.data = prompts.data.to(device)
        self.provpt_prompt_blocks[adapter_name] = self.provpt_prompt_blocks[adapter_name].to(device)
        self._index(adapter_name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PromptBank:
        super()._apply(fn, recurse)
        self._index_all()
        return self
