"""Diagnose particles: whether the chains have mixed and their samples can be trusted, with traces for reports."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dubito.core.errors import UnsupportedError
from dubito.fitting.diagnosis import Diagnosis, Finding, general_findings
from dubito.fitting.history import History, Trace
from dubito.methods.mcmc import diagnostics
from dubito.methods.mcmc.diagnostics import autocorrelation, rhat
from dubito.methods.mcmc.posterior import ParticlePosterior

# The largest number of weights that are examined, evenly spaced.
LOOKED_AT = 1000
# The R-hat above which chains disagree, the one above which their samples are useless (Gelman & Rubin 1992), and the
# number of effective samples that intervals need.
POOR_RHAT, BAD_RHAT, FEW = 1.05, 1.2, 100.0
# The smallest number of samples per chain for any diagnosis.
FEWEST = 4

# The largest lag of plotted autocorrelations.
LAGS = 50
# The number of outputs and of weights that a report shows.
OUTPUTS, WEIGHTS = 2, 1


@dataclass(frozen=True)
class Mixing:
    """How well a set of quantities has mixed: the largest R-hat and the smallest effective sample sizes."""

    rhat: float  # the largest R-hat
    ess_bulk: float  # the smallest effective sample size for the centre
    ess_tail: float  # the smallest one for the tails

    @classmethod
    def of(cls, draws: Tensor) -> Mixing | None:
        """Measure draws ``[K, S, P]``; None if there are too few, or if all are constant."""
        moving = draws.double().flatten(0, 1).var(0) > 0
        if draws.shape[1] < FEWEST or not bool(moving.any()):
            return None
        draws = draws[..., moving]
        found = (diagnostics.rhat(draws).max(), diagnostics.ess_bulk(draws).min(), diagnostics.ess_tail(draws).min())
        return cls(*(float(value) for value in found))

    def __str__(self) -> str:
        return f"R-hat {self.rhat:.3f}, effective samples {self.ess_bulk:.0f} (bulk), {self.ess_tail:.0f} (tails)"


@dataclass(frozen=True, kw_only=True)
class ChainDiagnosis(Diagnosis):
    """Diagnostics and findings, printed as sentences. A number that does not apply is None.

    Args:
        num_chains: The number of chains.
        num_samples: The number of samples per chain.
        function: Mixing of the network's outputs at some training inputs.
        weights: Mixing of the weights, which can be worse than that of the outputs because weights have symmetries.
        acceptance: The mean acceptance probability.
        divergent: The fraction of divergent transitions.
        energy_fraction: The smallest E-BFMI of a chain.
        momentum_temperature: The mean temperature of the momenta divided by the recipe's; 1 is correct.
        findings: What is wrong and what to change; empty if the samples can be trusted.
        measured: What was measured at the end of the fit.
    """

    num_chains: int
    num_samples: int
    function: Mixing | None
    weights: Mixing | None
    acceptance: float | None
    divergent: float | None
    energy_fraction: float | None
    momentum_temperature: float | None

    def lines(self) -> Iterator[str]:
        """Yield what was measured, one sentence each."""
        yield from super().lines()
        yield f"{self.num_chains} chain(s) of {self.num_samples} samples."
        if self.function:
            yield f"In function space: {self.function}."
        if self.weights:
            yield f"In weight space: {self.weights}."
        numbers = {
            "Mean acceptance": self.acceptance,
            "Fraction of divergent transitions": self.divergent,
            "Energy fraction (E-BFMI)": self.energy_fraction,
            "Temperature of the momenta, relative to the recipe's": self.momentum_temperature,
        }
        yield from (f"{what}: {value:.2f}." for what, value in numbers.items() if value is not None)


def looked_at(posterior: ParticlePosterior) -> Tensor:
    """Return the indices of the sampled numbers that are examined, evenly spaced."""
    size = posterior.samples.shape[-1]
    return torch.linspace(0, size - 1, min(LOOKED_AT, size), dtype=torch.float64).round().long()


def diagnose(posterior: ParticlePosterior) -> ChainDiagnosis:
    """Diagnose the particles and the statistics that were recorded with them."""
    statistics, samples = posterior.statistics, posterior.samples
    is_chain = posterior.recipe.is_chain
    means = {
        name: float(statistics[name].mean()) for name in ("acceptance", "divergent", "kinetic") if name in statistics
    }
    energies = statistics.get("energy")
    temperature = posterior.recipe.temperature
    numbers = ChainDiagnosis(
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
    own = _findings(numbers, posterior.recipe.explores_modes) if is_chain else _about_particles(posterior)
    return replace(numbers, findings=(*own, *general_findings(posterior)), measured=posterior.fit_record)


def _findings(found: ChainDiagnosis, explores: bool) -> Iterator[Finding]:
    """Yield the findings that apply, the most important first."""
    if found.num_samples < FEWEST:
        yield Finding(
            "few samples", "care", f"There are too few samples for a diagnosis: keep at least {FEWEST}, better 100."
        )
        return
    yield from _about_steps(found)
    mixing = found.function
    if mixing is None:
        yield Finding(
            "chains have not moved",
            "no",
            "Do not use these samples: all give the same predictions, so the chains have not moved.",
        )
        return
    if mixing.rhat > POOR_RHAT and explores:
        yield Finding(
            "several modes",
            "care",
            f"The modes predict differently (R-hat {mixing.rhat:.2f} in function space). This is expected of "
            "several modes, but each mode is represented by its own samples only.",
        )
    elif mixing.rhat > POOR_RHAT:
        who = "the chains disagree" if found.num_chains > 1 else "the halves of the chain disagree"
        wrong = mixing.rhat > BAD_RHAT
        yield Finding(
            "chains did not mix", "no" if wrong else "care",
            f"{'Do not use these samples: ' if wrong else 'The chains mix slowly: '}{who} about the predictions (R-hat "
            f"{mixing.rhat:.3f}, above {POOR_RHAT}). Take more samples or a larger thinning, use a longer burn-in, or "
            "select fewer weights.",
        )  # fmt: skip
    elif min(mixing.ess_bulk, mixing.ess_tail) < FEW:
        yield Finding(
            "few effective samples",
            "care",
            "Means can be used, but not tails: the effective sample size in function space is only "
            f"{min(mixing.ess_bulk, mixing.ess_tail):.0f}, below {FEW:.0f}. Take more samples or a larger thinning.",
        )
    if found.weights is not None and found.weights.rhat > POOR_RHAT and mixing.rhat <= POOR_RHAT and not explores:
        yield Finding(
            "weights did not mix",
            "care",
            f"Weights mix worse than functions (R-hat {found.weights.rhat:.2f}): predictions can be used, but "
            "marginals of weights (for pruning or an update) may miss parts of the posterior.",
        )


def _about_steps(found: ChainDiagnosis) -> Iterator[Finding]:
    """Yield the findings about the transitions."""
    if found.divergent is not None and found.divergent > 0.01:
        yield Finding(
            "divergent transitions",
            "care",
            f"{found.divergent:.0%} of the transitions diverged, so parts of the posterior are missing: raise "
            "`acceptance` (to 0.95), or use a prior without narrow regions.",
        )
    if found.acceptance is not None and found.acceptance < 0.5:
        yield Finding(
            "low acceptance",
            "care",
            f"The acceptance is only {found.acceptance:.2f}: use a longer burn-in, or lower step_size.",
        )
    if found.energy_fraction is not None and found.energy_fraction < 0.3:
        yield Finding(
            "slow energy",
            "care",
            f"The energy mixes slowly (E-BFMI {found.energy_fraction:.2f}, below 0.3), so the tails are visited too "
            "rarely: take more samples.",
        )
    if found.momentum_temperature is not None and not 0.8 < found.momentum_temperature < 1.25:
        wrong = found.momentum_temperature > 2
        yield Finding(
            "heated momenta", "no" if wrong else "care",
            f"The momenta have {found.momentum_temperature:.2f} times their correct temperature: gradient noise or a "
            f"too large step heats the chain. {'Do not use these samples. ' if wrong else ''}Lower step_size, use "
            "larger batches, or kernel='sgnht'.",
        )  # fmt: skip


def _about_particles(posterior: ParticlePosterior) -> Iterator[Finding]:
    """Yield the findings about optimized particles, which are no chain: whether there are enough of them."""
    count, size = posterior.num_particles, posterior.selection.num_weights
    if count < size:
        yield Finding(
            "few particles", "care",
            f"{count} particles for {size:,} random weights: they underestimate the variance in most directions; use "
            "more particles, or fewer random weights.",
        )  # fmt: skip


def history(posterior: ParticlePosterior) -> History:
    """Return the text of `diagnose()`, with traces of outputs and of weights if there are enough samples."""
    traces: tuple[Trace, ...] = ()
    if posterior.samples.shape[1] >= FEWEST:
        traces = (*function_traces(posterior, OUTPUTS), *weight_traces(posterior, WEIGHTS))
    return History(tuple(str(diagnose(posterior)).splitlines()), traces)


def function_traces(posterior: ParticlePosterior, num: int) -> tuple[Trace, ...]:
    """Return traces of the `num` outputs at training inputs with the largest R-hat, the largest first."""
    _require_chains(posterior)
    return tuple(_trace(f"output {index}", posterior.trace[..., index]) for index in _worst(posterior.trace, num))


def weight_traces(posterior: ParticlePosterior, num: int) -> tuple[Trace, ...]:
    """Return traces of the `num` weights with the largest R-hat, among those that `diagnose` examines."""
    _require_chains(posterior)
    chosen = looked_at(posterior)
    draws = posterior.samples[..., chosen.to(posterior.samples.device)]
    return tuple(_trace(weight_name(posterior, int(chosen[index])), draws[..., index]) for index in _worst(draws, num))


def weight_name(posterior: ParticlePosterior, index: int) -> str:
    """Return the name of one sampled number: its parameter and index, or the noise."""
    selection = posterior.selection
    for name, span in selection.slices.items():
        if span.start <= index < span.stop:
            place, shape = int(selection.positions(name)[index - span.start]), selection.shapes[name]
            steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            where = ", ".join(str(place // step % size) for step, size in zip(steps, shape, strict=True))
            return f"{name}[{where}]" if shape else name
    return "log noise"


def _require_chains(posterior: ParticlePosterior) -> None:
    if not posterior.recipe.is_chain or posterior.samples.shape[1] < FEWEST:
        raise UnsupportedError("Traces need a chain of at least 4 samples: use SGMCMC or HMC with more samples.")


def _worst(draws: Tensor, num: int) -> list[int]:
    """Return the quantities of draws ``[K, S, P]`` with the largest R-hat, without constant ones."""
    score = torch.where(draws.double().flatten(0, 1).var(0) > 0, rhat(draws), 0.0)
    return torch.sort(score, descending=True, stable=True).indices[:num].tolist()


def _trace(name: str, draws: Tensor) -> Trace:
    return Trace.of(name, draws, autocorrelation(draws)[:, :LAGS])
