"""Models on several devices: which wrappers relocation refuses, how processes agree, sharded tensors.

FSDP 2 is recognised by its methods: PyTorch before 2.6, or without distributed, has no class to compare with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..backbone.checks import ONE_PROCESS_PER_DEVICE


# Wrappers that relocation does not work with: why not, and what to use instead. By name, since not all of them are
# installed.
_REFUSED_WRAPPERS = {
    # Scores are the gradient of a plain tensor, and each replica has a copy of it.
    "DataParallel": f"loses the scores of its replicas {ONE_PROCESS_PER_DEVICE}",
    "FullyShardedDataParallel": "flattens the prompts into one vector with other weights. Use FSDP version 2 "
    "(`fully_shard`).",
    "DeepSpeedEngine": "updates copies of the weights, which a move cannot write to. Use `DistributedDataParallel` or "
    "FSDP version 2 (`fully_shard`).",
}


def refuse_wrapper(name: str) -> None:
    """Raise a ValueError if a module's class is a parallel wrapper that relocation does not work with."""
    if name in _REFUSED_WRAPPERS:
        raise ValueError(
            f"Relocation needs all scores and the prompts that the optimizer updates, but got `{name}`, which "
            f"{_REFUSED_WRAPPERS[name]}"
        )


def _processes() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def is_first_process() -> bool:
    """Whether this is the first of the training processes, or the only one."""
    return _processes() == 1 or torch.distributed.get_rank() == 0


def broadcast(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Give all processes the first process's values, on the CPU. They are exchanged on `device`.

    Each process has computed them too, but rounding may differ, and decisions must not.
    """
    if _processes() == 1:
        return values
    on_device = values.to(device)
    torch.distributed.broadcast(on_device, 0)
    return on_device.cpu()


def broadcast_objects(objects: list[Any]) -> list[Any]:
    """The first process's list, in all processes."""
    if _processes() == 1:
        return objects
    received = [objects]
    torch.distributed.broadcast_object_list(received, 0)
    return received[0]


def reshard(model: nn.Module) -> None:
    """Make the modules of a sharded model hold their shards again.

    A forward pass without a backward pass, such as an evaluation, leaves some modules with a gathered copy. Writes to
    that copy would be lost, and the optimizer does not know it.
    """
    for module in model.modules():
        if hasattr(type(module), "reshard"):
            module.reshard()  # type: ignore[operator]


def is_sharded(tensor: Any) -> bool:
    """Whether each process holds only a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Any) -> torch.Tensor:
    """The tensor, gathered if it is sharded. All processes must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def write_row(tensor: Any, row: int, values: torch.Tensor) -> None:
    """`tensor[row] = values`. A sharded tensor cannot be indexed, so it is gathered and each process keeps its shard.
    All processes must call this."""
    gathered = full_tensor(tensor)
    gathered[row] = values
    if gathered is not tensor:
        from torch.distributed.tensor import distribute_tensor

        tensor.copy_(distribute_tensor(gathered, tensor.device_mesh, tensor.placements))
