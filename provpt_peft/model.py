"""`ProVPTModel`: the PEFT tuner. Puts prompts into a model, manages adapters, moves prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from peft.tuners import tuners_utils
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from .backbone.attention import PromptedBlock
from .backbone.checkpointing import Checkpointing
from .backbone.checks import (
    check_modules_to_save,
    check_new_adapter,
    check_replica,
    check_shallow,
    check_sharding,
    check_unadapted,
    modules_around,
)
from .backbone.families import find_blocks, resolve
from .backbone.shallow import ShallowPrompts
from .compiling import is_exporting
from .config import BackboneFamily, ProVPTConfig, absolute
from .evaluation import hold_statistics, switch_randomness
from .labels import ShownLabels, check_problem_type
from .mixed import BASE, MixedBatch
from .prompts import PromptBank, init_bound
from .registration import PREFIX


logger = logging.getLogger(__name__)

# The layers for which PEFT's `modules_to_save` wrappers support mixed batches.
_MIXED_BY_PEFT = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ProVPTModel(BaseTuner):
    """Relocatable deep visual prompts in a frozen vision transformer.

    Made by `peft.get_peft_model(model, ProVPTConfig(...))`; `peft_model.base_model` is this object.

    Example:
        ```python
        >>> model = get_peft_model(vit, ProVPTConfig(num_prompts=10, modules_to_save=["classifier"]))
        >>> tuner = model.base_model
        >>> tuner.move_prompt(0, 12)
        >>> tuner.prompt_distribution()
        [9, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 11]
        ```
    """

    prefix: str = PREFIX
    tuner_layer_cls = PromptBank
    # Called with the `PeftModel` when PEFT saves or loads an adapter. `provpt_peft` sets it to `share.card.keep_card`.
    keep_card: ClassVar[Callable[[nn.Module], None] | None] = None

    bank: PromptBank
    patch_size: Any

    def __init__(self, model: nn.Module, peft_config: dict[str, ProVPTConfig], *args: Any, **kwargs: Any) -> None:
        # transformers loads adapters with `inject_adapter_in_model`, which passes a bare config and returns a bare
        # model: the bank that all blocks share would be lost. PEFT's own error (`uses_shared_state`) has no advice.
        if not isinstance(peft_config, dict):
            raise ValueError(
                f"PROVPT's prompts must be held by a `PeftModel`, got a bare {type(model).__name__}. "
                "Load an image classifier's adapter with `provpt_peft.load_image_classifier(adapter)`, and pass the "
                "model and image processor that it returns to a `pipeline`; load other adapters with "
                "`PeftModel.from_pretrained(base_model, adapter)`; make a new adapter with `get_peft_model`."
            )
        super().__init__(model, peft_config, *args, **kwargs)

    @property
    def num_blocks(self) -> int:
        """L, the number of transformer blocks, in forward order."""
        return self.bank.num_blocks

    def prompt_blocks(self, adapter_name: str | None = None) -> Tensor:
        """d_k: the block of each prompt, 1 … L or 0 for undistributed. A copy, int64 of shape (N,).

        Args:
            adapter_name: Name of the adapter, the active one by default.

        Raises:
            ValueError: If there is no such adapter.
        """
        return self.bank.blocks(self._adapter(adapter_name))

    def prompt_distribution(self, adapter_name: str | None = None) -> list[int]:
        """The number of prompts in each of the L blocks, from `prompt_blocks`. Undistributed prompts do not count."""
        return torch.bincount(self.prompt_blocks(adapter_name), minlength=self.num_blocks + 1)[1:].tolist()

    def prompts(self, adapter_name: str | None = None) -> nn.Parameter:
        """P: the prompt vectors, the trainable parameter of shape (N, D). Errors as for `prompt_blocks`."""
        return self.bank.provpt_prompts[self._adapter(adapter_name)]

    def move_prompt(self, prompt: int, block: int, adapter_name: str | None = None) -> None:
        """Move a prompt to another block. Its vector does not change.

        Args:
            prompt: Index of the prompt, 0 … N-1.
            block: The new block, 1 … L, or 0 to leave the prompt undistributed.
            adapter_name: Name of the adapter, the active one by default.

        Raises:
            IndexError: If there is no such prompt.
            ValueError: If there is no such block or no such adapter.
        """
        self.bank.move(self._adapter(adapter_name), prompt, block)

    def kept_keys(self) -> AbstractContextManager[None]:
        """Cache the prompts' keys and values between forward passes, for serving.

        Inside the context, without gradients and in eval mode, each block computes them once per adapter, dtype and
        device. They are recomputed after a move, a load, a deletion or a change of device or dtype, and whenever the
        pass is compiled, traced or transformed. Leave the context before you change weights in any other way.

        Example:
            ```python
            >>> with model.base_model.kept_keys(), torch.no_grad():
            ...     logits = [model(pixel_values=images).logits for images in requests]
            ```
        """
        return self.bank.keep()

    def _adapter(self, adapter_name: str | None) -> str:
        if adapter_name is None and len(self.active_adapters) != 1:
            raise ValueError(
                f"Prompts belong to one adapter, but {len(self.active_adapters)} are active. "
                "Pass `adapter_name` or activate one with `set_adapter`."
            )
        adapter_name = self.active_adapters[0] if adapter_name is None else adapter_name
        if adapter_name not in self.bank.provpt_prompts:
            raise ValueError(
                f"There is no adapter {adapter_name!r}. The model has {sorted(self.bank.provpt_prompts.keys())}."
            )
        return adapter_name

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add the prompts of an adapter whose config is in `self.peft_config`. Called by PEFT.

        Raises:
            ValueError: If the model has no known blocks or contains another PEFT method, if the config does not fit
                its blocks, if the adapter's name cannot be used, if FSDP 2 is set up in a way that cannot work, or
                after `unload`. The model is then unchanged.
        """
        config = self.peft_config[adapter_name] = self.peft_config[adapter_name].for_a_model()
        # So that the adapter is loaded from any folder. PEFT's `add_adapter` leaves the name to `save_pretrained`.
        name = config.base_model_name_or_path or model.__dict__.get("name_or_path") or None
        config.base_model_name_or_path = absolute(name)
        first = "bank" not in self._modules
        if not first:
            self._check_hooked()
        check_sharding()
        if first:
            check_unadapted(model)
        check_new_adapter(model, adapter_name, self.peft_config)
        check_problem_type(model, config, self._others(adapter_name))
        found = find_blocks(model, config.backbone) if first else [(b.block, b.family) for b in self.blocks]
        distribution = config.start_distribution(len(found))
        check_modules_to_save(model, config.modules_to_save, found)
        if config.shallow:
            check_shallow(model, *found[0])

        trainable = {} if first else {p: p.requires_grad for p in self.parameters()}
        if first:
            self._install(model, found)
        self.bank.add_adapter(adapter_name, distribution, config.reserve, config.prompt_dropout, config.shallow)
        try:
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        except Exception:
            self.bank.delete_adapter(adapter_name)
            if first:
                self._remove_blocks()
            raise
        # The training record belongs to prompts that may be loaded from a file next; until then it is set aside.
        self._records[adapter_name] = config.training
        config.take(len(found))
        # PEFT activates the active adapter again with the new config's `inference_mode`.
        for parameter, requires_grad in trainable.items():
            parameter.requires_grad = requires_grad
        self._follow_adapter()

    def _install(self, model: nn.Module, found: Sequence[tuple[nn.Module, BackboneFamily]]) -> None:
        """Make the bank and hook it into the blocks."""
        norms = [resolve(block, family.norm) for block, family in found]
        widths = [norm.weight.shape[-1] for norm in norms]
        around = modules_around(model, found[0][0])
        configs: list[Any] = [getattr(module, "config", None) for module in around]
        sizes = [config.patch_size for config in configs if hasattr(config, "patch_size")]
        self.patch_size = sizes[-1] if sizes else 16  # for the bound; 16 if no config has one
        self.bank = PromptBank(widths, init_bound(self.patch_size, max(widths)), reference=norms[0])
        self.bank.train(model.training)
        self.blocks = [PromptedBlock(*parts, self.bank, number) for number, parts in enumerate(found, start=1)]
        self._hooked = True  # until `unload`
        self._records: dict[str, dict[str, Any] | None] = {}
        self._last_trained: str | None = None
        self._labels = ShownLabels()
        # Whether the last state dict that was loaded, here or into a model around it, had none of our prompts.
        self.left_out = False
        # An entry for each call of the model around the base model that is in progress. Copies of the tuner share it.
        self._calls: list[None] = []
        self._call_check = model.register_forward_pre_hook(self._check_call)
        self.register_load_state_dict_pre_hook(ProVPTModel._check_whole)
        self.shallow = ShallowPrompts(self.blocks[0].block, self.blocks[-1].block, self.bank)
        self.checkpointing = Checkpointing(around, [block.block for block in self.blocks], self.bank)

    def _replace_module(self, parent: nn.Module, name: str, new: nn.Module, child: nn.Module) -> None:
        """PEFT's own method also copies a `weight`, but a head of several layers has no single one."""
        setattr(parent, name, new)

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("PROVPT replaces no modules.")  # pragma: no cover, abstract in `BaseTuner`

    def train(self, mode: bool = True) -> ProVPTModel:
        """Set training mode. The frozen backbone's own dropout stays off unless `backbone_dropout` is set, and its
        running statistics (BatchNorm) stay as they are."""
        super().train(mode)
        self._set_modes()
        return self

    def _others(self, adapter_name: str) -> list[ProVPTConfig]:
        return [config for name, config in self.peft_config.items() if name != adapter_name]

    def _follow_adapter(self) -> None:
        """Set what depends on which adapter is active."""
        self._set_modes()
        if self.active_adapters:
            active = self.active_adapters[0]
            self._labels.show(self.model, self.peft_config[active], self._others(active))

    def _set_modes(self) -> None:
        """Switch parts of the frozen backbone to eval mode. Blocks themselves stay in training mode: transformers only
        checkpoints activations then."""
        if "bank" not in self._modules:
            return
        adapter = self.bank.enabled_adapter
        config: Any = None if adapter is None else self.peft_config[adapter]
        if not isinstance(config, ProVPTConfig | None):
            raise ValueError(
                f"The config of the adapter {adapter!r} must be a ProVPTConfig, got a {type(config).__name__}: "
                "another method was added to the model. Use one method per model, or `unload()` this one first."
            )
        keep = config is None or config.backbone_dropout
        for block in self.blocks:
            block.keep_dropout = keep
        switch_randomness(self.model, keep)
        hold_statistics(self.model)

    # ---- adapters: PEFT's own functions walk the wrapped model only, the bank is on the tuner -----------------------

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Activate an adapter.

        Raises:
            ValueError: If several are given: a block sees the prompts of one adapter.
        """
        if not isinstance(adapter_name, str) and len(adapter_name) > 1:
            raise ValueError(
                f"PROVPT can have one active adapter at a time, got {list(adapter_name)}. Activate one of them."
            )
        if self._last_trained in self.active_adapters:
            # transformers sets `problem_type` in the first training step, after this was last done.
            self.peft_config[self._last_trained].remember_labels(self.model)
        tuners_utils.set_adapter(self, adapter_name, inference_mode=inference_mode, layer_cls=PromptBank)
        self.active_adapter = adapter_name
        self._follow_adapter()

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter; if it was active, the next one becomes active.

        Raises:
            ValueError: If there is no such adapter.
        """
        if adapter_name not in self.peft_config:
            raise ValueError(f"Adapter {adapter_name} does not exist")
        del self.peft_config[adapter_name]
        self._records.pop(adapter_name, None)
        if adapter_name == self._last_trained:
            self._last_trained = None
        was_active = adapter_name in self.active_adapters
        active = tuners_utils.delete_adapter(self, adapter_name=adapter_name, prefix=PREFIX, layer_cls=PromptBank)
        self.active_adapter = active or []
        if was_active and active:
            # PEFT leaves a head as it is if the deleted adapter has none of its own.
            self.set_adapter(active)
        else:
            self._follow_adapter()

    set_requires_grad = tuners_utils.set_requires_grad

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Make the prompts of a new adapter float32, whatever the backbone's precision, if `autocast_adapter_dtype`.

        PEFT calls this after each load too, with its default. PEFT's own function would then change the precision of
        an adapter that has another, and put a new parameter in its place: a trainable one that no optimizer knows.
        """
        if adapter_name not in self.bank.cast:
            self.bank.cast.add(adapter_name)
            prompts = self.bank.provpt_prompts[adapter_name]
            if autocast_adapter_dtype and prompts.dtype.itemsize < torch.float32.itemsize:
                prompts.data = prompts.data.float()

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        for module in self.modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                module.enable_adapters(enabled)
        self._set_modes()

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        # PEFT calls this around each forward.
        check_replica(self)
        names = kwargs.pop("adapter_names", None)
        images = kwargs.get("pixel_values", args[0] if args else None)
        self.bank.check_device(images)
        if self.training and torch.is_grad_enabled() and not is_exporting():
            self._remember_training(images)
        with self._called(), nullcontext() if names is None else self._mix(names, (*args, *kwargs.values())):
            yield

    def _remember_training(self, images: Any) -> None:
        if self.bank.enabled_adapter is None:
            return
        self._last_trained = self.bank.enabled_adapter
        config = self.peft_config[self._last_trained]
        # Some models (SigLIP 2) take patches instead of images.
        config.remember_training(images.shape[-2:] if isinstance(images, Tensor) and images.dim() == 4 else None)
        if not torch.compiler.is_compiling():
            config.remember_labels(self.model)

    @torch.compiler.disable  # names cannot be part of a compiled graph
    def _mix(self, names: Sequence[str], inputs: Sequence[Any]) -> AbstractContextManager[None]:
        """Give each image of a batch the prompts and the head of the adapter named for it."""
        wrappers = [module for module in self.model.modules() if isinstance(module, ModulesToSaveWrapper)]
        self._check_mixing(names, inputs, wrappers)
        for wrapper in wrappers:
            if self._name_heads not in wrapper._forward_pre_hooks.values():
                wrapper.register_forward_pre_hook(self._name_heads, with_kwargs=True)
        return self.bank.mix(names)

    def _name_heads(
        self, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """In a mixed batch, pass each image's adapter to a `modules_to_save` wrapper, in PEFT's format."""
        mixed = self.bank.mixed()
        return None if mixed is None else (args, kwargs | {"adapter_names": _names_in(wrapper, mixed)})

    def _check_mixing(self, names: Sequence[str], inputs: Sequence[Any], wrappers: Sequence[Any]) -> None:
        """Check the adapter names given for the images of a batch.

        Raises:
            ValueError: If the names do not fit the batch, or if the adapters cannot share one.
        """
        instead = "Run one batch for each adapter, switching with `set_adapter`."
        if self.training:
            raise ValueError(
                "`adapter_names` is for inference, but the model is in training mode. Call `model.eval()` first; to "
                "train several adapters, train one after the other."
            )
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"`adapter_names` must be a list of names, one for each image, got {names!r}.")
        # What a larger model makes of its samples is only known in the first block, which checks again.
        images = next((len(each) for each in inputs if isinstance(each, Tensor) and each.dim() == 4), len(names))
        if len(names) != images:
            raise ValueError(
                f"`adapter_names` must name an adapter for each image, got {len(names)} names for {images} images. "
                f"Use {BASE!r} for an image without an adapter."
            )
        unknown = sorted({name for name in names if name != BASE and name not in self.bank.provpt_prompts})
        if unknown:
            raise ValueError(
                f"`adapter_names` must name adapters of the model, {sorted(self.bank.provpt_prompts)}, or {BASE!r}, "
                f"got {', '.join(unknown)}. Load them with `load_adapter`."
            )
        shallow = sorted(self.bank.shallow & set(names))
        if shallow:
            raise ValueError(
                f"`adapter_names` cannot name adapters of VPT-Shallow, whose tokens enter every image of a batch, got "
                f"{', '.join(shallow)}. {instead}"
            )
        names_of_parts = ("norm", "key", "value")
        on_the_way = [resolve(b.block, getattr(b.family, part)) for b in self.blocks for part in names_of_parts]
        for wrapper in wrappers:
            if not isinstance(wrapper.original_module, _MIXED_BY_PEFT):
                raise ValueError(
                    "With `adapter_names`, each module in `modules_to_save` must be a single linear, embedding or "
                    f"convolution layer, got a {type(wrapper.original_module).__name__}. {instead}"
                )
            if any(part is wrapper for part in on_the_way):
                raise ValueError(
                    "`adapter_names` cannot be used if `modules_to_save` contains a norm or a projection that prompts "
                    f"go through. {instead}"
                )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base model with the prompts."""
        with self._enable_peft_forward_hooks(*args, **kwargs):
            return super().forward(*args, **{k: v for k, v in kwargs.items() if k != "adapter_names"})

    @contextmanager
    def _called(self) -> Iterator[None]:
        self._calls.append(None)
        try:
            yield
        finally:
            self._calls.pop()

    def _check_call(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Warn once if the base model is trained instead of the model around it: its own parameters do not include the
        prompts, so an optimizer for them only trains the head."""
        if self._calls or not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        adapter = self.bank.enabled_adapter
        if adapter is not None and self.bank.provpt_prompts[adapter].requires_grad:
            self._call_check.remove()
            logger.warning(
                "A %s with prompts was called directly in training mode. Its parameters do not contain the prompts, "
                "so an optimizer for them does not train prompts. Give the Trainer, or your training loop, the model "
                "that `get_peft_model` returned.",
                type(model).__name__,
            )

    @staticmethod
    def _check_whole(module: ProVPTModel, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Refuse prompts without their blocks, as in a file that only has the parameters with `requires_grad`. With
        `strict=False` they would be put into the blocks where the model's own prompts happen to be."""
        prompts, blocks = (f"{prefix}bank.{container}." for container in ("provpt_prompts", "provpt_prompt_blocks"))
        for adapter_name in module.peft_config:
            if prompts + adapter_name in state_dict and blocks + adapter_name not in state_dict:
                raise ValueError(
                    f"Prompts must be loaded with their blocks, but the state dict has {prompts + adapter_name!r} "
                    f"and no {blocks + adapter_name!r}. Save with `save_pretrained`, or save all tensors with "
                    "`provpt_` in their names. If no prompt has ever moved, add the missing tensor from "
                    "`model.state_dict()`."
                )
        module.left_out = not any(prompts + adapter_name in state_dict for adapter_name in module.peft_config)

    @classmethod
    def _get_adapter_state_dict(
        cls, model: nn.Module, config: ProVPTConfig, adapter_name: str, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        if config.modules_to_save:
            _tuner(model)._check_hooked()
        bank = _tuner(model).bank
        selected = super()._get_adapter_state_dict(model, config, adapter_name, *args, **kwargs)
        bank.check(adapter_name, selected)
        if cls.keep_card is not None:
            cls.keep_card(model)
        # The config is written after the tensors. The model's labels are those of the active adapter, unless another
        # one was trained last.
        tuner = _tuner(model)
        if adapter_name in tuner.active_adapters and tuner._last_trained in (None, adapter_name):
            config.remember_labels(tuner.model)
        return selected

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: ProVPTConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        tuner = _tuner(model)
        tuner._check_hooked()
        bank = tuner.bank
        remapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        bank.check(adapter_name, remapped)
        if cls.keep_card is not None:
            cls.keep_card(model)
        surplus = sorted(set(remapped) - set(model.state_dict()))
        if surplus:
            raise ValueError(
                f"An adapter's file must only hold tensors of the adapter, got {surplus} as well. An adapter only "
                "fits the backbone and config it was made with. Save it again."
            )
        config.training = tuner._records.pop(adapter_name, None) or config.training
        return {key: bank.from_file(adapter_name, key, tensor) for key, tensor in remapped.items()}

    def unload(self) -> nn.Module:
        """Remove the prompts and return the base model. As in PEFT, modules in `modules_to_save` are the active
        adapter's, and frozen parameters stay frozen."""
        model = super().unload()
        self._remove_blocks()
        switch_randomness(model, True)
        hold_statistics(model, hold=False)
        return model

    def _remove_blocks(self) -> None:
        hooked: list[Any] = [*self.blocks, self.shallow, self.checkpointing, self._call_check]
        for part in hooked:
            part.remove()
        self._hooked = False

    def _check_hooked(self) -> None:
        """After `unload`, refuse to load an adapter, which would have no effect, or to save one whose head is gone."""
        if not self._hooked:
            raise ValueError(
                "Adapters must be saved and loaded while their prompts are in the model, but `unload` has removed "
                "them. Save before it; to load an adapter, wrap the base model again, with `get_peft_model` or "
                "`PeftModel.from_pretrained`."
            )

    def _refuse_merging(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "Prompts cannot be merged: they are extra inputs of the attention, not a change of its weights. "
            "Keep the adapter (`save_pretrained`), or call `unload()` for the base model without prompts."
        )

    merge_and_unload = _refuse_merging
    merge_adapter = _refuse_merging
    unmerge_adapter = _refuse_merging


@torch.compiler.disable  # names cannot be part of a compiled graph
def _names_in(wrapper: Any, mixed: MixedBatch) -> list[str]:
    """The adapter of each image, or `BASE` if the adapter has no module of its own in the wrapper."""
    return [name if name in wrapper.modules_to_save else BASE for name in mixed.names]


def _tuner(model: nn.Module) -> ProVPTModel:
    found = next((module for module in model.modules() if isinstance(module, ProVPTModel)), None)
    if found is None:
        raise ValueError(
            f"PROVPT adapters must be saved and loaded with the model that `get_peft_model` returned for them, got a "
            f"{type(model).__name__} without one."
        )
    return found
