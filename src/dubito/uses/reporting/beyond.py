"""The sections of a report on data unlike the evaluated data: shifted versions of it, and unfamiliar data sets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from dubito.uses.metrics.scores import DETECTION, SCORES
from dubito.uses.reporting import plots, readings
from dubito.uses.reporting.evaluation import Evaluation, Histogram
from dubito.uses.reporting.parts import Listing, Looks, Methods, Panel, Section, column, first_seed, table, task
from dubito.uses.reporting.plots import Look
from dubito.uses.reporting.tables import Column, describe, goal, in_words, short

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
DETECTION_SCORES = [name for name, score in SCORES.items() if score.vectors == DETECTION]
_SHOWN_UNCERTAINTIES = {"classification": ("entropy", "epistemic"), "regression": ("stddev", "epistemic")}


def shifts(methods: Methods, look_of: Looks) -> Iterator[Section]:
    """Yield the scores on shifted data."""
    kinds = list(dict.fromkeys(kind for runs in methods.values() for run in runs for kind in run.shifts))
    if not kinds:
        return
    shown = _SHIFT_SCORES[task(methods)]
    rows = [[_shift_panel(methods, look_of, kind, score) for score in shown] for kind in kinds]
    groups = tuple(tuple(panel for panel in row if panel is not None) for row in rows)
    tables = [
        table(
            f"{describe(score)}, mean over severities", methods, [_shift_column(methods, kind, score) for kind in kinds]
        )
        for score in shown
    ]
    note = "The same scores on shifted versions of the data; severity 0 is the unshifted data."
    listings = _limits(methods, kinds)
    if listings:
        note += (
            " The first table says from where on the best method claims too much, and below which confidence to refuse "
            "there: of the other answers as many are right as on the data itself."
        )
    panels = tuple(filter(None, groups))
    yield Section("shift", "Under shift", note, tuple(tables), panels, legend=any(groups), listings=listings)


def _limits(methods: Methods, kinds: Sequence[str]) -> tuple[Listing, ...]:
    """Return, for each kind of shift, the mildest severity at which the first method is overconfident."""
    name, runs = next(iter(methods.items()))
    rows = []
    for kind in kinds:
        found = runs[0].overconfident_from(kind)
        if found is None:
            rows.append((kind, "never", "–", "–", "–", "–"))
            continue
        severity, seen = found
        refuse = "no threshold helps" if seen.threshold is None else f"{seen.threshold:.2f}"
        left = "–" if seen.threshold is None else readings.percent(seen.answered)
        start = "always" if severity is None else f"severity {severity:g}"
        rows.append((kind, start, readings.percent(seen.observed), readings.percent(seen.claimed), refuse, left))
    if not runs[0].curves.shifted:
        return ()
    head = ("shift", "overconfident from", "right there", "claimed", "refuse below", "still answered")
    return (Listing(f"Where {in_words(name)} claims too much", head, tuple(rows)),)


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
    axes, named = figure.axes[0], short(lines)
    text = readings.percent if score == "accuracy" or score.startswith("coverage") else readings.number
    values = readings.along(axes, readings.marked_lines(axes, named), lambda x: f"severity {x:g}", text)
    alt = f"{describe(score)} against {kind}; at the strongest: {told}."
    return Panel(figure, f"{kind}: {describe(score)}", alt, (values,))


def _by_severity(run: Evaluation, kind: str, score: str) -> dict[float, float]:
    """Return the score by severity, with the data itself as severity 0; nothing where the shift has no severities."""
    rows = {s: scores[score] for k, s, scores in run.shift_rows() if k == kind and s is not None}
    return {0: run.scores[score], **rows} if rows else {}


def _shift_column(methods: Methods, kind: str, score: str) -> Column:
    return column(score, methods, lambda run: _shift_mean(run, kind, score), title=kind)


def _shift_mean(run: Evaluation, kind: str, score: str) -> float | None:
    values = [scores[score] for k, _, scores in run.shift_rows() if k == kind]
    return statistics.fmean(values) if values else None


def ood(methods: Methods, look_of: Looks) -> Iterator[Section]:
    """Yield how well unfamiliar data are told apart."""
    sets = list(dict.fromkeys(name for runs in methods.values() for run in runs for name in run.ood))
    if not sets:
        return
    tables = [table(f"Detecting {key}", methods, _ood_columns(methods, key)) for key in sets]
    groups = [tuple(_ood_panels(methods, look_of, uncertainty)) for uncertainty in _SHOWN_UNCERTAINTIES[task(methods)]]
    note = (
        "How well does each uncertainty tell unfamiliar inputs from the data? An AUROC of 0.5 means that it cannot, 1 "
        "that it always can. In the figures the evaluated data is filled, unfamiliar data sets are lines; the axis of "
        "shares is logarithmic."
    )
    lines = tuple((key, Look(plots.INK, plots.DASHES[i % len(plots.DASHES)])) for i, key in enumerate(sets))
    yield Section(
        "ood", "Out of distribution", note + first_seed(methods), tuple(tables), tuple(filter(None, groups)), sets=lines
    )


def _ood_columns(methods: Methods, key: str) -> list[Column]:
    uncertainties = list(dict.fromkeys(d for runs in methods.values() for run in runs for d in run.ood.get(key, {})))
    return [
        _ood_column(methods, key, uncertainty, score) for score in DETECTION_SCORES for uncertainty in uncertainties
    ]


def _ood_column(methods: Methods, key: str, uncertainty: str, score: str) -> Column:
    def value(run: Evaluation) -> float | None:
        return run.ood.get(key, {}).get(uncertainty, {}).get(score)

    return column(score, methods, value, title=_UNCERTAINTY_NAMES[uncertainty], group=describe(score))


def _ood_panels(methods: Methods, look_of: Looks, uncertainty: str) -> Iterator[Panel]:
    curves = {name: runs[0].curves.histograms.get(uncertainty) for name, runs in methods.items()}
    shown = {name: curve for name, curve in curves.items() if curve is not None}
    right = max(map(_reach, shown.values()), default=0.0)
    title = _UNCERTAINTY_TITLES[uncertainty]
    for name, curve in shown.items():
        end = right if _reach(curve) else None
        figure = plots.histogram(curve, xlabel=title, look=look_of[name], right=end, legend=False)
        areas = ", ".join(f"{key} {by[uncertainty]['auroc']:.3g}" for key, by in methods[name][0].ood.items())
        alt = f"{title} of {name} in and out of distribution; AUROC: {areas}."
        yield Panel(figure, name, alt, readings.histogram(figure, curve, end or curve.edges[-1]))


def _reach(curve: Histogram) -> float:
    """Return where the bins end, or 0 if all counts are in the first bin, which must not set the shared axis."""
    beyond = any(any(counts[1:]) for counts in (curve.inside, *curve.outside.values()))
    return curve.edges[-1] if beyond else 0.0
