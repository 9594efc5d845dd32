"""Pictures of chains: traces and autocorrelations of what the network says, one colour per chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dubito.fitting.posterior import Course
from dubito.methods.mcmc.history import function_courses

if TYPE_CHECKING:
    from dubito.methods.mcmc.posterior import ParticlePosterior


def plot_traces(posterior: ParticlePosterior, num: int = 4) -> Any:
    """Draw the chains of the quantities that mix worst in function space; returns a matplotlib figure.

    Args:
        posterior: Particles of a chain.
        num: How many quantities.
    """
    courses = function_courses(posterior, num)
    figure, axes = _figure(courses, "sample")
    for axis, course in zip(axes, courses, strict=True):
        axis.plot(course.values.mT.numpy(), linewidth=0.8)
    axes[0].set_ylabel("value at a training input")
    return figure


def plot_autocorrelations(posterior: ParticlePosterior, num: int = 4) -> Any:
    """Draw the autocorrelation of the quantities that mix worst in function space; returns a matplotlib figure.

    Args:
        posterior: Particles of a chain.
        num: How many quantities.
    """
    courses = function_courses(posterior, num)
    figure, axes = _figure(courses, "lag")
    for axis, course in zip(axes, courses, strict=True):
        axis.plot(course.autocorrelation.mT.numpy(), linewidth=1.0)
        axis.axhline(0.0, color="grey", linewidth=0.8)
        axis.set_ylim(-0.3, 1.05)
    axes[0].set_ylabel("autocorrelation")
    return figure


def _figure(courses: Sequence[Course], xlabel: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(courses), 2.6), layout="constrained")
    axes = figure.subplots(1, len(courses), squeeze=False)[0]
    for axis, course in zip(axes, courses, strict=True):
        axis.set_xlabel(xlabel)
        axis.set_title(course.name, fontsize="medium")
    return figure, axes
