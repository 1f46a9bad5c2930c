"""VTAB-1k and FGVC as in the paper, from a local folder or a data set repository of the Hub.

    python -m examples.research.vtab --root vtab-1k --model_name_or_path google/vit-base-patch16-224-in21k
    python -m examples.research.vtab --model_name_or_path google/vit-base-patch16-224-in21k --report
    python -m examples.research.vtab --suite fgvc --root fgvc --model_name_or_path google/vit-base-patch16-224-in21k
    python -m examples.research.vtab --hub_dataset OWNER/NAME --model_name_or_path google/vit-base-patch16-224-in21k

Layout of VTAB-1k: a folder for each task with images and the lists `train800.txt`, `val200.txt`, `train800val200.txt`
and `test.txt`, one `path label` a line. Layout of FGVC: a folder for each task with images and the lists `train.json`,
`val.json` and `test.json`, each a map from path to class, as VPT has them. Paths are relative to the task's folder, or
to `images` or `Images` in it; classes may be counted from any number and with gaps. A repository of the Hub has the
same layout; the folders of the tasks that are asked for are downloaded to its cache. A task that is missing is named
and left out.

The protocol is the paper's: a grid of base learning rates and weight decays is searched on the validation split, then
the best setting is trained on all training images (VTAB-1k: 1,000; FGVC: the training split) with each seed and
tested. SGD with momentum 0.9, learning rate base_lr * batch / 256. VPT has a cosine schedule and batch 64 from 100
prompts on, else 128; PRO-VPT a constant rate and batch 64. `vpt-deep-constant` is VPT-Deep under PRO-VPT's recipe, so
that a margin is not the schedule's. VTAB-1k is resized to 224 without augmentation. FGVC is cropped at random and
mirrored to train; to evaluate, its images are cut to the middle square of 224/256 of the shorter side, as VPT does,
since the paper does not say. The whole grid is 40 trainings of 100 epochs for each method and task, nine times as many
for (A) and (B), whose pruned share is searched as well; `--base_lrs`, `--weight_decays` and `--prune_shares` make it
smaller.

Each training is one line of the results file, so a sweep that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError
from PIL import Image
from tqdm.auto import tqdm

from . import tasks
from .common import PAPER_DROPOUT, append_lines, fit, read_lines, results_parser
from .methods import (
    METHODS,
    PRUNE_SHARES,
    Setting,
    best_of_grid,
    describe,
    grid_of,
    make_method_relocator,
    make_model,
    print_tables,
    read_runs,
    setting_of,
)


# Classes, test images, and the prompts per block that VPT lists. The names are those of the common folders.
VTAB: dict[str, dict[str, tuple[int, int, int]]] = {
    "natural": {
        "cifar": (100, 10000, 10),
        "caltech101": (102, 6084, 10),
        "dtd": (47, 1880, 10),
        "oxford_flowers102": (102, 6149, 1),
        "oxford_iiit_pet": (37, 3669, 1),
        "svhn": (10, 26032, 50),
        "sun397": (397, 21750, 5),
    },
    "specialized": {
        "patch_camelyon": (2, 32768, 100),
        "eurosat": (10, 5400, 100),
        "resisc45": (45, 6300, 10),
        "diabetic_retinopathy": (5, 42670, 1),
    },
    "structured": {
        "clevr_count": (8, 15000, 100),
        "clevr_dist": (6, 15000, 200),
        "dmlab": (6, 22735, 100),
        "kitti": (4, 711, 100),
        "dsprites_loc": (16, 73728, 100),
        "dsprites_ori": (16, 73728, 100),
        "smallnorb_azi": (18, 12150, 200),
        "smallnorb_ele": (9, 12150, 200),
    },
}
FGVC: dict[str, dict[str, tuple[int, int, int]]] = {
    "fgvc": {
        "CUB_200_2011": (200, 5794, 10),
        # The paper's table has 6,084 test images here, which is Caltech101's number.
        "nabirds": (555, 24633, 50),
        "OxfordFlower": (102, 6149, 5),
        "Stanford-cars": (196, 8041, 200),
        "Stanford-dogs": (120, 8580, 100),
    }
}
SUITES = {"vtab-1k": VTAB, "fgvc": FGVC}
# Files of the parts: to search with, to validate on, to train the final model with, to test on.
FILES = {
    "vtab-1k": ("train800.txt", "val200.txt", "train800val200.txt", "test.txt"),
    "fgvc": ("train.json", "val.json", "train.json", "test.json"),
}
BASE_LRS = (50.0, 25.0, 10.0, 5.0, 2.5, 1.0, 0.5, 0.25, 0.1, 0.05)
WEIGHT_DECAYS = (0.01, 0.001, 0.0001, 0.0)
NORMALIZATIONS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "inception": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
CONSTANT = "vpt-deep-constant"
# What the search chooses.
CHOSEN = ("base_lr", "weight_decay", "prune_share")


class MissingTask(Exception):
    """A task's files are not there, or not those of the protocol or of the results so far."""


class FolderSplit:
    """A split whose images are read when they are asked for. Indexing gives a `tasks.Split`.

    Args:
        paths: The images.
        labels: Their classes, (B,).
        args: Image size, normalisation and workers.
        crop: Take a box at random (8 to 100 % of the area) and mirror every other one (`"random"`), take a square from
            the middle (`"centre"`), or squeeze the whole image (None).
        keep: Keep the resized pixels in memory.
    """

    def __init__(
        self, paths: Sequence[Path], labels: torch.Tensor, args: argparse.Namespace, crop: str | None, keep: bool
    ) -> None:
        self.paths = paths
        self.labels = labels
        self.size = args.image_size
        self.crop = crop
        self.keep = keep
        self.kept: dict[int, torch.Tensor] = {}
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) for v in NORMALIZATIONS[args.normalization])
        self.pool = ThreadPoolExecutor(args.workers)
        self.restart()

    def restart(self) -> None:
        """Begin with the random crops anew, so that they do not depend on the runs before."""
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: slice | Sequence[int] | torch.Tensor) -> tasks.Split:
        numbers = torch.arange(len(self))[index].tolist()
        draws = self.rng.random((len(numbers), 5)) if self.crop == "random" else [None] * len(numbers)
        pixels = torch.stack(list(self.pool.map(self._read, numbers, draws)))
        return tasks.Split((pixels.float() / 255 - self.mean) / self.std, self.labels[numbers])

    def _read(self, number: int, draw: np.ndarray | None) -> torch.Tensor:
        if number in self.kept:
            return self.kept[number]
        with Image.open(self.paths[number]) as file:
            picture = file.convert("RGB")
        box, mirror = None, False
        if draw is not None:
            box, mirror = _random_box(picture.size, draw), draw[4] < 0.5
        elif self.crop == "centre":
            box = _middle(picture.size)
        picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if mirror:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        if self.keep:
            self.kept[number] = pixels
        return pixels


def _middle(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The square in the middle that is left of an image whose shorter side is resized to 256 when 224 are cut out."""
    width, height = size
    side = min(size) * 224 / 256
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(size: tuple[int, int], draw: np.ndarray) -> tuple[float, float, float, float]:
    """A random box of 8 to 100 % of the area and an aspect ratio of 3/4 to 4/3, as large as fits, from four numbers in
    0 … 1."""
    width, height = size
    area = (0.08 + 0.92 * draw[0]) * width * height
    ratio = math.exp(math.log(3 / 4) + draw[1] * (math.log(4 / 3) - math.log(3 / 4)))
    w, h = min(math.sqrt(area * ratio), width), min(math.sqrt(area / ratio), height)
    left, top = draw[2] * (width - w), draw[3] * (height - h)
    return left, top, left + w, top + h


def read_list(path: Path) -> tuple[list[Path], list[int]]:
    """Images and classes of a list, `path label` lines or a JSON map.

    Raises:
        MissingTask: If there is no such file, or an image that it names is missing.
    """
    if not path.exists():
        raise MissingTask(f"there is no {path}")
    if path.suffix == ".json":
        pairs = list(json.loads(path.read_text()).items())
    else:
        pairs = [line.rsplit(maxsplit=1) for line in path.read_text().splitlines() if line.strip()]
    # VPT's lists of CUB and NABirds leave `images` out, that of the dogs `Images`.
    folders = [path.parent / name for name in ("", "images", "Images")]
    folder = next((f for f in folders if pairs and (f / pairs[0][0]).exists()), path.parent)
    paths = [folder / name for name, _ in pairs]
    missing = next((image for image in paths if not image.exists()), None)
    if missing is not None:
        raise MissingTask(f"{path} names {missing}, which is not there")
    return paths, [int(label) for _, label in pairs]


def folder_of(task: str, args: argparse.Namespace) -> Path:
    """The folder of a task's images and lists, downloaded where it is the Hub's.

    Raises:
        MissingTask: If it cannot be downloaded.
    """
    if args.hub_dataset is None:
        return args.root / task
    try:
        root = snapshot_download(
            args.hub_dataset, repo_type="dataset", revision=args.revision, allow_patterns=f"{task}/*"
        )
    # No such repository, no connection, no right to read, or a disk that is full.
    except (HTTPError, HFValidationError, OSError) as error:
        raise MissingTask(f"{args.hub_dataset} could not be downloaded ({error})") from error
    return Path(root) / task


def load(suite: str, task: str, args: argparse.Namespace) -> list[FolderSplit]:
    """The four parts of a task: to search with, to validate on, to train the final model with, to test on.

    Raises:
        MissingTask: If files are missing, classes or numbers of images are not those of the paper's tables, or the
            results file has runs on other splits of the task.
    """
    num_labels, num_test, _ = specification(suite, task)
    folder = folder_of(task, args)
    found = [read_list(folder / name) for name in FILES[suite]]
    # FGVC's classes are counted from 1 in some lists, and have gaps.
    classes = {label: number for number, label in enumerate(sorted({c for _, labels in found for c in labels}))}
    counts = [len(paths) for paths, _ in found]
    expected = [800, 200, 1000, num_test] if suite == "vtab-1k" else [*counts[:3], num_test]
    if len(classes) > num_labels or (not args.any_size and (counts != expected or len(classes) != num_labels)):
        raise MissingTask(
            f"{task} should have {expected} images of {num_labels} classes, but has {counts} of {len(classes)}; "
            "`--any_size` takes other numbers of images and fewer classes"
        )
    splits = []
    for part, (paths, labels) in enumerate(found):
        train = part in (0, 2)
        crop = None if suite == "vtab-1k" else "random" if train else "centre"
        keep = part < 3 and suite == "vtab-1k"
        numbers = torch.tensor([classes[label] for label in labels])
        splits.append(FolderSplit(paths, numbers, args, crop, keep))
    if {line["data_hash"] for line in read_lines(args.output, {"suite": suite, "task": task})} - {data_hash(splits)}:
        raise MissingTask(f"{args.output} has runs on other splits of {task}; `--output` names another file")
    return splits


def data_hash(splits: list[FolderSplit]) -> str:
    """Twelve digits of a hash of the names of a task's images and their labels, in their order."""
    digest = hashlib.sha256()
    for split in splits:
        for path, label in zip(split.paths, split.labels.tolist(), strict=True):
            digest.update(f"{path.name} {label}\n".encode())
    return digest.hexdigest()[:12]


def tasks_of(suite: str) -> list[str]:
    """The suite's tasks, group by group."""
    return [task for of in SUITES[suite].values() for task in of]


def specification(suite: str, task: str) -> tuple[int, int, int]:
    """Classes, test images, prompts per block."""
    return next(of[task] for of in SUITES[suite].values() if task in of)


def prompts_of(task: str, args: argparse.Namespace) -> int:
    """Prompts a block: those asked for, or VPT's for the task."""
    return specification(args.suite, task)[2] if args.num_prompts is None else args.num_prompts


def run(
    method: str,
    task: str,
    seed: int,
    setting: Setting,
    final: bool,
    splits: list[FolderSplit],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Train once and validate, or test if it is a final run. Returns the line; accuracies in percent."""
    split, measured = splits[2:] if final else splits[:2]
    split.restart()
    base_lr, weight_decay, prune_share = setting
    num_labels = specification(args.suite, task)[0]
    num_prompts = prompts_of(task, args)
    plain = "vpt-deep" if method == CONSTANT else method
    start = (num_prompts, args.epochs, prune_share, PAPER_DROPOUT)
    model = make_model(plain, num_labels, *start, seed, args.model_name_or_path)
    model.to(args.device)
    constant = method == CONSTANT or method.startswith("pro-vpt")
    batch_size = 64 if constant or num_prompts >= 100 else 128
    trainable = [p for p in model.parameters() if p.requires_grad]
    rate = base_lr * batch_size / 256
    optimizer = torch.optim.SGD(trainable, lr=rate, momentum=0.9, weight_decay=weight_decay)
    relocator = make_method_relocator(method, model, optimizer, split, prune_share, seed)
    start = time.perf_counter()
    loss = fit(model, optimizer, split, args.epochs, seed, relocator, batch_size, cosine=not constant)
    seconds = time.perf_counter() - start
    return {
        **protocol(args),
        "method": method,
        "task": task,
        "seed": seed,
        "base_lr": base_lr,
        "weight_decay": weight_decay,
        "prune_share": prune_share,
        "split": "test" if final else "validation",
        "num_prompts": num_prompts,
        "batch_size": batch_size,
        "train_loss": loss,
        "test_accuracy" if final else "validation_accuracy": 100 * tasks.evaluate(model, measured)[1],
        "train_time": seconds,
        "images_per_second": args.epochs * len(split) / seconds,
        "data_hash": data_hash(splits),
        **describe(plain, model, optimizer, split[:batch_size], relocator),
    }


def protocol(args: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a table have in common."""
    return {
        "suite": args.suite,
        "model": str(args.model_name_or_path or "DINOv2-S"),
        "device": args.device,
        "any_size": args.any_size,
        "epochs": args.epochs,
        "image_size": args.image_size,
        "normalization": args.normalization,
    }


def finished(method: str, task: str, split: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs of a method on a task in the results file that followed the protocol."""
    wanted = {"method": method, "task": task, "split": split, "num_prompts": prompts_of(task, args)}
    return read_runs(args.output, wanted | protocol(args))


def grid(method: str, args: argparse.Namespace) -> list[Setting]:
    """The settings of a method's search."""
    return grid_of(method, dict(zip(CHOSEN, (args.base_lrs, args.weight_decays, args.prune_shares), strict=True)))


def best_setting(method: str, task: str, args: argparse.Namespace) -> Setting | None:
    """The setting that the first seed's validation accuracies choose."""
    lines = [line for line in finished(method, task, "validation", args) if line["seed"] == args.seeds[0]]
    return best_of_grid(grid(method, args), CHOSEN, lines)


def sweep(method: str, task: str, splits: list[FolderSplit], args: argparse.Namespace) -> None:
    """The search, then the final runs; what is finished is left out."""

    def once(seed: int, setting: Setting, final: bool) -> None:
        lines = finished(method, task, "test" if final else "validation", args)
        if (seed, setting) not in {(line["seed"], setting_of(line, CHOSEN)) for line in lines}:
            append_lines(args.output, [run(method, task, seed, setting, final, splits, args)])

    for setting in tqdm(grid(method, args), desc=f"{task}, {method}: search"):
        once(args.seeds[0], setting, False)
    best = best_setting(method, task, args)
    assert best is not None
    for seed in tqdm(args.seeds, desc=f"{task}, {method}: test"):
        once(seed, best, True)


def report(args: argparse.Namespace) -> None:
    """Print the tables of the final runs with the setting that the search chose."""
    chosen = {}
    for method, task in dict.fromkeys((line["method"], line["task"]) for line in read_lines(args.output)):
        if task in tasks_of(args.suite):
            best = best_setting(method, task, args)
            lines = finished(method, task, "test", args)
            chosen[method, task] = [line for line in lines if setting_of(line, CHOSEN) == best]
    groups = {group: list(of) for group, of in SUITES[args.suite].items()}
    print_tables({key: lines for key, lines in chosen.items() if lines}, groups, (*METHODS, CONSTANT))


def main() -> None:
    parser = results_parser(__doc__, "vtab", checkpoint=True, device=True, epochs=100, image_size=224)
    parser.add_argument("--suite", choices=SUITES, default="vtab-1k", help="default: vtab-1k")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--root", type=Path, help="folder of the tasks")
    source.add_argument("--hub_dataset", metavar="OWNER/NAME", help="data set of the Hub in the same layout")
    parser.add_argument("--revision", help="commit, tag or branch of the Hub's data set (default: main)")
    parser.add_argument(
        "--methods", nargs="+", choices=(*METHODS, CONSTANT), metavar="METHOD",
        default=["full", "linear", "lora-8", "vpt-shallow", "vpt-deep", CONSTANT, "pro-vpt-paper", "pro-vpt-default"],
        help=f"among {', '.join((*METHODS, CONSTANT))} (default: LoRA of rank 8, and the others that are no ablation)",
    )  # fmt: skip
    parser.add_argument("--tasks", nargs="+", help="folders of the tasks (default: all of the suite)")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="the first one searches (default: 0 1 2)"
    )
    parser.add_argument("--base_lrs", nargs="+", type=float, default=BASE_LRS, help="default: the paper's 10")
    parser.add_argument("--weight_decays", nargs="+", type=float, default=WEIGHT_DECAYS, help="default: the paper's 4")
    parser.add_argument("--prune_shares", nargs="+", type=float, default=PRUNE_SHARES, help="default: 0.1 to 0.9")
    parser.add_argument("--normalization", choices=NORMALIZATIONS, default="inception", help="default: inception")
    parser.add_argument("--num_prompts", type=int, help="prompts per block (default: VPT's for each task)")
    parser.add_argument("--workers", type=int, default=4, help="threads that read images (default: 4)")
    parser.add_argument("--any_size", action="store_true", help="take splits of other sizes than the paper's")
    args = parser.parse_args()
    known = tasks_of(args.suite)
    unknown = sorted(set(args.tasks or ()) - set(known))
    if unknown:
        parser.error(f"{args.suite} has no {unknown}, its tasks are {', '.join(known)}")
    if not args.report:
        if args.root is None and args.hub_dataset is None:
            parser.error("name the data with --root or --hub_dataset")
        for task in args.tasks or known:
            try:
                splits = load(args.suite, task, args)
            except MissingTask as reason:
                print(f"{task} is left out: {reason}.")
                continue
            for method in args.methods:
                sweep(method, task, splits, args)
    report(args)


if __name__ == "__main__":
    main()
