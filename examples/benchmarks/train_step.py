"""Seconds a training step: prompts appended inside the attention, against prepended tokens.

    python examples/benchmarks/train_step.py

The contenders alternate in one run. Medians and their ratios are printed; the ratio to "prepended" is the figure to
quote, since absolute times depend on the machine. The last line is a relocation as a whole (scores, reward, policy,
default preset), against an epoch of `--epoch_images` without it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from peft import get_peft_model
from prepended import prepend_prompts
from tqdm.auto import tqdm
from transformers import ViTConfig, ViTForImageClassification

from provpt_peft import ProVPTConfig, RelocationConfig, Relocator


# Width, heads: DeiT's names for ViT shapes of 12 blocks.
SHAPES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}


def make_vit(shape: str, image_size: int) -> ViTForImageClassification:
    width, heads = SHAPES[shape]
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            image_size=image_size,
            num_labels=100,
        )
    )


def step_of(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, after: Callable) -> Callable:
    """A function that runs one training step in train mode."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    model.train()

    def step() -> None:
        loss = model(pixel_values=images, labels=labels).loss
        loss.backward()
        after(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def contenders(args: argparse.Namespace) -> tuple[dict[str, Callable], Callable]:
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(0, 100, (args.batch_size,))

    def nothing(loss: torch.Tensor) -> None:
        pass

    steps = {}
    # The floor: a frozen backbone with a trainable head and a gradient through all blocks.
    floor = make_vit(args.shape, args.image_size)
    floor.vit.requires_grad_(False)
    floor.vit.embeddings.cls_token.requires_grad_(True)
    steps["frozen backbone"] = step_of(floor, images, labels, nothing)

    config = ProVPTConfig(num_prompts=args.num_prompts, modules_to_save=["classifier"])
    ours = get_peft_model(make_vit(args.shape, args.image_size), config)
    steps["appended"] = step_of(ours, images, labels, nothing)

    scored = get_peft_model(make_vit(args.shape, args.image_size), config)
    in_steps = Relocator(scored, RelocationConfig(score_images=0))
    steps["scored in each step"] = step_of(scored, images, labels, in_steps.record_step)

    relocated = get_peft_model(make_vit(args.shape, args.image_size), config)
    settings = RelocationConfig(trigger="always")
    score_images = torch.randn(settings.score_images, *images.shape[1:])
    batch = {"pixel_values": score_images, "labels": torch.randint(0, 100, (settings.score_images,))}
    relocator = Relocator(relocated, settings, score_batches=[batch])
    steps["relocated between epochs"] = step_of(relocated, images, labels, relocator.record_step)

    oracle = make_vit(args.shape, args.image_size)
    oracle.vit.requires_grad_(False)
    oracle.prompts = torch.nn.Parameter(ours.base_model.prompts().detach().clone())
    prepend_prompts(oracle.vit.layers, oracle.prompts, ours.base_model.prompt_blocks(), config.prompt_dropout)
    steps["prepended"] = step_of(oracle, images, labels, nothing)
    return steps, relocator.relocate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="ViT shape (default: small)")
    parser.add_argument("--num_prompts", type=int, default=100, help="prompts a block (default: 100)")
    parser.add_argument("--batch_size", type=int, default=8, help="images a step (default: 8)")
    parser.add_argument("--image_size", type=int, default=224, help="side of an image in pixels (default: 224)")
    parser.add_argument("--epoch_images", type=int, default=1000, help="images of an epoch (default: 1000, VTAB-1k's)")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each contender (default: 20)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    steps, relocate = contenders(args)
    for step in steps.values():  # warm-up
        step()
    relocate()
    seconds: dict[str, list[float]] = {name: [] for name in (*steps, "relocation")}
    for _ in tqdm(range(args.rounds), desc="rounds"):
        for name, step in (*steps.items(), ("relocation", relocate)):
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)

    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"ViT {args.shape}, {args.image_size} px, batch {args.batch_size}, {args.num_prompts} prompts a block, "
        f"{args.threads} threads, train mode, prompt dropout 0.1, median of {args.rounds}"
    )
    print(f"{'':24}{'ms a step':>12}{'/ frozen':>12}{'/ prepended':>14}")
    for name, median in medians.items():
        floor, oracle = medians["frozen backbone"], medians["prepended"]
        print(f"{name:24}{1000 * median:12.0f}{median / floor:12.3f}{median / oracle:14.3f}")
    num_steps = args.epoch_images / args.batch_size
    plain, with_relocator = (num_steps * medians[name] for name in ("appended", "relocated between epochs"))
    print(
        f"An epoch of {args.epoch_images} images with a relocation is "
        f"{(with_relocator + medians['relocation']) / plain:.3f} times one without "
        f"({(plain + medians['relocation']) / plain:.3f} if the steps take the same)."
    )


if __name__ == "__main__":
    main()
