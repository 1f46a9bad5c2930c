"""The first images of a training loader, taken without disturbing the training that follows."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from ..evaluation import copy_of, fixed_randomness, images_in
from .parallel import broadcast_objects, is_first_process


def first_batches(loader: Iterable[Any], num_images: int) -> list[Any]:
    """The first images of a loader's first epoch, in its batches, on the CPU.

    The loader's own data set, workers and collator read them, so data are opened only where training opens them. The
    order comes from a copy of the sampler. The global generators of Python, NumPy and PyTorch are seeded during the
    call and restored afterwards. So the images are the same in each run, and the call does not change training. There
    is one exception: the call advances a data set, collator or loader that keeps its own generator or counter.

    With several processes, all of them must call this. The first one reads the images and sends them to the others.

    Args:
        loader: A `DataLoader`, plain or prepared by accelerate, or any other iterable of batches.
        num_images: Number of images. The last batch is cut to fit if it is a dict of tensors of equal length, and of
            options such as `interpolate_pos_encoding`.

    Raises:
        ValueError: If the loader is empty or can be read only once, or if `num_images` is below 1.
    """
    # The loader inside accelerate's own, which reads one batch ahead and counts its epochs.
    loader = getattr(loader, "base_dataloader", loader)
    source = loader.dataset if isinstance(loader, DataLoader) else loader
    if num_images < 1:
        raise ValueError(f"`num_images` must be at least 1, got {num_images}. Give the number of images to score on.")
    if isinstance(source, Iterator):
        raise ValueError(
            f"The images that scores are measured on (`score_images={num_images}`) are read from the training data "
            f"before training, but a {type(source).__name__} can be read only once. Give a data set that starts again "
            "from the beginning at each `iter()`."
        )
    batches: list[Any] = []
    failure: Exception | None = None
    if is_first_process():
        try:
            batches = _read(loader, num_images)
        except Exception as error:
            failure = error
    # The other processes wait here, and learn about a failure too.
    batches, told = broadcast_objects([batches, None if failure is None else f"{type(failure).__name__}: {failure}"])
    if failure is not None:
        raise failure
    if told is not None:
        raise ValueError(f"The first process could not read the first training images: {told}")
    if not batches:
        raise ValueError("Scores are measured on the first training images, but the training loader has none.")
    return batches


def _read(loader: Any, num_images: int) -> list[Any]:
    batches: list[Any] = []
    # Workers and collators do not draw from the generators of devices.
    with fixed_randomness(torch.device("cpu")):
        for batch in _again(loader):
            # Copied out of the workers' shared memory, which is scarce.
            batch = copy_of(send_to_device(batch, "cpu"))
            size = images_in(batch)
            batches.append(_cut(batch, num_images) if size > num_images else batch)
            num_images -= size
            if num_images <= 0:
                break
    return batches


def _again(loader: Any) -> Iterable[Any]:
    """A copy of a loader: the same data set, with copies of the sampler and the generator."""
    stateful = type(loader).__name__ == "StatefulDataLoader"  # torchdata's, which has its own iterator
    if not isinstance(loader, DataLoader) or not (stateful or type(loader).__iter__ is DataLoader.__iter__):
        return loader
    dataset: Any = loader.dataset
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    settings: dict[str, Any] = {}
    # If accelerate gives each process whole batches (`split_batches` is off), the unsplit sampler has the same ones.
    if type(sampler).__name__ == "BatchSamplerShard" and not sampler.split_batches:
        sampler = sampler.batch_sampler
    # `shared` keeps the data from being copied with their sampler. A sampler that holds the loader's generator gets a
    # copy that holds the generator's copy.
    held = (dataset, *(getattr(part, "data_source", None) for part in (sampler, getattr(sampler, "sampler", None))))
    shared = {id(data): data for data in held}
    generator = copy.deepcopy(loader.generator, shared) or torch.Generator().manual_seed(0)
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        # If accelerate splits a stream over processes, read the whole stream.
        if type(dataset).__name__ == "IterableDatasetShard":
            dataset = dataset.dataset
        settings |= dict(batch_size=loader.batch_size, drop_last=loader.drop_last)
    else:
        own = copy.deepcopy(sampler, shared)
        settings |= dict(batch_sampler=own) if loader.batch_sampler is not None else dict(batch_size=None, sampler=own)
    if loader.num_workers:
        settings |= dict(prefetch_factor=1, timeout=loader.timeout)
        settings |= dict(multiprocessing_context=loader.multiprocessing_context)
    return DataLoader(
        dataset,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        generator=generator,
        **settings,
    )


def _cut(batch: Any, num_images: int) -> Any:
    """The first images of a batch if it is a dict as `first_batches` says, otherwise the whole batch."""
    if not isinstance(batch, Mapping):
        return batch
    tensors = {name: value for name, value in batch.items() if not isinstance(value, bool | str | None)}
    lengths = {len(value) if isinstance(value, torch.Tensor) and value.dim() else None for value in tensors.values()}
    if None in lengths or len(lengths) > 1:
        return batch
    first = {name: value[:num_images] if name in tensors else value for name, value in batch.items()}
    return type(batch)(first)  # type: ignore[call-arg]  # an image processor's `BatchFeature`, for one
