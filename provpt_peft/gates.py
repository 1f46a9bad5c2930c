"""Scores as gradients of gates: one gate for each prompt and image (paper, Eqs. 4 to 6).

A gate m multiplies the effect of a prompt on one image. m = 1 is the model, m = 0 the model without the prompt, so
dL/dm at 1 estimates, to first order, the loss with the prompt minus the loss without it: above 0 means idle.

Gates on the `"output"` scale what a prompt adds to its block's attention output o, with gradient g. Without the
prompt's key (weight a, value v) the other weights are renormalised, and o becomes o - a / (1 - a) (v - o). So an
image's score is the sum over queries and heads of a / (1 - a) g·(v - o). Gates on the `"vector"` scale the prompt
itself: Eq. 6 as printed, g·p, which LayerNorm makes close to noise.

Legend: B images, W windows per image (1 unless the family is windowed), H heads, T tokens, n prompts of a block, N
prompts of the adapter, D width, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch


# Removing a key of weight a moves the output by a / (1 - a) times its distance to the key's value. The factor is
# unbounded although the change is not, so in 1 - a, weights are clamped to this.
MOST_WEIGHT = 0.7
# Scale of the loss, so that float16 gradients do not vanish. A power of 2 leaves those of other dtypes unchanged.
SCALE = 2.0**10

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Gates:
    """The gates of an adapter's prompts during one forward pass.

    The blocks pass their prompts or outputs through an identity, whose backward pass computes one number per image and
    prompt, the gradient of `values`. Gradient clipping and the parameters' gradients are not involved.

    Args:
        on: What a gate multiplies: the prompt's contribution to its block's `"output"`, or its `"vector"`.
        adapter_name: The adapter whose prompts have gates, while it is the enabled one.
        num_prompts: N.
    """

    def __init__(self, on: Literal["output", "vector"], adapter_name: str, num_prompts: int) -> None:
        self.on = on
        self.adapter_name = adapter_name
        self.num_prompts = num_prompts
        # (B, N), once a block has seen the images.
        self.values: torch.Tensor | None = None

    def on_vectors(self, prompts: torch.Tensor, rows: torch.Tensor, images: int) -> torch.Tensor:
        """Apply the gates to a block's prompts (B or 1, n, D), at the indices `rows`, before the norm."""
        if self.on != "vector":
            return prompts
        return _OnVectors.apply(prompts.expand(images, -1, -1), self._columns(rows, images))

    def on_output(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        images: int,
        scaling: float | None,
        attend: Attend,
    ) -> torch.Tensor:
        """Apply the gates to the output of a block's attention.

        Args:
            output, query: (B * W, T, H, d) and (B * W, H, T, d).
            key, value: Of the tokens, then of the prompts, (B * W, H, T + n, d).
            rows, images: Indices of the block's prompts, (n,), and B.
            scaling: Factor of the products of queries and keys, by default 1 / sqrt(d).
            attend: The same attention for other values. Maps query, key and values to an output like `output`.
        """
        if self.on != "output":
            return output
        return _OnOutput.apply(output, query, key, value, self._columns(rows, images), scaling, attend)

    def gradients(self, loss: torch.Tensor) -> torch.Tensor:
        """s: the score of each prompt on each image, to first order, (B, N) in loss units.

        The loss is a mean over B images, so B times its gradient is the derivative of an image's own loss. A prompt
        that the loss does not reach scores 0, as Eq. 4 says.

        Raises:
            ValueError: If no block with prompts has seen the images.
        """
        if self.values is None or not loss.requires_grad:
            raise ValueError(
                "Scores need a loss that depends on the prompts, but it reached none of them. In `compute_loss`, call "
                "the model that has the adapter, with gradients, while the adapter is enabled."
            )
        wide = loss if loss.dtype == torch.float64 else loss.float()
        (gradient,) = torch.autograd.grad(SCALE * wide, [self.values], allow_unused=True)
        return torch.zeros_like(self.values) if gradient is None else gradient * (len(self.values) / SCALE)

    def _columns(self, rows: torch.Tensor, images: int) -> torch.Tensor:
        """The gates of the prompts at the indices `rows`, (B, n), on the device of `rows`."""
        if self.values is None:
            self.values = torch.zeros(images, self.num_prompts, device=rows.device, requires_grad=True)
        if len(self.values) != images:
            raise ValueError(
                f"Scores need the same images in all passes of one loss, got {len(self.values)} and then {images}. "
                "In `compute_loss`, call the model on whole batches."
            )
        return self.values[:, rows.to(self.values.device)].to(rows.device)


class _OnVectors(torch.autograd.Function):
    """Identity on the prompts of each image (B, n, D)."""

    @staticmethod
    def forward(ctx, prompts, gates):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(prompts)
        return prompts.view_as(prompts)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (prompts,) = ctx.saved_tensors
        return grad, (grad * prompts).sum(dim=-1).float()


class _OnOutput(torch.autograd.Function):
    """Identity on the attention's output (B * W, T, H, d).

    It only saves tensors that the attention saves for its own backward pass anyway. The prompts' attention weights,
    which no fast kernel returns, are computed in the backward pass, one block at a time, so scoring takes no more
    memory than training.
    """

    @staticmethod
    def forward(ctx, output, query, key, value, gates, scaling, attend):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(output, query, key, value)
        ctx.images, ctx.count = gates.shape
        ctx.scaling, ctx.attend = scaling, attend
        device = query.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        output, query, key, value = ctx.saved_tensors
        # Keys, queries and masks may have different dtypes, which autocast made one in the forward pass.
        device, dtype, enabled = ctx.autocast
        with torch.autocast(device, dtype, enabled):
            weights = _prompt_weights(query, key, ctx.count, ctx.scaling, ctx.attend)
        weights = weights / (1 - weights.clamp(max=MOST_WEIGHT))
        # Products of float16 overflow before the gradients do.
        wide = grad.float() if grad.dtype == torch.float16 else grad
        heads = wide.transpose(1, 2)  # (B * W, H, T, d)
        along_output = (heads * output.transpose(1, 2)).sum(dim=-1, keepdim=True)  # g·o, (B * W, H, T, 1)
        along_value = heads @ value[:, :, -ctx.count :].transpose(2, 3).to(wide.dtype)  # g·v, (B * W, H, T, n)
        scores = (weights * (along_value - along_output)).sum(dim=(1, 2))  # (B * W, n)
        scores = scores.view(ctx.images, -1, ctx.count).sum(dim=1)
        return grad, None, None, None, scores.float(), None, None


def _prompt_weights(
    query: torch.Tensor, key: torch.Tensor, count: int, scaling: float | None, attend: Attend
) -> torch.Tensor:
    """Attention weights on the last `count` keys, those of the prompts: (B * W, H, T, n).

    The same attention, with values that are 1 for prompts and 0 for tokens, gives a query's total weight on prompts.
    Its split over the prompts is a softmax over them alone, since prompts have no mask.
    """
    indicator = torch.zeros_like(key)
    indicator[:, :, -count:] = 1.0
    total = attend(query, key, indicator)[..., :1].transpose(1, 2)  # (B * W, H, T, 1)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    split = (query @ key[:, :, -count:].transpose(2, 3) * factor).float().softmax(dim=-1)
    return total * split
