"""Pictures of a model's attention: where its class token looks, and the share that each prompt gets.

    python examples/attention_maps.py my-adapter photo.jpg other.jpg -o maps.png
    python examples/attention_maps.py my-adapter photo.jpg -o prompts.png --of prompts

You can copy this one file. It needs torch, matplotlib, transformers, peft and provpt_peft.

Legend: B images, W windows per image, H heads, T tokens, n prompts of a block, h x w patches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from transformers.image_utils import load_image

from provpt_peft import ProVPTModel, load_image_classifier


def prompt_attention(model: nn.Module, **inputs: torch.Tensor) -> list[list[float]]:
    """The attention weight that each prompt gets, for each block, in ascending order of the prompts.

    It is the mean over images and heads. The weights are those of the class token (the first one), or their mean over
    all tokens in families with windows.

    Args:
        model: A model with a PROVPT adapter, which is enabled.
        inputs: Inputs of the model, such as `pixel_values`.

    Raises:
        ValueError: If no adapter is enabled, or a VPT-Shallow one.
    """
    tuner = _tuner(model)
    weights = _attention_weights(model, tuner, inputs)
    means = []
    for block, count, of_block in zip(tuner.blocks, tuner.prompt_distribution(), weights, strict=True):
        queries = of_block if block.family.windowed else of_block[:, :, :1]  # (…, H, queries, T + n)
        means.append(queries[..., queries.shape[-1] - count :].mean(dim=(0, 1, 2)).tolist())
    return means


def plot_prompt_attention(model: nn.Module, **inputs: torch.Tensor) -> Figure:
    """The attention weights on the prompts of each block: a dot for each prompt, a bar for their sum. It shows
    saturated and deficient blocks at a glance.

    Args:
        model: A model with a PROVPT adapter, which is enabled.
        inputs: Inputs of the model, such as `pixel_values`.

    Raises:
        ValueError: If no adapter is enabled, or a VPT-Shallow one, or if no block has prompts.
    """
    means = prompt_attention(model, **inputs)
    if not any(means):
        raise ValueError("At least one block must have prompts, got all prompts in no block. Move one to a block.")
    figure = Figure(figsize=(max(5.0, 0.35 * len(means) + 1.5), 3.5), layout="constrained")
    axes = figure.subplots()
    blocks = range(1, len(means) + 1)
    axes.bar(blocks, [sum(block) for block in means], color="lightgray", label="all prompts of the block")
    dots = [(number, weight) for number, block in zip(blocks, means, strict=True) for weight in block]
    numbers, weights = zip(*dots, strict=True)
    axes.scatter(numbers, weights, s=12, color="#0072B2", label="one prompt", zorder=3)
    axes.set(xlabel="block", ylabel="share of the attention", xlim=(0.4, len(means) + 0.6))
    axes.set_xticks(blocks)
    axes.legend()
    return figure


def attention_map(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Where the class token looks in the last block, as shares of its attention to the patches, (B, h, w).

    Args:
        model: A model with a PROVPT adapter and a class token.
        pixel_values: (B, 3, height, width).

    Raises:
        ValueError: If the family has no class token that sees all patches (families with windows have none), or if no
            adapter is enabled, or a VPT-Shallow one.
    """
    tuner = _tuner(model)
    family = tuner.blocks[-1].family
    if family.windowed:
        raise ValueError(f"A map needs a class token that sees all patches, which {family.name} lacks. Use a ViT.")
    patch = tuner.patch_size
    sides = (patch, patch) if isinstance(patch, int) else patch
    height, width = (side // of_patch for side, of_patch in zip(pixel_values.shape[2:], sides, strict=True))
    weights = _attention_weights(model, tuner, {"pixel_values": pixel_values})[-1]
    tokens = weights.shape[2]
    if tokens <= height * width:
        raise ValueError(
            f"A map needs a class token beside the {height * width} patches, but there are {tokens} tokens in all. "
            "Use a family that has one."
        )
    patches = weights[:, :, 0, tokens - height * width : tokens].mean(dim=1)  # (B, h * w)
    return (patches / patches.sum(dim=1, keepdim=True)).unflatten(1, (height, width))


def plot_attention_maps(models: Mapping[str, nn.Module], pixel_values: torch.Tensor) -> Figure:
    """Images, and beside each of them where each model's class token looks in its last block.

    Args:
        models: Models with a PROVPT adapter and a class token, by name, for example VPT-Deep and PRO-VPT.
        pixel_values: (B, 3, height, width), normalised as the models expect.

    Raises:
        ValueError: If a model has no class token that sees all patches.
    """
    maps = {name: attention_map(model, pixel_values) for name, model in models.items()}
    count = len(pixel_values)
    figure = Figure(figsize=(2.2 * (len(models) + 1), 2.2 * count + 0.3), layout="constrained")
    grid = figure.subplots(count, len(models) + 1, squeeze=False)
    for row, image in enumerate(pixel_values.float().cpu()):
        low, high = image.amin(), image.amax()
        shown = ((image - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0).numpy()
        grid[row][0].imshow(shown)
        for axes, values in zip(grid[row][1:], maps.values(), strict=True):
            axes.imshow(shown.mean(axis=2), cmap="gray", vmin=0, vmax=1)
            extent = (-0.5, image.shape[2] - 0.5, image.shape[1] - 0.5, -0.5)
            axes.imshow(values[row].cpu().numpy(), cmap="inferno", alpha=0.6, extent=extent)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    for axes, name in zip(grid[0], ["image", *maps], strict=True):
        axes.set_title(name, fontsize=10)
    return figure


def _tuner(model: nn.Module) -> ProVPTModel:
    tuner = next((module for module in model.modules() if isinstance(module, ProVPTModel)), None)
    if tuner is None or tuner.bank.enabled_adapter is None:
        raise ValueError(
            f"The picture shows a model's prompts, but the {type(model).__name__} has no PROVPT adapter that is "
            "enabled. Wrap it with `get_peft_model`, or load an adapter."
        )
    if tuner.bank.enabled_adapter in tuner.bank.shallow:
        raise ValueError("The picture shows prompts in each block, but those of VPT-Shallow are tokens. Use VPT-Deep.")
    return tuner


@torch.no_grad()
def _attention_weights(model: nn.Module, tuner: ProVPTModel, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The attention weights (B * W, H, T, T + n) of each block, in eval mode."""
    found: list[torch.Tensor] = []
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with _recorded(tuner, found):
            model(**inputs)
    finally:
        for module in was_training:
            module.training = True
    return found


@contextmanager
def _recorded(tuner: ProVPTModel, found: list[torch.Tensor]) -> Iterator[None]:
    """Run all blocks with `eager` attention, which returns the weights, and keep these."""

    def recording(block: Any) -> Any:
        def attend(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            implementation: str | None = None,
            **kwargs: Any,
        ) -> Any:
            # A boolean mask is for sdpa; `eager` would add it to the logits.
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
            output, weights = type(block).attend(block, query, key, value, mask, implementation="eager", **kwargs)
            found.append(weights.float())
            return output, weights

        return attend

    try:
        for block in tuner.blocks:
            vars(block)["attend"] = recording(block)
        yield
    finally:
        for block in tuner.blocks:
            vars(block).pop("attend", None)


def main() -> None:
    """Load an adapter and images, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", help="folder that save_pretrained wrote, or Hub id")
    parser.add_argument("images", nargs="+", help="image files or URLs")
    parser.add_argument("--base_model", help="folder or Hub id of the base model (default: what the adapter names)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="picture to write, such as maps.png")
    parser.add_argument(
        "--of",
        choices=("maps", "prompts"),
        default="maps",
        help="where the class token looks, or each prompt's share of the attention (default: maps)",
    )
    options = parser.parse_args()
    model, image_processor, _ = load_image_classifier(options.adapter, options.base_model)
    images = [load_image(image) for image in options.images]
    pixel_values = image_processor(images, return_tensors="pt")["pixel_values"]
    if options.of == "maps":
        figure = plot_attention_maps({"last block's attention": model}, pixel_values)
    else:
        figure = plot_prompt_attention(model, pixel_values=pixel_values)
    figure.savefig(options.output, dpi=150)
    print(f"The picture is in {options.output}.")


if __name__ == "__main__":
    main()
