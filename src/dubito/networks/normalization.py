"""Running statistics of normalization layers: recomputed for other weights, or taken from single batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from dubito.core import distributed, params
from dubito.core.batches import Batch, Source
from dubito.core.params import Buffers
from dubito.networks.watching import inputs_of

# Examples over which statistics are recomputed; more of them hardly change the averages.
ROWS = 10_000


def running_norms(model: nn.Module) -> dict[str, _NormBase]:
    """Return the layers with running statistics, by name: BatchNorm, and InstanceNorm with `track_running_stats`."""
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _NormBase)}
    return {name: norm for name, norm in norms.items() if norm.running_mean is not None}


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers with running statistics, by name."""
    return {name: norm for name, norm in running_norms(model).items() if isinstance(norm, _BatchNorm)}


def running_statistics(norms: Mapping[str, _NormBase]) -> Buffers:
    """Return a copy of the running means and variances of these layers, by the names of the network's buffers."""
    return {
        f"{name}.{key}" if name else key: getattr(norm, key).clone()
        for name, norm in norms.items() for key in ("running_mean", "running_var")
    }  # fmt: skip


@torch.no_grad()
def recalibrate(
    model: nn.Module, source: Source, *, call: Callable[[Any], Any] | None = None, rows: int | None = ROWS
) -> nn.Module:
    """Replace running statistics by averages over the batches of the data, in place.

    Averaged or sampled weights need other statistics than those of training (Izmailov et al. 2018,
    https://arxiv.org/abs/1803.05407). All other layers run in evaluation mode. A network without such layers is
    unchanged.

    Args:
        model: The network.
        source: The training data.
        call: The function that runs the network on a batch of inputs; None calls the network.
        rows: The largest number of examples to use; None uses all.
    """
    norms = recalibrate_on(model, (batch.inputs for batch in _enough(source, rows)), call=call)
    distributed.mean_([value for norm in norms for value in (norm.running_mean, norm.running_var) if value is not None])
    return model


@torch.no_grad()
def recalibrate_on(
    model: nn.Module, inputs: Iterable[Any], *, call: Callable[[Any], Any] | None = None
) -> list[_NormBase]:
    """Do the same with batches of inputs, of two rows at least, in this process alone; return the layers."""
    norms = list(running_norms(model).values())
    if not norms:
        return []
    with _in_training_mode(model, momentum=None):
        for norm in norms:
            norm.reset_running_stats()
        for count, batch in enumerate(inputs, start=1):
            for norm in norms:
                if not isinstance(norm, _BatchNorm):  # without a momentum only BatchNorm computes the plain average
                    norm.momentum = 1 / count
            params.call(model, batch) if call is None else call(batch)
    return norms


@torch.no_grad()
def batch_statistics(model: nn.Module, inputs: Any) -> Buffers:
    """Return the means and variances with which BatchNorm layers in training mode normalize these inputs."""
    before, norms = params.buffers_of(model), batch_norms(model)
    try:
        with _in_training_mode(model, momentum=1.0):
            seen = inputs_of(model, norms, inputs)
        found = running_statistics(norms)
    finally:
        params.load_(model, before)
    for name, given in seen.items():  # a running variance is unbiased, but the normalizing one is not
        count = given.numel() / given.shape[1]
        found[f"{name}.running_var" if name else "running_var"] *= (count - 1) / count
    return found


@contextmanager
def _in_training_mode(model: nn.Module, momentum: float | None) -> Iterator[None]:
    """Put the network into evaluation mode, and layers with running statistics into training mode."""
    model.eval()
    norms = running_norms(model).values()
    momenta = [(norm, norm.momentum) for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = momentum
    try:
        yield
    finally:
        model.eval()
        for norm, before in momenta:
            norm.momentum = before


def _enough(source: Source, rows: int | None) -> Iterator[Batch]:
    """Yield batches until there are `rows` examples; batches of one row, which has no variance, are skipped."""
    seen = 0
    for batch in source.replay():
        if rows is not None and seen >= rows:
            return
        seen += batch.size
        if batch.num_rows > 1:
            yield batch
