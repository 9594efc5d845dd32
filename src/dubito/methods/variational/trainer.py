"""Variational inference as an `Inference`: one update is one optimizer step on the bound."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.objectives import ELBO
from dubito.core import batches, distributed, params
from dubito.core.batches import Batch
from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.core.randomness import draw_seed
from dubito.fitting.gradient_training import GradientDescent, negative_log_likelihood
from dubito.fitting.inference import Inference, Info, Problem, State
from dubito.fitting.output_noise import fit_hyper
from dubito.methods.variational.diagnosis import data_log_likelihood, expected_log_noise, gradient_noise, moving_scales
from dubito.methods.variational.joint import JointModule
from dubito.methods.variational.module import VariationalModule
from dubito.methods.variational.natural import NaturalGradientDescent
from dubito.methods.variational.posterior import Record, VariationalPosterior
from dubito.methods.variational.recipe import Variational

# The number of weight samples for the expected log-likelihood after the fit.
EVALUATION_DRAWS = 8
# The learning rate factor of the noise of a regression, one number that all data inform.
NOISE_RATE = 10.0


class VariationalTrainer:
    """The steps of `Variational`.

    Args:
        module: The converted network.
        before: In an update, the posterior that is the prior.
    """

    def __init__(
        self,
        recipe: Variational,
        problem: Problem,
        module: VariationalModule,
        before: VariationalPosterior | None = None,
    ) -> None:
        if recipe.objective.needs_weight_samples and distributed.is_active():
            raise UnsupportedError(f"{recipe.objective!r} cannot be trained by several processes: use ELBO().")
        self.recipe, self.problem, self.module, self.before = recipe, problem, module, before
        self.progress, self.weight_noise = 0.0, torch.Generator(problem.source.device)
        self.temperature = recipe.kl_temperature(problem.likelihood)
        self._try_one_row()
        own = {**dict(module.network.named_parameters()), **dict(module.network.named_buffers())}
        self.plain = module.plain_network(own).eval()  # weights of a state are loaded into this copy
        self.hyper = fit_hyper(problem.model, problem)
        self.descent = self._descent()

    def _descent(self) -> GradientDescent | NaturalGradientDescent:
        """Return the optimization."""
        recipe, problem, module = self.recipe, self.problem, self.module
        rates = {f"hyper.{name}": NOISE_RATE for name in self.hyper}
        if isinstance(recipe.objective, ELBO) and recipe.optimizer == "natural":
            return NaturalGradientDescent(
                problem, module, negative_log_likelihood(problem), temperature=self.temperature,
                num_samples=recipe.objective.num_samples, hyper=self.hyper, rates=rates,
            )  # fmt: skip
        scales = [name for name, _ in module.named_parameters() if not name.startswith("network.")]
        rates |= dict.fromkeys(scales, recipe.scale_rate)
        no_decay = dict.fromkeys([*scales, *(f"network.{name}" for name in module.selection.names)], 0.0)
        return GradientDescent(
            problem, module, self._loss, hyper=self.hyper, weight_decay=no_decay, rates=rates, codes=False
        )

    def inference(self) -> Inference:
        """Return the steps for the fit loop."""
        init, epochs = self.descent.init, self.problem.training.epochs
        return Inference(init, self.update, self.posterior, epochs=epochs, score=self.score)

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Take one optimizer step."""
        self.progress = self.problem.progress_at(state["step"])
        if self.module.sampled:
            self.weight_noise.manual_seed(draw_seed(generator))  # a process without rows never calls `_loss`
        return self.descent.update(state, batch, generator)

    def _loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        weight = self.recipe.kl_weight(self.progress)
        with self.module.drawing_from(self.weight_noise):
            return self.recipe.objective(
                self.module, batch.inputs, batch.targets, num_data=self.problem.num_data,
                likelihood=self.problem.likelihood, temperature=self.temperature * weight,
                hyper=hyper, batch_size=batch.size,
            )  # fmt: skip

    @torch.no_grad()
    def score(self, state: State, batch: Batch) -> Tensor:
        """Return the log-probability of validation targets under the network at the means."""
        values = {**state["params"], **state["buffers"]}
        means = {n.removeprefix("network."): value for n, value in values.items() if n.startswith("network.")}
        outputs = params.functional_call(self.plain, means, batch.inputs)
        return self.problem.likelihood.log_prob(outputs, batch.targets, state["hyper"])

    @torch.no_grad()
    def posterior(self, state: State) -> VariationalPosterior:
        """Return the posterior, and measure how well it fits the training data."""
        module, problem = self._loaded(state), self.problem
        network = self._plain_network(module)
        draws = [module.sample_weights() for _ in range(EVALUATION_DRAWS)]
        likelihood = self._likelihood(state, network, draws)
        means = dict(network.named_parameters())
        scales, slices = module.scales(), module.selection.slices
        priors = {
            name: part.prior.fitted(part.chosen(means[name]), scales[slices[name]].view_as(part.log_scale))
            for name, part in module.parts()
        }
        record = self._record(state, module, network, draws, likelihood)
        count = problem.num_data + (self.before.num_data if self.before else 0)
        factor = module.factor.detach().clone() if isinstance(module, JointModule) else None
        found = (module.selection, scales, priors, record, factor)
        return VariationalPosterior(network, likelihood, self.recipe, count, *found)

    def _likelihood(self, state: State, network: nn.Module, draws: list[Params]) -> Likelihood:
        """Return the likelihood with its learned numbers; the noise is the best one for the drawn weights."""
        hyper = {name: value.detach() for name, value in state["hyper"].items()}
        if "log_noise" in hyper:
            hyper["log_noise"] = expected_log_noise(network, draws, self.problem.source)
        return self.problem.likelihood.resolved(hyper)

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
        """Return the log-likelihood of the network before the fit, at the best noise for it."""
        if self.recipe.redraws or self.problem.training.epochs == 0:
            return None  # some weights were newly drawn, or none has moved
        likelihood = self.problem.likelihood.resolved(self.hyper)
        return float(data_log_likelihood(self.problem.model.eval(), [{}], self.problem.source, likelihood)[0])

    def _loaded(self, state: State) -> VariationalModule:
        self.descent.load(state)
        return self.module

    def _plain_network(self, module: VariationalModule) -> nn.Module:
        """Return the network at the means, with the requires_grad flags of the user's model."""
        network, asked = module.mean_module(), dict(self.problem.model.named_parameters())
        for name, value in network.named_parameters():
            value.requires_grad_(asked[name].requires_grad)
        return network

    def _try_one_row(self) -> None:
        """Call the module once, to find layers that a pass calls several times before the first step."""
        inputs = batches.take(self.problem.source.first().inputs, slice(0, 1))
        with torch.no_grad():
            params.call(self.module.eval(), inputs)
