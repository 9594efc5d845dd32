"""Networks that are valid PyTorch and were once too much for some method."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Recurrent(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.states, self.out = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.states(x[..., None])[0][:, -1])


class Attention(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(1, 4), nn.Linear(4, outputs)
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x[..., None])
        return self.out(self.mix(x, x, x, need_weights=False)[0].mean(1))


class WeightNorm(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))
        self.out = nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


class Bag(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(7, 3), nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.bag((10 * x).long().abs() % 7)))


class LogitScale(nn.Module):
    """A network with a parameter without axes, as contrastive models have it."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = mlp(outputs)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale.exp()


def mlp(outputs: int, inplace: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=inplace), nn.Linear(4, outputs))


def normalized(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, outputs))


NETWORKS = {
    "lstm": Recurrent,
    "attention": Attention,
    "weight norm": WeightNorm,
    "embedding bag": Bag,
    "logit scale": LogitScale,
}
