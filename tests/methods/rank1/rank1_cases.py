"""Networks of every layer type that can have rank-1 factors, small and in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention of a sequence to another, with a mask, then a mean over positions."""

    def __init__(self, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first, **options)
        self.head = nn.Linear(6, 3)
        self.other = options.get("kdim") or 6

    def forward(self, x: Tensor) -> Tensor:
        y = x[..., : self.other]
        mask = torch.zeros(len(x), x.shape[1], dtype=torch.bool)
        mask[:, -1] = True
        if not self.attention.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        mixed, _ = self.attention(x, y, y, key_padding_mask=mask)
        return self.head(mixed.mean(1 if self.attention.batch_first else 0))


class Recurrent(nn.Module):
    """An LSTM, then its last states."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, **options)
        size = (options.get("proj_size") or 4) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, (hidden, cell) = self.lstm(x if self.lstm.batch_first else x.transpose(0, 1))
        mixed = states.mean(1 if self.lstm.batch_first else 0)
        return self.head(mixed) + hidden.sum((0, 2))[:, None] + cell.sum((0, 2))[:, None]


class Shared(nn.Module):
    """One linear layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).tanh()).tanh())


class Pooled(nn.Sequential):
    """Layers, then a mean over all positions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(2).mean(-1)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(24, 3))


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(5, *shape, dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)), normal(4)),
    "linear, positions": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(6, 3)), normal(2, 4)),
    "conv1d": (lambda: Pooled(nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Conv1d(4, 3, 2, padding=1)), normal(2, 7)),
    "conv2d": (
        lambda: Pooled(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.Tanh(),
                       nn.Conv2d(6, 3, 2, padding_mode="circular", padding=1, bias=False)),
        normal(4, 6, 5),
    ),
    "depthwise": (lambda: Pooled(nn.Conv2d(3, 6, 3, groups=3), nn.Tanh(), nn.Conv2d(6, 3, 1)), normal(3, 5, 5)),
    "conv3d": (lambda: Pooled(nn.Conv3d(1, 3, 2)), normal(1, 3, 4, 3)),
    "transposed": (
        lambda: Pooled(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), nn.Tanh(),
                       nn.ConvTranspose2d(6, 3, 2)),
        normal(4, 3, 3),
    ),
    "transposed 1d": (lambda: Pooled(nn.ConvTranspose1d(2, 3, 3, dilation=2)), normal(2, 4)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)),
        lambda: torch.randint(7, (5, 3)),
    ),
    "norms": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(),
                              nn.Linear(16, 3), nn.LayerNorm(3)),
        normal(2, 4, 4),
    ),
    "instance and rms norms": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
                              nn.ReLU(), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(16, 3),
                              nn.RMSNorm(3)),
        normal(2, 4, 4),
    ),
    "attention": (Attention, normal(4, 6)),
    "attention, sequence first": (lambda: Attention(batch_first=False), normal(4, 6)),
    "attention, other keys": (lambda: Attention(kdim=4, vdim=4, add_bias_kv=True), normal(4, 6)),
    "attention, no bias": (lambda: Attention(bias=False, add_zero_attn=True), normal(4, 6)),
    "encoder": (encoder, normal(4, 6)),
    "lstm": (lambda: Recurrent(batch_first=True), normal(6, 5)),
    "lstm, deep": (lambda: Recurrent(num_layers=2, bidirectional=True), normal(4, 5)),
    "lstm, projected": (lambda: Recurrent(batch_first=True, proj_size=2, bias=False), normal(4, 5)),
    "called twice": (Shared, normal(4)),
}  # fmt: skip


def network(name: str) -> tuple[nn.Module, Tensor]:
    """A network in evaluation mode with statistics of its own, and a batch of inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(len(name))
        make, inputs = CASES[name]
        model = make().double().eval()
        for module in model.modules():
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
        return model, inputs()


def blobs(rows: int = 90, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Three classes in four dimensions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A small classifier of `blobs`."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
