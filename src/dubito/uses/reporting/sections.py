"""The sections of a report: to add one, write a function that yields it and list the function in `SECTIONS`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from dubito.fitting.history import Trace
from dubito.uses.metrics.scores import SCORES
from dubito.uses.reporting import bars, plots, readings
from dubito.uses.reporting.beyond import DETECTION_SCORES, ood, shifts
from dubito.uses.reporting.evaluation import Evaluation, GroupScores, Reliability
from dubito.uses.reporting.examples import examples
from dubito.uses.reporting.groups import wilson
from dubito.uses.reporting.parts import Looks, Methods, Panel, Section, column, first_seed, means, table, task
from dubito.uses.reporting.plots import Look
from dubito.uses.reporting.readings import Readings
from dubito.uses.reporting.tables import Column, describe, in_words, readable, short
from dubito.uses.reporting.verdict import verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADLINES = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "nll", "crps")}


def sections(methods: Methods) -> Iterator[Section]:
    """Yield the sections that have something to show."""
    look_of = plots.looks(methods)
    for make in SECTIONS:
        yield from make(methods, look_of)


def _scores(methods: Methods, look_of: Looks) -> Iterator[Section]:
    names = list(dict.fromkeys(name for runs in methods.values() for run in runs for name in run.scores))
    columns = [_score_column(name, methods) for name in names]
    columns.append(column("seconds", methods, lambda run: run.seconds_per_1000))
    note = "The best value of each column is bold. Time is wall-clock seconds for 1,000 predictions on this machine."
    seeds = {len(runs) for runs in methods.values()}
    if max(seeds) > 1:
        note += " Values are the mean ± standard deviation over seeds."
    counts = {run.count for runs in methods.values() for run in runs}
    if len(counts) > 1:
        note += f" The number of scored targets differs between methods: {min(counts):,} to {max(counts):,}."
    else:
        note += f" Scored on {counts.pop():,} targets."
    panels = (
        tuple(_points_panel(name, methods, look_of) for name in _HEADLINES[task(methods)]) if max(seeds) > 1 else ()
    )
    found = table("Scores on the evaluated data", methods, columns)
    yield Section("scores", "Scores", note, (found,), (panels,) if panels else (), legend=bool(panels))


def _points_panel(name: str, methods: Methods, look_of: Looks) -> Panel:
    values = {method: [run.scores[name] for run in runs] for method, runs in methods.items()}
    told = means(methods, lambda run: run.scores[name])
    figure = plots.points(values, score=describe(name), look_of=look_of)
    stops = [[(describe(name), statistics.fmean(each), _spread(each))] for each in values.values()]
    return Panel(
        figure,
        f"{describe(name)}, mean and deviation over seeds",
        f"{describe(name)} of each method: {told}.",
        readings.rows(figure, short(methods), stops),
    )


def _spread(values: Sequence[float]) -> str:
    mean = readings.number(statistics.fmean(values))
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2g} over {len(values)} seeds"


def _verdict(methods: Methods, look_of: Looks) -> Iterator[Section]:
    """Yield what the numbers mean."""
    yield Section("verdict", "The verdict", "", words=tuple(verdict(methods)))


def _score_column(name: str, methods: Methods) -> Column:
    """Compare one score; the coverages, and the widths, of several intervals stand under one title."""
    stem, _, level = name.partition("@")
    texts = {"title": f"{100 * float(level):g} %", "group": stem.capitalize()} if level else {}
    return column(name, methods, lambda run: run.scores.get(name), **texts)


def _reliability(methods: Methods, look_of: Looks) -> Iterator[Section]:
    if task(methods) != "classification":
        return
    panels = []
    for name, runs in methods.items():
        curve = _pooled([run.curves.reliability for run in runs if run.curves.reliability])
        ece = statistics.fmean(run.scores["ece"] for run in runs)
        alt = f"Reliability diagram of {name}: expected calibration error {ece:.3g}."
        figure = plots.reliability(curve, look=look_of[name])
        panels.append(Panel(figure, name, alt, readings.reliability(figure, curve)))
    note = (
        "Of the predictions made with a confidence of 80 %, are 80 % right? Bars are the accuracy in each bin, pale "
        "where there are fewer than ten predictions; lines are the mean confidence. A bar below its line means "
        "that the model is overconfident there."
    )
    yield Section("calibration", "Calibration", note, groups=(tuple(panels),))


def _pooled(curves: Sequence[Reliability]) -> Reliability:
    """Add the sums of all seeds."""
    sums = zip(*((c.counts, c.confidence_sums, c.correct_sums) for c in curves), strict=True)
    counts, confidences, corrects = (tuple(map(sum, zip(*parts, strict=True))) for parts in sums)
    return Reliability(curves[0].edges, counts, confidences, corrects)


def _bands(methods: Methods, look_of: Looks) -> Iterator[Section]:
    found = {name: runs[0].curves.band for name, runs in methods.items()}
    shown = {name: curve for name, curve in found.items() if curve is not None}
    if not shown:
        return
    ends = [end for curve in shown.values() for end in (*curve.low, *curve.high, *curve.targets)]
    margin = 0.04 * (max(ends) - min(ends))
    limits = (min(ends) - margin, max(ends) + margin)
    panels = []
    for name, curve in shown.items():
        alt = f"Mean and {curve.level:.0%} interval of {name} over the input, with the targets."
        figure = plots.band(curve, look=look_of[name], limits=limits)
        panels.append(Panel(figure, name, alt, readings.band(figure, curve)))
    note = "The mean, the central 95 % interval and the targets (dots) along the input, as the network sees it."
    yield Section("bands", "Predictions", note + first_seed(methods), groups=(tuple(panels),))


def _quantiles(methods: Methods, look_of: Looks) -> Iterator[Section]:
    if task(methods) != "regression":
        return
    curves = {name: [run.curves.quantiles for run in runs if run.curves.quantiles] for name, runs in methods.items()}
    errors = means(methods, lambda run: run.scores["quantile_error"])
    figure = plots.quantiles(curves, look_of=look_of, legend=False)
    panel = Panel(
        figure,
        "Calibration of quantiles",
        f"Observed against predicted quantiles; mean calibration error: {errors}.",
        _along(figure, methods, lambda x: f"below the {readings.percent(x)} quantile", readings.percent),
    )
    note = (
        "How often does the truth fall below the predicted quantile? A calibrated method follows the diagonal; an "
        "overconfident one is flatter in the middle, as the truth falls outside of its intervals too often."
    )
    yield Section("calibration", "Calibration", note, groups=((panel,),), legend=True)


def _risk_coverage(methods: Methods, look_of: Looks) -> Iterator[Section]:
    curves = {name: [run.curves.risk_coverage for run in runs] for name, runs in methods.items()}
    loss = "Error rate" if task(methods) == "classification" else "Squared error"
    areas = means(methods, lambda run: run.scores["aurc"])
    figure = plots.risk_coverage(curves, look_of=look_of, loss=loss, legend=False)
    text = readings.percent if loss == "Error rate" else readings.number
    panel = Panel(
        figure,
        "Risk against coverage",
        f"{loss} against the fraction answered; area under the curve: {areas}.",
        _along(figure, methods, lambda x: f"{loss.lower()} if {readings.percent(x)} are answered", text),
    )
    note = (
        "How large is the error if the network answers only the inputs it is most certain about? Lower is better; a "
        "useful uncertainty makes the curve fall steeply to the left."
    )
    yield Section("rejection", "Rejection", note, groups=((panel,),), legend=True)


def _along(
    figure: Figure, methods: Methods, title: Callable[[float], str], text: Callable[[float], str]
) -> tuple[Readings, ...]:
    """Read the lines of all methods."""
    axes = figure.axes[0]
    return (readings.along(axes, readings.marked_lines(axes, short(methods)), title, text),)


def _groups(methods: Methods, look_of: Looks) -> Iterator[Section]:
    """Yield what was claimed and what came true in parts of the data, of the first method."""
    name, runs = next(iter(methods.items()))
    found = runs[0].curves.groups
    if found:
        panels = tuple(group_panel(kind, scores, task(methods), look_of[name]) for kind, scores in found.items())
        yield Section("groups", "By group", group_note(task(methods), in_words(name)), groups=(panels,))


def group_note(kind_of_task: str, name: str) -> str:
    """Return how to read the figures of groups."""
    what = (
        "how often its intervals hold the truth" if kind_of_task == "regression" else "how often its answers are right"
    )
    claimed = "the level of the intervals" if kind_of_task == "regression" else "the mean confidence"
    return (
        f"{name}: {what} in parts of the data. The thick line is what is claimed, {claimed}; the thin line across the "
        "end of a bar is two standard errors. A bar that ends clearly before its thick line is overconfident there."
    )


def group_panel(kind: str, scores: GroupScores, kind_of_task: str, look: Look) -> Panel:
    """Return the figure of one kind of group."""
    errors = [wilson(share, count) for share, count in zip(scores.observed, scores.counts, strict=True)]
    xlabel = "Share of intervals that hold the truth" if kind_of_task == "regression" else "Share of right answers"
    figure = bars.shares(
        scores.labels, scores.observed, xlabel=xlabel, look=look, errors=errors, marks=scores.claimed
    )  # fmt: skip
    rows = list(zip(scores.labels, scores.counts, scores.claimed, scores.observed, strict=True))
    values = [
        (
            ("observed", seen, readings.percent(seen)),
            ("claimed", said, readings.percent(said)),
            ("data", None, f"{n:,.0f}"),
        )
        for _, n, said, seen in rows
    ]
    told = ", ".join(f"{label} {readings.percent(seen)} of {n:,.0f}" for label, n, _, seen in rows)
    return Panel(figure, kind, f"{xlabel} by {kind}: {told}.", readings.rows(figure, scores.labels, values))


def _trust(methods: Methods, look_of: Looks) -> Iterator[Section]:
    """Yield what the diagnoses say, if there are any."""
    words = tuple(
        f"{in_words(name)}: {_of_all_seeds(runs)}" for name, runs in methods.items() if runs[0].trust is not None
    )
    if words:
        note = "What the fit and the evaluated data say; posterior.diagnose() has the numbers of the fit."
        yield Section("trust", "Can it be trusted?", note, words=words)


def _of_all_seeds(runs: Sequence[Evaluation]) -> str:
    """Return the worst verdict over the seeds, and all their findings once."""
    found = [run.trust for run in runs if run.trust is not None]
    worst = max(found, key=lambda trust: ("yes", "with care", "no").index(trust.verdict))
    findings = [finding for trust in sorted(found, key=lambda each: each is not worst) for finding in trust.findings]
    kinds = {
        re.sub(r"[\d.,]+", "", finding): finding for finding in reversed(findings)
    }  # which differ in numbers alone
    return " ".join([f"{worst.verdict}.", *[finding for finding in findings if finding in kinds.values()][:3]])


def _chains(methods: Methods, look_of: Looks) -> Iterator[Section]:
    """Yield one section for each sampler: the diagnosis of its chains, and their traces."""
    for number, (name, runs) in enumerate(methods.items()):
        chains = runs[0].curves.chains
        if chains is None:
            continue
        looks = plots.chain_looks(len(chains.traces[0].values) if chains.traces else 0)
        named = tuple((f"chain {i + 1}", look) for i, look in enumerate(looks)) if len(looks) > 1 else ()
        panels = tuple(_trace_panel(name, curve, looks) for curve in chains.traces)
        note = (
            "A chain that has mixed looks like noise around one level, which is the same for all chains, and its "
            "autocorrelation falls to zero within a few lags. Shown are the outputs at training inputs and the weights "
            "that mix worst." + (" Of several seeds the first is shown." if len(runs) > 1 else "")
        )
        groups = (panels,) if panels else ()
        yield Section(
            f"chains-{number}", f"Chains: {readable(name)[0]}", note, groups=groups, sets=named, words=chains.words
        )


def _trace_panel(name: str, curve: Trace, looks: Sequence[Look]) -> Panel:
    each = ", ".join(f"{row[1]:.2f}" for row in curve.autocorrelation)
    alt = f"Course of {curve.name} along the chains of {name}; autocorrelation at lag 1: {each}."
    figure = plots.trace(curve, look_of=looks)
    names = [f"chain {i + 1}" if len(looks) > 1 else "value" for i in range(len(looks))]
    top, bottom = (dict(zip(names, axes.lines, strict=False)) for axes in figure.axes)
    found = (
        readings.along(figure.axes[0], top, lambda x: f"sample {x:,.0f}"),
        readings.along(figure.axes[1], bottom, lambda x: f"autocorrelation at lag {x:.0f}"),
    )
    return Panel(figure, curve.name, alt, found)


def _glossary(methods: Methods, look_of: Looks) -> Iterator[Section]:
    runs = [run for runs in methods.values() for run in runs]
    shown = {name.partition("@")[0] for run in runs for name in run.scores}
    shown |= {name for run in runs if run.ood for name in DETECTION_SCORES}
    terms = tuple((score.title, score.meaning) for name, score in SCORES.items() if name in shown)
    yield Section("glossary", "What the scores mean", "", terms=terms)


SECTIONS: tuple[Callable[[Methods, Looks], Iterator[Section]], ...] = (
    _verdict, _scores, _trust, examples, _reliability, _bands, _quantiles, _groups, _risk_coverage, shifts, ood,
    _chains, _glossary,
)  # fmt: skip
