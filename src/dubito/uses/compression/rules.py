r"""What pruning removes: small frozen rules over the marginals of any posterior.

A rule gives every weight a score from its mean $\mu$, standard deviation $\sigma$ and prior. How much goes is said in
one of three ways, for all weights at once or by layer:

- a threshold on the score (`LogAlpha(3)`, `SignalToNoise(1.0)`);
- a target, the fraction of weights to remove (`Magnitude(0.9)`);
- a budget, the accuracy that may be lost on held-out data (`SignalToNoise(max_drop=0.005)`).
"""

from __future__ import annotations

import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params
from dubito.core.randomness import default_generator
from dubito.core.settings import Setting, setting

Amount = float | Mapping[str, float]
Reduction = Literal["max", "mean", "sum", "norm"]
Masks = dict[str, Tensor]

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "max": torch.amax, "mean": torch.mean, "sum": torch.sum, "norm": torch.linalg.vector_norm,
}  # fmt: skip


@dataclass(frozen=True)
class Belief:
    """What a rule may look at, in the shapes of the prunable parameters.

    Args:
        mean: The means μ.
        variance: The variances σ², 0 where a weight is not random.
        precision: The diagonal of the posterior's precision; 1/σ² where weights are independent.
        prior: Mean and variance before the data, or None where there are none.
        no_prior: Why there is no prior, as a sentence.
        groups: What a posterior under a prior of groups says of them (`posterior.groups()`); else nothing.
    """

    mean: Params
    variance: Params
    precision: Params
    prior: tuple[Params, Params] | None = None
    no_prior: str = "This posterior has no prior."
    groups: tuple[Any, ...] = ()

    def map(self, function: Callable[..., Tensor], *columns: Params) -> Params:
        """Apply a function name by name, in float64."""
        return {name: function(*(column[name].double() for column in columns)) for name in self.mean}


@setting
class Rule(Setting, ABC):
    """The base of all rules: a score for each weight, and how much goes.

    Args:
        threshold: Where to cut: a number, or one per layer as a dict by layer or parameter name, or by a pattern
            (``{"fc1": 3, "conv*": 1}``); layers that no name fits stay whole.
        target: Instead: the fraction of weights to remove, or one per layer.
        max_drop: Instead: the accuracy that may be lost on held-out data (for regression: the relative rise of the
            root mean squared error).
        scope: Whether a single target holds over all layers together, or in each.
        reduce: How the weights of a unit speak together; each rule has its own default.
    """

    removes: ClassVar[Literal["above", "below"]] = "below"
    """Whether weights with high or with low scores go. At the threshold itself a high score goes, a low one stays."""
    needs_variance: ClassVar[bool] = True
    default_threshold: ClassVar[float | None] = None
    default_reduction: ClassVar[Reduction] = "max"
    adapts: ClassVar[bool] = False

    threshold: Amount | None = field(default=None, kw_only=True)
    target: Amount | None = field(default=None, kw_only=True)
    max_drop: float | None = field(default=None, kw_only=True)
    scope: Literal["global", "layer"] = field(default="global", kw_only=True)
    reduce: Reduction | None = field(default=None, kw_only=True)

    @abstractmethod
    def scores(self, belief: Belief, *, generator: torch.Generator | None = None) -> Params:
        """Return the score of each weight."""

    def relevance(self, belief: Belief, *, generator: torch.Generator | None = None) -> Params:
        """Return the scores, signed so that low ones go first, and +∞ where a weight is not random."""
        if self.needs_variance and not any(bool((v > 0).any()) for v in belief.variance.values()):
            raise UnsupportedError(
                f"{self!r} needs a posterior with a spread, but every variance is 0: fit Laplace(...) or "
                "Variational(...), or use rules.Magnitude(target)."
            )
        scores, sign = self.scores(belief, generator=generator), -1.0 if self.removes == "above" else 1.0
        if not self.needs_variance:
            return {name: sign * score for name, score in scores.items()}
        return {n: torch.where(belief.variance[n] > 0, sign * score, math.inf) for n, score in scores.items()}

    def reduced(self, rows: Tensor) -> Tensor:
        """Reduce relevances ``[units, weights]`` to one per unit."""
        return REDUCTIONS[self.reduce or self.default_reduction](rows, dim=1)

    def keep(self, relevance: Params) -> Masks:
        """Decide: one mask per tensor of relevances, true where something stays."""
        if self.max_drop is not None:
            raise InputError(f"{self!r} decides by held-out data: give `data=` to dubito.compress.")
        if self.target is not None:
            return self._by_target(relevance, self.target)
        if (level := self.default_threshold if self.threshold is None else self.threshold) is None:
            raise InputError(f"{self!r} must say how much goes: target=, threshold= or max_drop=.")
        masks = {name: torch.ones_like(value, dtype=torch.bool) for name, value in relevance.items()}
        return masks | {n: self._stays(relevance[n], at) for n, at in _by_name(level, relevance, repr(self)).items()}

    def _stays(self, relevance: Tensor, threshold: float) -> Tensor:
        return relevance > -threshold if self.removes == "above" else relevance >= threshold

    def _by_target(self, relevance: Params, target: Amount) -> Masks:
        if self.scope == "global" and not isinstance(target, Mapping):
            return lowest_removed(relevance, target)
        masks = {name: torch.ones_like(value, dtype=torch.bool) for name, value in relevance.items()}
        for name, fraction in _by_name(target, relevance, repr(self)).items():
            masks |= lowest_removed({name: relevance[name]}, fraction)
        return masks

    def __post_init__(self) -> None:
        given = [name for name in ("threshold", "target", "max_drop") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"{self.setting_name} takes one of threshold, target and max_drop, not {given}.")
        for name, low, high in (("target", 0.0, 1.0), ("max_drop", 0.0, 1.0), ("threshold", -math.inf, math.inf)):
            amount = getattr(self, name)
            by_layer = isinstance(amount, Mapping) and name != "max_drop"  # a budget is one for the whole network
            for number in amount.values() if by_layer else () if amount is None else (amount,):
                if isinstance(number, bool) or not isinstance(number, int | float) or not low <= number <= high:
                    wanted = "a number" if name == "threshold" else "a fraction from 0 to 1"
                    raise InputError(f"The {name} of {self.setting_name} must be {wanted}, not {number!r}.")
        if self.scope not in ("global", "layer"):
            raise InputError(f"The scope of a rule is 'global' or 'layer', not {self.scope!r}.")
        kinds = [kind for kind in REDUCTIONS if kind != "norm" or self.removes == "below"]  # a norm has no sign
        if self.reduce is not None and self.reduce not in kinds:
            raise InputError(f"The reduction of {self.setting_name} is one of {', '.join(kinds)}, not {self.reduce!r}.")


@setting
class SignalToNoise(Rule):
    r"""Remove where $|\mu| / \sigma$ is below the threshold (Graves 2011; Blundell et al. 2015).

    The ratio is that of mean and *standard deviation*: it does not change with the unit in which weights are measured.

    >>> belief = Belief({"w": torch.tensor([0.001, 1.0])}, {"w": torch.tensor([0.018, 0.1]) ** 2}, {})
    >>> rule = SignalToNoise(1.0)
    >>> rule.keep(rule.relevance(belief))["w"].tolist()
    [False, True]
    """

    setting_name = "rules.SignalToNoise"
    threshold: Amount | None = None
    default_threshold = 1.0

    def scores(self, belief: Belief, *, generator: torch.Generator | None = None) -> Params:
        r"""Return $|\mu| / \sigma$."""
        return belief.map(lambda mean, variance: mean.abs() / variance.sqrt(), belief.mean, belief.variance)


@setting
class ZeroDensity(Rule):
    r"""Remove where the log-density of the posterior at zero, $\log q(0)$, reaches the threshold (Graves 2011).

    It is a density: unlike the signal to noise it depends on the unit of the weights.
    """

    setting_name = "rules.ZeroDensity"
    removes = "above"
    threshold: Amount | None = None

    def scores(self, belief: Belief, *, generator: torch.Generator | None = None) -> Params:
        r"""Return $-\tfrac12 \log 2\pi\sigma^2 - \mu^2 / 2\sigma^2$."""
        at_mean = belief.map(lambda variance: -0.5 * (2 * math.pi * variance).log(), belief.variance)
        return belief.map(lambda top, m, v: top - m.square() / (2 * v), at_mean, belief.mean, belief.variance)


@setting
class LogAlpha(Rule):
    r"""Remove where $\log\alpha = \log(\sigma^2/\mu^2)$ reaches the threshold: a dropout rate above 0.95 for 3.

    The rule of sparse variational dropout (Molchanov et al. 2017, https://arxiv.org/abs/1701.05369).

    >>> belief = Belief({"w": torch.tensor([0.1, 1.0])}, {"w": torch.tensor([1.0, 1.0])}, {})
    >>> LogAlpha(3).keep(LogAlpha(3).relevance(belief))["w"].tolist()  # log α is 4.6 and 0
    [False, True]
    """

    setting_name = "rules.LogAlpha"
    threshold: Amount | None = None
    removes = "above"
    default_threshold = 3.0

    def scores(self, belief: Belief, *, generator: torch.Generator | None = None) -> Params:
        r"""Return $\log\alpha$; +∞ for a mean of zero."""
        return belief.map(lambda mean, variance: variance.log() - mean.square().log(), belief.mean, belief.variance)


@setting
class ModelReduction(Rule):
    r"""Remove where the evidence does not fall: no threshold to choose.

    With the posterior $\mathcal N(\mu, \sigma^2)$ under the prior $\mathcal N(\mu_p, \sigma_p^2)$, the network without
    the weight has the log evidence of the network with it plus

    $$\Delta F = \log \frac{q(0)}{p(0)}
      = \tfrac12 \ln \frac{\sigma_p^2}{\sigma^2} - \frac{\mu^2}{2\sigma^2} + \frac{\mu_p^2}{2\sigma_p^2}$$

    (the Savage-Dickey ratio; Beckers et al. 2024, "Principled pruning of Bayesian neural networks"). It goes where
    $\Delta F \ge 0$, also where the data has no curvature for it, $\sigma^2 \ge \sigma_p^2$: a value left over from the
    start of training is no evidence. For the weights of a unit the changes add up. What stays moves to its mean given
    that the rest is zero, the posterior of the smaller model; independent weights do not.
    """

    setting_name = "rules.ModelReduction"
    threshold: Amount | None = None
    removes = "above"
    default_threshold = 0.0
    default_reduction = "sum"
    adapts = True

    def scores(self, belief: Belief, *, generator: torch.Generator | None = None) -> Params:
        r"""Return $\Delta F$ in nats."""
        if belief.prior is None:
            raise UnsupportedError(
                f"ModelReduction compares the posterior with a proper prior. {belief.no_prior} Use rules.LogAlpha(3) "
                "or rules.SignalToNoise(1.0) here."
            )
        return belief.map(_evidence_gain, belief.mean, belief.variance, *belief.prior)


@setting
class PosteriorDamage(Rule):
    r"""Remove what the log-posterior misses least, by its second-order expansion around the mode.

    - ``"opd"``: $P_{ii}\,\mu_i^2$ with the posterior's precision P (Dhahri et al. 2024, optimal posterior damage);
    - ``"obd"``: $\tfrac12 H_{ii}\,\mu_i^2$ with the curvature of the data alone, $P$ less the prior's precision
      (LeCun et al. 1990, optimal brain damage);
    - ``"obs"``: $\mu_i^2 / 2\,[P^{-1}]_{ii}$, the loss after the other weights have adapted (Hassibi & Stork 1993).

    Args:
        target: The fraction of weights to remove.
        kind: Which of the three.
        update: Move the weights that stay to their mean given that the others are zero: the update of ``"obs"`` for
            all removed weights at once. Only Laplace posteriors know it; independent weights do not move.
    """

    setting_name = "rules.PosteriorDamage"
    target: Amount | None = None
    default_reduction = "sum"
    kind: Literal["opd", "obd", "obs"] = "opd"
    update: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in ("opd", "obd", "obs"):
            raise InputError(f"PosteriorDamage(kind={self.kind!r}) is not one of opd, obd, obs.")

    def scores(self, belief: Belief, *, generator: torch.Generator | None = None) -> Params:
        """Return the damage."""
        if self.kind == "obs":
            return belief.map(lambda mean, variance: mean.square() / (2 * variance), belief.mean, belief.variance)
        if self.kind == "opd":
            return belief.map(lambda mean, precision: precision * mean.square(), belief.mean, belief.precision)
        if belief.prior is None:
            return belief.map(lambda mean, precision: 0.5 * precision * mean.square(), belief.mean, belief.precision)
        return belief.map(_data_damage, belief.mean, belief.precision, belief.prior[1])


@setting
class GroupRelevance(Rule):
    r"""Remove the groups that a prior of groups has switched off: whole neurons, channels, words or gates.

    The score of a weight is that of its group, the least one where it is in several: how far the group's relevance lies
    above the level at which it is noise (group normal-Jeffreys and horseshoe: Louizos et al. 2017,
    https://arxiv.org/abs/1705.08665; gates: a signal to noise of 1, Neklyudov et al. 2017,
    https://arxiv.org/abs/1705.07283).

    Args:
        threshold: By how much a relevance must lie above that level; by evidence, the nats that a removal may cost.
        by: ``"relevance"``, or ``"evidence"`` for gates: remove where the evidence does not fall (Wright et al. 2024).
    """

    setting_name = "rules.GroupRelevance"
    threshold: Amount | None = None
    by: Literal["relevance", "evidence"] = "relevance"
    needs_variance = False
    default_threshold = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by not in ("relevance", "evidence"):
            raise InputError(f"GroupRelevance(by={self.by!r}) is not 'relevance' or 'evidence'.")

    def scores(self, belief: Belief, *, generator: torch.Generator | None = None) -> Params:
        """Return the score of each weight's group; +∞ where a weight is in none."""
        if not belief.groups:
            raise UnsupportedError(
                "GroupRelevance needs a prior of groups: fit Variational(prior=priors.NormalJeffreys()), Horseshoe() "
                "or TruncatedLogUniform()."
            )
        found = belief.map(lambda mean: torch.full_like(mean, math.inf), belief.mean)
        for kind in belief.groups:
            score = self._of(kind).double()
            for member in (one for one in kind.members if one.parameter in found):
                whole = found[member.parameter]
                shape = [-1 if axis == member.axis else 1 for axis in range(whole.ndim)]
                found[member.parameter] = torch.minimum(whole, score.reshape(shape).to(whole.device))
        return found

    def keep(self, relevance: Params) -> Masks:
        """Decide; where a target would cut through a group, the whole group stays."""
        masks = super().keep(relevance)
        return {n: relevance[n] >= relevance[n][m].min() if bool(m.any()) else m for n, m in masks.items()}

    def _stays(self, relevance: Tensor, threshold: float) -> Tensor:
        return relevance > threshold if self.by == "evidence" else super()._stays(relevance, threshold)

    def _of(self, kind: Any) -> Tensor:
        if self.by == "relevance":
            return kind.relevance - kind.threshold
        if kind.evidence_gain is None:
            raise UnsupportedError("Only gates (priors.TruncatedLogUniform) know what the evidence gains by a removal.")
        return -kind.evidence_gain


@setting
class Magnitude(Rule):
    r"""Remove the smallest $|\mu|$: the baseline that every other rule must beat."""

    setting_name = "rules.Magnitude"
    target: Amount | None = None
    needs_variance = False
    default_reduction = "norm"

    def scores(self, belief: Belief, *, generator: torch.Generator | None = None) -> Params:
        r"""Return $|\mu|$."""
        return belief.map(torch.abs, belief.mean)


@setting
class Random(Rule):
    """Remove at random."""

    setting_name = "rules.Random"
    target: Amount | None = None
    needs_variance = False

    def scores(self, belief: Belief, *, generator: torch.Generator | None = None) -> Params:
        """Return uniform noise."""
        source = default_generator(generator)
        draw: dict[str, Any] = {"generator": source, "dtype": torch.float64, "device": source.device}
        return {name: torch.rand(mean.shape, **draw).to(mean.device) for name, mean in belief.mean.items()}


def lowest_removed(relevance: Params, fraction: float) -> Masks:
    """Keep all but a fraction of the finite relevances; of equal ones the earlier goes, so the count is exact.

    >>> lowest_removed({"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([2.0, math.inf])}, 2 / 3)
    {'a': tensor([ True, False]), 'b': tensor([False,  True])}
    """
    flat = torch.cat([value.reshape(-1) for value in relevance.values()])
    count = round(fraction * int((flat != math.inf).sum()))
    keep = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
    keep[torch.argsort(flat, stable=True)[:count]] = False
    parts = keep.split([value.numel() for value in relevance.values()])
    return {name: part.reshape(relevance[name].shape) for name, part in zip(relevance, parts, strict=True)}


def _by_name(amount: Amount, relevance: Params, rule: str) -> dict[str, float]:
    if not isinstance(amount, Mapping):
        return dict.fromkeys(relevance, amount)
    found: dict[str, float] = {}
    for key, number in amount.items():
        fitting = [n for n in relevance if fnmatch.fnmatchcase(n, key) or n == key or n.startswith(f"{key}.")]
        if not fitting:
            raise InputError(f"{rule} names '{key}', but what can be pruned is {', '.join(relevance)}.")
        found |= dict.fromkeys(fitting, number)
    return found


def _evidence_gain(mean: Tensor, variance: Tensor, prior_mean: Tensor, prior_variance: Tensor) -> Tensor:
    gain = 0.5 * (prior_variance / variance).log() - mean.square() / (2 * variance)
    gain = gain + prior_mean.square() / (2 * prior_variance)
    # float32 posteriors reach the prior's variance only up to rounding
    told_nothing = (variance >= prior_variance * (1 - 1e-6)) & (prior_mean == 0)
    return torch.where(told_nothing, gain.clamp_min(0.0), gain)


def _data_damage(mean: Tensor, precision: Tensor, prior_variance: Tensor) -> Tensor:
    return 0.5 * (precision - 1 / prior_variance).clamp_min(0.0) * mean.square()
