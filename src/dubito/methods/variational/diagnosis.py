"""Measure variational posteriors after the fit, and say whether they can be trusted, and if not, what to change."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.priors import ARD, LogUniform
from dubito.core import distributed, params
from dubito.core.batches import Source
from dubito.core.params import Params
from dubito.fitting.diagnosis import Diagnosis, Finding, Severity, general_findings
from dubito.fitting.fit_record import FitRecord
from dubito.fitting.inference import State

if TYPE_CHECKING:
    from dubito.methods.variational.posterior import VariationalPosterior


# A weight whose KL divergence is below this many nats is back at its prior.
COLLAPSED = 0.05

# Adam's squared first moment over its second moment for gradients of pure noise, (1 - β₁) / (1 + β₁).
NOISE_LEFT = 0.1 / 1.9


@dataclass(frozen=True, kw_only=True)
class VariationalDiagnosis(Diagnosis):
    """Diagnostics and findings, printed as sentences. A number that could not be measured is None.

    Args:
        kl_per_datum: The KL divergence from the prior, per example, in nats.
        nll_per_datum: The expected negative log-likelihood under the posterior, per example.
        nll_at_mean: The negative log-likelihood of the network at the means, per example.
        nll_at_start: The same of the network before the fit.
        collapsed: The fraction of random weights that are back at their prior.
        moving_scales: The fraction of scales that had not converged when training ended.
        gradient_noise: The fraction of the last squared gradients that is noise.
        findings: What is wrong and what to change; empty if the posterior is trustworthy.
        measured: What was measured at the end of the fit.
    """

    kl_per_datum: float
    nll_per_datum: float
    nll_at_mean: float
    nll_at_start: float | None
    collapsed: float | None
    moving_scales: float | None
    gradient_noise: float | None

    @property
    def healthy(self) -> bool:
        """The old spelling of `trustworthy`."""
        warnings.warn("`healthy` is the old spelling: write `trustworthy`.", DeprecationWarning, stacklevel=2)
        return self.trustworthy

    def lines(self) -> Iterator[str]:
        """Yield what was measured, one sentence each."""
        yield from super().lines()
        given = "" if self.nll_at_start is None else f", network before the fit {self.nll_at_start:.3f}"
        yield (
            f"Per datum: expected NLL {self.nll_per_datum:.3f} (network at the means {self.nll_at_mean:.3f}{given}), "
            f"KL divergence from the prior {self.kl_per_datum:.3f} nats."
        )
        shares = {
            "Weights back at their prior": self.collapsed,
            "Scales still moving at the end": self.moving_scales,
            "Noise in the last gradients": self.gradient_noise,
        }
        yield from (f"{what}: {share:.0%}." for what, share in shares.items() if share is not None)


def diagnose(posterior: VariationalPosterior) -> VariationalDiagnosis:
    """Diagnose a posterior from its scales and the measurements of its fit."""
    record, count = posterior.record, posterior.record.num_data
    divergences, start = posterior.divergences(), record.log_likelihood_at_start
    numbers = VariationalDiagnosis(
        kl_per_datum=record.kl / count,
        nll_per_datum=-record.log_likelihood / count,
        nll_at_mean=-record.log_likelihood_at_mean / count,
        nll_at_start=None if start is None else -start / count,
        collapsed=None if divergences is None else float((divergences < COLLAPSED).double().mean()),
        moving_scales=record.moving_scales,
        gradient_noise=record.gradient_noise,
    )
    is_update = posterior.num_data > count
    is_sparse = isinstance(posterior.recipe.prior, ARD | LogUniform)
    severity: Severity = "care" if _is_as_good_as_plain(posterior.fit_record) else "no"
    findings = (*_findings(numbers, is_update, is_sparse, severity), *general_findings(posterior))
    return replace(numbers, findings=findings, measured=posterior.fit_record)


def _is_as_good_as_plain(record: FitRecord | None) -> bool:
    """Return whether the posterior predicts as well as the plain network did on the held-out examples of the search."""
    if record is None or record.held_out_score is None:
        return False
    return (record.validation or record.training).log_score >= record.held_out_score


def _findings(found: VariationalDiagnosis, is_update: bool, is_sparse: bool, underfits: Severity) -> Iterator[Finding]:
    """Yield the findings that apply, the most important first."""
    reference = min(nll for nll in (found.nll_at_start, found.nll_at_mean) if nll is not None)
    if _is_worse(found.nll_per_datum, reference):
        yield Finding(
            "underfits",
            underfits,
            f"It underfits: NLL {found.nll_per_datum:.3f}, while one network reaches {reference:.3f}. Lower the "
            "temperature (such as 0.1), or select fewer random weights (select.last_layer()).",
        )
    noisy = found.gradient_noise is not None and found.gradient_noise > 0.9
    if noisy and _is_worse(found.nll_at_mean, found.nll_at_start) and not is_update:
        yield Finding(
            "noisy means",
            "care",
            f"The means fit the data worse than the network before the fit (NLL {found.nll_at_mean:.3f}), and "
            f"{found.gradient_noise:.0%} of the last gradients was noise: use larger batches, more samples "
            "(objectives.ELBO(num_samples=4)), estimator='local', or a lower learning rate.",
        )
    if found.moving_scales is not None and found.moving_scales > 0.5:
        yield Finding(
            "moving scales",
            "care",
            f"{found.moving_scales:.0%} of the scales were still moving when training ended, so they depend on "
            "initial_scale: train longer, or with a larger learning rate.",
        )
    elif found.kl_per_datum > max(found.nll_per_datum, 1.0) and not is_update and not is_sparse:
        yield Finding(
            "large divergence",
            "care",
            f"The KL divergence ({found.kl_per_datum:.2f} nats per datum) exceeds the NLL: there are too many random "
            "weights for the data; select fewer, or use a prior around the model (priors.Normal('model', 0.1)).",
        )
    if found.collapsed is not None and found.collapsed > 0.5 and not is_update and not is_sparse:
        yield Finding(
            "collapsed",
            "care",
            f"{found.collapsed:.0%} of the random weights are back at their prior and carry no information: use a "
            "smaller network, or a lower temperature.",
        )


def _is_worse(nll: float, reference: float | None) -> bool:
    """Return whether `nll` exceeds the reference by more than 0.1 nats and by more than 10 %."""
    return reference is not None and nll - reference > 0.1 + 0.1 * abs(reference)


@torch.no_grad()
def data_log_likelihood(network: nn.Module, draws: list[Params], source: Source, likelihood: Likelihood) -> Tensor:
    """Return the log-likelihood of all data for each weight sample, ``[S]``."""

    def measure(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return likelihood.log_prob(outputs, targets).double().sum(), len(outputs)

    return _summed(network, draws, source, measure)[:, 0]


@torch.no_grad()
def expected_log_noise(network: nn.Module, draws: list[Params], source: Source) -> Tensor:
    """Return the logarithm of the noise that maximizes the ELBO: the root of the expected squared residual."""

    def measure(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        residuals = outputs.double() - targets.reshape(outputs.shape)
        return residuals.square().sum(), residuals.numel()

    square, count = _summed(network, draws, source, measure).sum(0)
    return (square / count).clamp_min(1e-12).log() / 2


def _summed(
    network: nn.Module, draws: list[Params], source: Source, measure: Callable[[Tensor, Tensor], tuple[Tensor, int]]
) -> Tensor:
    """Sum a measure of outputs and targets, and a count, over all data for each weight sample: ``[S, 2]``."""
    totals = torch.zeros(len(draws), 2, dtype=torch.float64, device=source.device)
    for batch in source.replay():
        for total, draw in zip(totals, draws if batch.num_rows else (), strict=False):
            value, count = measure(params.functional_call(network, draw, batch.inputs), batch.targets)
            total += torch.stack([value, value.new_tensor(count)])
    distributed.sum_([totals])
    return totals


def gradient_noise(state: State, names: list[str]) -> float | None:
    """Return the fraction of the squared gradient of some parameters that is noise, from Adam's moments."""
    moments = _adam_moments(state, names)
    if moments is None:
        return None
    mean, square = moments
    signal = (float(mean.square().sum() / square.sum()) - NOISE_LEFT) / (1 - NOISE_LEFT)
    return 1 - min(max(signal, 0.0), 1.0)


def moving_scales(state: State) -> float | None:
    """Return the fraction of scales that have not converged: their last gradients mostly had the same sign."""
    names = [name for name in state["params"] if name.startswith("posterior.")]
    moments = _adam_moments(state, names)
    if moments is None:
        return None
    mean, square = moments
    return float((mean.abs() > 0.5 * square.sqrt()).double().mean())


def _adam_moments(state: State, names: list[str]) -> tuple[Tensor, Tensor] | None:
    """Return the running means of gradients and of their squares, flat; None if the optimizer has none."""
    moments, step = state["optimizer"], state["step"]
    names = [name for name in names if name in moments.get("first", ())]
    if not names or step == 0:
        return None
    first, second = (torch.cat([moments[k][n].double().flatten() for n in names]) for k in ("first", "second"))
    return first / (1 - 0.9**step), (second / (1 - 0.999**step)).clamp_min(1e-300)
