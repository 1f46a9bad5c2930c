"""Checks on a model and a new adapter, before prompts are added."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from accelerate.utils import parse_flag_from_env
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers.backbone_utils import BackboneMixin

from ..config import BackboneFamily, ProVPTConfig
from ..prompts import PromptBank
from ..registration import PREFIX
from .attention import sees_images_first
from .families import resolve


def modules_around(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """The modules that contain a block, from the model down to the block itself."""
    return [module for module in model.modules() if any(part is block for part in module.modules())]


# The end of what a refusal of `nn.DataParallel` says.
ONE_PROCESS_PER_DEVICE = (
    "(the Trainer uses it if one process has several devices). Start one process per device with `accelerate launch`, "
    "or set CUDA_VISIBLE_DEVICES to one device."
)


def check_replica(module: nn.Module) -> None:
    """Refuse what `nn.DataParallel` makes of a model on each device."""
    if getattr(module, "_is_replica", False):
        raise ValueError(
            "A block's prompts must be on the device of its images, but `nn.DataParallel` copies only the model "
            f"{ONE_PROCESS_PER_DEVICE}"
        )


def check_sharding() -> None:
    """Refuse an option of FSDP 2 with which accelerate would fail when it shards the model: it takes no buffers. Only
    `accelerate launch` tells of it beforehand."""
    flags = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    if all(map(parse_flag_from_env, flags)) and os.environ.get("FSDP_VERSION") == "2":
        raise ValueError(
            "FSDP 2 must not load models in the way that saves CPU memory, which takes parameters only: the blocks of "
            "the prompts are a buffer. Set `fsdp_cpu_ram_efficient_loading` to false, in accelerate's config or "
            "with `accelerate launch --fsdp_cpu_ram_efficient_loading false`."
        )


def check_modules_to_save(
    model: nn.Module, suffixes: Sequence[str] | None, found: Sequence[tuple[nn.Module, BackboneFamily]]
) -> None:
    """PEFT trains copies of the modules in `modules_to_save`. Copies of hooked modules would contain prompts."""
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
                "`modules_to_save` must not name attention modules, first norms of windowed blocks, or modules that "
                f"contain one, since prompts are hooked into them, but {suffix!r} names {around[0]!r}. Name parts of "
                "an attention module, such as its key projection, or other modules."
            )


def check_shallow(model: nn.Module, block: nn.Module, family: BackboneFamily) -> None:
    """Every block must accept extra tokens, and no inner block's output may be used as a feature map."""
    feature_maps = [type(m).__name__ for m in modules_around(model, block) if isinstance(m, BackboneMixin)]
    if not family.extra_tokens or feature_maps:
        reason = f"feature maps of {feature_maps[0]}" if feature_maps else f"blocks of {family.name}"
        raise ValueError(
            "`shallow=True` needs blocks that accept extra tokens (no windows, no masks or biases tied to the image "
            f"size) and a model without feature maps of inner blocks, got {reason}. Leave `shallow` out: deep prompts "
            "fit every backbone."
        )


def check_unadapted(model: nn.Module) -> None:
    """Tensors of a second method would be saved with ours, and a second prompt bank would hide the first."""
    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, PromptBank)) or hasattr(module, "provpt_block"):
            raise ValueError(
                f"PROVPT needs a model without other adapters in it, but found {type(module).__name__} at {name!r}. "
                "Call `unload()` or `merge_and_unload()` first, or add another PROVPT adapter with `add_adapter`."
            )


def check_new_adapter(model: nn.Module, adapter_name: str, configs: Mapping[str, ProVPTConfig]) -> None:
    """PEFT recognises an adapter's tensors by its name, so the name must not occur elsewhere in the path of a saved
    tensor. All adapters share one `backbone`: the blocks are found once, for the first adapter."""
    taken = _names_in_saved_paths(model, {suffix for c in configs.values() for suffix in c.modules_to_save or ()})
    confused = sorted(name for name in configs if name in PREFIX or "." in name or name in taken)
    if confused:
        raise ValueError(
            f"An adapter's name must not be part of the prefix '{PREFIX}', contain a dot or be a name in the path of "
            f"the prompts or of a module in `modules_to_save`, got {confused[0]!r}: PEFT could not tell its tensors "
            "from others. Choose another name."
        )
    backbone = configs[adapter_name].backbone
    others = [config.backbone for config in configs.values() if config.backbone != backbone]
    if others:
        raise ValueError(
            f"All adapters of a model have to describe the same `backbone`, got {backbone} and {others[0]}. "
            "Use the first adapter's description."
        )


def _names_in_saved_paths(model: nn.Module, suffixes: Iterable[str]) -> set[str]:
    """The names in the paths of an adapter's prompts and of what is saved of modules that end in one of `suffixes`."""
    names = {"base_model", "model", "bank", *PromptBank.adapter_layer_names, *PromptBank.other_param_names}
    names |= {"original_module", "modules_to_save"}
    for path, module in model.named_modules():
        if path.endswith(tuple(suffixes)):
            saved = module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module
            names.add(path.split(".")[-1])
            names |= {name for key in saved.state_dict() for name in key.split(".")}
    return names
