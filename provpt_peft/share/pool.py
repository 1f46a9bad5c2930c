"""Many tasks on one backbone: image classifiers that share a batch, in which each image has its own task."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import Tensor, nn
from torch.nn import functional as F

from ..backbone.sizes import fixed_size
from ..config import ProVPTConfig, absolute
from ..model import ProVPTModel
from ..prompts import PromptBank, check_prompts, read_blocks
from .files import BANK, PROMPT_BLOCKS, PROMPTS, is_head, read_adapter
from .hub import check_trained, chosen, image_processor_of, local_folder


_HEADS = "base_model.model."


class UnknownTask(KeyError):
    """There is no task of this name."""


@dataclass(frozen=True)
class Prediction:
    """A task's prediction for an image.

    Args:
        task: Name of the task.
        scores: The probability of each of the task's labels, the most likely first; for a regression, its value.
    """

    task: str
    scores: dict[str, float]

    @property
    def label(self) -> str:
        """The most likely label."""
        return next(iter(self.scores))


@dataclass(frozen=True)
class _Task:
    adapter: str  # its name in the bank
    labels: list[str]
    problem_type: str | None
    image_processor: Any
    nbytes: int


class ClassifierPool:
    """Image classifiers for many tasks that share a frozen backbone, each a PROVPT adapter with a linear head.

    Images of different tasks go through the backbone in one batch, each with its own task's prompts and head. Tasks
    may differ in the number of prompts, their blocks and the number of classes. Threads may load, unload and classify
    at the same time; one batch is computed at a time.

    Args:
        base_model: Folder or Hub id of the backbone that all adapters were trained on.
        find: Function from a task's name to its adapter, a folder or a Hub id, or to None if there is no such task.
            A requested task that is not in memory is loaded from there. Without it, only `load` loads tasks.
        capacity: Maximum number of tasks in memory. A further one replaces the least recently used.
        device: Where to compute.
        from_pretrained_kwargs: Passed on to `AutoModelForImageClassification.from_pretrained`.

    Example:
        ```python
        >>> pool = ClassifierPool("google/vit-base-patch16-224-in21k")
        >>> pool.load("flowers", "flowers-provpt")
        >>> pool.load("birds", "me/birds-provpt")
        >>> [prediction.label for prediction in pool.classify([rose, robin], ["flowers", "birds"])]
        ['rose', 'robin']
        ```
    """

    def __init__(
        self,
        base_model: str | os.PathLike[str],
        find: Callable[[str], str | os.PathLike[str] | None] | None = None,
        *,
        capacity: int = 1000,
        device: str | torch.device = "cpu",
        **from_pretrained_kwargs: Any,
    ) -> None:
        from transformers import AutoModelForImageClassification  # slow to import

        if capacity < 1:
            raise ValueError(f"`capacity` must be at least 1, got {capacity}. Give the number of tasks to keep.")
        self.base_model = absolute(str(base_model))
        self.capacity = capacity
        self._find = find
        model, loading_info = AutoModelForImageClassification.from_pretrained(
            self.base_model, **from_pretrained_kwargs | {"output_loading_info": True}
        )
        self._missing = loading_info["missing_keys"]
        # The tuner needs an adapter; no image ever uses this one.
        self._bank: PromptBank = ProVPTModel(model, {"none": ProVPTConfig(num_prompts=1)}, "none").bank
        self._model = model.requires_grad_(False).eval().to(device)
        self._bank.to(device)
        self._fixed_size = fixed_size(model)
        self._revision = from_pretrained_kwargs.get("revision")
        self._download = chosen(from_pretrained_kwargs, "token", "cache_dir", "local_files_only", "force_download")
        self._heads: list[_TaskHeads] = []
        self._tasks: OrderedDict[str, _Task] = OrderedDict()  # the least recently used first
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks in memory, the least recently used first."""
        with self._lock:
            return list(self._tasks)

    @property
    def nbytes(self) -> int:
        """Bytes of the prompts, blocks and heads of the tasks in memory."""
        with self._lock:
            return sum(task.nbytes for task in self._tasks.values())

    def labels(self, name: str) -> list[str]:
        """The labels of a task, which is loaded if it is not in memory. Errors as for `load`."""
        return self._use(name).labels

    def load(self, name: str, adapter: str | os.PathLike[str], *, same_base: bool = False) -> None:
        """Load a task into memory. It replaces a task of the same name.

        Args:
            name: Name of the task.
            adapter: Folder that `PeftModel.save_pretrained` wrote, or a Hub id.
            same_base: Whether its base model is this pool's under another name.

        Raises:
            ValueError: If the adapter's files are broken, or not for this backbone, or if its head is not linear, if
                neither it nor the base model has a head, if its labels do not fit the head, or if its folder has no
                image processor and the base model's makes images of another size.
        """
        folder = local_folder(adapter, self._download)
        config, tensors, _ = read_adapter(folder)
        base = (absolute(config.base_model_name_or_path), config.revision or self._revision)
        if not same_base and base != (self.base_model, self._revision):
            raise ValueError(
                f"{folder}: the adapter must be for the pool's base model, {self.base_model!r} (revision "
                f"{self._revision!r}), got one for {base[0]!r} ({base[1]!r}). If they are the same, pass "
                "`same_base=True`."
            )
        if config.shallow:
            raise ValueError(
                f"{folder}: adapters of VPT-Shallow cannot share a batch with others. Load it with "
                "`load_image_classifier`."
            )
        heads = {key.removeprefix(_HEADS): tensor for key, tensor in tensors.items() if not key.startswith(BANK)}
        where = f"{folder / SAFETENSORS_WEIGHTS_NAME}: "
        classes = self._check(where, config, tensors, heads)
        check_trained(folder, heads, self._missing)
        if config.id2label is not None and len(config.id2label) != classes:
            raise ValueError(
                f"{folder}: the labels of an adapter without a head must fit the base model's head, got "
                f"{len(config.id2label)} labels for {classes} classes. Save the adapter again with its head in "
                "`modules_to_save`."
            )
        names = config.id2label or ({} if heads else self._model.config.id2label)
        labels = [names.get(number, f"LABEL_{number}") for number in range(classes)]
        if len(set(labels)) < classes:
            raise ValueError(f"{folder}: each class must have a unique name, got {labels}. Correct `id2label`.")
        revision = {} if self._revision is None else {"revision": self._revision}
        image_processor = image_processor_of(folder, self.base_model, config, **revision, **self._download)
        task = _Task(
            f"task{next(self._numbers)}",
            labels,
            config.problem_type,
            image_processor,
            sum(tensor.nbytes for tensor in tensors.values()),
        )
        with self._lock:
            try:
                self._install(task, config, tensors, heads)
            except Exception:
                self._remove(task)
                raise
            if name in self._tasks:
                self.unload(name)
            while len(self._tasks) >= self.capacity:
                self.unload(next(iter(self._tasks)))
            self._tasks[name] = task

    def unload(self, name: str) -> None:
        """Remove a task from memory.

        Raises:
            KeyError: If it is not there.
        """
        with self._lock:
            self._remove(self._tasks.pop(name))

    def classify(self, images: Sequence[Any], tasks: Sequence[str]) -> list[Prediction]:
        """Classify images, each by its own task.

        Args:
            images: PIL images, or what the tasks' image processors take.
            tasks: The name of each image's task.

        Raises:
            UnknownTask: If there is no such task. It is a `KeyError`.
            ValueError: If there are not as many names as images, or a task's adapter cannot be loaded.
        """
        if isinstance(tasks, str) or len(images) != len(tasks):
            raise ValueError(f"There must be a task for each image, got {len(images)} images and {tasks!r}.")
        predictions: list[Prediction | None] = [None] * len(images)
        # No more tasks at once than may be in memory, and images of one size together.
        names = list(dict.fromkeys(tasks))
        for first in range(0, len(names), self.capacity):
            together = names[first : first + self.capacity]
            batches: dict[tuple[Any, ...], dict[int, Any]] = {}
            for number, (image, name) in enumerate(zip(images, tasks, strict=True)):
                if name in together:
                    inputs = self._use(name).image_processor(image, return_tensors="pt")
                    shape = tuple((key, tensor.shape) for key, tensor in inputs.items())
                    batches.setdefault(shape, {})[number] = inputs
            for batch in batches.values():
                of_images = self._predict([tasks[number] for number in batch], list(batch.values()))
                for number, prediction in zip(batch, of_images, strict=True):
                    predictions[number] = prediction
        return [prediction for prediction in predictions if prediction is not None]

    def _remove(self, task: _Task) -> None:
        if task.adapter in self._bank.provpt_prompts:
            self._bank.delete_adapter(task.adapter)
        for head in self._heads:
            head.weights.pop(task.adapter, None)

    def _use(self, name: str) -> _Task:
        """A task, now marked as the most recently used."""
        with self._lock:
            if name in self._tasks:
                self._tasks.move_to_end(name)
                return self._tasks[name]
        adapter = None if self._find is None else self._find(name)
        if adapter is None:
            raise UnknownTask(f"There is no task {name!r}.")
        self.load(name, adapter)
        return self._use(name)

    def _check(
        self, where: str, config: ProVPTConfig, tensors: Mapping[str, Tensor], heads: Mapping[str, Tensor]
    ) -> int:
        """Check an adapter's tensors; `heads` has names in the model as keys. Returns the number of classes."""
        try:
            count = sum(config.start_distribution(self._bank.num_blocks)) + config.reserve
            shape = (count, max(self._bank.widths))
            check_prompts(tensors[PROMPTS], tensors[PROMPT_BLOCKS], shape, self._bank.num_blocks, shallow=False)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        counts = {self._model.config.num_labels} if not heads else set()
        for key, tensor in heads.items():
            path, _, kind = key.rpartition(".")
            linear = self._linear(path)
            if linear is None or not is_head(key):
                raise ValueError(
                    f"{where}besides prompts, an adapter in a pool may have a linear head only, got {key}. Load it "
                    "with `load_image_classifier`."
                )
            if f"{path}.weight" not in heads:
                raise ValueError(f"{where}a head must have a weight, got {key} alone. Save the adapter again.")
            width = (linear.in_features,) if kind == "weight" else ()
            if tensor.dim() != 1 + len(width) or tensor.shape[1:] != width:
                raise ValueError(
                    f"{where}the head must take the backbone's {linear.in_features} features, got {key} of "
                    f"shape {tuple(tensor.shape)}. Use the base model that the adapter was trained with."
                )
            counts.add(len(tensor))
        if len(counts) != 1:
            raise ValueError(f"{where}heads must agree on the number of classes, got {sorted(counts)}. Save it again.")
        return counts.pop()

    def _linear(self, path: str) -> nn.Linear | None:
        """The linear layer at a path of the model, which may be inside the `_TaskHeads` that replaced it."""
        try:
            module = self._model.get_submodule(path)
        except AttributeError:
            return None
        module = module.linear if isinstance(module, _TaskHeads) else module
        return module if isinstance(module, nn.Linear) else None

    def _install(
        self, task: _Task, config: ProVPTConfig, tensors: Mapping[str, Tensor], heads: Mapping[str, Tensor]
    ) -> None:
        bank, name = self._bank, task.adapter
        bank.add_adapter(name, config.start_distribution(bank.num_blocks), config.reserve, dropout=0.0, shallow=False)
        with torch.no_grad():
            bank.provpt_prompts[name].requires_grad_(False).copy_(tensors[PROMPTS])
            bank.provpt_prompt_blocks[name].copy_(bank.one_hot(read_blocks(tensors[PROMPT_BLOCKS])))
        for path in {key.rpartition(".")[0] for key in heads}:
            module = self._model.get_submodule(path)
            if not isinstance(module, _TaskHeads):
                module = _TaskHeads(module, bank)
                self._model.set_submodule(path, module)
                self._heads.append(module)
            like = module.linear.weight
            weight, bias = heads[f"{path}.weight"], heads.get(f"{path}.bias")
            # Copies: a tensor that safetensors has read may keep the whole file in memory.
            copied = None if bias is None else bias.to(like, copy=True)
            module.weights[name] = weight.to(like, copy=True), copied

    @torch.inference_mode()
    def _predict(self, names: Sequence[str], inputs: Sequence[Mapping[str, Tensor]]) -> list[Prediction]:
        """Predictions for images of one size, each (1, …), with the tasks of these names."""
        batch = {key: torch.cat([of_image[key] for of_image in inputs]) for key in inputs[0]}
        like = next(self._model.parameters())
        batch = {key: t.to(like) if t.is_floating_point() else t.to(like.device) for key, t in batch.items()}
        other_size = self._fixed_size not in (None, batch.get("pixel_values", like).shape[-2:])
        sizes = {"interpolate_pos_encoding": True} if other_size else {}
        with self._lock:  # loads a task again if another thread has evicted it
            tasks = [self._use(name) for name in names]
            with self._bank.mix([task.adapter for task in tasks]):
                logits = self._model(**batch, **sizes).logits.float().cpu()
        return [_prediction(name, task, row) for name, task, row in zip(names, tasks, logits, strict=True)]


class _TaskHeads(nn.Module):
    """A linear head for each task, instead of the model's own. In a mixed batch each image gets its task's head, or
    the model's own if its task has none. Outputs beyond a task's classes are -inf."""

    def __init__(self, linear: nn.Linear, bank: PromptBank) -> None:
        super().__init__()
        self.linear = linear
        self.weights: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._bank = (bank,)  # a tuple hides the module from `nn.Module`

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, …, D) to logits (B, …, C), where C is the largest number of classes in the batch."""
        mixed = self._bank[0].mixed()
        if mixed is None:
            return self.linear(features)
        images: dict[str, list[int]] = {}
        for number, name in enumerate(mixed.names):
            images.setdefault(name, []).append(number)
        own = (self.linear.weight, self.linear.bias)
        found = [F.linear(features[of], *self.weights.get(name, own)) for name, of in images.items()]
        most = max(logits.shape[-1] for logits in found)
        result = found[0].new_full((*features.shape[:-1], most), -torch.inf)
        for of, logits in zip(images.values(), found, strict=True):
            result[of, ..., : logits.shape[-1]] = logits
        return result


def _prediction(name: str, task: _Task, logits: Tensor) -> Prediction:
    """The prediction from a row of logits, of which the first ones are the task's."""
    scores = logits[: len(task.labels)]
    if task.problem_type == "multi_label_classification":
        scores = scores.sigmoid()
    elif task.problem_type != "regression" and len(scores) > 1:
        scores = scores.softmax(dim=-1)
    order = scores.argsort(descending=True, stable=True).tolist()
    return Prediction(name, {task.labels[number]: scores[number].item() for number in order})
