"""A doctor for particles: have the chains mixed, and can their samples be trusted?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dubito.methods.mcmc import diagnostics

if TYPE_CHECKING:
    from dubito.methods.mcmc.posterior import ParticlePosterior

# At most so many weights are looked at, evenly spaced.
LOOKED_AT = 1000
# An R-hat above which chains disagree, and how many effective samples intervals need.
POOR_RHAT, FEW = 1.05, 100.0
# The samples of a chain below which nothing can be said.
FEWEST = 4


@dataclass(frozen=True)
class Mixing:
    """How well one set of quantities has mixed: the worst R-hat, the fewest effective samples.

    Args:
        rhat: The largest R-hat.
        ess_bulk: The smallest effective sample size for the centre.
        ess_tail: The smallest one for the tails.
    """

    rhat: float
    ess_bulk: float
    ess_tail: float

    @classmethod
    def of(cls, draws: Tensor) -> Mixing | None:
        """Measure draws ``[K, S, P]``; None where there are too few, or none that moves."""
        moving = draws.double().flatten(0, 1).var(0) > 0
        if draws.shape[1] < FEWEST or not bool(moving.any()):
            return None
        draws = draws[..., moving]
        found = (diagnostics.rhat(draws).max(), diagnostics.ess_bulk(draws).min(), diagnostics.ess_tail(draws).min())
        return cls(*(float(value) for value in found))

    def __str__(self) -> str:
        return f"R-hat {self.rhat:.3f}, effective samples {self.ess_bulk:.0f} (bulk), {self.ess_tail:.0f} (tails)"


@dataclass(frozen=True)
class Diagnosis:
    """Numbers and findings; prints as plain words. What does not apply is None.

    Args:
        num_chains: The number of chains.
        num_samples: Samples of each.
        function: Mixing of what the network says about some training inputs.
        weights: Mixing of the weights themselves, which may be poor where functions mix well: weights have symmetries.
        acceptance: The mean acceptance.
        divergent: The share of divergent transitions.
        energy_fraction: The smallest E-BFMI of a chain.
        momentum_temperature: The mean temperature of the momenta over that of the recipe; 1 is right.
        findings: What is wrong and what to change; empty where the samples can be trusted.
    """

    num_chains: int
    num_samples: int
    function: Mixing | None
    weights: Mixing | None
    acceptance: float | None
    divergent: float | None
    energy_fraction: float | None
    momentum_temperature: float | None
    findings: tuple[str, ...] = ()

    @property
    def trustworthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        lines = [f"{self.num_chains} chain(s) of {self.num_samples} samples."]
        lines += [f"In function space: {self.function}."] if self.function else []
        lines += [f"In weight space: {self.weights}."] if self.weights else []
        numbers = {
            "Mean acceptance": self.acceptance,
            "Share of divergent transitions": self.divergent,
            "Energy fraction (E-BFMI)": self.energy_fraction,
            "Temperature of the momenta over what it should be": self.momentum_temperature,
        }
        lines += [f"{what}: {value:.2f}." for what, value in numbers.items() if value is not None]
        return "\n".join([*lines, *(self.findings or ("The samples can be trusted.",))])


def looked_at(posterior: ParticlePosterior) -> Tensor:
    """Return which sampled numbers are looked at, evenly spaced among all."""
    size = posterior.samples.shape[-1]
    return torch.linspace(0, size - 1, min(LOOKED_AT, size), dtype=torch.float64).round().long()


def diagnose(posterior: ParticlePosterior) -> Diagnosis:
    """Look at the particles and at what was written down along the way."""
    statistics, samples = posterior.statistics, posterior.samples
    is_chain = posterior.recipe.is_chain
    means = {
        name: float(statistics[name].mean()) for name in ("acceptance", "divergent", "kinetic") if name in statistics
    }
    energies = statistics.get("energy")
    temperature = posterior.recipe.temperature
    numbers = Diagnosis(
        num_chains=samples.shape[0],
        num_samples=samples.shape[1],
        function=Mixing.of(posterior.trace) if is_chain else None,
        weights=Mixing.of(samples[..., looked_at(posterior).to(samples.device)]) if is_chain else None,
        acceptance=means.get("acceptance"),
        divergent=means.get("divergent"),
        energy_fraction=None if energies is None or energies.shape[1] < FEWEST else
        float(diagnostics.energy_fraction(energies).min()),
        momentum_temperature=means["kinetic"] / temperature if "kinetic" in means else None,
    )  # fmt: skip
    findings = tuple(_findings(numbers, posterior.recipe.explores_modes)) if is_chain else _about_particles(posterior)
    return replace(numbers, findings=findings)


def _findings(found: Diagnosis, explores: bool) -> Iterator[str]:
    """The sentences that apply, the most important first."""
    if found.num_samples < FEWEST:
        yield f"There are too few samples to judge: keep at least {FEWEST}, better 100."
        return
    yield from _about_steps(found)
    mixing = found.function
    if mixing is None:
        yield "Do not trust it: the predictions are the same at every sample, so the chains have not moved."
        return
    if mixing.rhat > POOR_RHAT and explores:
        yield (
            f"The modes predict differently (R-hat {mixing.rhat:.2f} in function space): that is what several modes "
            "are for, but each of them is only as well covered as its own samples."
        )
    elif mixing.rhat > POOR_RHAT:
        who = "the chains disagree" if found.num_chains > 1 else "the halves of the chain disagree"
        yield (
            f"Do not trust it: {who} about the predictions (R-hat {mixing.rhat:.2f}, above {POOR_RHAT}). Run it "
            "longer, with more burn-in, or on fewer weights."
        )
    elif min(mixing.ess_bulk, mixing.ess_tail) < FEW:
        yield (
            f"Trust means, not tails: only {min(mixing.ess_bulk, mixing.ess_tail):.0f} of the samples count as "
            f"independent in function space, and {FEW:.0f} are wanted. Take more samples or a larger thinning."
        )
    if found.weights is not None and found.weights.rhat > POOR_RHAT and mixing.rhat <= POOR_RHAT and not explores:
        yield (
            f"Weights mix worse than functions (R-hat {found.weights.rhat:.2f}): predictions can be used, but "
            "marginals of weights (for pruning, or an update) are those of the part that was visited."
        )


def _about_steps(found: Diagnosis) -> Iterator[str]:
    """What the transitions themselves tell."""
    if found.divergent is not None and found.divergent > 0.01:
        yield (
            f"{found.divergent:.0%} of the transitions diverged, so parts of the posterior are left out: aim at a "
            "higher acceptance (0.95), or use a prior without such narrow places."
        )
    if found.acceptance is not None and found.acceptance < 0.5:
        yield f"The acceptance is only {found.acceptance:.2f}: adapt longer, or lower step_size."
    if found.energy_fraction is not None and found.energy_fraction < 0.3:
        yield (
            f"The energy mixes slowly (E-BFMI {found.energy_fraction:.2f}, below 0.3), so the tails are reached too "
            "rarely: take more samples."
        )
    if found.momentum_temperature is not None and not 0.8 < found.momentum_temperature < 1.25:
        yield (
            f"The momenta are at {found.momentum_temperature:.2f} of their temperature: gradient noise or too large a "
            "step heats the chain. Lower step_size, use larger batches, or kernel='sgnht'."
        )


def _about_particles(posterior: ParticlePosterior) -> tuple[str, ...]:
    """Particles that were optimized are no chain; what can be said is whether they are many enough."""
    count, size = posterior.num_particles, posterior.selection.num_weights
    if count >= size:
        return ()
    return (
        f"{count} particles for {size:,} random weights: their spread is too narrow in most directions; use more "
        "particles, or fewer random weights.",
    )
