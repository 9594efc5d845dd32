"""Layers of every kind that puts noise on its outputs, and networks that are hard to convert, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oracles import fixed_normal

LAYERS: dict[str, tuple[Any, Tensor]] = {
    "linear": (lambda: nn.Linear(3, 2), fixed_normal(2, 3)),
    "linear_without_bias": (lambda: nn.Linear(3, 2, bias=False), fixed_normal(2, 3)),
    "linear_on_positions": (lambda: nn.Linear(3, 2), fixed_normal(2, 4, 3)),
    "linear_without_batch": (lambda: nn.Linear(3, 2), fixed_normal(3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 2, stride=2, padding=1), fixed_normal(2, 2, 5)),
    "conv2d_not_square": (lambda: nn.Conv2d(2, 2, (1, 3), padding=(0, 1), dilation=(1, 2)), fixed_normal(2, 2, 3, 5)),
    "conv2d_circular": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), fixed_normal(2, 1, 3, 4)),
    "conv2d_reflect": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), fixed_normal(2, 1, 3, 4)),
    "conv2d_groups": (lambda: nn.Conv2d(4, 2, 2, groups=2), fixed_normal(2, 4, 3, 3)),
    "conv2d_depthwise": (lambda: nn.Conv2d(3, 3, 2, groups=3), fixed_normal(2, 3, 3, 3)),
    "conv2d_without_batch": (lambda: nn.Conv2d(2, 2, 2), fixed_normal(2, 3, 3)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), fixed_normal(2, 1, 2, 3, 2)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(2, 3, 2, stride=2, output_padding=1), fixed_normal(2, 2, 3)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(2, 2, 2, stride=2, padding=1), fixed_normal(2, 2, 3, 3)),
    "embedding": (lambda: nn.Embedding(5, 3), torch.tensor([[0, 4, 4], [2, 1, 0]])),
    "embedding_padding": (lambda: nn.Embedding(5, 3, padding_idx=0), torch.tensor([[0, 4, 4], [2, 1, 0]])),
}
# Their gains are sampled as weights under every estimator.
NORMS: dict[str, tuple[Any, Tensor]] = {
    "layer_norm": (lambda: nn.LayerNorm((2, 3)), fixed_normal(2, 2, 3)),
    "rms_norm": (lambda: nn.RMSNorm(3), fixed_normal(2, 4, 3)),
    "instance_norm": (lambda: nn.InstanceNorm2d(2, affine=True), fixed_normal(2, 2, 3, 2)),
}


class Tied(nn.Module):
    """An embedding whose weight is also the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


class Reading(nn.Module):
    """Calls its embedding, and reads the weight of it and of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.linear(self.embedding(tokens).mean(1), self.mix.weight, self.mix.bias)
        return F.linear(hidden, self.embedding.weight)


class Loop(nn.Module):
    """A hand-written recurrent network: one layer, called at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(5, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 3)
        for step in x.unbind(1):
            state = torch.tanh(self.cell(torch.cat([step, state], -1)))
        return self.head(state)


class Recurrent(nn.Module):
    """A recurrent block of any kind, many layers, both directions."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.block = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x)[0].mean(1))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class LowRank(nn.Linear):
    """A linear layer with a forward of its own, as adapters have it."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.down, self.up = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class Token(nn.Sequential):
    """A container with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 2), nn.Tanh())
        self.token = nn.Parameter(torch.randn(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.token)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


TOKENS = torch.tensor([[0, 1, 2], [3, 4, 5]])

NETWORKS: dict[str, tuple[Any, Tensor]] = {
    "top_level_linear": (lambda: nn.Linear(3, 2), fixed_normal(4, 3)),
    "mlp": (mlp, fixed_normal(4, 3)),
    "convolutional": (convolutional, fixed_normal(4, 1, 4, 4)),
    "tied": (Tied, TOKENS),
    "reading": (Reading, TOKENS),
    "loop": (Loop, fixed_normal(4, 3, 2)),
    "lstm": (lambda: Recurrent(nn.LSTM), fixed_normal(4, 5, 3)),
    "gru": (lambda: Recurrent(nn.GRU), fixed_normal(4, 5, 3)),
    "attention": (Attending, fixed_normal(4, 5, 4)),
    "transformer_encoder": (encoder, fixed_normal(4, 5, 4)),
    "low_rank": (LowRank, fixed_normal(4, 3)),
    "token": (Token, fixed_normal(4, 3)),
}
