"""SETR-PUP: a vision transformer and a head that upsamples step by step (Zheng et al. 2021, Sec. 3.3).

Legend: B images, D width, h x w patches, C classes, H x W pixels of the labels.
"""

from __future__ import annotations

import inspect
import itertools

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import SemanticSegmenterOutput


IGNORED = 255


class ProgressiveUpsampling(nn.Module):
    """Four times convolution, batch norm, ReLU and twice the size; then the classes.

    Args:
        width: D, the channels of what comes in.
        num_labels: C.
        channels: Channels in between.
        steps: How often.
    """

    def __init__(self, width: int, num_labels: int, channels: int = 256, steps: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        widths = [width] + [channels] * steps
        self.steps = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in itertools.pairwise(widths)
        )
        self.classify = nn.Conv2d(channels, num_labels, 1)

    def forward(self, tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Tokens (B, h * w, D) to logits (B, C, 16 h, 16 w)."""
        features = self.norm(tokens).transpose(1, 2).unflatten(2, (height, width))  # (B, D, h, w)
        for step in self.steps:
            features = F.interpolate(step(features), scale_factor=2, mode="bilinear", align_corners=False)
        return self.classify(features)


class SetrPup(nn.Module):
    """A vision transformer of transformers with the head of SETR-PUP on its last tokens.

    Args:
        backbone: A model whose `last_hidden_state` ends with the tokens of the patches, such as ViT, DeiT, DINOv2.
        num_labels: C.
        channels: Channels of the head.
    """

    def __init__(self, backbone: PreTrainedModel, num_labels: int, channels: int = 256) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = ProgressiveUpsampling(backbone.config.hidden_size, num_labels, channels)
        # ViT and DeiT have to be told of another size, DINOv2 adapts by itself.
        names = inspect.signature(backbone.forward).parameters
        self.size_options = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in names else {}

    @classmethod
    def from_pretrained(cls, name_or_path: str, num_labels: int, channels: int = 256) -> SetrPup:
        """With the weights of a checkpoint and a new head."""
        return cls(AutoModel.from_pretrained(name_or_path), num_labels, channels)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> SemanticSegmenterOutput:
        """Logits of each pixel, and the mean cross-entropy where there are labels.

        Args:
            pixel_values: (B, 3, height, width), both divisible by the patch size.
            labels: Class numbers (B, H, W), 255 for pixels that do not count.
        """
        patch = self.backbone.config.patch_size
        height, width = (side // patch for side in pixel_values.shape[2:])
        tokens = self.backbone(pixel_values, **self.size_options).last_hidden_state[:, -height * width :]
        logits = self.head(tokens, height, width)
        loss = None
        if labels is not None:
            upsampled = F.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
            loss = F.cross_entropy(upsampled, labels, ignore_index=IGNORED)
        return SemanticSegmenterOutput(loss=loss, logits=logits)
