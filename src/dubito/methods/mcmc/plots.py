"""Plot traces and autocorrelations of the network's outputs, one colour per chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dubito.fitting.history import Trace
from dubito.methods.mcmc.diagnosis import function_traces
from dubito.methods.mcmc.posterior import ParticlePosterior


def plot_traces(posterior: ParticlePosterior, num: int = 4) -> Any:
    """Plot traces of the outputs that mix worst, as a matplotlib figure.

    Args:
        posterior: The posterior of a sampler.
        num: The number of outputs.
    """
    traces = function_traces(posterior, num)
    return _figure(traces, "sample", "value at a training input", [trace.values for trace in traces])[0]


def plot_autocorrelations(posterior: ParticlePosterior, num: int = 4) -> Any:
    """Plot autocorrelations of the outputs that mix worst, as a matplotlib figure.

    Args:
        posterior: The posterior of a sampler.
        num: The number of outputs.
    """
    traces = function_traces(posterior, num)
    figure, axes = _figure(traces, "lag", "autocorrelation", [trace.autocorrelation for trace in traces])
    for axis in axes:
        axis.axhline(0.0, color="grey", linewidth=0.8)
        axis.set_ylim(-0.3, 1.05)
    return figure


def _figure(traces: Sequence[Trace], xlabel: str, ylabel: str, curves: Sequence[Any]) -> tuple[Any, Any]:
    """Return a figure with one panel per trace, and a line per chain in each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(traces), 2.6), layout="constrained")
    axes = figure.subplots(1, len(traces), squeeze=False)[0]
    for axis, trace, of_chains in zip(axes, traces, curves, strict=True):
        axis.plot(list(zip(*of_chains, strict=True)), linewidth=0.8)
        axis.set_xlabel(xlabel)
        axis.set_title(trace.name, fontsize="medium")
    axes[0].set_ylabel(ylabel)
    return figure, axes
