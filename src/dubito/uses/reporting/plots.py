"""The figures of a report, each one panel. They only draw: from the curves of an `Evaluation` to a matplotlib `Figure`.

They can be used alone, and touch no global state of matplotlib (no pyplot, no current figure):

    result = dubito.evaluate(posterior, test_loader)
    plots.reliability(result.curves.reliability).savefig("reliability.pdf")
    plots.risk_coverage({"map": [map_result.curves.risk_coverage], "laplace": [result.curves.risk_coverage]})

Where several methods share a panel, each gives a list: one curve per seed, drawn as their mean and standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dubito.fitting.history import Trace
from dubito.uses.reporting.evaluation import Band, Histogram, Quantiles, Reliability, RiskCoverageCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours (2008, https://jfly.uni-koeln.de/color/), told apart with any colour vision; without their
# black and yellow, which vanish on a dark or a light page.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 1.5), (2.5, 1), (6, 1.2, 1, 1.2))
INK, MUTED, GRID = "#1f2328", "#59636e", "#d1d9e0"
_FEW = 10  # predictions in a bin, below which its accuracy is unreliable

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "dubito",
}


@dataclass(frozen=True)
class Look:
    """How a method is drawn, in all figures.

    Attributes:
        color: Its colour.
        dash: The lengths of its dashes and gaps; none for a solid line.
        key: What the ids of its marks begin with in an SVG file, so that a page can single them out.
    """

    color: str = PALETTE[0]
    dash: tuple[float, ...] = ()
    key: str = ""

    def mark(self, artist: Any, part: str) -> None:
        """Give an artist the id of this method and of a part of its drawing."""
        if self.key:
            artist.set_gid(f"{self.key}-{part}")

    @property
    def linestyle(self) -> Any:
        """The line style as matplotlib spells it."""
        return (0, self.dash) if self.dash else "-"


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return one look per method: colours and dashes both change, so one line shows through another that covers it."""
    return {
        name: Look(PALETTE[i % len(PALETTE)], DASHES[i % len(DASHES)], f"method-{i}") for i, name in enumerate(names)
    }


def style() -> AbstractContextManager[None]:
    """Return a context with matplotlib's defaults and our changes, whatever the user's own settings are."""
    from matplotlib.style import context

    return context(["default", _STYLE])


def reliability(curve: Reliability, *, look: Look | None = None, title: str = "") -> Figure:
    """Draw how often predictions of each confidence were right, and below it how many there were.

    A bar is the accuracy of its bin, pale if it rests on fewer than ten predictions; the line across it is the mean
    confidence.
    """
    look = look or Look()
    with style():
        figure = _figure(title, height=3.2)
        top, bottom = figure.subplots(2, sharex=True, gridspec_kw={"height_ratios": [5, 1]})
        edges, counts = np.asarray(curve.edges), np.asarray(curve.counts)
        filled = counts > 0
        left, width, rows = edges[:-1][filled], 0.92 * np.diff(edges)[filled], counts[filled]
        accuracy, confidence = (np.asarray(s)[filled] / rows for s in (curve.correct_sums, curve.confidence_sums))
        bars = top.bar(left, accuracy, width, align="edge", color=look.color)
        for bar, count in zip(bars, rows, strict=True):
            bar.set_alpha(0.35 if count < _FEW else None)
        top.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
        top.hlines(confidence, left, left + width, color=INK, linewidth=1.4)
        top.set(ylabel="Accuracy", ylim=(0, 1), xlim=(0, 1))
        bottom.bar(left, rows / counts.sum(), width, align="edge", color=MUTED)
        bottom.set(xlabel="Confidence", ylabel="Share", ylim=(0, 1), yticks=[0, 1])
    return figure


def risk_coverage(
    methods: Mapping[str, Sequence[RiskCoverageCurve]],
    *,
    look_of: Mapping[str, Look] | None = None,
    loss: str = "Error rate",
    legend: bool = True,
) -> Figure:
    """Draw the risk of answering only the most certain fraction of inputs, one line a method."""
    with style():
        figure, axes = _panel("Fraction answered, surest first", f"{loss} of the answered")
        drawn = {}
        for name, look, runs in _each(methods, look_of):
            x = np.asarray(runs[0].coverage)
            drawn[name] = _line(axes, x, [np.interp(x, run.coverage, run.risk) for run in runs], look)
        axes.set(xlim=(0, 1))
        axes.set_ylim(bottom=0)
        if legend:
            _legend(axes, drawn)
    return figure


def shift(
    methods: Mapping[str, Sequence[Mapping[float, float]]],
    *,
    score: str,
    look_of: Mapping[str, Look] | None = None,
    target: float | None = None,
    legend: bool = True,
) -> Figure:
    """Draw a score against the severity of a shift, one line a method.

    Args:
        methods: For each method and seed, the score by severity.
        score: The title of the score.
        look_of: How each method is drawn.
        target: The value that a calibrated method would have at every severity, if there is one.
        legend: Whether to name the methods.
    """
    with style():
        figure, axes = _panel("Severity", score)
        if target is not None:
            axes.axhline(target, color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
        drawn = {}
        for name, look, runs in _each(methods, look_of):
            severities = sorted(set.intersection(*(set(run) for run in runs)))
            values = [np.asarray([run[severity] for severity in severities]) for run in runs]
            drawn[name] = _line(axes, np.asarray(severities), values, look, marker="o", markersize=4)
        if legend:
            _legend(axes, drawn)
    return figure


def histogram(
    curve: Histogram,
    *,
    xlabel: str,
    look: Look | None = None,
    title: str = "",
    right: float | None = None,
    legend: bool = True,
) -> Figure:
    """Draw how an uncertainty is spread, on a logarithmic axis: the data is filled, out-of-distribution sets are lines.

    Args:
        curve: The counts.
        xlabel: The name of the uncertainty.
        look: How the method is drawn.
        title: A title.
        right: Where the axis ends, so that several panels compare; the last edge if not given.
        legend: Whether to name the sets.
    """
    look = look or Look()
    with style():
        figure, axes = _panel(xlabel, "Share", title)
        edges = np.asarray(curve.edges)
        inside = np.asarray(curve.inside)
        drawn = {"in distribution": axes.stairs(inside / inside.sum(), edges, fill=True, color=look.color, alpha=0.55)}
        for i, (name, counts) in enumerate(curve.outside.items()):
            share = np.asarray(counts) / sum(counts)
            line = Look(INK, DASHES[i % len(DASHES)])
            drawn[name] = axes.stairs(share, edges, color=INK, linestyle=line.linestyle, linewidth=1.3)
        # Most predictions are certain: on a linear axis one would see a single spike and not the tail.
        fewest = min(1 / sum(counts) for counts in (curve.inside, *curve.outside.values()))
        axes.set(xlim=(0, edges[-1] if right is None else right), yscale="log", ylim=(fewest / 2, 1.5))
        axes.yaxis.set_major_formatter("{x:g}")
        if legend:
            _legend(axes, drawn)
    return figure


def quantiles(
    methods: Mapping[str, Sequence[Quantiles]], *, look_of: Mapping[str, Look] | None = None, legend: bool = True
) -> Figure:
    """Draw how often the truth fell below each predicted quantile, one line a method; calibrated is the diagonal."""
    with style():
        figure, axes = _panel("Predicted quantile", "Fraction of targets below it")
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
        drawn = {}
        for name, look, runs in _each(methods, look_of):
            x = np.asarray(runs[0].levels)
            drawn[name] = _line(axes, x, [np.interp(x, run.levels, run.observed) for run in runs], look)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        if legend:
            _legend(axes, drawn)
    return figure


def band(
    curve: Band, *, look: Look | None = None, title: str = "", limits: tuple[float, float] | None = None
) -> Figure:
    """Draw a regression over its one input: mean, central interval and targets.

    Args:
        curve: The prediction, ordered by its input.
        look: How the method is drawn.
        title: A title.
        limits: The ends of the vertical axis, so that several panels compare.
    """
    look = look or Look()
    with style():
        figure, axes = _panel("Input", "Target", title)
        axes.fill_between(curve.x, curve.low, curve.high, color=look.color, alpha=0.25, linewidth=0)
        axes.scatter(curve.x, curve.targets, s=6, color=INK, alpha=0.6, linewidths=0)
        axes.plot(curve.x, curve.mean, color=look.color)
        axes.margins(x=0.01)
        if limits is not None:
            axes.set_ylim(limits)
    return figure


def points(methods: Mapping[str, Sequence[float]], *, score: str, look_of: Mapping[str, Look] | None = None) -> Figure:
    """Draw a score of each method: a dot for the mean, a bar of one standard deviation over seeds, the first on top.

    Args:
        methods: For each method its values over seeds.
        score: The title of the score.
        look_of: How each method is drawn.
    """
    with style():
        figure, axes = _panel(score, "")
        for place, (_, look, values) in enumerate(_each(methods, look_of)):
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
            drawn = axes.errorbar(
                np.mean(values), -place, xerr=spread, color=look.color, fmt="o", capsize=4, elinewidth=1.8
            )
            seeds = axes.plot(values, [-place] * len(values), "|", color=look.color, alpha=0.5)
            for number, artist in enumerate((*drawn.get_children(), *seeds)):
                look.mark(artist, f"part{number}")
        axes.set(yticks=[], ylim=(0.6 - len(methods), 0.4))
        axes.locator_params(axis="x", nbins=5)
        axes.margins(x=0.08)
    return figure


def scatter(
    places: Sequence[tuple[float, float]],
    *,
    xlabel: str,
    ylabel: str,
    look_of: Sequence[Look],
    names: Sequence[str],
    labels: Sequence[str],
    logarithmic: bool = False,
) -> Figure:
    """Draw one point for each place.

    Args:
        places: The points ``(x, y)``.
        xlabel: What the horizontal axis shows.
        ylabel: What the vertical axis shows.
        look_of: How each point is drawn.
        names: What the id of each point ends with in an SVG file.
        labels: A short text beside each point.
        logarithmic: Whether the horizontal axis is logarithmic.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    with style():
        figure, axes = _panel(xlabel, ylabel)
        if logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        for (x, y), look, name, label in zip(places, look_of, names, labels, strict=True):
            (mark,) = axes.plot([x], [y], "o", color=look.color, markersize=6.5)
            mark.set_gid(name)
            axes.annotate(label, (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=6.5, color=MUTED)
    return figure


def trace(curve: Trace, *, look_of: Sequence[Look] | None = None) -> Figure:
    """Draw one quantity along the samples of every chain, and below it the autocorrelation of each chain.

    Args:
        curve: The quantity.
        look_of: How each chain is drawn.
    """
    look_of = chain_looks(len(curve.values)) if look_of is None else look_of
    with style():
        figure = _figure("", height=3.6)
        top, bottom = figure.subplots(2, gridspec_kw={"height_ratios": [3, 2]})
        for look, values, correlations in zip(look_of, curve.values, curve.autocorrelation, strict=True):
            top.plot(curve.samples, values, color=look.color, linewidth=0.9)
            bottom.plot(correlations, color=look.color, linewidth=1.3)
        top.set(xlabel="Sample", ylabel="Value")
        top.margins(x=0.01)
        bottom.axhline(0, color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
        lowest = min(-0.3, *(min(row) for row in curve.autocorrelation))
        bottom.set(xlabel="Lag", ylabel="Autocorrelation", ylim=(1.1 * lowest, 1.05))
        bottom.margins(x=0.01)
    return figure


def chain_looks(num: int) -> tuple[Look, ...]:
    """Return one look per chain: solid, since a trace has too many turns for dashes."""
    return tuple(Look(PALETTE[i % len(PALETTE)]) for i in range(num))


def _figure(title: str, height: float = 2.8) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure((3.6, height), layout="constrained")
    if title:
        figure.suptitle(title, parse_math=False)  # a method's name may hold a dollar sign
    return figure


def _panel(xlabel: str, ylabel: str, title: str = "") -> tuple[Figure, Axes]:
    figure = _figure(title)
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _each(methods: Mapping[str, Any], look_of: Mapping[str, Look] | None) -> Iterable[tuple[str, Look, Any]]:
    look_of = looks(methods) if look_of is None else look_of
    return [(name, look_of[name], runs) for name, runs in methods.items()]


def _line(axes: Axes, x: Any, runs: Sequence[Any], look: Look, **options: Any) -> Any:
    """Draw the mean of several runs, and for more than one a band of one standard deviation around it."""
    mean = np.mean(runs, axis=0)
    if len(runs) > 1:
        with np.errstate(invalid="ignore"):  # an infinite NLL has no spread
            spread = np.std(runs, axis=0, ddof=1)
        look.mark(axes.fill_between(x, mean - spread, mean + spread, color=look.color, alpha=0.18, linewidth=0), "band")
    line = axes.plot(x, mean, color=look.color, linestyle=look.linestyle, **options)[0]
    look.mark(line, "line")
    return line


def _legend(axes: Axes, drawn: Mapping[str, Any]) -> None:
    """Name what was drawn; matplotlib itself would hide a leading underscore and read dollars as formulas."""
    texts = axes.legend(list(drawn.values()), [str(i) for i in range(len(drawn))]).get_texts()
    for text, name in zip(texts, drawn, strict=True):
        text.set(text=name, parse_math=False)
