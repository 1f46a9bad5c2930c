"""Small scenes with shapes, their masks and boxes: for segmentation and detection where there is no other data.

    python -m examples.research.scenes              # .cache/scenes-112, for segmentation
    python -m examples.research.scenes --size 84    # .cache/scenes-84, for detection

Discs, squares and triangles in bright colours, which may overlap, on a ground with a gradient and grain. Each split is
written as two common layouts at once, of the same images:

    images/<split>/000000.png
    annotations/<split>/000000.png      per-pixel class numbers, 0 the ground (as ADE20K has it)
    instances_<split>.json              boxes and masks of what is in sight (as COCO has it)
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw


CACHE = Path(__file__).resolve().parents[2] / ".cache"
CLASSES = ("disc", "square", "triangle")
CORNERS = (60, 4, 3)
COUNTS = {"train": 600, "validation": 100, "test": 200}
MOST_SHAPES = 4
# Less of a shape than this share of its own area in sight, and it is no object.
LEAST_VISIBLE = 0.3


def draw_scene(rng: np.random.Generator, size: int) -> tuple[Image.Image, np.ndarray, list[dict[str, Any]]]:
    """A scene of `size` x `size` pixels.

    Returns:
        The picture; its class numbers (size, size), 0 the ground; and for each shape in sight its class number from 1
        on and the mask (size, size) of what is in sight.
    """
    across = np.linspace(0, 1, size)
    slope = rng.uniform(-40, 40, size=(2, 3))
    ground = rng.uniform(40, 160, size=3) + across[:, None, None] * slope[0] + across[None, :, None] * slope[1]
    ground = ground + rng.normal(scale=12, size=(size, size, 3))
    picture = Image.fromarray(ground.clip(0, 255).astype(np.uint8))
    owner = np.zeros((size, size), dtype=np.int64)  # number of the shape in front, from 1 on
    shapes = []
    for number in range(1, rng.integers(1, MOST_SHAPES + 1) + 1):
        kind = int(rng.integers(len(CLASSES)))
        radius = size * rng.uniform(0.1, 0.22)
        centre = rng.uniform(0.8 * radius, size - 0.8 * radius, size=2)
        angles = 2 * math.pi * (np.arange(CORNERS[kind]) / CORNERS[kind] + rng.random())
        points = (centre + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)).clip(0, size - 1)
        polygon = [(float(x), float(y)) for x, y in points]
        ImageDraw.Draw(picture).polygon(polygon, fill=tuple(int(v) for v in rng.integers(30, 256, size=3)))
        mask = Image.new("1", (size, size))
        ImageDraw.Draw(mask).polygon(polygon, fill=1)
        owner[np.asarray(mask)] = number
        shapes.append({"number": number, "kind": kind + 1, "area": int(np.asarray(mask).sum())})
    kinds = np.array([0, *(shape["kind"] for shape in shapes)], dtype=np.uint8)
    objects = []
    for shape in shapes:
        visible = owner == shape["number"]
        if visible.sum() >= LEAST_VISIBLE * shape["area"]:
            objects.append({"kind": shape["kind"], "mask": visible})
    return picture, kinds[owner], objects


def as_annotation(number: int, image: int, thing: dict[str, Any]) -> dict[str, Any]:
    """An object in COCO's words, its mask as run lengths down the columns, the first of them outside."""
    rows, columns = np.nonzero(thing["mask"])
    left, top = int(columns.min()), int(rows.min())
    box = [left, top, int(columns.max()) - left + 1, int(rows.max()) - top + 1]
    pixels = thing["mask"].T.ravel()
    changes = np.flatnonzero(np.diff(pixels, prepend=False))
    runs = np.diff(changes, prepend=0, append=len(pixels)).tolist()
    return {
        "id": number, "image_id": image, "category_id": thing["kind"], "bbox": box, "area": len(rows), "iscrowd": 0,
        "segmentation": {"size": list(thing["mask"].shape), "counts": runs},
    }  # fmt: skip


def write(folder: Path, counts: dict[str, int] | None = None, size: int = 112, seed: int = 0) -> Path:
    """Write the splits into a folder, unless they are there. Returns the folder."""
    done = folder / "complete"
    if done.exists():
        return folder
    rng = np.random.default_rng(seed)
    for split, count in (counts or COUNTS).items():
        images, annotations = [], []
        for part in ("images", "annotations"):
            (folder / part / split).mkdir(parents=True, exist_ok=True)
        for image in range(count):
            picture, kinds, objects = draw_scene(rng, size)
            name = f"{image:06d}.png"
            picture.save(folder / "images" / split / name)
            Image.fromarray(kinds).save(folder / "annotations" / split / name)
            images.append({"id": image, "file_name": name, "width": size, "height": size})
            annotations += [as_annotation(len(annotations) + n, image, thing) for n, thing in enumerate(objects)]
        categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES, start=1)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"instances_{split}.json").write_text(json.dumps(content))
    done.touch()
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="where to write (default: .cache/scenes-<size>)")
    parser.add_argument("--size", type=int, default=112, help="side of an image in pixels (default: 112)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = write(options.folder or CACHE / f"scenes-{options.size}", size=options.size, seed=options.seed)
    print(f"The scenes are in {folder}.")
