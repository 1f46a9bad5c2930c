"""Prompts inside the attention: their keys and values are appended, their tokens never exist.

VPT-Deep drops a block's prompt tokens after the block, so they act on the other tokens only through the keys and
values that the block's attention makes of them. Appending those is the same function as prepending tokens, without the
cost of carrying the tokens through queries, output projection and MLP.

Legend: B images, W windows an image (1 unless the family is windowed), H heads, T tokens, n prompts of the block,
D width, d head size.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .backbones import FAMILIES, BackboneFamily, resolve
from .prompts import KeptKeys, Observation, PromptBank, moments_of


IMPLEMENTATION = "provpt"

# Removing a key of weight a moves the output by a / (1 - a) times its distance to the key's value. The factor has no
# bound, though the change has: weights above this count as this.
MOST_WEIGHT = 0.7


class PromptedBlock:
    """One block of the backbone and the prompts it sees.

    Making one hooks the prompts into the block's attention; `remove` undoes it. The attention module keeps its class
    and its place: it only gets a copy of its config that names our attention function.

    Args:
        block: The block module.
        family: Where its parts are.
        bank: The prompts.
        number: Number of the block, 1 … L.
        keep_dropout: Whether the attention's own dropout stays on in training.
    """

    def __init__(self, block: nn.Module, family: BackboneFamily, bank: PromptBank, number: int) -> None:
        self.block = block
        self.family = family
        self.bank = bank
        self.number = number
        self.keep_dropout = False
        self.images: int | None = None
        self.width = resolve(block, family.norm).weight.shape[-1]
        self.attention = resolve(block, family.attention)
        self.attention.provpt_block = self
        if family.own_attention is not None:
            self.attention.forward = self._attend_by_registry
        else:
            self.config = self.attention.config
            self.attention.config = copy.copy(self.config)
            # The public setter of `_attn_implementation` writes into sub-configs, which models share.
            self.attention.config._attn_implementation_internal = IMPLEMENTATION
        sees_images = sees_images_first(block, family)
        self._hook = None if sees_images is None else sees_images.register_forward_pre_hook(self._count_images)
        # A description may be wrong: an attention that does its own arithmetic would leave the prompts out.
        self.reached = False
        self._check = block.register_forward_hook(self._check_reached) if family not in FAMILIES else None

    def remove(self) -> None:
        """Take the prompts out of the block and make its attention what it was."""
        self.attention.__dict__.pop("provpt_block", None)
        if self.family.own_attention is not None:
            self.attention.__dict__.pop("forward", None)
        else:
            self.attention.config = self.config
        for hook in (self._hook, self._check):
            if hook is not None:
                hook.remove()

    def _count_images(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.images = args[0].shape[0]

    def _check_reached(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.reached and not torch.compiler.is_compiling():
            raise ValueError(
                "The attention of a described `backbone` has to call transformers' attention registry with its "
                f"`config`, but {self.family.attention!r} of {self.family.block}, a {type(self.attention).__name__}, "
                "did its own arithmetic, which leaves the prompts out. Let it call `ALL_ATTENTION_FUNCTIONS`."
            )

    def _attend_by_registry(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The `forward` of an attention module that does its own arithmetic, while there are prompts in it.

        Returns:
            What the module's own `forward` returns: context (B * W, T, D), and the attention weights where asked for.
        """
        forward = type(self.attention).forward
        if self.bank.enabled_adapter is None:
            return forward(self.attention, *args, **kwargs)
        assert self.family.own_attention is not None
        inputs = self.family.own_attention(self.attention, *args, **kwargs)
        dropout = self.attention.dropout
        output, weights = prompted_attention(
            self.attention,
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.mask,
            scaling=inputs.scaling,
            dropout=dropout.p if dropout.training else 0.0,
            implementation="eager" if inputs.output_attentions else "sdpa",
        )
        return output.flatten(2), weights

    def attend(
        self, *args: Any, implementation: str | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the attention function that the model's own config names at this moment, or the one given.

        `eager` is in no registry: it stands in the module that the attention's class comes from. Where it does not,
        the attention does its own arithmetic, and ViT's is as good as any.
        """
        implementation = implementation or self.config._attn_implementation
        eager = getattr(sys.modules[type(self.attention).__module__], "eager_attention_forward", None)
        if eager is None:
            from transformers.models.vit.modeling_vit import eager_attention_forward

            eager = eager_attention_forward
        function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
        if "flash" not in implementation:
            return function(self.attention, *args, **kwargs)
        # The flash function looks up its own name on the module's config once more.
        prompted_config, self.attention.config = self.attention.config, self.config
        try:
            return function(self.attention, *args, **kwargs)
        finally:
            self.attention.config = prompted_config

    def keys_and_values(
        self, images: int, key: torch.Tensor, observation: Observation | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """What the block's prompts add to the attention.

        Without gradients and in eval mode keys and values are computed once and kept while the tensors that they are
        made of do not change, see `_state`.

        Args:
            images: B.
            key: The tokens' keys, (…, H, T, d).
            observation: What the prompts are to be observed by, if they are.

        Returns:
            None if the block has no prompts, else their indices (n,), and keys and values in the dtype of the tokens',
            each (1 or B, H, n, d).
        """
        bank = self.bank
        adapter = bank.enabled_adapter
        if adapter is None or adapter in bank.shallow:
            return None
        rows = bank.rows(adapter, self.number)
        if rows is None:
            return None
        state = self._state(adapter, key) if bank.keeps() else None
        kept = bank.kept.get((adapter, self.number)) if state is not None else None
        if kept is not None and kept.state == state:
            return rows, kept.key, kept.value
        prompts = bank.provpt_prompts[adapter][rows, : self.width].unsqueeze(0)  # (1, n, D)
        rate = bank.dropout[adapter] if bank.training else 0.0
        if rate > 0.0:
            # As `F.dropout`, with the same random numbers, but what is stored for the backward pass is a boolean mask.
            mask = torch.empty(images, *prompts.shape[1:], dtype=torch.bool, device=prompts.device)
            prompts = torch.where(mask.bernoulli_(1 - rate), prompts / (1 - rate), 0.0)
        if observation is not None and observation.score == "taylor":
            prompts = _ObserveVectors.apply(prompts.expand(images, -1, -1), observation.columns(rows))
        norm, *projections = self._parts()
        prompts = prompts.to(norm.weight.dtype)
        normed = norm(prompts) if self.family.norm_first else prompts
        heads = (*normed.shape[:2], key.shape[1], key.shape[3])
        prompt_key, prompt_value = (
            projection(normed).view(heads).transpose(1, 2).to(key.dtype) for projection in projections
        )
        if self.family.normalize_keys:
            prompt_key = F.normalize(prompt_key, dim=-1)
        if state is not None:
            storages = [tensor.untyped_storage() for tensor in self._sources(adapter)]
            bank.kept[adapter, self.number] = KeptKeys(state, prompt_key, prompt_value, storages)
        return rows, prompt_key, prompt_value

    def _parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The norm, the key and the value projection, which `modules_to_save` may have replaced."""
        family = self.family
        return resolve(self.block, family.norm), resolve(self.block, family.key), resolve(self.block, family.value)

    def _state(self, adapter: str, key: torch.Tensor) -> tuple[Any, ...] | None:
        """What the prompts' keys and values are made of, as memory addresses and PyTorch's counts of changes.

        None where these do not tell: for tensors of other libraries and those made in inference mode, and while there
        are gradients, since the step of a fused optimizer that they announce is not counted. What they do not tell
        anywhere is writing through `.data` or NumPy, other settings of the norm, and hooks on norm or
        projections: the next call of `train()` or `eval()` makes up for it.
        """
        sources = self._sources(adapter)
        if any(type(t) not in (nn.Parameter, torch.Tensor) or t.is_inference() or t.grad is not None for t in sources):
            return None
        autocast = torch.is_autocast_enabled(key.device.type)
        return key.dtype, key.device, autocast, *((t.data_ptr(), t._version) for t in sources)

    def _sources(self, adapter: str) -> tuple[torch.Tensor, ...]:
        """The tensors that the prompts' keys and values are made of."""
        tensors = (tensor for module in self._parts() for tensor in (*module.parameters(), *module.buffers()))
        return (self.bank.provpt_prompts[adapter], *tensors)


def sees_images_first(block: nn.Module, family: BackboneFamily) -> nn.Module | None:
    """The module whose input tells the number of images, which the attention of a windowed family cannot tell from
    windows; None in other families. A norm runs again where a checkpointed block does."""
    if not family.windowed:
        return None
    return resolve(block, family.norm) if family.norm_first else block


def prompted_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function that transformers calls in a prompted block.

    Args:
        module: The attention module.
        query, key, value: (B * W, H, T, d).
        attention_mask: None, or a mask or relative position bias that broadcasts to (B * W, H, T, T).

    Returns:
        Output (B * W, T, H, d), and the attention weights (B * W, H, T, T + n) where the implementation gives them.
    """
    block: Any = module.provpt_block
    if not torch.compiler.is_compiling():
        block.reached = True
    adapter = block.bank.enabled_adapter
    if adapter is not None and not block.keep_dropout:
        kwargs["dropout"] = 0.0
    observation = block.bank.observation
    if observation is not None and not (torch.is_grad_enabled() and observation.adapter_name == adapter):
        observation = None
    if observation is not None and block.number == block.bank.num_blocks and not torch.compiler.is_compiling():
        observation.count_batch()
    images = key.shape[0] if block.images is None else block.images
    appended = block.keys_and_values(images, key, observation)
    if appended is None:
        return block.attend(query, key, value, attention_mask, **kwargs)
    rows, *keys_and_values = appended
    prompt_key, prompt_value = (_for_each_window(x, key.shape[0]) for x in keys_and_values)
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 4:
            attention_mask = _dense_mask(attention_mask, query, key)
            kwargs["implementation"] = "sdpa"
        visible = True if attention_mask.dtype == torch.bool else 0.0
        attention_mask = F.pad(attention_mask, (0, len(rows)), value=visible)
    key = torch.cat([key, prompt_key], dim=2)  # (B * W, H, T + n, d)
    value = torch.cat([value, prompt_value], dim=2)
    output, weights = block.attend(query, key, value, attention_mask, **kwargs)

    if observation is not None and observation.score in ("gate", "fisher"):
        # Flex gives the logarithm of the weights' sum, (B * W, H, T), in their place.
        if weights is None or weights.dim() != 4:
            prompt_weights = _prompt_weights(block, query, key, prompt_key, attention_mask, **kwargs)
        else:
            prompt_weights = weights[..., -len(rows) :].detach()
        if observation.score == "fisher":
            prompt_weights = prompt_weights / (1 - prompt_weights.clamp(max=MOST_WEIGHT))
        output = _ObserveGate.apply(output, prompt_weights, prompt_value, observation.columns(rows), images)
    return output, weights


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, prompted_attention)


def _for_each_window(prompts: torch.Tensor, batch: int) -> torch.Tensor:
    """(1 or B, H, n, d) to (B * W, H, n, d): every window of an image sees the image's prompts."""
    images = prompts.shape[0]
    if images == batch:
        return prompts
    expanded = prompts.unsqueeze(1).expand(-1, batch // images, -1, -1, -1)
    return expanded.reshape(batch, *prompts.shape[1:])


def _dense_mask(attention_mask: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The masks of flex (a `BlockMask`) and flash (2-D, over keys) as a boolean one that broadcasts to (…, T, T).

    Neither can be extended by the prompts as it is. transformers makes a `BlockMask` even where nothing is masked.
    """
    if isinstance(attention_mask, torch.Tensor):
        return attention_mask[:, None, None, :].bool()
    batch, heads = attention_mask.shape[:2]  # 1 where a mask is the same for all heads
    return create_mask(attention_mask.mask_mod, batch, heads, query.shape[2], key.shape[2], device=key.device)


@torch.no_grad()
def _prompt_weights(
    block: PromptedBlock,
    query: torch.Tensor,
    key: torch.Tensor,
    prompt_key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention weights on the prompts, (B * W, H, T, n), from an implementation that does not give any.

    The same attention, with values that are 1 for prompts and 0 for tokens, gives each query's total weight on
    prompts. Its split over the prompts is a softmax over them alone, since prompts have no mask.
    """
    num_prompts = prompt_key.shape[2]
    indicator = torch.zeros_like(key)
    indicator[:, :, -num_prompts:] = 1.0
    kwargs["dropout"] = 0.0
    total = block.attend(query, key, indicator, attention_mask, **kwargs)[0][..., :1].transpose(1, 2)  # (…, H, T, 1)
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    split = (query @ prompt_key.transpose(2, 3) * scaling).float().softmax(dim=-1)
    return total * split


class _ObserveGate(torch.autograd.Function):
    """Identity on the attention's output whose backward reports each prompt's gate gradient.

    A gate m multiplies a prompt key's unnormalised attention weight; m = 1 is the model and m = 0 is the model without
    the prompt. With weights a, values v, output o = sum_k a_k v_k and its gradient g, the derivative at m = 1 is
    dL/dm_k = sum over queries and heads of a_k g.(v_k - o), the first-order estimate of the loss with the prompt minus
    the loss without it (Eq. 4 of the paper). Without the prompt the weights are normalised anew, and the output is
    o - a_k / (1 - a_k) (v_k - o): that factor in the place of a_k gives the derivative along the change itself.
    """

    @staticmethod
    def forward(ctx, output, prompt_weights, prompt_value, moments, images):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(output, prompt_weights, prompt_value)
        ctx.images = images
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        output, prompt_weights, prompt_value = ctx.saved_tensors
        # Products with a loss scale in them overflow float16 before the gradients do.
        wide = grad.float() if grad.dtype == torch.float16 else grad
        grad_heads = wide.transpose(1, 2)  # (B * W, H, T, d)
        along_output = (grad_heads * output.transpose(1, 2)).sum(dim=-1, keepdim=True)  # g.o, (B * W, H, T, 1)
        along_value = grad_heads @ prompt_value.transpose(2, 3).to(wide.dtype)  # g.v_k, (B * W, H, T, n)
        scores = (prompt_weights * (along_value - along_output)).sum(dim=(1, 2))  # (B * W, n)
        scores = scores.view(ctx.images, -1, scores.shape[-1]).sum(dim=1)
        return grad, None, None, moments_of(scores.float()), None


class _ObserveVectors(torch.autograd.Function):
    """Identity on the prompts of each image (B, n, D) whose backward reports g_k.p_k for each image, Eq. 6."""

    @staticmethod
    def forward(ctx, prompts, moments):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(prompts)
        return prompts.view_as(prompts)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (prompts,) = ctx.saved_tensors
        return grad, moments_of((grad * prompts).sum(dim=-1).float())
