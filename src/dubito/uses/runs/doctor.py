"""Look for what may be wrong with a run, and say it in sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import dubito
from dubito.core.errors import DubitoError
from dubito.uses.reporting import evaluate
from dubito.uses.runs.run import TableRun, decision_scores

Level = Literal["ok", "warning", "problem"]
# By how much a score may differ, relative to itself, when it is computed again.
SAME = 1e-3


@dataclass(frozen=True)
class Examined:
    """One thing that was looked at.

    Attributes:
        level: Whether it is fine.
        text: What was found, as a sentence.
    """

    level: Level
    text: str


def examine(run: TableRun) -> Iterator[Examined]:
    """Yield what was found, one check after the other."""
    for check in (_version, _scores_again, _epistemic, _intervals, _risk, _coverage, _diagnosis):
        yield from check(run)


def _version(run: TableRun) -> Iterator[Examined]:
    made, own = run.settings.get("dubito"), dubito.__version__
    if made == own:
        yield Examined("ok", f"The run was made by this version, {own}.")
    else:
        yield Examined("warning", f"The run was made by dubito {made}; this is {own}.")


def _scores_again(run: TableRun) -> Iterator[Examined]:
    found = evaluate(run.posterior, run.parts["held_out"], target_scale=run.target_scale).scores
    before = run.scores.scores
    close = {name: math.isclose(value, before[name], rel_tol=SAME, abs_tol=SAME) for name, value in found.items()}
    different = [name for name, same in close.items() if not same]
    rows = len(run.parts["held_out"][1])
    if run.scores.count > rows:
        yield Examined("ok", f"Predictions work; {rows:,} of {run.scores.count:,} held-out rows are kept to compare.")
    elif different:
        name = different[0]
        told = f"The {name} of the held-out rows is {found[name]:.5g} here, but was {before[name]:.5g}."
        yield Examined("problem", told)
    else:
        yield Examined("ok", f"Predictions for {rows:,} held-out rows give the same scores as when the run was made.")


def _epistemic(run: TableRun) -> Iterator[Examined]:
    if float(run.calibration.familiarity.median()) == 0:
        yield Examined(
            "warning",
            "This posterior is a single point: rows are unfamiliar only if they hold unseen categories, or numbers "
            "outside of the range of the training rows. Fit with another method, such as laplace().",
        )


def _intervals(run: TableRun) -> Iterator[Examined]:
    if run.task == "classification":
        return
    reach, rows = run.calibration.reach(run.coverage), run.calibration.num_rows
    if reach is None:
        yield Examined("warning", f"{rows} held-out rows are too few to calibrate intervals of {run.coverage:.0%}.")
        return
    usual = _normal_reach(run.coverage)
    told = f"Intervals reach {reach:.2f} standard deviations, where {usual:.2f} would be expected"
    if 0.5 < reach / usual < 2:
        yield Examined("ok", f"{told}.")
    else:
        yield Examined("warning", f"{told}: the posterior's own standard deviations are off.")


def _risk(run: TableRun) -> Iterator[Examined]:
    if run.risk is None:
        return
    answered = float((run.calibration.uncertainty <= run.calibration.threshold(run.risk)).double().mean())
    level: Level = "ok" if answered > 0.1 else "warning"
    yield Examined(level, f"At a risk of {run.risk:g}, {answered:.0%} of the held-out rows are answered.")


def _coverage(run: TableRun) -> Iterator[Examined]:
    pair = run.parts.get("validation")
    if pair is None or run.task == "classification" or run.calibration.reach(run.coverage) is None:
        return
    truth = run._draws.scaled(pair[1])
    found = decision_scores(run.predict_inputs(pair[0]), run.encoder, truth)["coverage"]
    spread = 3 * math.sqrt(run.coverage * (1 - run.coverage) * (1 / len(truth) + 1 / run.calibration.num_rows))
    level: Level = "ok" if abs(found - run.coverage) <= spread else "warning"
    told = f"Intervals hold {found:.1%} of {len(truth)} validation rows; {run.coverage:.0%} was asked for."
    yield Examined(level, told)


def _diagnosis(run: TableRun) -> Iterator[Examined]:
    diagnose: Callable[[], Any] | None = getattr(run.unguarded, "diagnose", None)
    if diagnose is None:
        return
    try:
        yield Examined("ok", " ".join(str(diagnose()).split()))
    except DubitoError as error:
        yield Examined("warning", str(error))


def _normal_reach(coverage: float) -> float:
    from scipy.stats import norm

    return float(norm.ppf(0.5 + coverage / 2))
