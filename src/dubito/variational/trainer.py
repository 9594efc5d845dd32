"""Variational inference as an `Inference`: one update is one step on the bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dubito import batches, distributed, params
from dubito.batches import Batch, Source
from dubito.descent import Descent
from dubito.errors import UnsupportedError
from dubito.inference import Inference, Info, Problem, State
from dubito.likelihoods import Likelihood
from dubito.params import Params
from dubito.point import fit_log_noise
from dubito.variational.module import VariationalModule
from dubito.variational.posterior import Record, VariationalPosterior

if TYPE_CHECKING:
    from dubito.variational.recipe import Variational

# Weight draws over which the expected log-likelihood of the data is taken after the fit.
EVALUATION_DRAWS = 8
# The share of the squared first moment of Adam that is left of pure noise, (1 - β₁) / (1 + β₁).
NOISE_LEFT = 0.1 / 1.9


class Trainer:
    """The steps of `Variational`.

    Args:
        recipe: The recipe.
        problem: Model, data and likelihood.
        module: The converted network.
        before: The posterior that is the prior, where this is an update.
    """

    def __init__(
        self,
        recipe: Variational,
        problem: Problem,
        module: VariationalModule,
        before: VariationalPosterior | None = None,
    ) -> None:
        if recipe.objective.needs_weight_samples and distributed.is_active():
            raise UnsupportedError(f"{recipe.objective!r} cannot be trained by several processes; use the ELBO there.")
        self.recipe, self.problem, self.module, self.before = recipe, problem, module, before
        self.progress = 0.0
        self._try_one_row()
        scales = [name for name, _ in module.named_parameters() if name.startswith("posterior.")]
        no_decay = dict.fromkeys([*scales, *(f"network.{name}" for name in module.selection.names)], 0.0)
        hyper = problem.likelihood.hyper()
        self.descent = Descent(problem, module, self._loss, hyper=hyper, weight_decay=no_decay)

    def inference(self) -> Inference:
        """Return the steps for the fit loop."""
        init, epochs = self.descent.init, self.problem.training.epochs
        return Inference(init, self.update, self.posterior, epochs=epochs, score=self.score)

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Take one optimizer step."""
        self.progress = self.problem.progress_at(state["step"])
        return self.descent.update(state, batch, generator)

    def _loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        warmup = self.recipe.kl_warmup
        weight = min(self.progress / warmup, 1.0) if warmup else 1.0
        return self.recipe.objective(
            self.module, batch.inputs, batch.targets, num_data=self.problem.num_data,
            likelihood=self.problem.likelihood, temperature=self.recipe.temperature * weight,
            hyper=hyper, batch_size=batch.size,
        )  # fmt: skip

    @torch.no_grad()
    def score(self, state: State, batch: Batch) -> Tensor:
        """The log-probability of validation targets under the network at the means."""
        network = self._loaded(state).mean_module()
        return self.problem.likelihood.log_prob(params.call(network, batch.inputs), batch.targets, state["hyper"])

    @torch.no_grad()
    def posterior(self, state: State) -> VariationalPosterior:
        """Return what was learned, and measure on the training data how well it explains them."""
        module, problem = self._loaded(state), self.problem
        network = self._plain_network(module)
        draws = [module.sample_weights() for _ in range(EVALUATION_DRAWS)]
        hyper = {name: value.detach() for name, value in state["hyper"].items()}
        if "log_noise" in hyper:
            hyper["log_noise"] = expected_log_noise(network, draws, problem.source)
        likelihood = problem.likelihood.resolved(hyper)
        means = dict(network.named_parameters())
        priors = {n: part.prior.fitted(part.chosen(means[n]), part.scale) for n, part in module.parts()}
        record = self._record(state, module, network, draws, likelihood)
        count = problem.num_data + (self.before.num_data if self.before else 0)
        found = (module.selection, module.scales(), priors, record)
        return VariationalPosterior(network, likelihood, self.recipe, count, *found)

    def _record(
        self, state: State, module: VariationalModule, network: nn.Module, draws: list[Params], likelihood: Likelihood
    ) -> Record:
        totals = data_log_likelihood(network, [*draws, {}], self.problem.source, likelihood)
        explained = totals[:-1]
        kl = torch.stack([module.kl().double() for _ in range(EVALUATION_DRAWS)]).mean()
        earlier = None if self.before is None else self.before.bound
        return Record(
            num_data=self.problem.num_data,
            log_likelihood=float(explained.mean()),
            log_likelihood_error=float(explained.std() / math.sqrt(len(explained))),
            log_likelihood_at_mean=float(totals[-1]),
            log_likelihood_at_start=self._at_start(),
            kl=float(kl),
            gradient_noise=gradient_noise(state, [f"network.{name}" for name in module.selection.names]),
            moving_scales=moving_scales(state),
            earlier_bound=earlier,
        )

    def _at_start(self) -> float | None:
        """How well the network that was given explains the data, at the noise that suits it best."""
        if self.recipe.starts_fresh:
            return None
        network, likelihood = self.problem.model.eval(), self.problem.likelihood
        if "log_noise" in likelihood.hyper():
            likelihood = likelihood.resolved({"log_noise": fit_log_noise(network, self.problem)})
        return float(data_log_likelihood(network, [{}], self.problem.source, likelihood)[0])

    def _loaded(self, state: State) -> VariationalModule:
        self.descent.load(state)
        return self.module

    def _plain_network(self, module: VariationalModule) -> nn.Module:
        """The network at the means, with the gradients that the user's own asks for."""
        network, asked = module.mean_module(), dict(self.problem.model.named_parameters())
        for name, value in network.named_parameters():
            value.requires_grad_(asked[name].requires_grad)
        return network

    def _try_one_row(self) -> None:
        """Call the module once, so that layers which a pass calls several times are known before the first step."""
        inputs = batches.take(self.problem.source.first().inputs, slice(0, 1))
        with torch.no_grad():
            params.call(self.module.eval(), inputs)


def gradient_noise(state: State, names: list[str]) -> float | None:
    """Return the share of the squared gradient of some parameters that is noise, from the moments that Adam keeps."""
    moments = _adam_moments(state, names)
    if moments is None:
        return None
    mean, square = moments
    signal = (float(mean.square().sum() / square.sum()) - NOISE_LEFT) / (1 - NOISE_LEFT)
    return 1 - min(max(signal, 0.0), 1.0)


def moving_scales(state: State) -> float | None:
    """Return the share of scales whose last gradients mostly agreed in their sign: they were still on their way."""
    names = [name for name in state["params"] if name.startswith("posterior.")]
    moments = _adam_moments(state, names)
    if moments is None:
        return None
    mean, square = moments
    return float((mean.abs() > 0.5 * square.sqrt()).double().mean())


def _adam_moments(state: State, names: list[str]) -> tuple[Tensor, Tensor] | None:
    """The running mean of gradients and of their squares, flat; None for another optimizer or before the first step."""
    moments, step = state["optimizer"], state["step"]
    if "first" not in moments or step == 0:
        return None
    first, second = (torch.cat([moments[k][n].double().flatten() for n in names]) for k in ("first", "second"))
    return first / (1 - 0.9**step), (second / (1 - 0.999**step)).clamp_min(1e-300)


@torch.no_grad()
def data_log_likelihood(network: nn.Module, draws: list[Params], source: Source, likelihood: Likelihood) -> Tensor:
    """Return the log-likelihood of all data at each draw of the weights, ``[S]``."""

    def measure(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return likelihood.log_prob(outputs, targets).double().sum(), len(outputs)

    return _summed(network, draws, source, measure)[:, 0]


@torch.no_grad()
def expected_log_noise(network: nn.Module, draws: list[Params], source: Source) -> Tensor:
    """Return the logarithm of the noise that maximizes the bound: the root of the expected squared residual."""

    def measure(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        residuals = outputs.double() - targets.reshape(outputs.shape)
        return residuals.square().sum(), residuals.numel()

    square, count = _summed(network, draws, source, measure).sum(0)
    return (square / count).clamp_min(1e-12).log() / 2


def _summed(
    network: nn.Module, draws: list[Params], source: Source, measure: Callable[[Tensor, Tensor], tuple[Tensor, int]]
) -> Tensor:
    """Sum a measure of outputs and targets, and a count, over all data for each draw: ``[S, 2]``."""
    totals = torch.zeros(len(draws), 2, dtype=torch.float64, device=source.device)
    for batch in source.replay():
        for total, draw in zip(totals, draws if batch.num_rows else (), strict=False):
            value, count = measure(params.functional_call(network, draw, batch.inputs), batch.targets)
            total += torch.stack([value, value.new_tensor(count)])
    distributed.sum_([totals])
    return totals
