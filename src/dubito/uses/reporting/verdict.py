"""The verdict of a report: what the numbers of the best method mean, and whether it can be trusted, in sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from dubito.fitting.diagnosis import (
    FEW_VALIDATION,
    FEW_VALIDATION_DATA,
    LITTLE,
    NOT_MEASURED,
    Diagnosis,
    Finding,
    overconfident,
    underconfident,
)
from dubito.fitting.posterior import Posterior
from dubito.uses.metrics import ClassificationMetrics, RegressionMetrics
from dubito.uses.reporting.evaluation import Evaluation, Reliability, Trust
from dubito.uses.reporting.groups import UNCERTAINTY, wilson
from dubito.uses.reporting.readings import number, percent
from dubito.uses.reporting.tables import in_words

# The confidence from which an answer counts as sure, how many such answers a sentence needs, and the share of inputs
# that may be refused.
SURE, FEWEST, REFUSED = 0.9, 20, 0.1
# From which AUROC on an uncertainty tells unfamiliar inputs apart well, and below which it does not.
WELL, BADLY = 0.9, 0.7
_LEADS = {
    "yes": "On data like this it can be trusted.",
    "with care": "On data like this, trust it with care.",
    "no": "Do not trust it as it is.",
}

# How far the accuracy may be from the mean confidence, and the coverage of intervals from its level, beyond noise.
TOLERANCE = 0.1
# How much worse than a uniform guess the log score may be, in nats.
WORSE = 0.1
LEVEL = 0.9
# Errors below this share of half an interval are far smaller than expected; a normal distribution has 0.61.
SMALL_ERRORS = 0.3


def verdict(methods: Mapping[str, Sequence[Evaluation]]) -> Iterator[str]:
    """Yield sentences about the first of several methods, the best one; each has one evaluation per seed."""
    (name, runs), *others = methods.items()
    if others:
        equal = equal_to_the_first(methods)
        equal = equal if len(equal) < 5 else [*equal[:3], f"{len(equal) - 3} others"]
        noise = "the spread over seeds" if len(runs) > 1 else f"two standard errors on {runs[0].count:,} targets"
        rest = f"; within {noise} {_listed(equal)} did as well" if equal else ""
        yield f"Best by the likelihood of the targets (NLL): {in_words(name)}{rest}."
    worst = max((run.trust.verdict for run in runs if run.trust is not None), key=list(_LEADS).index, default=None)
    if worst is not None:
        yield _LEADS[worst]
    yield from _sure_answers(runs) if runs[0].task == "classification" else _intervals(runs)
    yield from _worst_group(runs[0])
    yield from _refusing(runs)
    yield from _shifted(runs)
    yield from _unfamiliar(runs)


def equal_to_the_first(methods: Mapping[str, Sequence[Evaluation]]) -> list[str]:
    """Return the names of the other methods whose NLL cannot be told from that of the first, in words."""
    (_, runs), *others = methods.items()
    return [in_words(other) for other, found in others if _is_equal(runs, found)]


def _is_equal(best: Sequence[Evaluation], other: Sequence[Evaluation]) -> bool:
    """Return whether the NLL of two methods differs by less than one standard deviation over seeds.

    With one seed, by less than two standard errors of the difference over the data.
    """
    first, second = ([run.scores["nll"] for run in runs] for runs in (best, other))
    if not all(map(math.isfinite, (*first, *second))):
        return False
    if len(first) == len(second) == 1:
        return _differs_by_chance(best[0].curves.nll_parts, other[0].curves.nll_parts)
    if min(len(first), len(second)) < 2:
        return False
    spread = math.sqrt((statistics.variance(first) + statistics.variance(second)) / 2)
    return statistics.fmean(second) - statistics.fmean(first) < spread


def _differs_by_chance(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether the mean difference of parts is below two standard errors; False if there are too few parts."""
    if len(first) != len(second) or len(first) < FEWEST:
        return False
    differences = [after - before for before, after in zip(first, second, strict=True)]
    return statistics.fmean(differences) < 2 * statistics.stdev(differences) / math.sqrt(len(differences))


def _sure_answers(runs: Sequence[Evaluation]) -> Iterator[str]:
    """Compare the accuracy of sure answers with their confidence; the difference counts beyond two standard errors."""
    count, confidence, right = (sum(parts) for parts in zip(*map(_sums, runs), strict=True))
    if count < FEWEST:
        total = sum(run.count for run in runs)
        yield f"It is hardly ever {percent(SURE)} sure or more: {count:,.0f} times in {total:,}."
        return
    accuracy, said = right / count, confidence / count
    error = 2 * math.sqrt(max(said * (1 - said), 1 / count) / count)
    told = f"Of the answers it is at least {percent(SURE)} sure of, {percent(accuracy)} are right"
    yield f"{told}; it claims {percent(said)}" + (
        ": it is overconfident." if accuracy < said - error else
        ": it could be more confident." if accuracy > said + error else "."
    )  # fmt: skip


def _sums(run: Evaluation) -> tuple[float, float, float]:
    """Return the number, the confidences and the right ones of the sure answers."""
    curve = run.curves.reliability
    assert isinstance(curve, Reliability)
    rows = zip(curve.edges, curve.counts, curve.confidence_sums, curve.correct_sums, strict=False)
    kept = [row[1:] for row in rows if row[0] >= SURE - 1e-9]
    counts, confidences, corrects = zip(*kept, strict=True) if kept else ((0.0,), (0.0,), (0.0,))
    return sum(counts), sum(confidences), sum(corrects)


def _intervals(runs: Sequence[Evaluation]) -> Iterator[str]:
    level, found = 0.9, _mean(runs, lambda run: run.scores.get("coverage@0.9"))
    if found is None:
        return
    error = 2 * math.sqrt(level * (1 - level) / runs[0].count)
    yield f"Its {percent(level)} intervals hold {percent(found)} of the targets" + (
        ": they are too narrow." if found < level - error else
        ": they are wider than needed." if found > level + error else "."
    )  # fmt: skip


def _refusing(runs: Sequence[Evaluation]) -> Iterator[str]:
    """Say what refusing the least certain inputs gains."""
    whole, kept = (_mean(runs, lambda run, at=at: _risk(run, at)) for at in (1.0, 1 - REFUSED))  # type: ignore[misc]
    if not whole or kept is None:
        return
    if runs[0].task == "classification":
        what, first, second = "error rate", percent(whole), percent(kept)
    else:
        what, first, second = "root mean squared error", number(math.sqrt(whole)), number(math.sqrt(kept))
    told = f"If it refuses the {percent(REFUSED)} it is least certain of, the {what}"
    yield f"{told} falls from {first} to {second}." if kept < 0.98 * whole else f"{told} does not fall ({first})."


def _risk(run: Evaluation, coverage: float) -> float:
    """Return the risk at the smallest coverage of the curve that is at least the one asked for."""
    curve = run.curves.risk_coverage
    pairs = sorted(zip(curve.coverage, curve.risk, strict=True))
    return next((risk for share, risk in pairs if share >= coverage - 1e-9), pairs[-1][1])


def _shifted(runs: Sequence[Evaluation]) -> Iterator[str]:
    """Say which shifts do harm, where the confidence becomes wrong, and what to do about it."""
    yield from _overconfident(runs[0]) if runs[0].task == "classification" else _worst_shift(runs)


def _overconfident(run: Evaluation) -> Iterator[str]:
    """Say for the two shifts that mislead a classifier most from where on they do, and below what to refuse."""
    found = {kind: run.overconfident_from(kind) for kind in run.shifts}
    wrong = {kind: each for kind, each in found.items() if each is not None}
    honest = [kind for kind in found if kind not in wrong]
    if honest and run.curves.shifted:
        yield f"It is not overconfident under {_listed(honest)}, at any severity that was tried."
    for kind in sorted(wrong, key=lambda kind: wrong[kind][1].observed - wrong[kind][1].claimed)[:2]:
        severity, seen = wrong[kind]
        start = f"Under {kind} it is overconfident" + ("" if severity is None else f" from severity {severity:g} on")
        facts = f"there {percent(seen.observed)} are right, and it claims {percent(seen.claimed)}"
        if seen.threshold is None:
            yield f"{start}: {facts}, and no threshold on its confidence helps. Do not use it there."
        else:
            left = f"of the {percent(seen.answered)} that are left as many are right as on the data itself"
            yield f"{start}: {facts}. Refuse below {seen.threshold:.2f}, and {left}."
    if len(wrong) > 2:
        rest = sorted(wrong, key=lambda kind: wrong[kind][1].observed - wrong[kind][1].claimed)[2:]
        yield f"It is also overconfident under {_listed(rest)}: see the table under shift."


def _worst_shift(runs: Sequence[Evaluation]) -> Iterator[str]:
    """Say for the shift that harms a regression most what becomes of its errors and intervals."""
    ends: dict[str, tuple[float, float]] = {}
    for kind in runs[0].shifts:
        rows = [[scores for k, _, scores in run.shift_rows() if k == kind] for run in runs]
        if all(rows):
            worst = [max(each, key=lambda scores: scores["rmse"]) for each in rows]
            ends[kind] = (
                statistics.fmean(scores["rmse"] for scores in worst),
                statistics.fmean(scores.get("coverage@0.9", math.nan) for scores in worst),
            )
    before = _mean(runs, lambda run: run.scores["rmse"])
    if not ends or before is None:
        return
    kind = max(ends, key=lambda kind: ends[kind][0])
    error, covered = ends[kind]
    told = f"Under {kind} the RMSE is {number(error)} at worst, in place of {number(before)}"
    yield (
        f"{told}; its 90 % intervals then hold {percent(covered)} of the targets." if covered == covered else f"{told}."
    )


def _worst_group(run: Evaluation) -> Iterator[str]:
    """Name the group in which the claims are furthest above what came true, beyond noise."""
    found = []
    for kind, scores in run.curves.groups.items():
        for label, count, claimed, observed in zip(
            scores.labels, scores.counts, scores.claimed, scores.observed, strict=True
        ):
            if count >= FEWEST and wilson(observed, count)[1] < claimed:
                found.append((observed - claimed, kind, label, count, claimed, observed))
    if found:
        _, kind, label, count, claimed, observed = min(found)
        what = "hold the truth" if run.task == "regression" else "of its answers are right"
        said = f"in place of {percent(claimed)}" if run.task == "regression" else f"and it claims {percent(claimed)}"
        lead = "its intervals" if run.task == "regression" else ""
        told = f"{lead} {what} in {percent(observed)} of {count:,.0f} cases" if lead else f"{percent(observed)} {what}"
        where = f"in the {label} of the {kind.lower()}" if kind == UNCERTAINTY else f"where {kind} is {label}"
        yield f"Beware {where}: {told.strip()}, {said}."


def _unfamiliar(runs: Sequence[Evaluation]) -> Iterator[str]:
    """Say how well unfamiliar data sets are told apart, by the uncertainty that does it best."""
    for name in runs[0].ood:
        by = [
            statistics.fmean(run.ood[name][kind]["auroc"] for run in runs if name in run.ood)
            for kind in runs[0].ood[name]
        ]
        best = max(by, default=0.0)
        how = "well" if best >= WELL else "badly" if best < BADLY else "in part"
        yield f"It tells {name} from familiar data {how} (AUROC {best:.2f})."


def _listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them.

    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


def _mean(runs: Sequence[Evaluation], value: Callable[[Evaluation], float | None]) -> float | None:
    found = [each for each in map(value, runs) if each is not None]
    return statistics.fmean(found) if len(found) == len(runs) else None


def trust_in(
    posterior: Posterior, metrics: ClassificationMetrics | RegressionMetrics, num_classes: int | None
) -> Trust:
    """Return the verdict of the posterior's own diagnosis and of its scores on the evaluated data.

    Args:
        posterior: The posterior.
        metrics: Its scores.
        num_classes: The number of classes, for a classification.
    """
    known = (each for each in posterior.diagnose().findings if each.name not in (NOT_MEASURED, FEW_VALIDATION_DATA))
    here = (
        _about_classes(metrics, num_classes) if isinstance(metrics, ClassificationMetrics) else _about_numbers(metrics)
    )
    found = Diagnosis(findings=(*here, *_about_the_number(int(metrics.compute()["count"])), *known))
    return Trust(found.verdict, tuple(str(finding) for finding in found.findings))


def _about_the_number(count: int) -> Iterator[Finding]:
    if count < FEW_VALIDATION:
        yield Finding(
            "few data", "care",
            f"Only {count} targets were evaluated, too few to tell whether probabilities are right: evaluate at least "
            f"{FEW_VALIDATION}.",
        )  # fmt: skip


def _about_classes(metrics: ClassificationMetrics, num_classes: int | None) -> Iterator[Finding]:
    scores, bins = metrics.compute(), metrics.reliability()
    if num_classes is not None and not scores["nll"] <= math.log(num_classes) + WORSE:
        yield Finding(
            "worse than a guess", "no",
            f"Its probabilities for these data are worse than a guess among {num_classes} classes (NLL "
            f"{scores['nll']:.3g} against {math.log(num_classes):.3g}): the training may have diverged (lower the "
            "learning rate), or the data are unlike those that it was trained on.",
        )  # fmt: skip
        return
    confidence = float(bins.confidence_sums.sum() / bins.counts.sum())
    gap, right = confidence - scores["accuracy"], f"{scores['accuracy']:.0%} of these labels are right"
    if abs(gap) > TOLERANCE + 2 * math.sqrt(scores["accuracy"] * (1 - scores["accuracy"]) / scores["count"]):
        yield (overconfident if gap > 0 else underconfident)(right, f"it is {confidence:.0%} sure")
    if num_classes is not None and scores["nll"] > (1 - LITTLE) * math.log(num_classes):
        yield Finding(
            "no better than a guess", "care",
            f"Its probabilities for these data are no better than a guess among {num_classes} classes (NLL "
            f"{scores['nll']:.3g} against {math.log(num_classes):.3g}): what it has learned does not hold for them.",
        )  # fmt: skip


def _about_numbers(metrics: RegressionMetrics) -> Iterator[Finding]:
    scores = metrics.compute()
    if f"coverage@{LEVEL:g}" not in scores:
        return
    covered, half_width = scores[f"coverage@{LEVEL:g}"], scores[f"width@{LEVEL:g}"] / 2
    if covered < LEVEL - TOLERANCE - 2 * math.sqrt(LEVEL * (1 - LEVEL) / scores["count"]):
        held = f"its intervals of {LEVEL:.0%} hold {covered:.0%} of these numbers"
        yield overconfident(held, f"{LEVEL:.0%} are expected")
    elif scores["rmse"] < SMALL_ERRORS * half_width:
        fact = f"the root mean squared error is {scores['rmse']:.3g}"
        yield underconfident(fact, f"its intervals of {LEVEL:.0%} reach {half_width:.3g} to either side")
