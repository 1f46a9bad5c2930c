"""What the scripts share: models, their training, exact idleness, files of results and their options."""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForImageClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    get_cosine_schedule_with_warmup,
)

from provpt_peft import ProVPTConfig, RelocationConfig, Relocator

from ..dinov2_small import prepare
from .tasks import Split


RESULTS = Path(__file__).parent / "results"
# The paper's drop rate on prompts.
PAPER_DROPOUT = 0.1


def make_base(
    num_labels: int, seed: int = 0, checkpoint: str | Path | None = None, **settings: Any
) -> PreTrainedModel:
    """A classifier with a new head, of the demo's DINOv2-S unless another checkpoint is named. `settings` change its
    config."""
    torch.manual_seed(seed)
    return AutoModelForImageClassification.from_pretrained(
        checkpoint or prepare(), num_labels=num_labels, ignore_mismatched_sizes=True, **settings
    )


def make_model(num_prompts: int = 5, eps: float | None = None, seed: int = 0, num_labels: int = 10) -> PeftModel:
    """DINOv2-S with prompts, which have the paper's dropout, and a new head. `eps` replaces the epsilon of its norms
    (1e-6)."""
    settings = {} if eps is None else {"layer_norm_eps": eps}
    base = make_base(num_labels, seed, **settings)
    config = ProVPTConfig(num_prompts=num_prompts, prompt_dropout=PAPER_DROPOUT, modules_to_save=["classifier"])
    return get_peft_model(base, config)


def make_vit(width: int, blocks: int, heads: int, **settings: int) -> ViTForImageClassification:
    """A ViT classifier of a shape, with random weights. `settings` change its config."""
    shape = dict(hidden_size=width, num_hidden_layers=blocks, num_attention_heads=heads, intermediate_size=4 * width)
    return ViTForImageClassification(ViTConfig(**(shape | settings)))


def with_lora(base: PreTrainedModel, rank: int) -> PeftModel:
    """LoRA in the queries and values, at a scale of 1, and a trainable head."""
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    return get_peft_model(base, config)


def file_bytes(model: torch.nn.Module) -> int:
    """Size of the file that holds what was trained in a model."""
    if isinstance(model, PeftModel):
        tensors = get_peft_model_state_dict(model)
    else:
        tensors = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return len(safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def peak_memory(model: torch.nn.Module, optimizer: torch.optim.Optimizer, function: Callable[[], Any]) -> int:
    """Bytes of weights, optimizer states and, at its peak, of what a function allocates. On CUDA what PyTorch's
    allocator has reserved meanwhile, for other living models too."""
    if next(model.parameters()).is_cuda:
        # Models refer to themselves: without this, those of runs before would live on.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_reserved()
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    kept = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *states))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    running = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return kept + peak


def even(budget: int, num_blocks: int) -> list[int]:
    """Prompts in each block, as even as can be."""
    return [budget // num_blocks + (block < budget % num_blocks) for block in range(num_blocks)]


def starting_prompts(
    strategy: str, num_prompts: int, num_blocks: int, epochs: int, prune_share: float | None
) -> tuple[list[int], int]:
    """The prompts in each block that a strategy begins with, and its reserve.

    Args:
        strategy: `"B"` begins with more prompts, so many that the budget is left after pruning; `"adding"` with fewer,
            by one for each epoch in which one may be added, at most half. All others begin with the budget; a name
            that ends in `first-last`, as in `"vpt-deep-1-4"`, with all of it in these blocks, counted from 1.
        num_prompts: The budget: prompts per block.
        num_blocks: Blocks of the backbone.
        epochs: Epochs of the run.
        prune_share: The share that (A) and (B) prune.
    """
    budget, reserve = num_prompts * num_blocks, 0
    if found := re.search(r"(\d+)-(\d+)$", strategy):
        first, last = map(int, found.groups())
        return [0] * (first - 1) + even(budget, last - first + 1) + [0] * (num_blocks - last), 0
    if strategy == "B":
        assert prune_share is not None
        budget = round(budget / (1 - prune_share))
    elif strategy == "adding":
        reserve = min(epochs - 1, budget // 2)
    return even(budget - reserve, num_blocks), reserve


def make_optimizer(
    model: torch.nn.Module, learning_rate: float = 3e-3, head_learning_rate: float = 1e-3
) -> torch.optim.Optimizer:
    """AdamW with a rate for what is trained in the backbone, prompts or LoRA, and one for the head."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    head = [p for name, p in trained.items() if "classifier" in name]
    inside = [p for name, p in trained.items() if "classifier" not in name]
    groups = [{"params": inside, "lr": learning_rate}, {"params": head, "lr": head_learning_rate}]
    return torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0)


def train_epoch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Split,
    seed: int,
    batch_size: int = 32,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    max_grad_norm: float | None = None,
) -> float:
    """One epoch in train mode, shuffled by `seed`. Returns the mean loss. A scheduler steps with the optimizer."""
    model.train()
    device = next(model.parameters()).device
    losses = []
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    for batch in order.split(batch_size):
        part = train[batch]
        loss = model(pixel_values=part.images.to(device), labels=part.labels.to(device)).loss
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def make_relocator(
    config: RelocationConfig, model: PeftModel, optimizer: torch.optim.Optimizer, source: Split, seed: int
) -> Relocator:
    """A relocator that scores on images of a split, which the seed chooses."""
    config = replace(config, seed=seed)
    return Relocator(model, config, optimizer, score_batches=[score_batch(source, config.score_images, seed)])


def score_batch(source: Split, count: int, seed: int) -> dict[str, torch.Tensor]:
    """So many images of a split, which the seed chooses, as a batch."""
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed))
    return as_batch(source[order[:count]])


def as_batch(part: Split) -> dict[str, torch.Tensor]:
    """A split under the names of a model's arguments."""
    return {"pixel_values": part.images, "labels": part.labels}


class Mover(Protocol):
    """What `fit` asks to move prompts, as it does a `Relocator`."""

    def relocate(self, progress: float) -> Any:
        """Called before each epoch, with the share of training that is done."""

    def finish(self) -> Any:
        """Called after training."""


def fit(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Split,
    epochs: int,
    seed: int,
    relocator: Mover | None = None,
    batch_size: int = 32,
    cosine: bool = False,
    warmup: float = 0.0,
    max_grad_norm: float | None = None,
    after_epoch: Callable[[int], None] | None = None,
) -> float:
    """Train, with relocations between the epochs if there is a relocator, at constant rates or with cosine decay after
    a warm-up over a share of the steps. `after_epoch` is told the number of each epoch that ends, from 1. Returns the
    last epoch's mean loss."""
    steps = epochs * -(-len(train) // batch_size)
    scheduler = get_cosine_schedule_with_warmup(optimizer, round(warmup * steps), steps) if cosine else None
    for epoch in range(epochs):
        if relocator is not None:
            relocator.relocate(progress=epoch / epochs)
        loss = train_epoch(model, optimizer, train, 1000 * seed + epoch, batch_size, scheduler, max_grad_norm)
        if after_epoch is not None:
            after_epoch(epoch + 1)
    if relocator is not None:
        relocator.finish()
    return loss


def exact_idleness(model: PeftModel, part: Split) -> torch.Tensor:
    """Eq. 4 itself: the loss with a prompt minus the loss without it, for each prompt in turn, (N,)."""
    relocator = Relocator(model, RelocationConfig(idleness="exact"), score_batches=[as_batch(part)])
    return relocator.measure()[0].score


class Components(NamedTuple):
    """Estimates of the variances that add up to a cell's."""

    columns: float
    rows: float
    rest: float


def variance_components(table: torch.Tensor) -> Components:
    """Split the variance of a table with one run a cell, as two-way analysis of variance with random effects does: an
    effect's mean square less that of the rest, over the number of its cells. What comes out below 0 is 0."""
    rows, columns = table.shape
    of_rows, of_columns = (table.mean(dim, keepdim=True) - table.mean() for dim in (1, 0))
    rest = (table - table.mean() - of_rows - of_columns).square().sum().item() / ((rows - 1) * (columns - 1))
    mean_square_rows = columns * of_rows.square().sum().item() / (rows - 1)
    mean_square_columns = rows * of_columns.square().sum().item() / (columns - 1)
    return Components(max(mean_square_columns - rest, 0.0) / rows, max(mean_square_rows - rest, 0.0) / columns, rest)


def mean_and_spread(values: list[float]) -> str:
    """Mean and standard deviation, as text."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def mean_and_error(values: list[float], form: str = ".2f") -> str:
    """Mean and its standard error, as text. `form` is the mean's, a sign and a number of digits."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return f"{statistics.mean(values):{form}}" + ("" if error is None else f" ± {error:{form.removeprefix('+')}}")


def mean_error_and_number(values: list[float], form: str = ".2f") -> str:
    """The same with the number of values in brackets; empty where there is none."""
    return f"{mean_and_error(values, form)} ({len(values)})" if values else ""


def print_header(cells: Sequence[str]) -> None:
    """Print the head of a Markdown table."""
    print(f"| {' | '.join(cells)} |\n|{' --- |' * len(cells)}")


def read_lines(path: Path, settings: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The results in a file of JSON lines, none if it is not there yet. With settings, the lines that have them."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if (settings or {}).items() <= line.items()]


def images_of(args: argparse.Namespace) -> dict[str, Any]:
    """What says which images a task has, beside its seed."""
    return {name: getattr(args, name) for name in ("train_images", "validation_images", "image_size")}


def refuse_other_images(task: str, seed: int, data_hash: str, args: argparse.Namespace) -> None:
    """Raise SystemExit if the results file has runs of a task and a seed on other images: other versions of a package
    may draw or split otherwise."""
    same_data = {"task": task, "seed": seed} | images_of(args)
    if {line["data_hash"] for line in read_lines(args.output, same_data)} - {data_hash}:
        raise SystemExit(
            f"{args.output} has runs on other images of {task}, seed {seed}, than those that are made here, "
            f"{data_hash}. Name another file with --output."
        )


def append_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Add results to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps({k: _plain(v) for k, v in line.items()}) + "\n" for line in lines)


def _plain(value: Any) -> Any:
    """JSON has no number for the loss of a run that diverged."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Options that are whole numbers.
_HELP = {
    "epochs": "epochs of a run",
    "train_images": "training images",
    "validation_images": "validation images",
    "image_size": "side of an image in pixels",
    "num_prompts": "prompts in each block",
    "seed": "seed",
    "threads": "CPU threads",
}


def results_parser(
    description: str, results: str, checkpoint: bool = False, device: bool = False, **defaults: int
) -> argparse.ArgumentParser:
    """A parser with the options of a script that keeps results.

    Args:
        description: The script's docstring.
        results: Name of the file in `results/` beside this one, without its ending.
        checkpoint: Whether the script takes other backbones than the demo's.
        device: Whether it takes a device.
        defaults: Options of `_HELP` that the script has, with their defaults.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if checkpoint:
        parser.add_argument("--model_name_or_path", help="checkpoint of the backbone (default: the demo's DINOv2-S)")
    if device:
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{_HELP[name]} (default: {default})")
    file = f"{results}.jsonl"
    parser.add_argument(
        "--output", type=Path, default=RESULTS / file, help=f"the results file (default: {file} in {RESULTS.name}/)"
    )
    parser.add_argument("--report", action="store_true", help="only print, and draw where there is a picture")
    return parser
