"""Classifiers of integer token sequences: a small transformer and an LSTM. Padding does not affect the outputs.

Every layer is called as a module, and attention is implemented here, because `nn.MultiheadAttention` reads the weights
of its layers without calling them. So methods that use layer rules or second derivatives work on both networks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count, Share
from dubito.core.errors import InputError
from dubito.networks.models.dense import check_num_weights

PADDING = 0  # the token with which `dubito.data` pads


def mean_over_tokens(states: Tensor, is_token: Tensor) -> Tensor:
    """Return the mean of ``states [B, T, H]`` over the positions with ``is_token [B, T]``; 0 if there are none."""
    weights = is_token.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1.0)


class Attention(nn.Module):
    """Multi-head self-attention, ``softmax(q kᵀ / √d) v`` per head; padding gets no attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        """Map ``[B, T, H]`` to ``[B, T, H]``."""
        parts = (self.query, self.key, self.value)
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        # The lowest finite number, not -inf, which would give NaN for a row without tokens.
        scores = scores.masked_fill(~is_token[:, None, None, :], torch.finfo(scores.dtype).min)
        mixed = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(dim=-1), v)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each with a layer norm before it and a shortcut (pre-norm)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        """Map ``[B, T, H]`` to ``[B, T, H]``."""
        x = x + self.dropout(self.attention(self.norm1(x), is_token))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """A transformer encoder and a linear layer on its mean state over the tokens; see `transformer`."""

    def __init__(
        self, vocabulary: int, outputs: int, length: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.length = length
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[B, T]`` to logits ``[B, C]``."""
        if tokens.shape[1] > self.length:
            raise InputError(
                f"A sequence of {tokens.shape[1]} tokens is too long for this transformer: its length is {self.length}."
            )
        is_token = tokens != PADDING
        numbers = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.dropout(self.tokens(tokens) + self.positions(numbers))
        for block in self.blocks:
            x = block(x, is_token)
        return self.head(mean_over_tokens(self.norm(x), is_token))


class LSTM(nn.Module):
    """An LSTM and a linear layer on its mean state over the tokens; see `lstm`."""

    def __init__(self, vocabulary: int, outputs: int, width: int, embedding: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, embedding, padding_idx=PADDING)
        self.lstm = nn.LSTM(embedding, width, num_layers=depth, batch_first=True, dropout=dropout if depth > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[B, T]``, padded at the end, to logits ``[B, C]``."""
        states, _ = self.lstm(self.tokens(tokens))
        return self.head(self.dropout(mean_over_tokens(states, tokens != PADDING)))


@checked_arguments
def transformer(
    vocabulary: Count,
    outputs: Count,
    length: Count = 64,
    width: Count = 64,
    depth: Count = 2,
    heads: Count = 4,
    dropout: Share = 0.1,
) -> Transformer:
    """Return a small pre-norm transformer classifier (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    Args:
        vocabulary: The number of distinct tokens; 0 is padding.
        outputs: The number of classes.
        length: The largest sequence length.
        width: The size of the states, a multiple of `heads`.
        depth: The number of blocks.
        heads: The number of attention heads.
        dropout: The dropout rate of embeddings and blocks.
    """
    if width % heads:
        raise InputError(f"width={width} must be a multiple of heads={heads}.")
    check_num_weights(width * (vocabulary + length + outputs) + 12 * depth * width**2)
    return Transformer(vocabulary, outputs, length, width, depth, heads, dropout)


@checked_arguments
def lstm(
    vocabulary: Count, outputs: Count, width: Count = 64, embedding: Count = 64, depth: Count = 1, dropout: Share = 0.1
) -> LSTM:
    """Return an LSTM classifier (Hochreiter and Schmidhuber 1997) of sequences that are padded at the end.

    Args:
        vocabulary: The number of distinct tokens; 0 is padding.
        outputs: The number of classes.
        width: The size of the state.
        embedding: The size of the word vectors.
        depth: The number of layers.
        dropout: The dropout rate between layers and before the last one.
    """
    check_num_weights(vocabulary * embedding + width * (4 * embedding + outputs) + (8 * depth - 4) * width**2)
    return LSTM(vocabulary, outputs, width, embedding, depth, dropout)
