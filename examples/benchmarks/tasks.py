"""The tasks of the benchmarks as tensors: scikit-learn's digits, orientation and location of sprites as in dSprites.

And what a classifier makes of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
# Pixels of a side are drawn so many times finer and averaged.
OVERSAMPLING = 4
ORIENTATIONS, SCALES, POSITIONS = 40, 6, 32
# Orientation and location are told apart in so many classes, as in VTAB-1k.
SPRITE_CLASSES = 16
TEST_IMAGES = 1000


@dataclass
class Split:
    """Images (B, 3, size, size), normalised as for ImageNet, and labels (B,)."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: slice | list[int] | torch.Tensor) -> Split:
        return Split(self.images[index], self.labels[index])


@dataclass
class Task:
    """A classification task with its splits."""

    num_labels: int
    train: Split
    validation: Split
    test: Split


def load(name: str, size: int = 56, train: int = 800, validation: int = 200, seed: int = 0) -> Task:
    """A task by name: `digits` (1,797 images in all), `orientation` or `location`. At most 1,000 test images.

    Args:
        name: Name of the task.
        size: Side of an image in pixels, a multiple of the backbone's patch size.
        train: Training images.
        validation: Validation images.
        seed: Seed of the split, and of the sprites.
    """
    if name == "digits":
        everything, num_labels = _digits(size), 10
    elif name in ("orientation", "location"):
        everything, num_labels = _sprites(size, train + validation + TEST_IMAGES, seed, name), SPRITE_CLASSES
    else:
        raise ValueError(f"`name` must be digits, orientation or location, got {name!r}.")
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))
    parts = order.split([train, validation, len(order) - train - validation])
    return Task(
        num_labels,
        *(everything[part[:limit]] for part, limit in zip(parts, (train, validation, TEST_IMAGES), strict=True)),
    )


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, batch_size: int = 128) -> tuple[float, float]:
    """Mean cross entropy and share of right answers, 0 … 1, of an image classifier in eval mode."""
    model.eval()
    device = next(model.parameters()).device
    logits = torch.cat([model(pixel_values=part.to(device)).logits.cpu() for part in split.images.split(batch_size)])
    right = int((logits.argmax(dim=-1) == split.labels).sum())
    return F.cross_entropy(logits, split.labels).item(), right / len(split)


def _normalised(gray: torch.Tensor) -> torch.Tensor:
    """(B, size, size) in 0 … 1 to (B, 3, size, size)."""
    return (gray[:, None] - MEAN) / STD


def _digits(size: int) -> Split:
    data = load_digits()
    gray = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    gray = F.interpolate(gray, size=(size, size), mode="bicubic").clamp(0, 1)[:, 0]
    return Split(_normalised(gray), torch.tensor(data.target))


def _outlines() -> list[np.ndarray]:
    """Square, ellipse and heart as polygons (points, 2) of about the same area."""
    t = np.linspace(0, 2 * math.pi, 100, endpoint=False)
    square = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * 0.9
    ellipse = np.stack([0.75 * np.cos(t), 1.4 * np.sin(t)], axis=1)
    heart = np.stack([
        16 * np.sin(t) ** 3,
        -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)),
    ], axis=1) / 14  # fmt: skip
    return [square, ellipse, heart]


def _sprites(size: int, count: int, seed: int, label: str) -> Split:
    """White shapes on black with the factors of dSprites; the label is the orientation in 16 bins of its 40 values, or
    the location along x in 16 bins of its 32, as in VTAB-1k."""
    rng = np.random.default_rng(seed)
    outlines, side = _outlines(), size * OVERSAMPLING
    pictures, labels = [], []
    for _ in range(count):
        outline = outlines[rng.integers(3)]
        scale = 0.5 + 0.5 * rng.integers(SCALES) / (SCALES - 1)
        orientation = int(rng.integers(ORIENTATIONS))
        steps = rng.integers(POSITIONS, size=2)
        position = steps / (POSITIONS - 1)
        angle = 2 * math.pi * orientation / ORIENTATIONS
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        centre = 0.2 + 0.6 * position
        points = (centre + 0.12 * scale * outline @ turn.T) * side
        picture = Image.new("L", (side, side))
        ImageDraw.Draw(picture).polygon([tuple(point) for point in points], fill=255)
        pictures.append(np.asarray(picture.resize((size, size), Image.Resampling.BOX), dtype=np.float32) / 255)
        factor, values = (orientation, ORIENTATIONS) if label == "orientation" else (int(steps[0]), POSITIONS)
        labels.append(factor * SPRITE_CLASSES // values)
    return Split(_normalised(torch.tensor(np.stack(pictures))), torch.tensor(labels))
