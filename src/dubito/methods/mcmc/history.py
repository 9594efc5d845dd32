"""Chains in reports: the text of the diagnosis, and traces of the quantities that mix worst."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.core.errors import UnsupportedError
from dubito.fitting.history import History, Trace
from dubito.methods.mcmc.diagnosis import FEWEST, diagnose, looked_at
from dubito.methods.mcmc.diagnostics import autocorrelation, rhat
from dubito.methods.mcmc.posterior import ParticlePosterior

# The largest lag of plotted autocorrelations.
LAGS = 50
# The number of outputs and of weights that a report shows.
OUTPUTS, WEIGHTS = 2, 1


def history(posterior: ParticlePosterior) -> History:
    """Return the text of `diagnose()`, with traces of outputs and of weights if there are enough samples."""
    traces: tuple[Trace, ...] = ()
    if posterior.samples.shape[1] >= FEWEST:
        traces = (*function_traces(posterior, OUTPUTS), *weight_traces(posterior, WEIGHTS))
    return History(tuple(str(diagnose(posterior)).splitlines()), traces)


def function_traces(posterior: ParticlePosterior, num: int) -> tuple[Trace, ...]:
    """Return traces of the `num` outputs at training inputs with the largest R-hat, the largest first."""
    _require_chains(posterior)
    return tuple(_trace(f"output {index}", posterior.trace[..., index]) for index in _worst(posterior.trace, num))


def weight_traces(posterior: ParticlePosterior, num: int) -> tuple[Trace, ...]:
    """Return traces of the `num` weights with the largest R-hat, among those that `diagnose` examines."""
    _require_chains(posterior)
    chosen = looked_at(posterior)
    draws = posterior.samples[..., chosen.to(posterior.samples.device)]
    return tuple(_trace(weight_name(posterior, int(chosen[index])), draws[..., index]) for index in _worst(draws, num))


def weight_name(posterior: ParticlePosterior, index: int) -> str:
    """Return the name of one sampled number: its parameter and index, or the noise."""
    selection = posterior.selection
    for name, span in selection.slices.items():
        if span.start <= index < span.stop:
            place, shape = int(selection.positions(name)[index - span.start]), selection.shapes[name]
            steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            where = ", ".join(str(place // step % size) for step, size in zip(steps, shape, strict=True))
            return f"{name}[{where}]" if shape else name
    return "log noise"


def _require_chains(posterior: ParticlePosterior) -> None:
    if not posterior.recipe.is_chain or posterior.samples.shape[1] < FEWEST:
        raise UnsupportedError("Traces need a chain of at least 4 samples: use SGMCMC or HMC with more samples.")


def _worst(draws: Tensor, num: int) -> list[int]:
    """Return the quantities of draws ``[K, S, P]`` with the largest R-hat, without constant ones."""
    score = torch.where(draws.double().flatten(0, 1).var(0) > 0, rhat(draws), 0.0)
    return torch.sort(score, descending=True, stable=True).indices[:num].tolist()


def _trace(name: str, draws: Tensor) -> Trace:
    return Trace.of(name, draws, autocorrelation(draws)[:, :LAGS])
