"""`nn.Embedding`: a lookup, which is a linear map of one-hot rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito.networks.layers.base import LayerRule, Side, channels_last_rows, check_kept, resized
from dubito.networks.layers.registry import register
from dubito.networks.layers.rows import IndexRows


@register(nn.Embedding)
class EmbeddingRule(LayerRule[nn.Embedding]):
    """Input `[B, *positions]` of integers; the weight is `[num_embeddings, D]`, and there is no bias.

    The row of `padding_idx` is a constant: it is looked up like any other, but gets no gradient. The gradients of
    `apply` are dense, even if the layer has `sparse=True`.
    """

    linear_in_input = False
    takes_indices = True

    def obstacle(self, layer: nn.Embedding) -> str | None:
        """`max_norm` rewrites the weight in `forward`; `scale_grad_by_freq` changes the gradient itself."""
        if layer.max_norm is not None:
            return "max_norm rewrites its weight in every forward pass; build it without max_norm"
        if layer.scale_grad_by_freq:
            return "scale_grad_by_freq changes its gradient; build it without scale_grad_by_freq"
        return None

    def apply(self, layer: nn.Embedding, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """$y_t = W_{x_t}$."""
        y = F.embedding(x, weight, layer.padding_idx)
        return y if bias is None else y + bias

    def apply_variance(
        self, layer: nn.Embedding, x: Tensor, weight_variance: Tensor, bias_variance: Tensor | None
    ) -> Tensor:
        r"""A lookup too: $\sigma^2_{x_t}$."""
        return self.apply(layer, x, weight_variance, bias_variance)

    def inputs_as_rows(self, layer: nn.Embedding, x: Tensor) -> IndexRows:
        """`[B, T]`."""
        index = channels_last_rows(x[None, ..., None])[0].squeeze(-1)
        return IndexRows(index, layer.num_embeddings, layer.padding_idx)

    def grads_as_rows(self, layer: nn.Embedding, g: Tensor) -> Tensor:
        """`[V, B, T, D]`."""
        return channels_last_rows(g)

    def bias_grads(self, layer: nn.Embedding, g: Tensor) -> Tensor:
        """`[V, B, D]`."""
        return channels_last_rows(g).sum(2)

    def constant_weights(self, layer: nn.Embedding) -> Tensor | None:
        """The row of `padding_idx`."""
        if layer.padding_idx is None:
            return None
        mask = torch.zeros_like(layer.weight, dtype=torch.bool)
        mask[layer.padding_idx] = True
        return mask

    def num_inputs(self, layer: nn.Embedding) -> int:
        """The size of the vocabulary."""
        return layer.num_embeddings

    def num_outputs(self, layer: nn.Embedding) -> int:
        """`embedding_dim`."""
        return layer.embedding_dim

    def channel_axis(self, layer: nn.Embedding, ndim: int) -> int:
        """The last axis of the output."""
        return ndim - 1

    def weight_axis(self, layer: nn.Embedding, side: Side) -> int:
        """`[num_embeddings, D]`: inputs first."""
        return 1 if side == "output" else 0

    def keep_outputs(self, layer: nn.Embedding, index: Tensor) -> nn.Embedding:
        """Columns of the weight."""
        index = check_kept(index, layer.embedding_dim)
        return resized(layer, {"weight": layer.weight[:, index]}, embedding_dim=len(index))

    def keep_inputs(self, layer: nn.Embedding, index: Tensor) -> nn.Embedding:
        """A smaller vocabulary: the new integer j stands for the old `index[j]`, so inputs must be renumbered."""
        index = check_kept(index, layer.num_embeddings)
        padding = None if layer.padding_idx is None else (index == layer.padding_idx).nonzero().flatten().tolist()
        return resized(
            layer,
            {"weight": layer.weight[index]},
            num_embeddings=len(index),
            padding_idx=padding[0] if padding else None,
        )
