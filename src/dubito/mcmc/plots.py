"""Pictures of chains: traces and autocorrelations of what the network says, one colour per chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dubito.errors import UnsupportedError
from dubito.mcmc.diagnostics import autocorrelation, rhat

if TYPE_CHECKING:
    from dubito.mcmc.posterior import ParticlePosterior

# The largest lag that is drawn.
LAGS = 50


def plot_traces(posterior: ParticlePosterior, num: int = 4) -> Any:
    """Draw the chains of the quantities that mix worst in function space; returns a matplotlib figure.

    Args:
        posterior: Particles of a chain.
        num: How many quantities.
    """
    figure, axes = _figure(posterior, num)
    for axis, index in zip(axes, _worst(posterior, num), strict=True):
        for chain in posterior.trace[..., index].double().cpu():
            axis.plot(chain.numpy(), linewidth=0.8)
        axis.set_xlabel("sample")
        axis.set_title(f"output {index}", fontsize="medium")
    axes[0].set_ylabel("value at a training input")
    return figure


def plot_autocorrelations(posterior: ParticlePosterior, num: int = 4) -> Any:
    """Draw the autocorrelation of the quantities that mix worst in function space; returns a matplotlib figure.

    Args:
        posterior: Particles of a chain.
        num: How many quantities.
    """
    figure, axes = _figure(posterior, num)
    for axis, index in zip(axes, _worst(posterior, num), strict=True):
        for chain in autocorrelation(posterior.trace[..., index]).cpu():
            axis.plot(chain[:LAGS].numpy(), linewidth=1.0)
        axis.axhline(0.0, color="grey", linewidth=0.8)
        axis.set_ylim(-0.3, 1.05)
        axis.set_xlabel("lag")
        axis.set_title(f"output {index}", fontsize="medium")
    axes[0].set_ylabel("autocorrelation")
    return figure


def _worst(posterior: ParticlePosterior, num: int) -> list[int]:
    """The quantities with the largest R-hat."""
    if not posterior.recipe.is_chain or posterior.trace.shape[1] < 4:
        raise UnsupportedError("There is no chain to draw: traces need a sampler's posterior with 4 samples or more.")
    return torch.sort(rhat(posterior.trace), descending=True, stable=True).indices[:num].tolist()


def _figure(posterior: ParticlePosterior, num: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    count = len(_worst(posterior, num))
    figure = Figure(figsize=(3.2 * count, 2.6), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]
