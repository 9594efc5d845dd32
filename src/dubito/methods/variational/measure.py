"""Measurements after a variational fit: the log-likelihood of the data, and whether training had converged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import distributed, params
from dubito.core.batches import Source
from dubito.core.params import Params
from dubito.fitting.inference import State

# Adam's squared first moment over its second moment for gradients of pure noise, (1 - β₁) / (1 + β₁).
NOISE_LEFT = 0.1 / 1.9


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
