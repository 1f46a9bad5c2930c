"""Tiny random models, one of each family, and their blocks. A step of training takes milliseconds."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from peft import PeftModel, get_peft_model
from torch import nn

from provpt_peft import ProVPTConfig


FOLDER = Path(__file__).parent
VIT_LIKE = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, image_size=32, patch_size=8, num_labels=3)
IMAGE_SIZE = 32


def make(family: str, **overrides: object) -> nn.Module:
    """An image classifier with random weights, in eval mode. LayerNorms get random weights too."""
    torch.manual_seed(0)
    if family == "swin":
        # 32 px and patches of 2 px: stages of 16 x 16, 8 x 8 and 4 x 4 tokens, windows of 4, shifted and not.
        settings = dict(
            image_size=32, patch_size=2, embed_dim=16, depths=[2, 2, 2], num_heads=[2, 4, 4], window_size=4
        )
        settings |= dict(num_labels=3) | overrides
        model = transformers.SwinForImageClassification(transformers.SwinConfig(**settings))
    else:
        config_class, model_class = {
            "vit": (transformers.ViTConfig, transformers.ViTForImageClassification),
            "deit": (transformers.DeiTConfig, transformers.DeiTForImageClassification),
            "dinov2": (transformers.Dinov2Config, transformers.Dinov2ForImageClassification),
            "dinov2_registers": (
                transformers.Dinov2WithRegistersConfig,
                transformers.Dinov2WithRegistersForImageClassification,
            ),
        }[family]
        settings = VIT_LIKE | (dict(mlp_ratio=2) if family.startswith("dinov2") else dict(intermediate_size=64))
        model = model_class(config_class(**(settings | overrides)))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.5, 0.5)
            elif isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
            elif type(module).__name__ == "SwinRelativePositionBias":
                module.relative_position_bias_table.normal_(std=0.5)
    return model.eval()


FAMILIES = ("vit", "deit", "dinov2", "dinov2_registers", "swin")


def blocks(model: nn.Module) -> list[nn.Module]:
    names = ("ViTLayer", "DeiTLayer", "Dinov2Layer", "Dinov2WithRegistersLayer", "SwinLayer")
    return [module for module in model.modules() if type(module).__name__ in names]


def prompted(model: nn.Module, adapter_name: str = "default", **config: object) -> PeftModel:
    config = dict(num_prompts=3, prompt_dropout=0.0, modules_to_save=["classifier"]) | config
    return get_peft_model(model, ProVPTConfig(**config), adapter_name=adapter_name)


def unlike_fresh(model: PeftModel) -> PeftModel:
    """Give a prompted model's prompts, blocks and head values that no fresh one has."""
    with torch.no_grad():
        model.base_model.prompts().normal_()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    for prompt, block in [(0, 4), (1, 4), (5, 0)]:
        model.base_model.move_prompt(prompt, block)
    return model


def images(count: int = 2, seed: int = 1, size: int = IMAGE_SIZE) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def labels(count: int = 2, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, 3, (count,), generator=torch.Generator().manual_seed(seed))
