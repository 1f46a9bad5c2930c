"""What it costs to serve many tasks with one backbone: batches of 32 images, and the service under load.

    python -m examples.research.serving                              # measures what is missing, prints the tables
    python -m examples.research.serving --report                     # the tables
    python -m examples.research.serving --shapes vit-base --tasks 8

The first table is of batches of 32 images from 1, 8 or 32 tasks. Each task is an adapter with a head: 10 prompts per
block, or LoRA of rank 8 in queries and values. The contenders take turns in one run; medians are stored. `mixed` is a
batch with `adapter_names`, `one by one` a batch for each adapter with `set_adapter`. `uneven` adapters have different
numbers of prompts in each block, so rows are padded and masked.

In the second table `examples/serve.py` answers `--clients` clients. Each sends a request when its last one has been
answered, from the same machine, which computes for both.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from tqdm.auto import tqdm
from transformers import ViTImageProcessor

from provpt_peft import ProVPTConfig

from .. import serve
from .common import append_lines, make_vit, print_header, read_lines, results_parser
from .cost import VIT_SHAPES


BATCH_SIZE = 32
PROMPTS, RANK = 10, 8
ONE, MIXED, UNEVEN, BY_TURNS = "one adapter", "mixed", "mixed, uneven", "one by one"
LORA_ONE, LORA_MIXED, BASE = "LoRA, one adapter", "LoRA, mixed", "no adapter"
CONTENDERS = (BASE, ONE, MIXED, UNEVEN, BY_TURNS, LORA_ONE, LORA_MIXED)


def with_adapters(shape: str, size: int, tasks: int, config: Callable[[int], Any]) -> PeftModel:
    """A ViT with an adapter for each task, "0", "1" and so on, from a config of its number."""
    torch.manual_seed(0)
    model = get_peft_model(make_vit(*VIT_SHAPES[shape], image_size=size, num_labels=10), config(0), adapter_name="0")
    for number in range(1, tasks):
        model.add_adapter(str(number), config(number))
    return model.eval()


def prompts(number: int) -> ProVPTConfig:
    return ProVPTConfig(num_prompts=PROMPTS, modules_to_save=["classifier"])


def uneven(number: int) -> ProVPTConfig:
    """As many prompts, 5 to 15 in a block."""
    counts = [PROMPTS + (block + number) % 11 - 5 for block in range(11)]
    return ProVPTConfig(num_prompts=[*counts, 11 * PROMPTS - sum(counts) + PROMPTS], modules_to_save=["classifier"])


def lora(number: int) -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])


@torch.inference_mode()
def batches(shape: str, tasks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of a shape and a number of tasks."""
    images = torch.randn(BATCH_SIZE, 3, args.image_size, args.image_size)
    names = [str(number % tasks) for number in range(BATCH_SIZE)]
    groups = [(str(n), [i for i, name in enumerate(names) if name == str(n)]) for n in range(tasks)]
    make = (shape, args.image_size, tasks)
    even, other, low_rank = with_adapters(*make, prompts), with_adapters(*make, uneven), with_adapters(*make, lora)

    def one_by_one() -> None:
        for name, of_task in groups:
            even.set_adapter(name)
            even(pixel_values=images[of_task])

    def one(model: PeftModel) -> None:
        model.set_adapter("0")
        model(pixel_values=images)

    def none() -> None:
        with even.disable_adapter():
            even(pixel_values=images)

    calls: dict[str, Callable[[], Any]] = {
        BASE: none,
        ONE: lambda: one(even),
        MIXED: lambda: even(pixel_values=images, adapter_names=names),
        UNEVEN: lambda: other(pixel_values=images, adapter_names=names),
        BY_TURNS: one_by_one,
        LORA_ONE: lambda: one(low_rank),
        LORA_MIXED: lambda: low_rank(pixel_values=images, adapter_names=names),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # warm-up
    for _ in tqdm(range(args.rounds), desc=f"{shape}, {tasks} tasks"):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    cell = cell_of("batches", shape, tasks, args)
    medians = {name: statistics.median(of) for name, of in seconds.items()}
    return [
        cell | {"contender": name, "seconds": median, "date": str(date.today())} for name, median in medians.items()
    ]


def service(shape: str, tasks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The line of a load on the service."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(file, "PNG")
    with tempfile.TemporaryDirectory() as folder:
        base, adapters = Path(folder, "base"), Path(folder, "adapters")
        torch.manual_seed(0)
        make_vit(*VIT_SHAPES[shape], image_size=args.image_size, num_labels=10).save_pretrained(base)
        ViTImageProcessor(size={"height": args.image_size, "width": args.image_size}).save_pretrained(base)
        model = with_adapters(shape, args.image_size, 1, prompts)
        for config in model.peft_config.values():
            config.base_model_name_or_path = str(base)
        for number in range(tasks):
            model.save_pretrained(adapters)
            (adapters / "0").rename(adapters / f"task{number}")
        server = uvicorn.Server(
            uvicorn.Config(serve.make_app(str(base), adapters, serve.Limits()), port=0, log_level="error")
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        def ask(number: int) -> float:
            start = time.perf_counter()
            address = f"http://127.0.0.1:{port}/tasks/task{number % tasks}"
            with urllib.request.urlopen(urllib.request.Request(address, data=file.getvalue())) as answer:
                json.load(answer)
            return time.perf_counter() - start

        with ThreadPoolExecutor(args.clients) as clients:
            list(clients.map(ask, range(tasks)))  # all are in memory then
            start = time.perf_counter()
            latencies = list(tqdm(clients.map(ask, range(args.requests)), total=args.requests, desc=f"{tasks} tasks"))
            seconds = time.perf_counter() - start
        server.should_exit = True
        thread.join()
    p50, p99 = np.percentile(latencies, [50, 99]).tolist()
    figures = {"requests": args.requests, "clients": args.clients, "requests_per_second": args.requests / seconds}
    cell = cell_of("service", shape, tasks, args)
    return [cell | figures | {"p50_seconds": p50, "p99_seconds": p99, "date": str(date.today())}]


def cell_of(kind: str, shape: str, tasks: int, args: argparse.Namespace) -> dict[str, Any]:
    """What the lines of a cell have in common."""
    settings = {name: getattr(args, name) for name in ("image_size", "threads", "rounds")}
    return {"kind": kind, "shape": shape, "tasks": tasks, "torch": torch.__version__, **settings}


def report(lines: list[dict[str, Any]]) -> None:
    """Print both tables."""
    cells: dict[tuple[str, int, int], dict[str, float]] = {}
    for line in lines:
        if line["kind"] == "batches":
            key = (line["shape"], line["image_size"], line["tasks"])
            cells.setdefault(key, {})[line["contender"]] = line["seconds"]
    print(f"| shape | px | tasks | {' | '.join(f'{name}, ms' for name in CONTENDERS)} | mixed / one | mixed / LoRA |")
    print(f"|{' --- |' * (len(CONTENDERS) + 5)}")
    for (shape, size, tasks), cell in sorted(cells.items()):
        times = " | ".join(f"{1000 * cell[name]:.0f}" for name in CONTENDERS)
        ratios = f"{cell[MIXED] / cell[ONE]:.2f} | {cell[MIXED] / cell[LORA_MIXED]:.2f}"
        print(f"| {shape} | {size} | {tasks} | {times} | {ratios} |")
    header = ["shape", "px", "tasks", "clients", "requests / s", "median, ms", "99 %, ms"]
    print()
    print_header(header)
    for line in lines:
        if line["kind"] == "service":
            cells_of = [line[name] for name in ("shape", "image_size", "tasks", "clients")]
            cells_of.append(f"{line['requests_per_second']:.0f}")
            cells_of += [f"{1000 * line[name]:.0f}" for name in ("p50_seconds", "p99_seconds")]
            print(f"| {' | '.join(map(str, cells_of))} |")


def main() -> None:
    parser = results_parser(__doc__, "serving", image_size=224, threads=2)
    parser.add_argument("--kinds", nargs="+", default=["batches", "service"], choices=["batches", "service"])
    parser.add_argument("--shapes", nargs="+", default=["vit-small"], choices=VIT_SHAPES, help="default: vit-small")
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--rounds", type=int, default=5, help="batches of each contender (default: 5)")
    parser.add_argument("--clients", type=int, default=16, help="of the service (default: 16)")
    parser.add_argument("--requests", type=int, default=300, help="to the service (default: 300)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for kind in [] if args.report else args.kinds:
        for shape in args.shapes:
            for tasks in args.tasks:
                if not read_lines(args.output, cell_of(kind, shape, tasks, args)):
                    append_lines(args.output, {"batches": batches, "service": service}[kind](shape, tasks, args))
    report(read_lines(args.output))


if __name__ == "__main__":
    main()
