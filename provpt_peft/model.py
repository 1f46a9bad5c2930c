"""`ProVPTModel`: the PEFT tuner. Puts prompts into a model, manages adapters, moves prompts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners import tuners_utils
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers.backbone_utils import BackboneMixin

from .attention import PromptedBlock, sees_images_first
from .backbones import BackboneFamily, find_blocks, resolve
from .checkpointing import CheckpointInputs
from .config import ProVPTConfig
from .prompts import PromptBank, init_bound
from .registration import PREFIX
from .shallow import ShallowPrompts


# Patch size for the bound of the initialisation where a backbone's config has none.
_DEFAULT_PATCH_SIZE = 16


class ProVPTModel(BaseTuner):
    """Relocatable deep visual prompts in a frozen vision transformer.

    Made by `peft.get_peft_model(model, ProVPTConfig(...))`; `peft_model.base_model` is this object. Attributes of the
    wrapped model are reachable through it.

    Example:
        ```python
        >>> model = get_peft_model(vit, ProVPTConfig(num_prompts=10, modules_to_save=["classifier"]))
        >>> tuner = model.base_model
        >>> tuner.prompt_distribution()
        [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]
        >>> tuner.move_prompt(0, 12)
        >>> tuner.prompt_distribution()
        [9, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 11]
        ```
    """

    prefix: str = PREFIX
    tuner_layer_cls = PromptBank
    target_module_mapping: dict[str, list[str]] = {}
    # All blocks share one bank, so `inject_adapter_in_model`, which returns the bare model, would lose it.
    uses_shared_state: bool = True

    bank: PromptBank
    patch_size: Any

    # ---- prompts ----------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """L, the number of transformer blocks, in forward order."""
        return self.bank.num_blocks

    def prompt_blocks(self, adapter_name: str | None = None) -> torch.Tensor:
        """d_k: the block of each prompt, a copy, int64 of shape (N,), 1 … L or 0 for undistributed.

        Args:
            adapter_name: Name of the adapter, the active one by default.

        Raises:
            ValueError: If there is no such adapter.
        """
        return self.bank.provpt_prompt_blocks[self._adapter(adapter_name)].clone()

    def prompt_distribution(self, adapter_name: str | None = None) -> list[int]:
        """The number of prompts in each of the L blocks. Undistributed prompts are in none.

        Raises:
            ValueError: If there is no such adapter.
        """
        counts = torch.bincount(self.prompt_blocks(adapter_name), minlength=self.num_blocks + 1)
        return counts[1:].tolist()

    def prompts(self, adapter_name: str | None = None) -> nn.Parameter:
        """P: the prompt vectors, the trainable parameter of shape (N, D).

        Raises:
            ValueError: If there is no such adapter.
        """
        return self.bank.provpt_prompts[self._adapter(adapter_name)]

    def move_prompt(self, prompt: int, block: int, adapter_name: str | None = None) -> None:
        """Give a prompt to another block. Its vector stays as it is.

        Args:
            prompt: Index of the prompt, 0 … N-1.
            block: The new block, 1 … L, or 0 to leave the prompt undistributed.
            adapter_name: Name of the adapter, the active one by default.

        Raises:
            IndexError: If there is no such prompt.
            ValueError: If there is no such block or no such adapter.
        """
        self.bank.move(self._adapter(adapter_name), prompt, block)

    def _adapter(self, adapter_name: str | None) -> str:
        if adapter_name is None:
            if len(self.active_adapters) != 1:
                raise ValueError(
                    f"Prompts belong to one adapter, but {len(self.active_adapters)} are active. "
                    "Pass `adapter_name` or activate one with `set_adapter`."
                )
            adapter_name = self.active_adapters[0]
        if adapter_name not in self.bank.provpt_prompts:
            raise ValueError(
                f"There is no adapter {adapter_name!r}. The model has {sorted(self.bank.provpt_prompts.keys())}."
            )
        return adapter_name

    # ---- injection --------------------------------------------------------------------------------------------------

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add the prompts of an adapter whose config is in `self.peft_config`. Called by PEFT.

        Raises:
            ValueError: If the model has no blocks that PROVPT knows or another PEFT method in it, if the config does
                not fit the model's blocks, or if the adapter's name cannot be used. The model is then as it was.
        """
        # A copy: PEFT keeps the object it is given, which may be given to other models too.
        config = self.peft_config[adapter_name] = copy.copy(self.peft_config[adapter_name])
        first = "bank" not in self._modules
        if first:
            _check_unadapted(model)
        self._check_adapter(model, adapter_name, config)
        found = find_blocks(model, config.backbone) if first else [(b.block, b.family) for b in self.blocks]
        distribution = config.start_distribution(len(found))
        _check_modules_to_save(model, config.modules_to_save, found)
        if config.shallow:
            _check_shallow(model, *found[0])

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
        # PEFT activates the active adapter anew with the new config's `inference_mode`.
        for parameter, requires_grad in trainable.items():
            parameter.requires_grad = requires_grad
        self._set_backbone_dropout()

    def _check_adapter(self, model: nn.Module, adapter_name: str, config: ProVPTConfig) -> None:
        if adapter_name in PREFIX or "." in adapter_name or adapter_name in _names_in_paths(model):
            raise ValueError(
                f"An adapter's name must not be part of the prefix '{PREFIX}', contain a dot or be the name of a "
                f"module, got {adapter_name!r}: PEFT could not tell its tensors from others. Choose another name."
            )
        others = [other for name, other in self.peft_config.items() if name != adapter_name]
        if any(other.backbone != config.backbone for other in others):
            raise ValueError(
                f"All adapters of a model have to describe the same `backbone`, got {config.backbone} beside "
                f"{others[0].backbone}. Use the first adapter's description."
            )

    def _install(self, model: nn.Module, found: Sequence[tuple[nn.Module, BackboneFamily]]) -> None:
        """Make the bank and hook it into the blocks."""
        norms = [resolve(block, family.norm) for block, family in found]
        widths = [norm.weight.shape[-1] for norm in norms]
        around = _around(model, found[0][0])
        configs = [getattr(module, "config", None) for module in around]
        patch_size = next((c.patch_size for c in reversed(configs) if hasattr(c, "patch_size")), _DEFAULT_PATCH_SIZE)
        self.patch_size = patch_size
        self.bank = PromptBank(widths, init_bound(patch_size, max(widths)), reference=norms[0])
        self.bank.train(model.training)
        self.blocks = [
            PromptedBlock(block, family, self.bank, number) for number, (block, family) in enumerate(found, start=1)
        ]
        self.shallow = ShallowPrompts(self.blocks[0].block, self.blocks[-1].block, self.bank)
        self._checkpointing = CheckpointInputs(around, self.bank)

    def _replace_module(self, parent: nn.Module, name: str, new: nn.Module, child: nn.Module) -> None:
        """Put a module in the place of another. PEFT's own method also copies weights, which a head of several layers
        has no single one of."""
        setattr(parent, name, new)

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("PROVPT replaces no modules.")  # pragma: no cover, abstract in `BaseTuner`

    # ---- the frozen backbone's dropout ------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> ProVPTModel:
        """Set training mode. The frozen backbone's own dropout stays off unless `backbone_dropout` is set."""
        super().train(mode)
        self._set_backbone_dropout()
        return self

    def _set_backbone_dropout(self) -> None:
        """Switch the backbone's dropout modules, and them only: transformers checkpoints a block's activations only
        while the block itself is in training mode."""
        if "bank" not in self._modules:
            return
        adapter = self.bank.enabled_adapter
        keep = adapter is None or self.peft_config[adapter].backbone_dropout
        for block in self.blocks:
            block.keep_dropout = keep
        for parent, dropout in _random_modules(self.model):
            dropout.training = parent.training and keep

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
        tuners_utils.set_adapter(self, adapter_name, inference_mode=inference_mode, layer_cls=PromptBank)
        self.active_adapter = adapter_name
        self._set_backbone_dropout()

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter; if it was active, the next one becomes active.

        Raises:
            ValueError: If there is no such adapter.
        """
        if adapter_name not in self.peft_config:
            raise ValueError(f"Adapter {adapter_name} does not exist")
        del self.peft_config[adapter_name]
        active = tuners_utils.delete_adapter(self, adapter_name=adapter_name, prefix=PREFIX, layer_cls=PromptBank)
        self.active_adapter = active or []
        self._set_backbone_dropout()

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Switch gradients of adapters on or off."""
        tuners_utils.set_requires_grad(self, adapter_names=adapter_names, requires_grad=requires_grad)

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        for module in self.modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                module.enable_adapters(enabled)
        self._set_backbone_dropout()

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        tuners_utils.cast_adapter_dtype(self, adapter_name=adapter_name, autocast_adapter_dtype=autocast_adapter_dtype)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        # PEFT calls this around each forward; without it, `adapter_names` would be ignored in silence.
        if kwargs.get("adapter_names") is not None:
            raise ValueError(
                "PROVPT cannot use different adapters for the images of one batch (`adapter_names`). "
                "Run one batch for each adapter, switching with `set_adapter`."
            )
        yield

    # ---- saving and loading -----------------------------------------------------------------------------------------

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: ProVPTConfig,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        selected = super()._get_adapter_state_dict(
            model=model, config=config, adapter_name=adapter_name, state_dict=state_dict, **kwargs
        )
        cls._check_tensors(model, adapter_name, selected)
        # The config is written after the tensors. transformers sets the kind of labels in the first training step.
        config.remember_labels(next(module for module in model.modules() if isinstance(module, ProVPTModel)).model)
        return selected

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: ProVPTConfig, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        remapped = super()._remap_adapter_state_dict_for_load(
            model=model, config=config, adapter_name=adapter_name, state_dict=state_dict
        )
        cls._check_tensors(model, adapter_name, remapped)
        surplus = sorted(set(remapped) - set(model.state_dict()))
        if surplus:
            raise ValueError(
                f"An adapter's file must hold no tensors but those of the adapter, got {surplus} as well. An adapter "
                "only fits the backbone and config it was made with; save it anew."
            )
        return remapped

    @staticmethod
    def _check_tensors(model: nn.Module, adapter_name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Check an adapter's tensors on their way to or from a file, before any of them is written anywhere."""
        bank = next(module for module in model.modules() if isinstance(module, PromptBank))
        by_container = {}
        for container in (*PromptBank.adapter_layer_names, *PromptBank.other_param_names):
            suffix = f".{container}.{adapter_name}"
            by_container[container] = next((t for key, t in tensors.items() if key.endswith(suffix)), None)
        bank.check(adapter_name, by_container["provpt_prompts"], by_container["provpt_prompt_blocks"])

    # ---- taking it out again ----------------------------------------------------------------------------------------

    def unload(self) -> nn.Module:
        """Take the prompts out and return the base model.

        As in PEFT, modules of `modules_to_save` are the active adapter's, and what was frozen stays frozen.
        """
        model = super().unload()
        self._remove_blocks()
        for parent, dropout in _random_modules(model):
            dropout.training = parent.training
        return model

    def _remove_blocks(self) -> None:
        for block in self.blocks:
            block.remove()
        self.shallow.remove()
        self._checkpointing.remove()
        self.bank.kept.clear()

    def _refuse_merging(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "Prompts cannot be merged: they are extra inputs of the attention, not a change of its weights. "
            "Keep the adapter (`save_pretrained`), or call `unload()` for the base model without prompts."
        )

    merge_and_unload = _refuse_merging
    merge_adapter = _refuse_merging
    unmerge_adapter = _refuse_merging


def _around(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """The modules that a block is in, from the model itself to the block."""
    return [module for module in model.modules() if any(part is block for part in module.modules())]


def _check_modules_to_save(
    model: nn.Module, suffixes: Sequence[str] | None, found: Sequence[tuple[nn.Module, BackboneFamily]]
) -> None:
    """PEFT trains copies of the modules whose names end so. Those of what prompts are hooked into would have copies of
    the prompts as well."""
    hooked = {resolve(block, family.attention) for block, family in found}
    hooked |= {sees_images_first(block, family) for block, family in found}
    modules = dict(model.named_modules())
    for suffix in suffixes or ():
        matches = [name for name in modules if name.endswith(suffix)]
        if not matches:
            raise ValueError(
                f"`modules_to_save` must name modules of the {type(model).__name__}, but it has none that ends with "
                f"{suffix!r}. Its last module is {list(modules)[-1]!r}; look at print(model) for the head's name."
            )
        around = [name for name in matches if hooked.intersection(modules[name].modules())]
        if around:
            raise ValueError(
                "`modules_to_save` must not name attentions, first norms of windowed blocks, or what these are in, "
                f"since prompts are hooked into them, but {suffix!r} names {around[0]!r}. Name parts of an attention, "
                "such as its key projection, or other modules."
            )


def _check_shallow(model: nn.Module, block: nn.Module, family: BackboneFamily) -> None:
    """A token more has to be the same to every block, and no inner block's output may be wanted as a feature map."""
    feature_maps = [type(m).__name__ for m in _around(model, block) if isinstance(m, BackboneMixin)]
    if not family.extra_tokens or feature_maps:
        reason = f"feature maps of {feature_maps[0]}" if feature_maps else f"blocks of {family.name}"
        raise ValueError(
            "`shallow=True` needs blocks that take more tokens than the image has, without windows, masks or biases "
            f"of the image's size, and without feature maps of inner blocks, got {reason}. Leave `shallow` out: deep "
            "prompts fit every backbone."
        )


def _check_unadapted(model: nn.Module) -> None:
    """A second method's tensors would be saved with ours, and a second bank would hide the first."""
    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, PromptBank)) or hasattr(module, "provpt_block"):
            raise ValueError(
                "PROVPT needs a model without other adapters in it, but found "
                f"{type(module).__name__} at {name!r}. Call `unload()` or `merge_and_unload()` first; further PROVPT "
                "adapters are added with `add_adapter`."
            )


def _names_in_paths(model: nn.Module) -> set[str]:
    """The names that occur in the paths of a model's tensors, those of its adapters aside."""
    names = {"base_model", "model", "bank", *PromptBank.adapter_layer_names, *PromptBank.other_param_names}
    for name, module in model.named_children():
        names.add(name)
        if isinstance(module, AuxiliaryTrainingWrapper):
            names |= {"original_module", "modules_to_save"}
        else:
            names |= _names_in_paths(module)
    return names


# What draws random numbers in training; DINOv3 scales its rotary positions at random.
_RANDOM_IN_TRAINING = ("Dropout", "DropPath", "RopePositionEmbedding")


def _random_modules(parent: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Parents and their modules that are random in training, except in modules that are trained themselves."""
    for child in parent.children():
        if any(name in type(child).__name__ for name in _RANDOM_IN_TRAINING):
            yield parent, child
        elif not isinstance(child, AuxiliaryTrainingWrapper):
            yield from _random_modules(child)
