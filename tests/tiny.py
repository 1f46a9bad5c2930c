"""Tiny random models, one of each family, and their blocks. A step of training takes milliseconds."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput

from provpt_peft import ProVPTConfig


FOLDER = Path(__file__).parent
TORCH_2_6 = torch.__version__.startswith("2.6.")
needs_compile = pytest.mark.skipif(TORCH_2_6, reason="PyTorch 2.6 compiles and exports none of transformers' models")
VIT_LIKE = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, image_size=32, patch_size=8, num_labels=3)
IMAGE_SIZE = 32


CLASSIFIERS = {
    "vit": "ViT",
    "deit": "DeiT",
    "msn": "ViTMSN",
    "ijepa": "IJepa",
    "dinov2": "Dinov2",
    "dinov2_registers": "Dinov2WithRegisters",
    "clip": "CLIP",
    "siglip": "Siglip",
    "siglip2": "Siglip2",
    "beit": "Beit",
    "data2vec": "Data2VecVision",
    "swin": "Swin",
    "swinv2": "Swinv2",
}
# No image classifier of transformers' own.
BARE = {"mae": "ViTMAE", "dinov3": "DINOv3ViT", "dpt": "DPT", "maskformer_swin": "MaskFormerSwin"}
# Of these transformers has one implementation of the attention only.
EAGER_ONLY = ("swinv2", "maskformer_swin")
WINDOWED = ("swin", "swinv2", "maskformer_swin")

# Those that most tests run on, and all.
FAMILIES = ("vit", "deit", "dinov2", "dinov2_registers", "swin")
ALL_FAMILIES = (*CLASSIFIERS, *BARE)


class Classifier(nn.Module):
    """A head on the mean of all that leaves a backbone which transformers has no classifier for."""

    def __init__(self, backbone: nn.Module, width: int, num_labels: int = 3) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Linear(width, num_labels)

    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        logits = self.classifier(self.backbone(pixel_values, **kwargs).last_hidden_state.mean(dim=1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def sizes_of(family: str) -> dict[str, Any]:
    """The sizes that a tiny config of a family is made with. All else is as the config's defaults have it."""
    if family in WINDOWED:
        # 32 px and patches of 2 px: stages of 16 x 16, 8 x 8 and 4 x 4 tokens, windows of 4, shifted and not.
        return dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2, 2], num_heads=[2, 4, 4], window_size=4)
    settings: dict[str, Any] = {k: v for k, v in VIT_LIKE.items() if k != "num_labels"}
    if family == "siglip2":
        settings = {k: v for k, v in settings.items() if k != "image_size"} | dict(num_patches=16)
    return settings | (dict(mlp_ratio=2) if family.startswith("dinov2") else dict(intermediate_size=64))


def settings_of(family: str) -> dict[str, Any]:
    """What a tiny config of a family is made with in most tests: its sizes, and what its defaults leave out."""
    return sizes_of(family) | {
        "mae": dict(mask_ratio=0.0),
        "beit": dict(use_relative_position_bias=True, layer_scale_init_value=0.5),
        "data2vec": dict(
            use_relative_position_bias=True, use_shared_relative_position_bias=True, layer_scale_init_value=0.5
        ),
        "dpt": dict(backbone_out_indices=[0, 1, 2, 3], is_hybrid=False),
        "dinov3": dict(num_register_tokens=2),
    }.get(family, {})


def bare(family: str, mask_token: bool = False, **settings: Any) -> transformers.PreTrainedModel:
    """A model without a head, from a config of the family's sizes and these settings, in eval mode. What starts as
    zeros or ones (biases, norms, positions, mask tokens) gets random weights, since its part would not be seen."""
    torch.manual_seed(0)
    name = (CLASSIFIERS | BARE)[family] + ("Vision" if family in ("clip", "siglip", "siglip2") else "")
    config = getattr(transformers, f"{name}Config")(**sizes_of(family) | settings)
    model_class = getattr(transformers, f"{name}Model")
    argument = "use_mask_token" in inspect.signature(model_class).parameters
    if mask_token and not argument and hasattr(config, "use_mask_token"):
        config.use_mask_token = True
    model = model_class(config, **dict(use_mask_token=mask_token) if argument else {})
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.numel()):
            if parameter.min() == parameter.max():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            elif parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model.eval()


def make(family: str, **overrides: object) -> nn.Module:
    """An image classifier with random weights, in eval mode. Norms and biases get random weights too."""
    torch.manual_seed(0)
    settings = settings_of(family) | overrides
    attention = {k: settings.pop(k) for k in ("attn_implementation",) if k in settings}
    if family in BARE:
        config = getattr(transformers, f"{BARE[family]}Config")(**settings, **attention)
        backbone = getattr(transformers, f"{BARE[family]}Model")(config)
        model: nn.Module = Classifier(backbone, 64 if family in WINDOWED else 32)
    else:
        name = CLASSIFIERS[family]
        config_class = getattr(transformers, f"{name}Config")
        if family in ("clip", "siglip", "siglip2"):
            num_labels = settings.pop("num_labels", 3)
            config = config_class(vision_config=settings, num_labels=num_labels, **attention)
        else:
            config = config_class(**dict(num_labels=3) | settings, **attention)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.5, 0.5)
            elif isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
        for name, parameter in model.named_parameters():
            if "relative_position_bias_table" in name:
                parameter.normal_(std=0.5)
    return model.eval()


def dual(prefix: str, **settings: Any) -> transformers.PreTrainedModel:
    """A model of images and text, in eval mode."""
    torch.manual_seed(0)
    tower = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    vision = tower | (dict(num_patches=16, patch_size=8) if prefix == "Siglip2" else dict(image_size=32, patch_size=8))
    text = tower | dict(vocab_size=99, max_position_embeddings=16, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config_class = getattr(transformers, f"{prefix}Config")
    config = config_class(text_config=text, vision_config=vision, projection_dim=32, **settings)
    return getattr(transformers, f"{prefix}Model")(config).eval()


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks, by the ends of their class names."""
    ends = ("ViTLayer", "DeiTLayer", "MAELayer", "MSNLayer", "JepaLayer", "Dinov2Layer", "RegistersLayer", "BeitLayer")
    ends += ("EncoderLayer", "Data2VecVisionLayer", "SwinLayer", "Swinv2Layer")
    return [module for module in model.modules() if type(module).__name__.endswith(ends)]


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


def processor(size: int) -> transformers.CLIPProcessor:
    """A processor of images and text, with an image processor unlike that of the tiny models."""
    tokenizer = transformers.CLIPTokenizer(vocab={"<|startoftext|>": 0, "<|endoftext|>": 1}, merges=[])
    sizes = dict(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    return transformers.CLIPProcessor(transformers.CLIPImageProcessorPil(**sizes), tokenizer)


def images(count: int = 2, seed: int = 1, size: int = IMAGE_SIZE) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def inputs(family: str, count: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    """What a model of a family takes.

    MAE shuffles patches by some noise. SigLIP 2 takes patches; each second image has four that are padding.
    """
    if family == "mae":
        noise = torch.rand(count, 16, generator=torch.Generator().manual_seed(seed))
        return dict(pixel_values=images(count, seed), noise=noise)
    if family != "siglip2":
        return dict(pixel_values=images(count, seed))
    patches = torch.randn(count, 16, 3 * 8 * 8, generator=torch.Generator().manual_seed(seed))
    shapes, mask = torch.tensor([[4, 4], [3, 4]] * count)[:count], torch.ones(count, 16, dtype=torch.int64)
    mask[1::2, 12:] = 0
    return dict(pixel_values=patches, pixel_attention_mask=mask, spatial_shapes=shapes)


def labels(count: int = 2, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, 3, (count,), generator=torch.Generator().manual_seed(seed))
