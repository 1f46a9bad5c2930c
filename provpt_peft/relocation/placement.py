"""What a moved prompt starts from in its new block: vector and optimizer moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..model import ProVPTModel
from .parallel import full_tensor, is_sharded, write_row


# Optimizer states that are running averages of gradients, and of their squares or magnitudes. In other states
# (iterates, step sizes, quantised codes) a 0 or a mean has another meaning.
_FIRST_MOMENTS = frozenset(("exp_avg", "momentum_buffer", "grad_avg"))
_SECOND_MOMENTS = frozenset(("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "sum"))
# Copies of the weights in schedule-free optimizers, which would draw a prompt back to its old vector.
_WEIGHTS = frozenset(("x", "y", "z"))


@torch.no_grad()
def place(
    tuner: ProVPTModel,
    adapter_name: str,
    prompt: int,
    block: int,
    optimizer: torch.optim.Optimizer | None = None,
    newcomers: Iterable[int] = (),
    generator: torch.Generator | None = None,
) -> Callable[[], None]:
    """Move a prompt to another block, where it starts from the mean of the prompts there.

    The mean changes the loss less than removing the median prompt does, and learns at its neighbours' rate. The
    reference code scales the vector by 1e-3 instead, which LayerNorm undoes. If the block has fewer than two prompts,
    or another prompt has just come there, the prompt keeps its vector, since copies would stay alike. A prompt from
    the reserve gets a new random vector in these cases, since weight decay has shrunk the old one.

    The optimizer's moments of the row belong to the old block. First moments become 0. Second moments become the mean
    of those in the new block, or of all prompts in blocks if the new block is empty. If they were 0 as well, Adam
    would step up to 6.5 times too far, since its bias correction has one step count for all rows. A copy of the
    weights, as schedule-free optimizers keep, gets the prompt's new vector.

    Args:
        tuner, adapter_name: The tuner, and the adapter.
        prompt, block: k* and a*, a block other than the prompt's. In block 0 the prompt stays as it is.
        optimizer: The prompts' optimizer, if there is one.
        newcomers: Prompts that have moved since the last training step.
        generator: Random generator on the CPU, for new random vectors.

    Returns:
        A function that undoes the move, for as long as no training step has been made.
    """
    prompts = tuner.prompts(adapter_name)
    replaced: list[tuple[Any, torch.Tensor]] = []

    def replace(tensor: Any, values: torch.Tensor) -> None:
        replaced.append((tensor, full_tensor(tensor)[prompt].clone()))
        write_row(tensor, prompt, values)

    @torch.no_grad()
    def undo() -> None:
        tuner.move_prompt(prompt, int(blocks[prompt]), adapter_name)
        for tensor, values in replaced:
            write_row(tensor, prompt, values)

    blocks = tuner.prompt_blocks(adapter_name).cpu()
    residents = (blocks == block).nonzero()[:, 0]
    peers = residents if len(residents) else (blocks != 0).nonzero()[:, 0]
    tuner.move_prompt(prompt, block, adapter_name)
    if block == 0:
        return undo
    if len(residents) >= 2 and not set(newcomers).intersection(residents.tolist()):
        replace(prompts, _mean(prompts, residents))
    elif blocks[prompt] == 0:
        bound = tuner.bank.bound
        drawn = torch.empty(prompts.shape[1]).uniform_(-bound, bound, generator=generator)
        replace(prompts, drawn.to(prompts))
    new_vector = bool(replaced)
    for name, moment in (optimizer.state.get(prompts, {}) if optimizer is not None else {}).items():
        # Quantised moments are tensors of other classes, which cannot be indexed.
        if not (type(moment) is torch.Tensor or is_sharded(moment)) or moment.shape != prompts.shape:
            continue
        if name in _FIRST_MOMENTS:
            replace(moment, torch.zeros_like(full_tensor(moment)[prompt]))
        elif name in _SECOND_MOMENTS and len(peers):
            replace(moment, _mean(moment, peers))
        elif name in _WEIGHTS and new_vector:
            replace(moment, full_tensor(prompts)[prompt].to(moment.dtype))
    return undo


def _mean(tensor: nn.Parameter | torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    whole = full_tensor(tensor)
    return whole[rows.to(whole.device)].mean(dim=0)
