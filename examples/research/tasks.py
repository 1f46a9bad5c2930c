"""Small tasks as tensors, as the tasks of VTAB-1k are: 800 training, 200 validation, up to 1,000 test images.

| task | group | classes | images |
| --- | --- | --- | --- |
| digits | natural | 10 | scikit-learn's handwritten digits |
| stamps | natural | 10 | category of Tux Paint's drawings and photos, from a Debian package (GPL; about 160 MB) |
| textile | specialized | 3 | textiles without defect, with a local and with a global one, from a wheel (MIT; 42 MB) |
| location | structured | 16 | sprites as in dSprites, location along x |
| orientation | structured | 16 | the same, orientation |
| count | structured | 8 | 3 to 10 coloured shapes |
| distance | structured | 6 | distance of the nearest of 1 to 5 objects on a plane, in perspective |

Images are generated, or downloaded once into `.cache` with pip or apt-get. And what a classifier makes of them:
`evaluate`.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from ..dinov2_small import download_wheel


MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
# Pixels of a side are drawn so many times finer and averaged.
OVERSAMPLING = 4
ORIENTATIONS, SCALES, POSITIONS = 40, 6, 32
# Orientation and location are told apart in so many classes, as in VTAB-1k.
SPRITE_CLASSES = 16
TEST_IMAGES = 1000
CACHE = Path(__file__).resolve().parents[2] / ".cache"
TEXTILES = "conformal-clip-data==0.1.4"
# Package and version of Debian 12.
STAMPS = ("tuxpaint-stamps-default", "2022.06.04-1")
STAMPS_SHA256 = "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34"
# Those with at least 16 drawings or photos.
STAMP_CATEGORIES = (
    "animals", "clothes", "food", "household", "plants", "seasonal", "space", "symbols", "town", "vehicles"
)  # fmt: skip


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
    """A task by name, see the table above. At most 1,000 test images.

    Args:
        name: Name of the task.
        size: Side of an image in pixels, a multiple of the backbone's patch size.
        train: Training images.
        validation: Validation images.
        seed: Seed of the split, and of what is generated.

    Raises:
        ValueError: If there is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"`name` must be one of {', '.join(TASKS)}, got {name!r}.")
    num_labels, make = TASKS[name]
    return Task(num_labels, *make(size, (train, validation, TEST_IMAGES), seed))


def data_hash(task: Task) -> str:
    """Twelve digits of a hash of a task's images, rounded to 8 bits, and labels: that runs have seen the same data."""
    digest = hashlib.sha256()
    for split in (task.train, task.validation, task.test):
        pixels = ((split.images * STD + MEAN) * 255).round().clamp(0, 255).to(torch.uint8)
        digest.update(pixels.numpy().tobytes() + split.labels.numpy().tobytes())
    return digest.hexdigest()[:12]


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, batch_size: int = 128) -> tuple[float, float]:
    """Mean cross entropy and share of right answers, 0 … 1, of an image classifier in eval mode."""
    model.eval()
    device = next(model.parameters()).device
    logits, labels = [], []
    for start in range(0, len(split), batch_size):
        part = split[start : start + batch_size]
        logits.append(model(pixel_values=part.images.to(device)).logits.cpu())
        labels.append(part.labels)
    found, right = torch.cat(logits), torch.cat(labels)
    return F.cross_entropy(found, right).item(), int((found.argmax(dim=-1) == right).sum()) / len(split)


def _normalised(pictures: torch.Tensor) -> torch.Tensor:
    """(B, size, size) or (B, 3, size, size) in 0 … 1 to (B, 3, size, size)."""
    return ((pictures if pictures.dim() == 4 else pictures[:, None]) - MEAN) / STD


def _split(everything: Split, counts: tuple[int, int, int], seed: int) -> list[Split]:
    """Disjoint random parts; the last one takes what is left, at most as many as it counts."""
    train, validation, test = counts
    if train + validation >= len(everything):
        raise ValueError(
            f"A task of {len(everything)} images cannot give {train} training and {validation} validation images and "
            "any to test on. Ask for fewer."
        )
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))
    parts = order.split([train, validation, len(order) - train - validation])
    return [everything[part[:limit]] for part, limit in zip(parts, (train, validation, test), strict=True)]


def _digits(size: int, counts: tuple[int, int, int], seed: int) -> list[Split]:
    data = load_digits()
    gray = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    gray = F.interpolate(gray, size=(size, size), mode="bicubic").clamp(0, 1)[:, 0]
    return _split(Split(_normalised(gray), torch.tensor(data.target)), counts, seed)


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


def _sprites(label: str, size: int, counts: tuple[int, int, int], seed: int) -> list[Split]:
    """White shapes on black with the factors of dSprites; the label is the orientation in 16 bins of its 40 values, or
    the location along x in 16 bins of its 32, as in VTAB-1k."""
    rng = np.random.default_rng(seed)
    outlines, side = _outlines(), size * OVERSAMPLING
    pictures, labels = [], []
    for _ in range(sum(counts)):
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
    return _split(Split(_normalised(torch.tensor(np.stack(pictures))), torch.tensor(labels)), counts, seed)


def _coloured(pictures: list[Image.Image], size: int) -> torch.Tensor:
    """Pictures to (B, 3, size, size), normalised."""
    arrays = [np.asarray(picture.convert("RGB").resize((size, size), Image.Resampling.BOX)) for picture in pictures]
    return _normalised(torch.tensor(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255)


def _draw_shape(
    draw: ImageDraw.ImageDraw, rng: np.random.Generator, centre: np.ndarray, radius: float, shade: float = 1.0
) -> None:
    """A disc, a square or a triangle in a bright colour."""
    colour = tuple(int(shade * value) for value in rng.integers(96, 256, size=3))
    corners = int(rng.choice([3, 4, 60]))
    angles = 2 * math.pi * (np.arange(corners) / corners + rng.random())
    points = centre + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    draw.polygon([tuple(point) for point in points], fill=colour)


def _counts(size: int, counts: tuple[int, int, int], seed: int) -> list[Split]:
    """3 to 10 shapes that do not touch on a dark ground; the label is their number less 3."""
    rng = np.random.default_rng(seed)
    side = size * OVERSAMPLING
    pictures, labels = [], []
    for _ in range(sum(counts)):
        number = int(rng.integers(3, 11))
        shapes: list[tuple[np.ndarray, float]] = []
        while len(shapes) < number:
            radius = side * rng.uniform(0.05, 0.09)
            centre = rng.uniform(radius, side - radius, size=2)
            if all(np.linalg.norm(centre - other) > radius + r + 0.02 * side for other, r in shapes):
                shapes.append((centre, radius))
        picture = Image.new("RGB", (side, side), tuple(int(value) for value in rng.integers(0, 64, size=3)))
        for centre, radius in shapes:
            _draw_shape(ImageDraw.Draw(picture), rng, centre, radius)
        pictures.append(picture)
        labels.append(number - 3)
    return _split(Split(_coloured(pictures, size), torch.tensor(labels)), counts, seed)


def _distances(size: int, counts: tuple[int, int, int], seed: int) -> list[Split]:
    """1 to 5 objects that stand on a plane, seen from a height of 1 in perspective; the label is the distance of the
    nearest one, 2 to 8 heights, in six bins. Objects differ in size, so that size alone does not tell."""
    rng = np.random.default_rng(seed)
    side = size * OVERSAMPLING
    horizon = 0.3 * side
    pictures, labels = [], []
    for _ in range(sum(counts)):
        nearest = rng.uniform(2, 8)
        distances = [nearest, *rng.uniform(nearest, 10, size=rng.integers(0, 5))]
        picture = Image.new("RGB", (side, side), (150, 180, 210))
        draw = ImageDraw.Draw(picture)
        draw.rectangle((0, horizon, side, side), fill=(70, 80, 60))
        for distance in sorted(distances, reverse=True):
            radius = side * rng.uniform(0.2, 0.4) / distance
            ground = horizon + 1.3 * side / distance
            centre = np.array([rng.uniform(0.1, 0.9) * side, ground - radius])
            _draw_shape(draw, rng, centre, radius, shade=0.5 + 0.5 * 2 / distance)
        pictures.append(picture)
        labels.append(int(nearest - 2))
    return _split(Split(_coloured(pictures, size), torch.tensor(labels)), counts, seed)


def _textiles(size: int, counts: tuple[int, int, int], seed: int) -> list[Split]:
    """Textiles without defect, with a local one and with a global one."""
    archive = CACHE / "conformal_clip_data.whl"
    if not archive.exists():
        with tempfile.TemporaryDirectory() as folder:
            wheel = download_wheel(TEXTILES, Path(folder))
            archive.parent.mkdir(parents=True, exist_ok=True)
            archive.write_bytes(wheel.read_bytes())
    pictures, labels = [], []
    with zipfile.ZipFile(archive) as wheel_file:
        for name in sorted(wheel_file.namelist()):
            label = next((n for n, part in enumerate(("nominal", "local", "global")) if f"/{part}/" in name), None)
            if label is not None and name.endswith(".jpg"):
                pictures.append(Image.open(io.BytesIO(wheel_file.read(name))))
                labels.append(label)
    return _split(Split(_coloured(pictures, size), torch.tensor(labels)), counts, seed)


def _stamp_package() -> bytes:
    """The Debian package with the drawings, fetched once with apt from wherever the machine gets its packages."""
    name, version = STAMPS
    package = CACHE / f"{name}_{version}_all.deb"
    instead = f"Run `apt-get update` first, or fetch {name} {version} (Debian 12) by hand and put it at {package}."
    if not package.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            try:
                subprocess.run(["apt-get", "download", f"{name}={version}"], cwd=folder, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                message = f"The stamps come with `apt-get download`, which failed: {error}. {instead}"
                raise RuntimeError(message) from error
            shutil.move(Path(folder) / package.name, package)
    content = package.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != STAMPS_SHA256:
        raise RuntimeError(f"{package} must have the SHA-256 {STAMPS_SHA256}, but has {found}. Remove it. {instead}")
    return content


def _stamp_files() -> dict[str, dict[str, list[bytes]]]:
    """PNG files of each category, those of one drawing (mirrored, flipped and numbered variants) together."""
    # A Debian package is an `ar` archive: after 8 bytes, members with a header of 60 bytes, at even offsets.
    content, offset = _stamp_package(), 8
    while not content[offset : offset + 16].startswith(b"data.tar"):
        length = int(content[offset + 48 : offset + 58])
        offset += 60 + length + length % 2
    data = content[offset + 60 : offset + 60 + int(content[offset + 48 : offset + 58])]
    drawings: dict[str, dict[str, list[bytes]]] = {category: {} for category in STAMP_CATEGORIES}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            match = re.search(r"/stamps/(\w+)/(.+)\.png$", member.name)
            if match and member.isfile() and match[1] in drawings:
                drawing = re.sub(r"(_mirror|_flip|[-_]?\d+)+$", "", match[2])
                file = archive.extractfile(member)
                assert file is not None
                drawings[match[1]].setdefault(drawing, []).append(file.read())
    return drawings


@cache
def _stamp_pictures() -> list[tuple[int, list[Image.Image]]]:
    """Category and pictures of each drawing, on white, at most 128 pixels a side."""
    drawings = []
    for label, by_name in enumerate(_stamp_files().values()):
        for files in by_name.values():
            pictures = []
            for content in files:
                picture = Image.open(io.BytesIO(content)).convert("RGBA")
                side = max(picture.size)
                ground = Image.new("RGBA", (side, side), "white")
                ground.alpha_composite(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
                pictures.append(ground.convert("RGB").resize((128, 128), Image.Resampling.BOX))
            drawings.append((label, pictures))
    return drawings


def _stamps(size: int, counts: tuple[int, int, int], seed: int) -> list[Split]:
    """Category of drawings. The splits share no drawing; each picture comes once as it is, and as often as it takes to
    fill its split turned by up to 20 degrees, mirrored or not, and in another brightness."""
    rng = np.random.default_rng(seed)
    drawings = _stamp_pictures()
    order = rng.permutation(len(drawings))
    total = sum(counts)
    ends = [round(len(order) * sum(counts[: part + 1]) / total) for part in range(3)]
    splits = []
    for part, (start, end) in zip(counts, zip([0, *ends], ends, strict=False), strict=True):
        originals = [(label, p) for index in order[start:end] for label, found in [drawings[index]] for p in found]
        originals = [originals[index] for index in rng.permutation(len(originals))]
        pictures, labels = [], []
        for number in range(part):
            label, picture = originals[number % len(originals)]
            if number >= len(originals):
                picture = picture.rotate(rng.uniform(-20, 20), Image.Resampling.BILINEAR, fillcolor="white")
                picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else picture
                picture = ImageEnhance.Brightness(picture).enhance(rng.uniform(0.7, 1.0))
            pictures.append(picture)
            labels.append(label)
        splits.append(Split(_coloured(pictures, size), torch.tensor(labels)))
    return splits


# Number of classes, and how to make the splits from the side of an image, their numbers of images, and a seed.
TASKS: dict[str, tuple[int, Callable[[int, tuple[int, int, int], int], list[Split]]]] = {
    "digits": (10, _digits),
    "stamps": (len(STAMP_CATEGORIES), _stamps),
    "textile": (3, _textiles),
    "location": (SPRITE_CLASSES, partial(_sprites, "location")),
    "orientation": (SPRITE_CLASSES, partial(_sprites, "orientation")),
    "count": (8, _counts),
    "distance": (6, _distances),
}
