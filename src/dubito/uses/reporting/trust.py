"""Whether an evaluated posterior can be trusted: what its fit measured, and what the evaluated data show."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
from dubito.uses.reporting.evaluation import Trust

# How far the accuracy may be from the mean confidence, and the coverage of intervals from its level, beyond noise.
TOLERANCE = 0.1
# How much worse than a uniform guess the log score may be, in nats.
WORSE = 0.1
LEVEL = 0.9
# Errors below this share of half an interval are far smaller than expected; a normal distribution has 0.61.
SMALL_ERRORS = 0.3


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
