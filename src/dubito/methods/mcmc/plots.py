"""Plot traces and autocorrelations of the network's outputs, one colour per chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dubito.fitting.history import Trace
from dubito.methods.mcmc.history import function_traces

if TYPE_CHECKING:
    from dubito.methods.mcmc.posterior import ParticlePosterior


def plot_traces(posterior: ParticlePosterior, num: int = 4) -> Any:
    """Plot traces of the outputs that mix worst, as a matplotlib figure.

    Args:
        posterior: The posterior of a sampler.
        num: The number of outputs.
    """
    traces = function_traces(posterior, num)
    figure, axes = _figure(traces, "sample")
    for axis, trace in zip(axes, traces, strict=True):
        axis.plot(list(zip(*trace.values, strict=True)), linewidth=0.8)
    axes[0].set_ylabel("value at a training input")
    return figure


def plot_autocorrelations(posterior: ParticlePosterior, num: int = 4) -> Any:
    """Plot autocorrelations of the outputs that mix worst, as a matplotlib figure.

    Args:
        posterior: The posterior of a sampler.
        num: The number of outputs.
    """
    traces = function_traces(posterior, num)
    figure, axes = _figure(traces, "lag")
    for axis, trace in zip(axes, traces, strict=True):
        axis.plot(list(zip(*trace.autocorrelation, strict=True)), linewidth=1.0)
        axis.axhline(0.0, color="grey", linewidth=0.8)
        axis.set_ylim(-0.3, 1.05)
    axes[0].set_ylabel("autocorrelation")
    return figure


def _figure(traces: Sequence[Trace], xlabel: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(traces), 2.6), layout="constrained")
    axes = figure.subplots(1, len(traces), squeeze=False)[0]
    for axis, trace in zip(axes, traces, strict=True):
        axis.set_xlabel(xlabel)
        axis.set_title(trace.name, fontsize="medium")
    return figure, axes
