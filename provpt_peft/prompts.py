"""The prompt bank: all prompts of an adapter in one parameter, their blocks in one buffer.

Legend: N prompts, D width of the widest block, L blocks, B images.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from .compiling import is_exporting, take_any_size
from .gates import Gates
from .mixed import BASE, MixedBatch


_WRITTEN_WHILE_COMPILED = (
    "The prompts' blocks were changed in the model's buffers, which a compiled model does not notice. Move prompts "
    "with `move_prompt`, load them with `load_state_dict`, or run the model once without compilation after the change."
)


_KEEPING = threading.Lock()
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def init_bound(patch_size: int | Sequence[int], hidden_size: int) -> float:
    """The bound of VPT's uniform initialisation, sqrt(6 / (3 * patch area + d)), for prompts of width d. The patch
    size is a side, or height and width, in pixels."""
    height, width = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    return math.sqrt(6.0 / (3 * height * width + hidden_size))


def transformed() -> bool:
    """Whether a transform of `torch.func` is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _captured() -> bool:
    """Whether a CUDA graph is being captured, during which tensor values cannot be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Compute with plain tensors even if the pass is traced or transformed, or runs under a dispatch mode."""
    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C._DisableFuncTorch(), _disable_current_modes():
            yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def read_blocks(stored: Tensor) -> Tensor:
    """The block of each prompt, (N,), from one-hot rows or averages of them, (N, 1 + L): the block it was in most.
    Block numbers, as in files of version 0.1, are returned unchanged."""
    return stored.argmax(dim=1) if stored.dtype in _FLOATS else stored


def check_prompts(
    prompts: Tensor | None, blocks: Tensor | None, shape: tuple[int, int | None], num_blocks: int, shallow: bool
) -> None:
    """Check the tensors of an adapter.

    Args:
        prompts: Floating point of the shape (N, D); a D of None allows any width.
        blocks: One-hot rows, (N, 1 + L), or averages of them; or block numbers 0 … L, int64 (N,), as in files of
            version 0.1. A shallow adapter's are all 1.
        shape: N and D.
        num_blocks: L.
        shallow: Whether the adapter is of VPT-Shallow.

    Raises:
        ValueError: If a tensor is missing or breaks these rules.
    """
    if prompts is None or blocks is None:
        missing = "prompts" if prompts is None else "the prompts' blocks"
        raise ValueError(f"An adapter consists of prompts and their blocks, but {missing} are missing. Save it again.")
    count, width = shape
    first, last = (1, 1) if shallow else (0, num_blocks)
    one_hot = blocks.dtype in _FLOATS
    expected = (count, 1 + num_blocks) if one_hot else (count,)
    fits = prompts.dim() == 2 and len(prompts) == count and prompts.shape[1] == (width or prompts.shape[1]) > 0
    if not (fits and prompts.is_floating_point()):
        rule = f"The prompts must be floating point of shape ({count}, {width or 'width'})"
        got = f"{prompts.dtype} of shape {tuple(prompts.shape)}"
    elif tuple(blocks.shape) != expected or not (one_hot or blocks.dtype == torch.int64):
        rule = f"The prompts' blocks must be one-hot rows of shape ({count}, {1 + num_blocks}), or int64 of ({count},)"
        got = f"{blocks.dtype} of shape {tuple(blocks.shape)}"
    elif one_hot and not (blocks.isfinite().all() and (blocks.amax(dim=1) > 0).all()):
        rule, got = "The rows of the prompts' blocks must be finite with a maximum above 0", "other values"
    elif (numbers := read_blocks(blocks)).min() < first or numbers.max() > last:
        rule, got = f"The prompts' blocks must be in {first} … {last}", f"{numbers.min()} … {numbers.max()}"
    else:
        return
    raise ValueError(f"{rule}, got {got}. An adapter only fits the backbone and `num_prompts` it was made with.")


class PromptBank(nn.Module, BaseTunerLayer):
    """All prompts of all PROVPT adapters of a model.

    An adapter has one parameter of shape (N, D) and one buffer of shape (N, 1 + L) that holds the block of each
    prompt, 1 … L, or 0 for undistributed (paper, Sec. 3.1), one-hot. A move only rewrites one row of the buffer, so an
    optimizer keeps the same parameter and checkpoints keep their shapes. One-hot, because many helpers average a whole
    state dict: an average of block numbers is a different block, an average of rows shows the block that the prompt
    was in most.

    Args:
        widths: Hidden size of each block, in forward order. A prompt in a block of width D_i uses the first D_i
            entries of its row.
        bound: Bound of the uniform initialisation.
        reference: A module of the frozen backbone. Prompts loaded onto the meta device follow its device.
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
        # Names of the adapters whose prompts have the precision that they were asked to have.
        self.cast: set[str] = set()
        # Names of the adapters whose prompts enter at the first block only, as tokens.
        self.shallow: set[str] = set()
        # A tuple hides the module from `nn.Module`, which would register it as a child of the bank.
        self._reference = (reference,)
        # What was read from an adapter's buffer: the block of each prompt, and the prompts of each block.
        self._read: dict[str, Tensor] = {}
        self._rows: dict[str, list[Tensor | None]] = {}
        # While scores are measured: the gates that the blocks' prompts pass through.
        self.gates: Gates | None = None
        # Mixed batches, in which each image has its own adapter, by the thread that runs them.
        self._mixed: dict[int, MixedBatch] = {}
        # Within `keep`: keys and values by adapter, block, dtype and device.
        self._kept: dict[tuple[Any, ...], tuple[Tensor, Tensor]] | None = None
        self._keepers = 0
        self.register_load_state_dict_post_hook(PromptBank._index_all)

    def add_adapter(
        self, adapter_name: str, distribution: Sequence[int], reserve: int, dropout: float, shallow: bool
    ) -> None:
        """Make the prompts of a new adapter: first those of each of the L blocks, then the reserve, which is in no
        block. A shallow adapter's prompts are all in the first block, where they enter as tokens, and stay there."""
        like = self._parameter()
        start = [block for block, count in enumerate(distribution, start=1) for _ in range(count)] + [0] * reserve
        prompts = torch.empty(len(start), max(self.widths), device=like.device, dtype=like.dtype)  # (N, D)
        self.provpt_prompts[adapter_name] = nn.Parameter(prompts.uniform_(-self.bound, self.bound))
        self.provpt_prompt_blocks[adapter_name] = self.one_hot(torch.tensor(start, device=like.device))
        self.dropout[adapter_name] = dropout
        if shallow:
            self.shallow.add(adapter_name)
        self._index(adapter_name)

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter's prompts; the next adapter becomes active if this one was."""
        super().delete_adapter(adapter_name)
        self.shallow.discard(adapter_name)
        self.cast.discard(adapter_name)
        for of_adapters in (self.dropout, self._rows, self._read):
            of_adapters.pop(adapter_name, None)
        self._forget()

    @property
    def enabled_adapter(self) -> str | None:
        """Name of the adapter whose prompts the blocks see now, or None."""
        active: Any = self.active_adapters
        return active[0] if active and not self.disable_adapters else None

    def one_hot(self, blocks: Tensor) -> Tensor:
        """The buffer, float32 (N, 1 + L), for blocks (N,), 0 … L."""
        return F.one_hot(blocks, 1 + self.num_blocks).float()

    def blocks(self, adapter_name: str) -> Tensor:
        """d_k: the block of each prompt, int64 of shape (N,), 1 … L or 0 for undistributed."""
        return self.provpt_prompt_blocks[adapter_name].argmax(dim=1)

    def rows(self, adapter_name: str, block: int) -> Tensor | None:
        """Indices of the prompts in a block (0 … L), int64 of shape (n,), in ascending order. None if it has none."""
        return self._rows[adapter_name][block]

    @torch.compiler.disable  # names cannot be part of a compiled graph
    def mix(self, names: Sequence[str]) -> ExitStack:
        """A context in which each image of this thread's batch sees the prompts of the adapter named for it."""
        adapters = [name for name in dict.fromkeys(names) if name != BASE]
        for adapter in adapters:
            self.read(adapter)
        rows = {adapter: self._rows[adapter] for adapter in adapters}
        thread = threading.get_ident()
        before = self._mixed.get(thread)
        self._mixed[thread] = MixedBatch(names, {a: self.provpt_prompts[a] for a in adapters}, rows)
        stack = ExitStack()
        if before is None:
            stack.callback(self._mixed.pop, thread)
        else:
            stack.callback(self._mixed.__setitem__, thread, before)
        return stack

    def mixed(self) -> MixedBatch | None:
        """The mixed batch that this thread runs."""
        return self._of_this_thread() if self._mixed and not self.disable_adapters else None

    @torch.compiler.disable  # a compiled graph cannot ask for its thread
    def _of_this_thread(self) -> MixedBatch | None:
        return self._mixed.get(threading.get_ident())

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Cache keys and values between forward passes. Nested contexts share one cache."""
        # Threads may leave in a different order than they entered.
        with _KEEPING:
            self._keepers += 1
            self._kept = {} if self._kept is None else self._kept
        try:
            yield
        finally:
            with _KEEPING:
                self._keepers -= 1
                if not self._keepers:
                    self._kept = None

    def kept(self) -> dict[tuple[Any, ...], tuple[Tensor, Tensor]] | None:
        """The cache in which this forward pass finds and stores keys and values. None if it has to compute them:
        outside of `keep`, with gradients or dropout, and if the pass is recorded or transformed."""
        if self._kept is None or torch.is_grad_enabled() or self.training or torch.compiler.is_compiling():
            return None
        return None if transformed() or torch.jit.is_tracing() or _captured() else self._kept

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out the cache, the gates and mixed batches."""
        return self.__dict__ | {"_kept": None, "_keepers": 0, "gates": None, "_mixed": {}}

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.clear()

    def read(self, adapter: str | None) -> None:
        """Update `rows` from an adapter's buffer. The first block calls this in each forward pass: weight averaging
        and optimizer helpers write into buffers too, and a write through `.data` only shows in the values. Shapes that
        depend on these values cannot be compiled, so a compiled graph checks them and fails if they changed."""
        if adapter is None or adapter in self.shallow or adapter not in self._read:
            return
        if torch.compiler.is_compiling():
            if not is_exporting():
                same = (self.blocks(adapter) == self._read[adapter]).all()
                torch._assert_async(same, _WRITTEN_WHILE_COMPILED)
        elif not _captured():
            with _unrecorded():
                blocks, known = self._plain_blocks(adapter), self._read[adapter]
                if blocks is not None and not (known.device == blocks.device and torch.equal(known, blocks)):
                    self._index(adapter, blocks)

    def _plain_blocks(self, adapter_name: str) -> Tensor | None:
        """Same as `blocks`, but `torch.func` may have wrapped the buffer, as in a `vmap` over models, which must all
        have the same blocks. None if the buffer has no values (meta and fake tensors)."""
        buffer = self.provpt_prompt_blocks[adapter_name]
        while torch._C._functorch.is_functorch_wrapped_tensor(buffer):
            over_models = torch._C._functorch.maybe_get_bdim(buffer)
            buffer = torch._C._functorch.get_unwrapped(buffer)
            buffer = buffer if over_models < 0 else buffer.movedim(over_models, 0)
        if type(buffer) is not Tensor or buffer.device.type == "meta":
            return None
        blocks = buffer.argmax(dim=-1).reshape(-1, buffer.shape[-2])  # (models, N)
        if len(blocks) > 1 and not (blocks == blocks[0]).all():
            raise ValueError(
                "Models that are run together by `torch.func.vmap` must have their prompts in the same blocks, got "
                f"{len(blocks)} models that differ. Run them one by one."
            )
        return blocks[0]

    @torch.inference_mode(False)  # training cannot use tensors that were made in inference mode
    def _index(self, adapter_name: str, blocks: Tensor | None = None) -> None:
        """Read an adapter's buffer, or its blocks (N,), into `rows`, so that a forward pass has no shape that depends
        on data."""
        self._forget()
        blocks = self.blocks(adapter_name) if blocks is None else blocks
        if blocks.device.type == "meta":
            return
        by_block: list[list[int]] = [[] for _ in range(1 + self.num_blocks)]
        for prompt, block in enumerate(blocks.tolist()):
            by_block[block].append(prompt)
        found = [torch.tensor(rows, device=blocks.device) if rows else None for rows in by_block]
        for rows in found:
            if rows is not None:
                take_any_size(rows, 0)
        self._rows[adapter_name], self._read[adapter_name] = found, blocks

    def _index_all(self, *args: object) -> None:
        for adapter_name in self.provpt_prompt_blocks:
            self._index(adapter_name)

    def move(self, adapter_name: str, prompt: int, block: int) -> None:
        """Move a prompt, 0 … N-1, to a block, 1 … L or 0 for undistributed. Only the buffer changes.

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
        buffer[prompt] = self.one_hot(torch.tensor(block)).to(buffer)
        self._index(adapter_name)

    def from_file(self, adapter_name: str, key: str, tensor: Tensor) -> Tensor:
        """Convert an adapter's tensor from a file to the model's format: block numbers become one-hot rows, and
        prompts have the precision of the adapter, in whose place `low_cpu_mem_usage` puts the file's tensor."""
        if ".provpt_prompts." in key:
            return tensor.to(self.provpt_prompts[adapter_name].dtype)
        numbers = tensor.dtype == torch.int64 and ".provpt_prompt_blocks." in key
        return self.one_hot(tensor) if numbers else tensor

    def check(self, adapter_name: str, tensors: Mapping[str, Tensor]) -> None:
        """Check an adapter's tensors when they are saved or loaded, before any of them is written."""
        prompts, blocks = (
            next((tensor for key, tensor in tensors.items() if key.endswith(f".{container}.{adapter_name}")), None)
            for container in (*self.adapter_layer_names, *self.other_param_names)
        )
        shape = (len(self.provpt_prompt_blocks[adapter_name]), max(self.widths))
        check_prompts(prompts, blocks, shape, self.num_blocks, adapter_name in self.shallow)

    def check_device(self, images: Any) -> None:
        """Refuse prompts without values, `ValueError`, unless the images have none either."""
        bare = [name for name, prompts in self.provpt_prompts.items() if prompts.is_meta]
        if bare and isinstance(images, Tensor) and not images.is_meta:
            raise ValueError(
                f"Prompts must have values, but those of {', '.join(bare)} are on the meta device. Offloading weights "
                "(`cpu_offload`, `disk_offload`) leaves them there: keep a model with prompts on its device."
            )

    def _parameter(self) -> Tensor:
        """A parameter of the frozen backbone, whose device and dtype prompts take."""
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
