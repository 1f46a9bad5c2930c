"""What does not depend on images: import, wrapping, switching and loading adapters, a relocation without its scoring.

    python -m examples.research.overheads

Prints medians in milliseconds and draws a relocation over the number of prompts (ViT-B, from 25 to 1600 per block), as
`docs/images/overheads.png`. `--huge` runs one training step of a ViT-H shape in bfloat16 with 200 prompts in each of
its 32 blocks (about 5 GB).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from peft import PeftModel, get_peft_model

from provpt_peft import ProVPTConfig, RelocationConfig, Relocator
from provpt_peft.relocation.idleness import Idleness
from provpt_peft.relocation.measure import Measurement

from .common import make_vit
from .pictures import plt, save


# Width, blocks, heads.
VIT_B = (768, 12, 12)
NUM_PROMPTS = (25, 50, 100, 200, 400, 800, 1600)
IMPORT = "import time, peft; start = time.perf_counter(); import provpt_peft; print(time.perf_counter() - start)"


def median_ms(function: Callable[[], object], rounds: int) -> float:
    """Median of the milliseconds that a function takes, after one call to warm up."""
    function()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def import_ms(rounds: int) -> float:
    """What `import provpt_peft` adds to `import peft`, in new processes."""
    runs = [subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, check=True) for _ in range(rounds)]
    return 1000 * statistics.median(float(run.stdout.split()[-1]) for run in runs)


def wrap_ms(rounds: int) -> float:
    models = [make_vit(*VIT_B) for _ in range(rounds + 1)]
    return median_ms(lambda: get_peft_model(models.pop(), ProVPTConfig(num_prompts=10)), rounds)


def switch_ms(rounds: int) -> float:
    model = get_peft_model(make_vit(*VIT_B), ProVPTConfig(num_prompts=10))
    model.add_adapter("other", ProVPTConfig(num_prompts=10))
    names = ["other", "default"] * (rounds + 1)
    return median_ms(lambda: model.set_adapter(names.pop()), rounds)


def load_ms(rounds: int) -> tuple[float, float]:
    """Loading an adapter of 100 prompts per block into a model, and reading its file alone."""
    with tempfile.TemporaryDirectory() as folder:
        get_peft_model(make_vit(*VIT_B), ProVPTConfig(num_prompts=100)).save_pretrained(folder)
        models = [make_vit(*VIT_B) for _ in range(rounds + 1)]
        load = median_ms(lambda: PeftModel.from_pretrained(models.pop(), folder), rounds)
        file = Path(folder) / "adapter_model.safetensors"
        return load, median_ms(lambda: [t.clone() for t in safetensors.torch.load_file(file).values()], rounds)


def all_idle(measurement: Measurement) -> Idleness:
    """Scores at random, all above 0, so that a prompt moves each time."""
    return Idleness.mean_of(torch.rand(2, len(measurement.blocks()), dtype=torch.float64))


def relocation_ms(num_prompts: int, rounds: int) -> tuple[float, float]:
    """A relocation that scores at random: the median, and the slowest, which updates the policy."""
    # The MLP has no part in it, nor have the images.
    model = get_peft_model(
        make_vit(*VIT_B, intermediate_size=64, image_size=32), ProVPTConfig(num_prompts=num_prompts)
    )
    optimizer = torch.optim.AdamW([model.base_model.prompts()])
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    model(**batch).loss.backward()
    config = RelocationConfig(idleness=all_idle, settle=0.0)
    relocator = Relocator(
        model, config, optimizer, score_batches=[batch], compute_loss=lambda model, batch: torch.rand(())
    )
    relocator.relocate()  # as before the first epoch, where nothing moves
    seconds = []
    for _ in range(rounds + 1):
        optimizer.step()
        start = time.perf_counter()
        moves = relocator.relocate()
        seconds.append(time.perf_counter() - start)
        assert moves
    return 1000 * statistics.median(seconds[1:]), 1000 * max(seconds[1:])


def huge_step() -> None:
    """One training step of a ViT-H/14 shape in bfloat16 with 200 prompts in each of its blocks."""
    model = make_vit(1280, 32, 16, patch_size=14).to(torch.bfloat16)
    model = get_peft_model(model, ProVPTConfig(num_prompts=200, modules_to_save=["classifier"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = model.base_model.prompts().detach().clone()
    pixel_values = torch.randn(1, 3, 224, 224, dtype=torch.bfloat16)
    start = time.perf_counter()
    loss = model(pixel_values=pixel_values, labels=torch.tensor([0])).loss
    loss.backward()
    optimizer.step()
    seconds = time.perf_counter() - start
    changed = (model.base_model.prompts() != before).any(dim=1).sum().item()
    print(f"ViT-H, bfloat16, batch 1: a step took {seconds:.1f} s, loss {loss.item():.3f}, {changed} prompts changed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="times each is measured (default: 9)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--huge", action="store_true", help="run a step of a ViT-H shape as well")
    parser.add_argument("--pictures", type=Path, default=Path("docs/images"), help="folder of the picture")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    load, read = load_ms(args.rounds)
    print("| | ms |\n| --- | --- |")
    print(f"| `import provpt_peft` after `import peft` | {import_ms(args.rounds):.0f} |")
    print(f"| `get_peft_model`, ViT-B | {wrap_ms(args.rounds):.1f} |")
    print(f"| `set_adapter` | {switch_ms(args.rounds):.2f} |")
    print(f"| `PeftModel.from_pretrained`, ViT-B, 100 prompts per block | {load:.1f} |")
    print(f"| reading that file alone | {read:.1f} |")
    relocations = {number: relocation_ms(number, args.rounds) for number in NUM_PROMPTS}
    for number, (median, slowest) in relocations.items():
        print(f"| a relocation, {number} prompts per block; the slowest | {median:.1f}; {slowest:.1f} |")

    figure, axis = plt.subplots(figsize=(5, 3.4))
    axis.plot(NUM_PROMPTS, [median for median, _ in relocations.values()], marker="o", label="median")
    axis.plot(NUM_PROMPTS, [slow for _, slow in relocations.values()], marker="s", label="slowest: with a PPO update")
    axis.set_xscale("log", base=2)
    axis.set_xticks(NUM_PROMPTS, [str(number) for number in NUM_PROMPTS])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("prompts per block, 12 blocks of width 768")
    axis.set_ylabel("a relocation without scoring (ms)")
    axis.legend(fontsize=8)
    figure.tight_layout()
    save(figure, args.pictures / "overheads.png")
    if args.huge:
        huge_step()


if __name__ == "__main__":
    main()
