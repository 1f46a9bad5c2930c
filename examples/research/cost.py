"""What prompts cost: time and memory of a training step, latency, file size, trainable parameters.

    python -m examples.research.cost                                 # measures what is missing, prints and draws
    python -m examples.research.cost --report --num_prompts 10 100   # a summary of all, the tables of these
    python -m examples.research.cost --shapes swin-tiny --num_prompts 10 100

The contenders of a cell (a shape and a number of prompts per block) take turns in one run, in train mode with the
default prompt dropout (none since version 0.2). Medians are stored, a line for each contender, so a run that was
stopped goes on where it was. Absolute times depend on the machine: the figures to compare are the ratios to the floor
and to prepended tokens.

The floor is a frozen backbone with a trainable head and a gradient through all blocks. A step with relocation has its
share of one relocation every `--epoch_images` images. Peak memory is weights, optimizer states and what a step
or a relocation allocates on top; on CUDA what the allocator has reserved. Latency is that of serving: keys and values
of the prompts are kept (`kept_keys`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from tqdm.auto import tqdm
from transformers import SwinConfig, SwinForImageClassification

from provpt_peft import ProVPTConfig, ProVPTModel, RelocationConfig, Relocator
from provpt_peft.backbone.families import find_blocks

from .common import (
    append_lines,
    file_bytes,
    make_vit,
    peak_memory,
    print_header,
    read_lines,
    results_parser,
    with_lora,
)
from .pictures import BLACK, BLUE, GREEN, PURPLE, SKY, VERMILLION, plt, save
from .prepended import prepend_prompts, prepend_prompts_in_windows


# Width, blocks, heads of ViT shapes; Swin-T is the default of transformers.
VIT_SHAPES = {"vit-tiny": (192, 12, 3), "vit-small": (384, 12, 6), "vit-base": (768, 12, 12)}
SHAPES = (*VIT_SHAPES, "swin-tiny")
FLOOR, PREPENDED, LORA, FULL = "frozen backbone", "prepended tokens", "LoRA, r = 8", "full fine-tuning"
OURS, DEFAULT, PAPER, TWO_PASSES = (
    "PRO-VPT, not relocated",
    "PRO-VPT, default preset",
    "PRO-VPT, paper preset",
    "PRO-VPT, scored in passes of their own",
)
# Not part of the default comparison.
SECOND_HALF = "PRO-VPT, all in the second half of the blocks"
COMPILED, CHECKPOINTED = ", compiled", ", gradient checkpointing"
PRESETS = {DEFAULT: "default", PAPER: "paper"}
CONTENDERS = (FLOOR, PREPENDED, OURS, TWO_PASSES, DEFAULT, PAPER, LORA, FULL)
COLOURS = {FLOOR: BLACK, PREPENDED: VERMILLION, OURS: SKY, DEFAULT: BLUE, PAPER: GREEN, LORA: PURPLE}


def make_base(shape: str, image_size: int) -> nn.Module:
    """A classifier with random weights; what it computes costs the same as with trained ones."""
    torch.manual_seed(0)
    if shape == "swin-tiny":
        return SwinForImageClassification(SwinConfig(image_size=image_size, num_labels=100))
    return make_vit(*VIT_SHAPES[shape], image_size=image_size, num_labels=100)


class Contender:
    """A model and its training step.

    Args:
        model: The model.
        batch: `pixel_values` and `labels` of a step.
        device: Where to run.
        relocator: Relocates its prompts, if given.
        passes: Forward and backward passes a step. The second one of two is to score with, as in the reference code.
        forward: What to call in place of the model, e.g. the model compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: dict[str, torch.Tensor],
        device: torch.device,
        relocator: Relocator | None = None,
        passes: int = 1,
        forward: Callable | None = None,
    ) -> None:
        self.model = model.train()
        self.batch = batch
        self.device = device
        self.relocator = relocator
        self.passes = passes
        self.forward = model if forward is None else forward
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.trainable, lr=1e-3, momentum=0.9)
        self.relocate()  # as before the first epoch, where nothing is measured or moved

    def step(self) -> None:
        for _ in range(self.passes):
            self.optimizer.zero_grad()
            loss = self.forward(**self.batch).loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def relocate(self) -> None:
        if self.relocator is not None:
            self.relocator.relocate()

    @torch.no_grad()
    def infer(self) -> None:
        self.forward(pixel_values=self.batch["pixel_values"][:1])

    def peak_memory(self) -> int:
        """Bytes at the peak of a step and a relocation."""

        def step_and_relocate() -> None:
            self.step()
            self.relocate()

        return peak_memory(self.model, self.optimizer, step_and_relocate)


def prompted(shape: str, num_prompts: int | list[int], args: argparse.Namespace) -> PeftModel:
    config = ProVPTConfig(num_prompts=num_prompts, modules_to_save=["classifier"])
    return get_peft_model(make_base(shape, args.image_size), config).to(args.device)


def with_prepended_tokens(shape: str, num_prompts: int, args: argparse.Namespace) -> nn.Module:
    """Swin's are without dropout."""
    base = make_base(shape, args.image_size)
    base.base_model.requires_grad_(False)
    layout = get_peft_model(make_base(shape, args.image_size), ProVPTConfig(num_prompts=num_prompts)).base_model
    blocks = [block for block, _ in find_blocks(base)]
    base.prompts = nn.Parameter(layout.prompts().detach().clone())
    base.to(args.device)
    prompt_blocks = layout.prompt_blocks().to(args.device)
    if shape == "swin-tiny":
        prepend_prompts_in_windows(blocks, base.prompts, prompt_blocks)
    else:
        prepend_prompts(blocks, base.prompts, prompt_blocks, dropout=ProVPTConfig().prompt_dropout)
    return base


def require_gradients(module: nn.Module, args: Any, output: Any) -> None:
    """Let the backward pass go through all blocks. Swin's embeddings give a tuple."""
    (output[0] if isinstance(output, tuple) else output).requires_grad_(True)


def plain_name(name: str) -> str:
    """A contender's name without the suffix that says how it is run."""
    return name.removesuffix(COMPILED).removesuffix(CHECKPOINTED)


def make_contender(name: str, shape: str, num_prompts: int, args: argparse.Namespace) -> Contender:
    """A contender by name; a suffix says how it is run."""
    device = torch.device(args.device)
    size = (3, args.image_size, args.image_size)

    def make_batch(count: int) -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.randn(count, *size, device=device),
            "labels": torch.randint(0, 100, (count,), device=device),
        }

    batch = make_batch(args.batch_size)
    plain = plain_name(name)
    if plain in (DEFAULT, PAPER):
        model = prompted(shape, num_prompts, args)
        config = RelocationConfig.preset(PRESETS[plain], settle=0.0)
        # In batches of a step's size.
        parts = torch.arange(config.score_images).split(args.batch_size)
        score_batches = [make_batch(len(part)) for part in parts]
        return Contender(model, batch, device, Relocator(model, config, score_batches=score_batches))
    if plain == FLOOR:
        model = make_base(shape, args.image_size).to(device)
        model.base_model.requires_grad_(False)
        model.base_model.embeddings.register_forward_hook(require_gradients)
    elif plain == PREPENDED:
        model = with_prepended_tokens(shape, num_prompts, args)
    elif plain == LORA:
        model = with_lora(make_base(shape, args.image_size), rank=8).to(device)
    elif plain == FULL:
        model = make_base(shape, args.image_size).to(device)
    elif plain == SECOND_HALF:
        num_blocks = len(find_blocks(make_base(shape, args.image_size)))
        half = num_blocks // 2
        model = prompted(shape, [0] * half + [2 * num_prompts] * (num_blocks - half), args)
    else:
        model = prompted(shape, num_prompts, args)
    if name.endswith(CHECKPOINTED):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    forward = torch.compile(model) if name.endswith(COMPILED) else None
    return Contender(model, batch, device, passes=2 if plain == TWO_PASSES else 1, forward=forward)


def seconds_of(function: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(shape: str, num_prompts: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of a cell."""
    device = torch.device(args.device)
    run = datetime.now().isoformat(timespec="seconds")
    # Each alone, so that on CUDA the peak is its own.
    peaks = {}
    for name in args.contenders:
        if not name.endswith(COMPILED):
            contender = make_contender(name, shape, num_prompts, args)
            contender.step()  # optimizer states exist from here on
            peaks[name] = contender.peak_memory()
            del contender
    found = {name: make_contender(name, shape, num_prompts, args) for name in args.contenders}
    relocated = {name: contender for name, contender in found.items() if contender.relocator is not None}
    for contender in found.values():
        contender.step()  # warm-up
    steps: dict[str, list[float]] = {name: [] for name in found}
    relocations: dict[str, list[float]] = {name: [] for name in relocated}
    latencies: dict[str, list[float]] = {name: [] for name in found}
    for _ in tqdm(range(args.rounds), desc=f"{shape}, {num_prompts} prompts per block: steps"):
        for name, contender in found.items():
            steps[name].append(seconds_of(contender.step, device))
        for name, contender in relocated.items():
            relocations[name].append(seconds_of(contender.relocate, device))
    with ExitStack() as serving:
        for contender in found.values():
            contender.model.eval()
            tuner = getattr(contender.model, "base_model", None)
            if isinstance(tuner, ProVPTModel):
                serving.enter_context(tuner.kept_keys())
            contender.infer()  # warm-up
        for _ in tqdm(range(10 * args.rounds), desc=f"{shape}, {num_prompts} prompts per block: latency"):
            for name, contender in found.items():
                latencies[name].append(seconds_of(contender.infer, device))

    for name, contender in found.items():
        seconds = statistics.median(steps[name])
        relocation = statistics.median(relocations[name]) if name in relocated else 0.0
        seconds += relocation * args.batch_size / args.epoch_images
        yield cell_of(shape, num_prompts, args) | {
            "contender": name,
            "step_seconds": seconds,
            "relocation_seconds": relocation,
            "images_per_second": args.batch_size / seconds,
            "peak_memory_bytes": peaks.get(name),
            "latency_seconds": statistics.median(latencies[name]),
            "file_bytes": file_bytes(contender.model),
            "trainable_parameters": sum(p.numel() for p in contender.trainable),
            "rounds": args.rounds,
            # Lines of one run are to be compared with each other only.
            "run": run,
            "torch": torch.__version__,
        }


def cell_of(shape: str, num_prompts: int, args: argparse.Namespace) -> dict[str, Any]:
    """What the lines of a cell have in common."""
    names = ("image_size", "batch_size", "threads", "device", "epoch_images")
    return {"shape": shape, "num_prompts": num_prompts} | {name: getattr(args, name) for name in names}


def summarize(lines: list[dict[str, Any]]) -> None:
    """Print one row for each run: PRO-VPT over the floor, prepended tokens and LoRA, and an epoch with a relocation
    over the same steps without it."""
    header = [
        "shape", "px, batch, device, threads, rounds", "prompts per block", "step / floor", "with relocation / floor",
        "/ prepended", "/ LoRA", "/ without", "peak / floor", "/ prepended", "latency / floor",
    ]  # fmt: skip
    print_header(header)
    runs: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault((line["shape"], line["num_prompts"], line["run"]), {})[line["contender"]] = line
    for (shape, number, _), cell in sorted(runs.items()):
        if not {FLOOR, PREPENDED, OURS, DEFAULT} <= set(cell):
            continue
        ours, best = cell[OURS], cell[DEFAULT]
        relocation = best["relocation_seconds"] * best["batch_size"] / best["epoch_images"]
        figures = [
            _ratio(ours, cell[FLOOR], "step_seconds"),
            *(_ratio(best, cell.get(name), "step_seconds") for name in (FLOOR, PREPENDED, LORA)),
            f"{best['step_seconds'] / (best['step_seconds'] - relocation):.3f}",
            *(_ratio(best, cell[name], "peak_memory_bytes") for name in (FLOOR, PREPENDED)),
            _ratio(best, cell[FLOOR], "latency_seconds"),
        ]
        names = ("image_size", "batch_size", "device", "threads", "rounds")
        setting = ", ".join(str(best[name]) for name in names)
        print(f"| {shape} | {setting} | {number} | {' | '.join(figures)} |")


def _ratio(line: dict[str, Any], other: dict[str, Any] | None, key: str) -> str:
    """A contender's figure over another's, nothing where that one was not run."""
    return "" if other is None else f"{line[key] / other[key]:.2f}"


def report(path: Path, pictures: Path, num_prompts: Sequence[int]) -> None:
    """Print a summary and a table for each cell of these numbers of prompts, and draw a picture for each shape."""
    lines = read_lines(path)
    summarize(lines)
    shapes: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        group = tuple(line[name] for name in ("shape", "image_size", "batch_size", "threads", "device"))
        shapes.setdefault(group, []).append(line)
    for (shape, size, batch, threads, device), of_shape in shapes.items():
        for number, run in sorted({(line["num_prompts"], line["run"]) for line in of_shape}):
            cell = {line["contender"]: line for line in of_shape if line["run"] == run}
            if number not in num_prompts or not {FLOOR, PREPENDED} <= set(cell):
                continue
            floor, oracle = cell[FLOOR], cell[PREPENDED]
            print(
                f"\n{shape}, {size} px, batch {batch}, {number} prompts per block, {device}, {threads} threads, "
                f"median of {floor['rounds']} ({run[:10]})\n\n| | ms a step | / floor | / prepended | images / s | "
                "peak MB | / floor | / prepended | latency ms | / floor | file kB | trainable |\n|" + " --- |" * 12
            )
            for name, line in cell.items():
                figures = [f"{1000 * line['step_seconds']:.0f}"]
                figures += [f"{line['step_seconds'] / other['step_seconds']:.2f}" for other in (floor, oracle)]
                figures.append(f"{line['images_per_second']:.1f}")
                peak = line["peak_memory_bytes"]
                figures.append("" if peak is None else f"{peak / 1e6:.0f}")
                figures += ["" if peak is None else f"{peak / o['peak_memory_bytes']:.2f}" for o in (floor, oracle)]
                latency = line["latency_seconds"]
                figures += [f"{1000 * latency:.1f}", f"{latency / floor['latency_seconds']:.2f}"]
                figures += [f"{line['file_bytes'] / 1e3:.0f}", f"{line['trainable_parameters']:,}"]
                print(f"| {name} | {' | '.join(figures)} |")
        standard = {line["run"] for line in of_shape if line["contender"] == PAPER}
        drawn = [line for line in of_shape if line["run"] in standard]
        title = f"{shape}, {size} px, batch {batch}, {device}, {threads} threads"
        if drawn:
            draw(drawn, title, pictures / f"cost_{shape}_{device}_{threads}.png")


def draw(lines: list[dict[str, Any]], title: str, path: Path) -> None:
    """Time, memory and latency over the number of prompts, each over the floor's in the same cell."""
    floor = {line["num_prompts"]: line for line in lines if line["contender"] == FLOOR}
    panels = {"step_seconds": "a training step", "peak_memory_bytes": "peak memory", "latency_seconds": "latency"}
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), sharex=True)
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for contender, colour in COLOURS.items():
            found = sorted((line for line in lines if line["contender"] == contender), key=lambda r: r["num_prompts"])
            numbers = [line["num_prompts"] for line in found]
            values = [line[name] / floor[line["num_prompts"]][name] for line in found]
            axis.plot(numbers, values, marker="o", markersize=3, color=colour, label=contender)
        axis.set_xscale("log")
        axis.set_xticks(sorted(floor), [str(number) for number in sorted(floor)])
        axis.minorticks_off()
        axis.set_xlabel("prompts per block")
        axis.set_ylabel(f"{label} / frozen backbone's")
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    save(figure, path)


def main() -> None:
    parser = results_parser(__doc__, "cost", device=True, image_size=224, threads=2)
    parser.add_argument("--shapes", nargs="+", default=["vit-small"], choices=SHAPES, help="default: vit-small")
    parser.add_argument("--num_prompts", type=int, nargs="+", default=[5, 10, 20, 50, 100, 200], help="a block")
    parser.add_argument("--batch_size", type=int, default=8, help="images a step (default: 8)")
    parser.add_argument("--epoch_images", type=int, default=1000, help="images of an epoch (default: 1000, VTAB-1k's)")
    parser.add_argument("--rounds", type=int, default=4, help="steps of each contender (default: 4)")
    parser.add_argument(
        "--contenders", nargs="+", default=CONTENDERS,
        help=f"which (default: all); also {SECOND_HALF!r}, and any with {COMPILED!r} or {CHECKPOINTED!r} behind it",
    )  # fmt: skip
    parser.add_argument("--pictures", type=Path, default=Path("docs/images"), help="folder of the pictures")
    args = parser.parse_args()
    unknown = [name for name in args.contenders if plain_name(name) not in (*CONTENDERS, SECOND_HALF)]
    if unknown:
        parser.error(f"there is no contender {unknown[0]!r}, they are {', '.join(map(repr, CONTENDERS))}; see --help")
    torch.set_num_threads(args.threads)
    if not args.report:
        for shape in args.shapes:
            for number in args.num_prompts:
                lines = read_lines(args.output, cell_of(shape, number, args))
                if not set(args.contenders) <= {line["contender"] for line in lines}:
                    append_lines(args.output, list(measure(shape, number, args)))
    report(args.output, args.pictures, args.num_prompts)


if __name__ == "__main__":
    main()
