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

    They come by the loader's own data set, workers and collator, so data are opened only where training opens them.
    The order is that of a copy of the sampler, and the generators of Python, NumPy and PyTorch are seeded meanwhile
    and put back, so the images are the same in each run, and training is what it is without this call. The exception
    is a data set, collator or loader with a generator or a count of its own: what it draws here, it does not draw
    again.

    With several processes all have to call it. The first one reads, and sends the images to the others.

    Args:
        loader: A `DataLoader`, as it is or as accelerate prepared it, or any other iterable of batches.
        num_images: How many. The last batch is cut to it where a batch is a dict of tensors of equal length.

    Raises:
        ValueError: If the loader is empty, or can be read only once.
    """
    # What accelerate made its own loader of: that reads one batch ahead and keeps count of its epochs.
    loader = getattr(loader, "base_dataloader", loader)
    source = loader.dataset if isinstance(loader, DataLoader) else loader
    if num_images < 1:
        raise ValueError(f"`num_images` must be at least 1, got {num_images}. Give the number of images to score on.")
    if isinstance(source, Iterator):
        raise ValueError(
            f"The images that scores are measured on (`score_images={num_images}`) are read from the training data "
            f"before training, but a {type(source).__name__} can be read only once. Give a data set that begins anew "
            "at each `iter()`."
        )
    batches: list[Any] = []
    failure: Exception | None = None
    if is_first_process():
        try:
            batches = _read(loader, num_images)
        except Exception as error:
            failure = error
    # The others wait here, and are told of a failure too.
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
            # Copied out of the memory that workers share, of which there is little.
            batch = copy_of(send_to_device(batch, "cpu"))
            size = images_in(batch)
            batches.append(_cut(batch, num_images) if size > num_images else batch)
            num_images -= size
            if num_images <= 0:
                break
    return batches


def _again(loader: Any) -> Iterable[Any]:
    """A loader like another, with copies of its sampler and its generator, on the same data set."""
    stateful = type(loader).__name__ == "StatefulDataLoader"  # torchdata's, with an iterator of its own
    if not isinstance(loader, DataLoader) or not (stateful or type(loader).__iter__ is DataLoader.__iter__):
        return loader
    dataset: Any = loader.dataset
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    settings: dict[str, Any] = {}
    # What accelerate splits over processes batch by batch, and not each batch, gives the same batches unsplit.
    if type(sampler).__name__ == "BatchSamplerShard" and not sampler.split_batches:
        sampler = sampler.batch_sampler
    # Data are not copied with their sampler. It may have the loader's generator, and so may their copies.
    held = (dataset, *(getattr(part, "data_source", None) for part in (sampler, getattr(sampler, "sampler", None))))
    shared = {id(data): data for data in held}
    generator = copy.deepcopy(loader.generator, shared) or torch.Generator().manual_seed(0)
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        # Of a stream that is split over processes by accelerate, the whole.
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
    """The first images of a batch, where it is a dict of tensors of one length; otherwise the batch as it is."""
    values = batch.values() if isinstance(batch, Mapping) else [None]
    lengths = {len(value) if isinstance(value, torch.Tensor) and value.dim() else None for value in values}
    if None in lengths or len(lengths) > 1:
        return batch
    return {name: tensor[:num_images] for name, tensor in batch.items()}
