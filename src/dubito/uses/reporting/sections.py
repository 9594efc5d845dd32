"""The sections of a report: to add one, write a function that yields it and list the function in `SECTIONS`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dubito.fitting.history import Trace
from dubito.uses.metrics.scores import DETECTION, SCORES
from dubito.uses.reporting import plots
from dubito.uses.reporting.evaluation import Evaluation, Histogram, Reliability
from dubito.uses.reporting.names import in_words
from dubito.uses.reporting.plots import Look
from dubito.uses.reporting.tables import Column, describe, goal, score_column
from dubito.uses.reporting.verdict import verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Methods = Mapping[str, Sequence[Evaluation]]  # one evaluation per seed
Looks = Mapping[str, Look]

_HEADLINES = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "nll", "crps")}
_SHIFT_SCORES = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "nll", "coverage@0.95")}
_UNCERTAINTY_TITLES = {
    "max-probability": "1 − largest probability",
    "entropy": "Entropy (nats)",
    "epistemic": "Epistemic uncertainty",
    "stddev": "Standard deviation",
}
_UNCERTAINTY_NAMES = {
    "max-probability": "max prob.",
    "entropy": "entropy",
    "epistemic": "epistemic",
    "stddev": "stddev",
}
_DETECTION = [name for name, score in SCORES.items() if score.vectors == DETECTION]
_SHOWN_UNCERTAINTIES = {"classification": ("entropy", "epistemic"), "regression": ("stddev", "epistemic")}


@dataclass(frozen=True)
class ReportTable:
    """A table that compares methods, one row each."""

    caption: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Listing:
    """A table of examples: its caption, the names of its columns, and its cells as text."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Panel:
    """A figure, its caption, and its text alternative."""

    figure: Figure
    caption: str
    alt: str


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        key: Its address.
        title: Its heading.
        note: How to read it.
        tables: Its tables.
        groups: Its figures; those of one group stand side by side.
        legend: Whether the figures need the methods' colours named.
        sets: The out-of-distribution sets or chains that the legend names, and how their lines are drawn.
        words: Sentences, each on a line of its own.
        terms: Words and their definitions.
        listings: Tables of examples.
    """

    key: str
    title: str
    note: str
    tables: tuple[ReportTable, ...] = ()
    groups: tuple[tuple[Panel, ...], ...] = ()
    legend: bool = False
    sets: tuple[tuple[str, Look], ...] = ()
    words: tuple[str, ...] = ()
    terms: tuple[tuple[str, str], ...] = ()
    listings: tuple[Listing, ...] = ()


def sections(methods: Methods) -> Iterator[Section]:
    """Yield the sections that have something to show."""
    look_of = plots.looks(methods)
    for make in SECTIONS:
        yield from make(methods, look_of)


def _task(methods: Methods) -> str:
    return next(iter(methods.values()))[0].task


def _table(caption: str, methods: Methods, columns: Sequence[Column]) -> ReportTable:
    return ReportTable(caption, tuple(methods), tuple(columns))


def _column(name: str, methods: Methods, value: Callable[[Evaluation], float | None], **texts: str) -> Column:
    """Compare `value` over methods; a method that lacks it in any seed has none."""
    found = [[value(run) for run in runs] for runs in methods.values()]
    return score_column(name, [None if None in values else values for values in found], **texts)  # type: ignore[misc]


def _scores(methods: Methods, look_of: Looks) -> Iterator[Section]:
    names = list(dict.fromkeys(name for runs in methods.values() for run in runs for name in run.scores))
    columns = [_score_column(name, methods) for name in names]
    columns.append(_column("seconds", methods, lambda run: run.seconds_per_1000))
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
        tuple(_points_panel(name, methods, look_of) for name in _HEADLINES[_task(methods)]) if max(seeds) > 1 else ()
    )
    table = _table("Scores on the evaluated data", methods, columns)
    yield Section("scores", "Scores", note, (table,), (panels,) if panels else (), legend=bool(panels))


def _points_panel(name: str, methods: Methods, look_of: Looks) -> Panel:
    values = {method: [run.scores[name] for run in runs] for method, runs in methods.items()}
    told = _means(methods, lambda run: run.scores[name])
    figure = plots.points(values, score=describe(name), look_of=look_of)
    return Panel(
        figure, f"{describe(name)}, mean and deviation over seeds", f"{describe(name)} of each method: {told}."
    )


def _verdict(methods: Methods, look_of: Looks) -> Iterator[Section]:
    """Yield what the numbers mean."""
    yield Section("verdict", "The verdict", "", words=tuple(verdict(methods)))


def _score_column(name: str, methods: Methods) -> Column:
    """Compare one score; the coverages, and the widths, of several intervals stand under one title."""
    stem, _, level = name.partition("@")
    texts = {"title": f"{100 * float(level):g} %", "group": stem.capitalize()} if level else {}
    return _column(name, methods, lambda run: run.scores.get(name), **texts)


def _reliability(methods: Methods, look_of: Looks) -> Iterator[Section]:
    if _task(methods) != "classification":
        return
    panels = []
    for name, runs in methods.items():
        curve = _pooled([run.curves.reliability for run in runs if run.curves.reliability])
        ece = statistics.fmean(run.scores["ece"] for run in runs)
        alt = f"Reliability diagram of {name}: expected calibration error {ece:.3g}."
        panels.append(Panel(plots.reliability(curve, look=look_of[name]), name, alt))
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
        panels.append(Panel(plots.band(curve, look=look_of[name], limits=limits), name, alt))
    note = "The mean, the central 95 % interval and the targets (dots) along the input, as the network sees it."
    yield Section("bands", "Predictions", note + _first_seed(methods), groups=(tuple(panels),))


def _quantiles(methods: Methods, look_of: Looks) -> Iterator[Section]:
    if _task(methods) != "regression":
        return
    curves = {name: [run.curves.quantiles for run in runs if run.curves.quantiles] for name, runs in methods.items()}
    errors = _means(methods, lambda run: run.scores["quantile_error"])
    panel = Panel(
        plots.quantiles(curves, look_of=look_of, legend=False),
        "Calibration of quantiles",
        f"Observed against predicted quantiles; mean calibration error: {errors}.",
    )
    note = (
        "How often does the truth fall below the predicted quantile? A calibrated method follows the diagonal; an "
        "overconfident one is flatter in the middle, as the truth falls outside of its intervals too often."
    )
    yield Section("calibration", "Calibration", note, groups=((panel,),), legend=True)


def _risk_coverage(methods: Methods, look_of: Looks) -> Iterator[Section]:
    curves = {name: [run.curves.risk_coverage for run in runs] for name, runs in methods.items()}
    loss = "Error rate" if _task(methods) == "classification" else "Squared error"
    areas = _means(methods, lambda run: run.scores["aurc"])
    panel = Panel(
        plots.risk_coverage(curves, look_of=look_of, loss=loss, legend=False),
        "Risk against coverage",
        f"{loss} against the fraction answered; area under the curve: {areas}.",
    )
    note = (
        "How large is the error if the network answers only the inputs it is most certain about? Lower is better; a "
        "useful uncertainty makes the curve fall steeply to the left."
    )
    yield Section("rejection", "Rejection", note, groups=((panel,),), legend=True)


def _shifts(methods: Methods, look_of: Looks) -> Iterator[Section]:
    kinds = list(dict.fromkeys(kind for runs in methods.values() for run in runs for kind in run.shifts))
    if not kinds:
        return
    shown = _SHIFT_SCORES[_task(methods)]
    rows = [[_shift_panel(methods, look_of, kind, score) for score in shown] for kind in kinds]
    groups = tuple(tuple(panel for panel in row if panel is not None) for row in rows)
    tables = [
        _table(
            f"{describe(score)}, mean over severities",
            methods,
            [_shift_column(methods, kind, score) for kind in kinds],
        )
        for score in shown
    ]
    note = "The same scores on shifted versions of the data; severity 0 is the unshifted data."
    yield Section("shift", "Under shift", note, tuple(tables), tuple(filter(None, groups)), legend=any(groups))


def _shift_panel(methods: Methods, look_of: Looks, kind: str, score: str) -> Panel | None:
    lines: dict[str, list[dict[float, float]]] = {}
    for name, runs in methods.items():
        found = [_by_severity(run, kind, score) for run in runs]
        if all(found):
            lines[name] = found
    if not lines:
        return None
    best = goal(score)
    target = best if best is not None and abs(best) < float("inf") else None
    figure = plots.shift(lines, score=describe(score), look_of=look_of, target=target, legend=False)
    ends = {name: statistics.fmean(run[max(run)] for run in runs) for name, runs in lines.items()}
    told = ", ".join(f"{name} {end:.3g}" for name, end in ends.items())
    return Panel(figure, f"{kind}: {describe(score)}", f"{describe(score)} against {kind}; at the strongest: {told}.")


def _by_severity(run: Evaluation, kind: str, score: str) -> dict[float, float]:
    """Return the score by severity, with the data itself as severity 0; nothing where the shift has no severities."""
    rows = {s: scores[score] for k, s, scores in run.shift_rows() if k == kind and s is not None}
    return {0: run.scores[score], **rows} if rows else {}


def _shift_column(methods: Methods, kind: str, score: str) -> Column:
    return _column(score, methods, lambda run: _shift_mean(run, kind, score), title=kind)


def _shift_mean(run: Evaluation, kind: str, score: str) -> float | None:
    values = [scores[score] for k, _, scores in run.shift_rows() if k == kind]
    return statistics.fmean(values) if values else None


def _ood(methods: Methods, look_of: Looks) -> Iterator[Section]:
    sets = list(dict.fromkeys(name for runs in methods.values() for run in runs for name in run.ood))
    if not sets:
        return
    tables = [_table(f"Detecting {key}", methods, _ood_columns(methods, key)) for key in sets]
    groups = [tuple(_ood_panels(methods, look_of, uncertainty)) for uncertainty in _SHOWN_UNCERTAINTIES[_task(methods)]]
    note = (
        "How well does each uncertainty tell unfamiliar inputs from the data? An AUROC of 0.5 means that it cannot, 1 "
        "that it always can. In the figures the evaluated data is filled, unfamiliar data sets are lines; the axis of "
        "shares is logarithmic."
    )
    lines = tuple((key, Look(plots.INK, plots.DASHES[i % len(plots.DASHES)])) for i, key in enumerate(sets))
    yield Section(
        "ood",
        "Out of distribution",
        note + _first_seed(methods),
        tuple(tables),
        tuple(filter(None, groups)),
        sets=lines,
    )


def _ood_columns(methods: Methods, key: str) -> list[Column]:
    uncertainties = list(dict.fromkeys(d for runs in methods.values() for run in runs for d in run.ood.get(key, {})))
    return [_ood_column(methods, key, uncertainty, score) for score in _DETECTION for uncertainty in uncertainties]


def _ood_column(methods: Methods, key: str, uncertainty: str, score: str) -> Column:
    def value(run: Evaluation) -> float | None:
        return run.ood.get(key, {}).get(uncertainty, {}).get(score)

    return _column(score, methods, value, title=_UNCERTAINTY_NAMES[uncertainty], group=describe(score))


def _ood_panels(methods: Methods, look_of: Looks, uncertainty: str) -> Iterator[Panel]:
    curves = {name: runs[0].curves.histograms.get(uncertainty) for name, runs in methods.items()}
    shown = {name: curve for name, curve in curves.items() if curve is not None}
    right = max(map(_reach, shown.values()), default=0.0)
    title = _UNCERTAINTY_TITLES[uncertainty]
    for name, curve in shown.items():
        end = right if _reach(curve) else None
        figure = plots.histogram(curve, xlabel=title, look=look_of[name], right=end, legend=False)
        areas = ", ".join(f"{key} {by[uncertainty]['auroc']:.3g}" for key, by in methods[name][0].ood.items())
        yield Panel(figure, name, f"{title} of {name} in and out of distribution; AUROC: {areas}.")


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
    findings = dict.fromkeys(finding for trust in found for finding in trust.findings)
    return " ".join([f"{worst.verdict}.", *list(findings)[:3]])


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
        yield Section(f"chains-{number}", f"Chains: {name}", note, groups=groups, sets=named, words=chains.words)


def _trace_panel(name: str, curve: Trace, looks: Sequence[Look]) -> Panel:
    each = ", ".join(f"{row[1]:.2f}" for row in curve.autocorrelation)
    alt = f"Course of {curve.name} along the chains of {name}; autocorrelation at lag 1: {each}."
    return Panel(plots.trace(curve, look_of=looks), curve.name, alt)


def _glossary(methods: Methods, look_of: Looks) -> Iterator[Section]:
    runs = [run for runs in methods.values() for run in runs]
    shown = {name.partition("@")[0] for run in runs for name in run.scores}
    shown |= {name for run in runs if run.ood for name in _DETECTION}
    terms = tuple((score.title, score.meaning) for name, score in SCORES.items() if name in shown)
    yield Section("glossary", "What the scores mean", "", terms=terms)


def _reach(curve: Histogram) -> float:
    """Return where the bins end, or 0 if all counts are in the first bin, which must not set the shared axis."""
    beyond = any(any(counts[1:]) for counts in (curve.inside, *curve.outside.values()))
    return curve.edges[-1] if beyond else 0.0


def _means(methods: Methods, value: Callable[[Evaluation], float]) -> str:
    return ", ".join(f"{name} {statistics.fmean(map(value, runs)):.3g}" for name, runs in methods.items())


def _first_seed(methods: Methods) -> str:
    return " Of several seeds the figures show the first." if any(len(runs) > 1 for runs in methods.values()) else ""


SECTIONS: tuple[Callable[[Methods, Looks], Iterator[Section]], ...] = (
    _verdict, _scores, _trust, _reliability, _bands, _quantiles, _risk_coverage, _shifts, _ood, _chains, _glossary,
)  # fmt: skip
