"""The statistics of BatchNorm layers: computed anew for other weights, or taken from single batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dubito.core import distributed, params
from dubito.core.batches import Batch, Source
from dubito.core.params import Buffers

# Examples over which statistics are computed anew; beyond it they hardly change.
ROWS = 10_000


def norm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the layers that normalize by statistics of the data, by name."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats}
    return {name: layer for name, layer in layers.items() if layer.running_mean is not None}


def norm_buffers(model: nn.Module) -> Buffers:
    """Return a copy of the running means and variances, by the names of the model's buffers."""
    return {
        f"{name}.{key}" if name else key: getattr(layer, key).clone()
        for name, layer in norm_layers(model).items() for key in ("running_mean", "running_var")
    }  # fmt: skip


@torch.no_grad()
def recalibrate(model: nn.Module, source: Source) -> nn.Module:
    """Replace the statistics of BatchNorm layers by averages over the batches of up to `ROWS` examples, in place.

    Weights that are an average or a sample were never trained with the statistics at hand (Izmailov et al. 2018,
    https://arxiv.org/abs/1803.05407). Everything else runs in evaluation mode, and a network without such layers is
    left alone.
    """
    layers = norm_layers(model)
    if not layers:
        return model
    with _in_training_mode(model, momentum=None):
        for layer in layers.values():
            layer.reset_running_stats()
        for batch in _enough(source):
            params.call(model, batch.inputs)
    distributed.mean_([value for layer in layers.values() for value in _statistics(layer)])
    return model


@torch.no_grad()
def statistics_of(model: nn.Module, inputs: Any) -> Buffers:
    """Return the means and variances with which BatchNorm layers in training mode normalize these inputs."""
    before, seen = params.buffers_of(model), {}
    handles = [
        layer.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
        for name, layer in norm_layers(model).items()
    ]
    try:
        with _in_training_mode(model, momentum=1.0):
            params.call(model, inputs)
        found = norm_buffers(model)
    finally:
        for handle in handles:
            handle.remove()
        params.load_(model, before)
    for name, given in seen.items():  # a running variance is unbiased, the one that normalizes is not
        count = given.numel() / given.shape[1]
        found[f"{name}.running_var" if name else "running_var"] *= (count - 1) / count
    return found


@contextmanager
def _in_training_mode(model: nn.Module, momentum: float | None) -> Iterator[None]:
    model.eval()
    layers = norm_layers(model).values()
    momenta = [(layer, layer.momentum) for layer in layers]
    for layer in layers:
        layer.train()
        layer.momentum = momentum
    try:
        yield
    finally:
        model.eval()
        for layer, before in momenta:
            layer.momentum = before


def _enough(source: Source) -> Iterator[Batch]:
    """Yield batches until there are `ROWS` examples; one row alone has no variance."""
    seen = 0
    for batch in source.replay():
        if seen >= ROWS:
            return
        seen += batch.size
        if batch.num_rows > 1:
            yield batch


def _statistics(layer: _BatchNorm) -> list[Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return [layer.running_mean, layer.running_var]
