"""The verdict of a report: what the numbers of the best method mean, in sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from dubito.uses.reporting.evaluation import Evaluation, Reliability
from dubito.uses.reporting.names import in_words

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


def verdict(methods: Mapping[str, Sequence[Evaluation]]) -> Iterator[str]:
    """Yield sentences about the first of several methods, the best one; each has one evaluation per seed."""
    (name, runs), *others = methods.items()
    if others:
        equal = [in_words(other) for other, found in others if _is_equal(runs, found)]
        rest = f"; within the spread over seeds {' and '.join(equal[:3])} did as well" if equal else ""
        yield f"Best by the likelihood of the targets (NLL): {in_words(name)}{rest}."
    worst = max((run.trust.verdict for run in runs if run.trust is not None), key=list(_LEADS).index, default=None)
    if worst is not None:
        yield _LEADS[worst]
    yield from _sure_answers(runs) if runs[0].task == "classification" else _intervals(runs)
    yield from _refusing(runs)
    yield from _shifted(runs)
    yield from _unfamiliar(runs)


def _is_equal(best: Sequence[Evaluation], other: Sequence[Evaluation]) -> bool:
    """Return whether the NLL of two methods differs by less than one standard deviation over seeds."""
    first, second = ([run.scores["nll"] for run in runs] for runs in (best, other))
    if min(len(first), len(second)) < 2 or not all(map(math.isfinite, (*first, *second))):
        return False
    spread = math.sqrt((statistics.variance(first) + statistics.variance(second)) / 2)
    return statistics.fmean(second) - statistics.fmean(first) < spread


def _sure_answers(runs: Sequence[Evaluation]) -> Iterator[str]:
    """Compare the accuracy of sure answers with their confidence; the difference counts beyond two standard errors."""
    count, confidence, right = (sum(parts) for parts in zip(*map(_sums, runs), strict=True))
    if count < FEWEST:
        total = sum(run.count for run in runs)
        yield f"It is hardly ever {_share(SURE)} sure or more: {count:,.0f} times in {total:,}."
        return
    accuracy, said = right / count, confidence / count
    error = 2 * math.sqrt(max(said * (1 - said), 1 / count) / count)
    told = (
        f"Of the answers it is at least {_share(SURE)} sure of, {_share(accuracy)} are right; it claims {_share(said)}"
    )
    yield told + (
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
    yield f"Its {_share(level)} intervals hold {_share(found)} of the targets" + (
        ": they are too narrow." if found < level - error else
        ": they are wider than needed." if found > level + error else "."
    )  # fmt: skip


def _refusing(runs: Sequence[Evaluation]) -> Iterator[str]:
    """Say what refusing the least certain inputs gains."""
    whole, kept = (_mean(runs, lambda run, at=at: _risk(run, at)) for at in (1.0, 1 - REFUSED))  # type: ignore[misc]
    if not whole or kept is None:
        return
    if runs[0].task == "classification":
        what, first, second = "error rate", _share(whole), _share(kept)
    else:
        what, first, second = "root mean squared error", f"{math.sqrt(whole):.4g}", f"{math.sqrt(kept):.4g}"
    told = f"If it refuses the {_share(REFUSED)} it is least certain of, the {what}"
    yield f"{told} falls from {first} to {second}." if kept < 0.98 * whole else f"{told} does not fall ({first})."


def _risk(run: Evaluation, coverage: float) -> float:
    """Return the risk at the smallest coverage of the curve that is at least the one asked for."""
    curve = run.curves.risk_coverage
    pairs = sorted(zip(curve.coverage, curve.risk, strict=True))
    return next((risk for share, risk in pairs if share >= coverage - 1e-9), pairs[-1][1])


def _shifted(runs: Sequence[Evaluation]) -> Iterator[str]:
    """Say for the shift that hurts most what becomes of the score."""
    good = runs[0].task == "classification"
    score = "accuracy" if good else "rmse"
    ends: dict[str, float] = {}
    for kind in runs[0].shifts:
        values = [[scores[score] for k, _, scores in run.shift_rows() if k == kind] for run in runs]
        if all(values):
            ends[kind] = statistics.fmean((min if good else max)(each) for each in values)
    before = _mean(runs, lambda run: run.scores[score])
    if not ends or before is None:
        return
    kind = (min if good else max)(ends, key=ends.__getitem__)
    if good:
        told = f"the accuracy is {_share(ends[kind])} at worst, in place of {_share(before)}"
    else:
        told = f"the RMSE is {ends[kind]:.4g} at worst, in place of {before:.4g}"
    yield f"Under {kind} {told}."


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


def _share(value: float) -> str:
    """Return a share as text.

    >>> _share(0.9), _share(0.9567)
    ('90 %', '95.7 %')
    """
    return f"{100 * value:.1f}".removesuffix(".0") + " %"


def _mean(runs: Sequence[Evaluation], value: Callable[[Evaluation], float | None]) -> float | None:
    found = [each for each in map(value, runs) if each is not None]
    return statistics.fmean(found) if len(found) == len(runs) else None
