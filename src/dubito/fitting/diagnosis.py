"""Diagnose a posterior: what was found, whether to trust it, why, and what to do next."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dubito.beliefs.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from dubito.core.errors import NotConvergedWarning, TrustWarning
from dubito.fitting.fit_record import ExampleScores, FitRecord

if TYPE_CHECKING:
    from dubito.fitting.posterior import Posterior

Verdict = Literal["yes", "with care", "no"]
Severity = Literal["care", "no"]

# Epistemic uncertainty below this (nats, or a share of the variance) is as good as none.
NEGLIGIBLE = 1e-3
# Fewer validation examples than this cannot tell a good posterior from a bad one.
FEW_VALIDATION = 50
# A share of the variance above this means that noise in the targets is taken for ignorance of the weights.
MOSTLY_EPISTEMIC = 0.9
# A network that gains less than this over a constant has learned nothing: nats, or a share of the labels' entropy.
LITTLE = 0.02
# A network is not trained to an optimum if one more step would gain more than this, in nats per example.
FAR_FROM_OPTIMUM = 0.2
# Targets of neighbours are alike if by this many standard deviations more so than by chance.
ALIKE = 3.0
# The noise of outputs differs too much for one noise level if their residuals differ by this factor.
UNEVEN = 4.0
# Errors of a regression are not normal if a Student-t distribution gains this many nats (with 3 degrees: 0.195).
HEAVY_TAILS = 0.15
# Inputs or targets that are larger, or all smaller than its inverse, should be standardized.
UNUSUAL = 1e3
# A posterior is worse than the plain network if by this many nats, and by two standard errors of both scores.
WORSE = 0.1
# Validation data differ from training data if the mean of a feature does by this many standard deviations.
SHIFTED = 0.7
# Mean squares of residuals, in predicted variances, that make a regression useless.
FAR_OFF = 25.0
# Findings that a fit also gives as a warning, besides all that make a posterior useless.
NOT_CONVERGED = ("worse than a constant", "not at an optimum")
NOT_MEASURED, FEW_VALIDATION_DATA = "not measured", "few validation data"
WARNED = ("not at an optimum", "prior at an edge", "epistemic zero")


class Finding(str):
    """One sentence or two about what is wrong and what to do, with a short name.

    Attributes:
        name: The name, such as ``"epistemic zero"``.
        severity: ``"care"``, or ``"no"`` if the posterior should not be used.
    """

    name: str
    severity: Severity

    def __new__(cls, name: str, severity: Severity, text: str) -> Finding:
        """Return the text with its name and severity."""
        found = super().__new__(cls, text)
        found.name, found.severity = name, severity
        return found


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is known about a posterior, printed as sentences.

    Args:
        findings: What is wrong and what to do about it; empty if nothing is.
        measured: What was measured at the end of the fit; None for a posterior that was not fitted to data here.
    """

    findings: tuple[Finding, ...] = ()
    measured: FitRecord | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether to trust the posterior: ``"yes"``, ``"with care"`` or ``"no"``."""
        if any(finding.severity == "no" for finding in self.findings):
            return "no"
        return "with care" if self.findings else "yes"

    @property
    def trustworthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def lines(self) -> Iterator[str]:
        """Yield what was measured, one sentence each."""
        if self.measured is not None:
            yield from describe(self.measured)

    def __str__(self) -> str:
        ends = {"yes": "Yes.", "with care": "With care: see above.", "no": "No: see above."}
        return "\n".join([*self.lines(), *self.findings, f"Can it be trusted? {ends[self.verdict]}"])


def diagnose(posterior: Posterior) -> Diagnosis:
    """Diagnose any posterior by what was measured at the end of its fit."""
    return Diagnosis(findings=tuple(general_findings(posterior)), measured=posterior.fit_record)


def warn_about(posterior: Posterior) -> None:
    """Warn of what makes a fresh posterior useless, or not what its user expects."""
    for finding in general_findings(posterior):
        if finding.severity == "no" or finding.name in WARNED:
            category = NotConvergedWarning if finding.name in NOT_CONVERGED else TrustWarning
            warnings.warn(finding, category, stacklevel=2)


def describe(record: FitRecord) -> Iterator[str]:
    """Yield a record in words."""
    own = record.training
    yield f"On {own.num_rows} training examples: {_in_words(own)}; the best constant has {record.constant:.3f}."
    if record.held_out_gain is not None and record.held_out_error is not None:
        yield (
            f"On {record.held_out} held-out examples the network beat the best constant by {record.held_out_gain:.3f} "
            f"(standard error {record.held_out_error:.3f})."
        )
    if (held := record.validation) is not None:
        yield f"On {held.num_rows} validation examples: {_in_words(held)}."
    far = "" if record.epistemic_far is None else f", and {record.epistemic_far:.3g} far from the data"
    unit = "nats" if own.accuracy is not None else "of the variance (share)"
    yield f"Epistemic uncertainty: {record.epistemic:.3g} {unit} on the data{far}."


def _in_words(scores: ExampleScores) -> str:
    if scores.accuracy is None:
        return f"log score {scores.log_score:.3f}"
    return f"log score {scores.log_score:.3f}, accuracy {scores.accuracy:.0%}, mean confidence {scores.confidence:.0%}"


def general_findings(posterior: Posterior) -> Iterator[Finding]:
    """Yield the findings that apply to any family, the most important first."""
    record = posterior.fit_record
    if record is None:
        yield Finding(
            NOT_MEASURED, "care",
            "Nothing is known about how well it predicts: it was not fitted to data here. Use dubito.evaluate.",
        )  # fmt: skip
        return
    yield from _about_the_network(record, _least_gain(posterior.likelihood, record), posterior.has_spread)
    yield from posterior.own_findings()
    yield from _about_the_plain_network(record)
    yield from _about_confidence(record)
    if posterior.has_spread:
        yield from _about_the_spread(record, posterior.more_spread)
    yield from _about_validation(record, posterior.num_data)


def _about_validation(record: FitRecord, num_data: int) -> Iterator[Finding]:
    held = record.validation
    if record.shift is not None and record.shift > SHIFTED:
        yield Finding(
            "validation data differ", "care",
            f"The inputs of the validation data differ from those of the training data (the mean of one feature by "
            f"{record.shift:.1f} standard deviations), so what was chosen or measured on them may not hold for data "
            "like the training data. Divide all data at random, unless the difference is meant.",
        )  # fmt: skip
    if held is None and record.training.accuracy is not None and num_data < FEW_VALIDATION:
        yield Finding(
            "few data", "care",
            f"There are only {num_data} training examples and no validation data, too few to tell whether "
            "probabilities are right.",
        )  # fmt: skip
    if held is not None and held.num_rows < FEW_VALIDATION:
        yield Finding(
            FEW_VALIDATION_DATA, "care",
            f"There are only {held.num_rows} validation examples, too few to tell whether probabilities are right: "
            f"give at least {FEW_VALIDATION}, or none at all.",
        )  # fmt: skip


def _about_the_network(record: FitRecord, least_gain: float, has_spread: bool) -> Iterator[Finding]:
    if record.constant >= 0 and (record.constant == math.inf or record.training.accuracy is not None):
        yield Finding(
            "equal targets", "no",
            "All training targets are equal, so there is nothing to learn from them: check that they are the right "
            "ones.",
        )  # fmt: skip
    else:
        yield from _about_training(record, least_gain, has_spread)


def _about_training(record: FitRecord, least_gain: float, has_spread: bool) -> Iterator[Finding]:
    centre, own, hint = record.centre, record.training, _about_sizes(record)
    # of classes the constant is an entropy; of numbers it depends on their unit
    margin = 0.2 if own.accuracy is None else 0.1 + 0.1 * abs(record.constant)
    if max(centre.log_score, own.log_score) < record.constant - margin:
        yield Finding(
            "worse than a constant", "no",
            f"The network predicts its own training data worse than one constant prediction does (log score "
            f"{centre.log_score:.3g} against {record.constant:.3g}): it is not trained, or its training diverged. "
            f"Train it first, or lower the learning rate.{hint}",
        )  # fmt: skip
    elif record.possible_gain > FAR_FROM_OPTIMUM:
        yield Finding(
            "not at an optimum", "care",
            f"The network is not trained to an optimum: one more step would gain {record.possible_gain:.2f} nats per "
            f"training example. Train it longer first; the posterior is one around these weights.{hint}",
        )  # fmt: skip
    elif (why := _no_better(record, least_gain, has_spread)) is not None:
        yield Finding(
            "no better than a constant", "care",
            f"{why}.{hint}",
        )  # fmt: skip
    if own.accuracy is None or centre.accuracy is None:
        if own.log_score < centre.log_score - 1.0 and own.log_score < record.constant - margin:
            yield Finding(
                "accuracy dropped", "no",
                f"The posterior predicts the training data far worse than its central network (log score "
                f"{own.log_score:.3g} against {centre.log_score:.3g}): use a narrower prior or a lower temperature.",
            )  # fmt: skip
        return
    if centre.accuracy - own.accuracy > 0.05 + 2 / own.num_rows:
        yield Finding(
            "accuracy dropped", "no",
            f"The posterior classifies {own.accuracy:.0%} of the training data correctly, its central network "
            f"{centre.accuracy:.0%}: it is too wide. Use a larger prior precision (a narrower prior), a lower "
            "temperature, or fewer random weights.",
        )  # fmt: skip


def _about_sizes(record: FitRecord) -> str:
    """Return what to do about numbers that no network can be trained on as they are; nothing if their size is usual."""
    words = ""
    for name, size in (("inputs", record.input_size), ("targets", record.target_size)):
        if size is not None and not 1 / UNUSUAL <= size <= UNUSUAL:
            words += f" The largest {name} are about {size:.0e} in size: standardize them to mean 0 and variance 1."
    return words


def _no_better(record: FitRecord, least_gain: float, has_spread: bool) -> str | None:
    """Return in words how it was seen that the network is no better than a constant on new data; None if it was not."""
    own, held, constant = record.training, record.validation, record.constant
    words, end = (
        "examples no better than one constant prediction does (log score",
        "it is not trained, or the inputs say nothing about the targets",
    )
    if max(record.centre.log_score, own.log_score) < constant + least_gain:
        return f"It predicts its own training {words} {own.log_score:.3f} against {constant:.3f}): {end}"
    if least_gain == -math.inf:
        return None
    if held is not None and held.num_rows >= FEW_VALIDATION:
        worse = held.log_score < constant + least_gain
        return f"It predicts validation {words} {held.log_score:.3f} against {constant:.3f}): {end}" if worse else None
    if (gain := record.held_out_gain) is not None and (error := record.held_out_error) is not None:
        told = f"it gained {gain:.3f} nats, with a standard error of {error:.3f}"
        said = (
            f"On {record.held_out} held-out examples the network cannot be told from one constant prediction ({told})"
        )
        return f"{said}: {end}" if gain < max(least_gain, 2 * error) else None
    if has_spread and own.log_score - record.complexity < constant + least_gain:
        return (
            f"What it gains over one constant prediction on its training data ({own.log_score - constant:.3f} nats) "
            f"could be chance: so many uncertain weights gain about {record.complexity:.3f} nats from noise"
        )
    if record.likeness is not None and record.likeness < ALIKE:
        return (
            "It may have learned noise by heart: nothing was held out to test it, and the targets of neighbouring "
            f"inputs are no more alike than by chance ({record.likeness:.1f} standard deviations). Give at least "
            f"{FEW_VALIDATION} validation examples"
        )
    return None


def _least_gain(likelihood: Likelihood, record: FitRecord) -> float:
    """Return by how many nats a network that has learned something beats a constant on its training data."""
    if isinstance(likelihood, Categorical | Bernoulli):
        return LITTLE * abs(record.constant)
    return LITTLE if isinstance(likelihood, Gaussian) else -math.inf  # elsewhere the constant is approximate


def _about_the_plain_network(record: FitRecord) -> Iterator[Finding]:
    """Compare with the held-out examples of the search, which trained a plain network."""
    plain, held = record.held_out_score, record.validation
    scores = held if held is not None and held.num_rows >= FEW_VALIDATION else record.training
    if plain is None or record.held_out_error is None or scores.error is None:
        return
    if plain - scores.log_score > WORSE + 2 * math.hypot(record.held_out_error, scores.error):
        where = "validation" if scores is held else "its own training"
        yield Finding(
            "worse than the plain network", "care",
            f"It predicts {where} examples with a log score of {scores.log_score:.3f}; a plain network had {plain:.3f} "
            f"on {record.held_out} held-out examples. Use MAP(), Laplace() or Auto(), or train longer.",
        )  # fmt: skip


def _about_confidence(record: FitRecord) -> Iterator[Finding]:
    held = record.validation
    if held is not None and held.squared_z is not None and held.squared_z > FAR_OFF:  # never by chance
        fact = f"the residuals of validation data are {held.squared_z**0.5:.1f} predicted standard deviations"
        yield Finding("overconfident", "no", overconfident(fact, "about 1 is expected"))
        return
    scores = held if held is not None and held.num_rows >= FEW_VALIDATION else record.training
    where = "validation" if scores is held else "training"
    if scores.accuracy is not None and scores.confidence is not None:
        error = 2 * (scores.accuracy * (1 - scores.accuracy) / scores.num_rows) ** 0.5
        gap = scores.accuracy - scores.confidence
        if gap > 0.1 + error:
            yield underconfident(
                f"{scores.accuracy:.0%} of {where} labels are right", f"it is {scores.confidence:.0%} sure"
            )
        elif -gap > 0.1 + error:
            fact = f"only {scores.accuracy:.0%} of {where} labels are right"
            yield overconfident(fact, f"it is {scores.confidence:.0%} sure")
    elif scores.squared_z is not None:
        spread = f"the residuals of {where} data are {scores.squared_z**0.5:.2f} predicted standard deviations"
        if where == "training" and scores.squared_z < 0.05:
            yield Finding(
                "underconfident", "care",
                f"{spread[0].upper()}{spread[1:]}, and about 1 is expected: the network is overfitted (train it for "
                "fewer epochs, or with weight decay), or the noise is too large.",
            )  # fmt: skip
        elif where == "validation" and scores.squared_z < 0.3:
            yield underconfident(spread, "about 1 is expected")
        elif scores.squared_z > 3:
            yield overconfident(spread, "about 1 is expected")
    if scores.uneven is not None and scores.uneven > UNEVEN:
        yield Finding(
            "outputs of different size", "care",
            f"The residuals of {where} data are {scores.uneven:.0f} times as large for one output as for another, "
            "compared with their predicted standard deviations. Standardize each target to variance 1, or use "
            "likelihood='heteroscedastic', which needs two outputs per target.",
        )  # fmt: skip
    if record.tail_gain is not None and record.tail_gain > HEAVY_TAILS:
        yield Finding(
            "errors not normal", "care",
            f"On held-out examples a few errors are far larger than most (a Student-t distribution would gain "
            f"{record.tail_gain:.2f} nats per example), so intervals are too wide for most inputs and too narrow for "
            "some. Look for wrong targets, or use likelihood='student-t' or 'heteroscedastic', which need two outputs.",
        )  # fmt: skip


def underconfident(fact: str, claim: str) -> Finding:
    """Return the finding that predictions are less sure than they could be."""
    return Finding(
        "underconfident", "care",
        f"It is underconfident: {fact}, but {claim}. Use a larger prior precision (a narrower prior) or a lower "
        "temperature; give validation data to choose them.",
    )  # fmt: skip


def overconfident(fact: str, claim: str) -> Finding:
    """Return the finding that predictions are surer than they should be."""
    return Finding(
        "overconfident", "care",
        f"It is overconfident: {fact}, but {claim}. Use decisions.temper with the validation data, more random "
        "weights, or an Ensemble.",
    )  # fmt: skip


def _about_the_spread(record: FitRecord, more_spread: str) -> Iterator[Finding]:
    near, far = record.epistemic, record.epistemic_far
    if max(near, far or 0.0) < NEGLIGIBLE:
        yield Finding(
            "epistemic zero", "care",
            f"Its epistemic uncertainty is negligible on the training data ({near:.1e}) and far from it"
            f"{'' if far is None else f' ({far:.1e})'}: it is as good as a single network. {more_spread}",
        )  # fmt: skip
    elif record.spread < 0.01 and (far is None or far < 1.1 * near):
        yield Finding(
            "equally uncertain", "care",
            "It is equally uncertain about all inputs, near and far: the posterior has not learned from the data. "
            "Train longer, or use a narrower prior.",
        )  # fmt: skip
    if record.training.squared_z is not None and near > MOSTLY_EPISTEMIC:
        yield Finding(
            "noise taken for ignorance", "care",
            f"{near:.0%} of the variance on the training data is called epistemic: noise in the targets is explained "
            "by uncertain weights. Use a larger prior precision, or give the noise: likelihoods.Gaussian(noise=...).",
        )  # fmt: skip
