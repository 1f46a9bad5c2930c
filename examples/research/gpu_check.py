"""What the suite can run on a CPU only, on a GPU: the same function as prepended tokens, time and memory, compiled
models, several devices.

    python -m examples.research.gpu_check                             # CUDA or MPS, ViT-S at 224 px
    python -m examples.research.gpu_check --only parity compiled      # some of it
    python -m examples.research.gpu_check --device cpu --shape tiny   # as the suite runs it

Prints one table with a verdict in each row, as it goes, and ends with 1 if a verdict begins with "fails". Rows say
"measured" where there is a figure and no bound, and why where something could not be run.

- `parity`: logits and gradients of the prompts, after moves and with an empty block, beside those of prepended tokens
  in double precision on the CPU. Prompts may differ by no more than twice what prepended tokens do in the same
  precision and attention, or by 1e-6.
- `scores`: those under mixed precision beside those in fp32, of a ViT and of a Swin, whose attention has masks.
- `cost`: a training step's time and peak memory over those of a frozen backbone and of prepended tokens.
- `compiled`: a compiled model beside the same model uncompiled while prompts move, and its graphs.
- `devices`: training with moves in a process for each device, with DDP and with FSDP 2, beside one process: what
  training has changed in the prompts.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from transformers import SwinConfig, SwinForImageClassification, ViTForImageClassification
from transformers.utils import is_flash_attn_2_available

from provpt_peft import ProVPTConfig, RelocationConfig, Relocator
from provpt_peft.backbone.families import find_blocks

from . import cost
from .common import make_vit
from .prepended import prepend_prompts


# Width, blocks and heads; image and patch size; prompts per block; images.
SHAPES = {
    "tiny": ((32, 4, 2), (16, 4), 3, 4),
    "vit-small": (cost.VIT_SHAPES["vit-small"], (224, 16), 10, 8),
    "vit-base": (cost.VIT_SHAPES["vit-base"], (224, 16), 10, 8),
}
NUM_LABELS = 10
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Gradients in half precision would underflow.
LOSS_SCALE = 1024.0
WAYS = ("DDP", "FSDP 2")
HOLDS, FAILS, MEASURED = "holds", "fails", "measured"


class Row(NamedTuple):
    """A row of the table."""

    check: str
    setting: str
    figure: str
    bound: str
    verdict: str


def make_base(shape: str, attention: str = "eager") -> ViTForImageClassification:
    """A classifier with random weights, the same each time."""
    torch.manual_seed(0)
    (width, blocks, heads), (image_size, patch_size), _, _ = SHAPES[shape]
    base = make_vit(width, blocks, heads, image_size=image_size, patch_size=patch_size, num_labels=NUM_LABELS)
    base.set_attn_implementation(attention)
    return base


def prompted(base: nn.Module, shape: str) -> PeftModel:
    """The classifier with prompts of unit variance, which have moved: block 2 has those of block 3, which has none."""
    number = SHAPES[shape][2]
    model = get_peft_model(base, ProVPTConfig(num_prompts=number, modules_to_save=["classifier"]))
    tuner = model.base_model
    generator = torch.Generator().manual_seed(1)
    prompts = tuner.prompts()
    prompts.data.copy_(torch.randn(prompts.shape, generator=generator))
    for prompt in range(2 * number, 3 * number):
        tuner.move_prompt(prompt, 2)
    return model


def images_of(shape: str) -> dict[str, torch.Tensor]:
    """Images and labels, the same each time."""
    generator = torch.Generator().manual_seed(2)
    size, count = SHAPES[shape][1][0], SHAPES[shape][3]
    images = torch.randn(count, 3, size, size, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, NUM_LABELS, (count,), generator=generator)}


def outputs(
    model: nn.Module, prompts: torch.Tensor, batch: dict[str, torch.Tensor], scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradient of the loss with respect to the prompts, in double precision on the CPU."""
    output = model.eval()(**batch)
    prompts.grad = None
    (scale * output.loss).backward()
    assert prompts.grad is not None
    return output.logits.detach().cpu().double(), prompts.grad.cpu().double() / scale


def with_tokens(base: nn.Module, model: PeftModel, dtype: torch.dtype, device: str) -> tuple[nn.Module, nn.Parameter]:
    """The classifier with another model's prompts and head, as tokens that are prepended in each block."""
    base.to(device, dtype).requires_grad_(False)
    head = model.base_model.model.classifier.modules_to_save["default"]
    base.classifier.load_state_dict(head.state_dict())
    prompts = nn.Parameter(model.base_model.prompts().detach().to(device, torch.promote_types(dtype, torch.float32)))
    blocks = [block for block, _ in find_blocks(base)]
    cast = prompts.to(dtype)
    prepend_prompts(blocks, cast, model.base_model.prompt_blocks().to(device))
    return base, prompts


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def largest(values: list[float]) -> float:
    """The largest value; NaN if there is one, which Python's `max` may leave out."""
    return torch.tensor(values).max().item()


def attentions(device: str, dtype: torch.dtype) -> Iterator[tuple[str, str, AbstractContextManager[Any]]]:
    """Name, implementation of transformers and context of each attention that there is."""
    yield "eager", "eager", nullcontext()
    yield "sdpa", "sdpa", nullcontext()
    if device == "cuda" and dtype != torch.float32:
        yield "sdpa, flash kernel", "sdpa", sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        if is_flash_attn_2_available():
            yield "flash_attention_2", "flash_attention_2", nullcontext()
    if device == "cuda":
        yield "flex_attention", "flex_attention", nullcontext()


def check_parity(shape: str, device: str) -> Iterator[Row]:
    """Each precision and attention beside prepended tokens in double precision."""
    batch = images_of(shape)
    model = prompted(make_base(shape), shape)
    exact, exact_prompts = with_tokens(make_base(shape), model, torch.float64, "cpu")
    expected = outputs(exact, exact_prompts, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()})
    for name, dtype in DTYPES.items():
        scale = LOSS_SCALE if dtype == torch.float16 else 1.0
        on_device = {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in batch.items()}
        for label, implementation, context in attentions(device, dtype):
            ours = prompted(make_base(shape, implementation).to(dtype), shape).to(device)
            tokens, prompts = with_tokens(make_base(shape, implementation), model, dtype, device)
            with context:
                found = outputs(ours, ours.base_model.prompts(), on_device, scale)
                theirs = outputs(tokens, prompts, on_device, scale)
            for what, ours_found, theirs_found, exactly in zip(
                ("logits", "gradients"), found, theirs, expected, strict=True
            ):
                error, bound = difference(ours_found, exactly), max(1e-6, 2 * difference(theirs_found, exactly))
                yield Row(
                    f"parity, {what}", f"{name}, {label}", f"{error:.1e}", f"{bound:.1e}",
                    HOLDS if error <= bound else FAILS,
                )  # fmt: skip


def make_swin(shape: str) -> SwinForImageClassification:
    """A classifier of the same images, in shifted windows, with random weights, the same each time."""
    torch.manual_seed(0)
    size = SHAPES[shape][1][0]
    config = SwinConfig(
        image_size=size, patch_size=size // 8, embed_dim=32, depths=[2, 2], num_heads=[1, 2], window_size=4,
        num_labels=NUM_LABELS,
    )  # fmt: skip
    return SwinForImageClassification(config)


def check_scores(shape: str, device: str) -> Iterator[Row]:
    """Scores under mixed precision. The backward pass repeats the attention for them, outside of autocast."""
    batch = {name: tensor.to(device) for name, tensor in images_of(shape).items()}
    for name, base in (("ViT", make_base(shape, "sdpa")), ("Swin", make_swin(shape))):
        model = prompted(base, shape).to(device)

        def scores(precision: str, model: nn.Module = model) -> torch.Tensor:
            def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
                with torch.autocast(device, DTYPES[precision], precision != "fp32"):
                    return model(**batch).loss

            config = RelocationConfig(idleness="fisher")
            return Relocator(model, config, None, [batch], compute_loss).measure()[0].score.nan_to_num()

        for precision in ("bf16", "fp16"):
            error = difference(scores(precision), scores("fp32"))
            yield Row("scores", f"{name}, {precision}", f"{error:.1e}", "1e-01", HOLDS if error <= 0.1 else FAILS)


def check_cost(shape: str, device: str, batch_size: int = 32, rounds: int = 20) -> Iterator[Row]:
    """Ratios of a training step's time and peak memory, at 10 and 100 prompts per block."""
    if shape not in cost.SHAPES or device == "mps":
        reason = "MPS tells neither" if device == "mps" else f"{shape} is too small for them to mean anything"
        yield Row("cost", "time and peak memory", "", "", f"not run: {reason}")
        return
    for number in (10, 100):
        args = SimpleNamespace(
            image_size=224, batch_size=batch_size, threads=torch.get_num_threads(), device=device, epoch_images=1000,
            rounds=rounds, contenders=[cost.FLOOR, cost.PREPENDED, cost.OURS, cost.DEFAULT],
        )  # fmt: skip
        lines = {line["contender"]: line for line in cost.measure(shape, number, args)}
        for metric, what in (("step_seconds", "step"), ("peak_memory_bytes", "peak memory")):
            for other in (cost.FLOOR, cost.PREPENDED):
                ratio = lines[cost.DEFAULT][metric] / lines[other][metric]
                setting = f"{shape}, {number} prompts per block, with relocation / {other}"
                yield Row(f"cost, {what}", setting, f"{ratio:.2f}", "", MEASURED)


def check_compiled(shape: str, device: str) -> Iterator[Row]:
    """A compiled model, with CUDA graphs and without, beside the same model uncompiled while prompts move."""
    ways: dict[str, dict[str, Any]] = {"aot_eager": dict(backend="aot_eager")}
    if device != "cpu":
        ways["inductor"] = {}
    if device == "cuda":
        ways["inductor, CUDA graphs"] = dict(mode="reduce-overhead")
    batch = {name: tensor.to(device) for name, tensor in images_of(shape).items()}
    for name, how in ways.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = prompted(make_base(shape, "sdpa"), shape).to(device)
        tuner = model.base_model
        compiled = torch.compile(model, **how)
        errors = []
        # A prompt after the other goes to block 3, which had none, and back to block 1.
        for prompt, block in [(None, 0), (0, 3), (1, 3), (0, 1)]:
            if prompt is not None:
                tuner.move_prompt(prompt, block)
            expected = outputs(model, tuner.prompts(), batch)
            found = outputs(compiled, tuner.prompts(), batch)
            errors += [difference(*pair) for pair in zip(found, expected, strict=True)]
        bound = 1e-5 if device == "cpu" else 1e-3  # inductor may use other kernels
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        verdict = HOLDS if all(error <= bound for error in errors) else FAILS
        yield Row("compiled", f"{name}, 3 moves, {graphs} graphs", f"{largest(errors):.1e}", f"{bound:.0e}", verdict)


def train(model: nn.Module, batch: dict[str, torch.Tensor], tuner: Any, rank: int = 0, world: int = 1) -> None:
    """Eight SGD steps on this process's images, with a move before every second one but the first."""
    per_process = len(batch["labels"]) // world
    part = {name: tensor[rank * per_process : (rank + 1) * per_process] for name, tensor in batch.items()}
    prompts = tuner.prompts()
    head = [p for p in model.parameters() if p.requires_grad and p is not prompts]
    # Gradients of the prompts are small where the backbone is random.
    optimizer = torch.optim.SGD([{"params": [prompts], "lr": 10.0}, {"params": head, "lr": 0.01}])
    config = RelocationConfig(settle=0.0, adjust="random", allocator="uniform", check_moves=False)
    relocator = Relocator(model, config, optimizer, score_batches=[batch])
    for step in range(8):
        if step % 2 == 0:
            relocator.relocate(progress=step / 8)
        model.train()
        model(**part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    relocator.finish()


def spread(way: str, model: PeftModel, device: torch.device) -> nn.Module:
    """The model as a way of training on several devices has it."""
    if way == WAYS[0]:
        return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for block, _ in find_blocks(model.base_model.model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def process(rank: int, world: int, shape: str, device_type: str, port: int, folder: str) -> None:
    """One of the processes that train together. Writes the prompts and their blocks after each way of training."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device_type == "cuda" else "gloo", rank=rank, world_size=world)
    batch = {name: tensor.to(device) for name, tensor in images_of(shape).items()}
    for way in WAYS:
        model = prompted(make_base(shape, "sdpa"), shape).to(device)
        tuner = model.base_model
        train(spread(way, model, device), batch, tuner, rank, world)
        prompts = tuner.prompts()
        prompts = prompts.full_tensor() if hasattr(prompts, "full_tensor") else prompts
        torch.save((prompts.detach().cpu(), tuner.prompt_blocks().cpu()), Path(folder) / f"{way} {rank}.pt")
    # A process that ends while another one still receives may take that down.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def check_devices(shape: str, device: str) -> Iterator[Row]:
    """DDP and FSDP 2, in as many processes as there are devices (two on a CPU), beside one process: what training
    changes in the prompts."""
    devices = {"cuda": torch.cuda.device_count(), "mps": 1, "cpu": 2}[device]
    # So many that each has the same number of images.
    world = max(n for n in range(1, devices + 1) if SHAPES[shape][3] % n == 0)
    if world == 1 or not torch.distributed.is_available():
        yield Row("devices", device, "", "", "not run: there is one device")
        return
    model = prompted(make_base(shape, "sdpa"), shape).to(device)
    tuner = model.base_model
    before = tuner.prompts().detach().cpu().clone()
    train(model, {name: tensor.to(device) for name, tensor in images_of(shape).items()}, tuner)
    expected, expected_blocks = tuner.prompts().detach().cpu(), tuner.prompt_blocks().cpu()
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(process, (world, shape, device, port, folder), nprocs=world)
        found = {way: [torch.load(Path(folder) / f"{way} {rank}.pt") for rank in range(world)] for way in WAYS}
    for way, of_processes in found.items():
        error = largest([difference(prompts - before, expected - before) for prompts, _ in of_processes])
        same = all(torch.equal(blocks, expected_blocks) for _, blocks in of_processes)
        verdict = HOLDS if same and error <= 1e-4 else FAILS
        blocks = "the same blocks" if same else "other blocks"
        yield Row("devices", f"{way}, {world} processes", f"{error:.1e}, {blocks}", "1e-04, the same", verdict)


CHECKS: dict[str, Callable[[str, str], Iterable[Row]]] = {
    "parity": check_parity, "scores": check_scores, "compiled": check_compiled, "devices": check_devices,
    "cost": check_cost,
}  # fmt: skip


def rows_of(check: str, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of a check. What it raises is a row too, so that the other checks are still run."""
    try:
        yield from CHECKS[check](args.shape, args.device)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
        yield Row(check, "stopped", "", "", f"{FAILS}: {reason:.200}")


def default_device() -> str:
    """CUDA, or else MPS, or else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=default_device(), choices=("cuda", "mps", "cpu"), help="default: the best")
    parser.add_argument("--shape", default="vit-small", choices=SHAPES, help="default: vit-small")
    parser.add_argument("--only", nargs="+", default=list(CHECKS), choices=CHECKS, help="default: all")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    print(f"{name}, PyTorch {torch.__version__}, {args.shape}\n")
    print(f"| {' | '.join(Row._fields)} |\n|{' --- |' * len(Row._fields)}")
    failed = 0
    for check in args.only:
        for row in rows_of(check, args):
            failed += row.verdict.startswith(FAILS)
            print(f"| {' | '.join(row)} |", flush=True)
    print(f"\n{failed} of the verdicts begin with {FAILS!r}.")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
