"""A doctor for variational posteriors: is it healthy, and if not, what to change."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dubito.variational.posterior import VariationalPosterior

# A weight whose divergence is below this many nats says no more than its prior.
COLLAPSED = 0.05
# A scale within this factor of where it started has not been learned.
UNMOVED = 1.1


@dataclass(frozen=True)
class Diagnosis:
    """Numbers and findings; prints as plain words.

    Args:
        kl_per_datum: The divergence from the prior, per example, in nats.
        nll_per_datum: The expected negative log-likelihood under the posterior, per example.
        nll_at_mean: That of the network at the means.
        nll_at_start: That of the network that was given, or None for a fresh start.
        collapsed: The share of random weights that are back at their prior, or None without a closed form.
        unmoved: The share of scales that are still where they started.
        gradient_noise: The share of the last squared gradients that is noise, or None.
        findings: What is wrong and what to change; empty for a healthy posterior.
    """

    kl_per_datum: float
    nll_per_datum: float
    nll_at_mean: float
    nll_at_start: float | None
    collapsed: float | None
    unmoved: float
    gradient_noise: float | None
    findings: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        lines = [
            f"Per datum: expected NLL {self.nll_per_datum:.3f} (network at the means {self.nll_at_mean:.3f}"
            + ("" if self.nll_at_start is None else f", network given {self.nll_at_start:.3f}")
            + f"), divergence from the prior {self.kl_per_datum:.3f} nats."
        ]
        lines += [] if self.collapsed is None else [f"Weights back at their prior: {self.collapsed:.0%}."]
        lines += [] if self.gradient_noise is None else [f"Noise in the last gradients: {self.gradient_noise:.0%}."]
        return "\n".join([*lines, *(self.findings or ("The posterior looks healthy.",))])


def diagnose(posterior: VariationalPosterior) -> Diagnosis:
    """Look at a posterior and at what was measured when it was fitted."""
    record, count = posterior.record, posterior.record.num_data
    divergences = posterior.divergences()
    start = record.log_likelihood_at_start
    initial = posterior.recipe.initial_scale
    moved = (posterior.scale / initial).log().abs() > math.log(UNMOVED)
    numbers = Diagnosis(
        kl_per_datum=record.kl / count,
        nll_per_datum=-record.log_likelihood / count,
        nll_at_mean=-record.log_likelihood_at_mean / count,
        nll_at_start=None if start is None else -start / count,
        collapsed=None if divergences is None else float((divergences < COLLAPSED).double().mean()),
        unmoved=1 - float(moved.double().mean()),
        gradient_noise=record.gradient_noise,
        findings=(),
    )
    return replace(numbers, findings=tuple(_findings(numbers, is_update=posterior.num_data > count)))


def _findings(found: Diagnosis, is_update: bool) -> list[str]:
    """The sentences that apply, the most important first."""
    findings = []
    reference = min(x for x in (found.nll_at_start, found.nll_at_mean) if x is not None)
    if found.nll_per_datum - reference > 0.1 + 0.1 * abs(reference):
        findings.append(
            f"It underfits: NLL {found.nll_per_datum:.3f} where one network reaches {reference:.3f}. Lower the "
            "temperature (0.1, say), choose fewer random weights (select.last_layer()), or use a learned prior "
            "(priors.Normal(scale='learn'))."
        )
    if found.unmoved > 0.5 and not is_update:
        findings.append(
            f"{found.unmoved:.0%} of the scales are still at initial_scale: train longer, with a larger learning rate "
            "or smaller batches."
        )
    if found.collapsed is not None and found.collapsed > 0.5 and not is_update:
        findings.append(
            f"{found.collapsed:.0%} of the random weights are back at their prior and carry nothing: a smaller network "
            "would do, or a lower temperature."
        )
    if found.kl_per_datum > max(found.nll_per_datum, 1.0) and not is_update:
        findings.append(
            f"The divergence ({found.kl_per_datum:.2f} nats per datum) outweighs the likelihood: there are many random "
            "weights for this much data; choose fewer, or a prior around the model (priors.Normal('model', 0.1))."
        )
    return findings
