"""Train a mixture over factors: one update is one optimizer step on the ELBO."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito.beliefs.objectives import kl_weight
from dubito.core import batches, params
from dubito.core.batches import Batch
from dubito.core.errors import InputError
from dubito.core.params import Params
from dubito.core.settings import Absent, setting
from dubito.fitting.gradient_training import GradientDescent
from dubito.fitting.inference import Inference, Info, Problem, State
from dubito.fitting.output_noise import fit_hyper, fit_log_noise
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.methods.map.posterior import PointPosterior
from dubito.methods.rank1 import families
from dubito.methods.rank1.layers import can_merge, merge
from dubito.methods.rank1.module import Rank1Module, split_blocks
from dubito.methods.rank1.posterior import Components, Rank1Posterior
from dubito.methods.rank1.sites import find_layout, unselected, without_batch_axis
from dubito.networks.normalization import recalibrate
from dubito.networks.swapping import switch_off_checkpointing
from dubito.networks.twin import light_copy

if TYPE_CHECKING:
    from dubito.methods.rank1.recipe import BatchEnsemble, Rank1


# The factor of the learning rate for the noise, which is a single number with a gradient from all data.
NOISE_RATE = 10.0


def expected_log_prob(log_prob: Tensor, bound: str) -> Tensor:
    r"""Return each example's term of the ELBO ``[B]`` from its log-probability under each component ``[K, B]``.

    The ``"mixture"``, $\log \frac1K \sum_k p_k$, is at least the ``"average"``, $\frac1K \sum_k \log p_k$ (Jensen).

    >>> given = torch.tensor([[0.9], [0.1]]).log()
    >>> [round(expected_log_prob(given, bound).exp().item(), 2) for bound in ("average", "mixture")]
    [0.3, 0.5]
    """
    return log_prob.mean(0) if bound == "average" else log_prob.logsumexp(0) - math.log(len(log_prob))


class Rank1Trainer:
    """The steps of `Rank1` and `BatchEnsemble`.

    Args:
        module: A module that is trained already; by default one is made.
    """

    def __init__(self, recipe: Rank1 | BatchEnsemble, problem: Problem, module: Rank1Module | None = None) -> None:
        self.recipe, self.rank1, self.problem = recipe, recipe.as_rank1(), problem
        self.progress, inputs = 0.0, problem.source.first().inputs
        self.left_out: tuple[str, ...] = ()
        if module is None:
            self.module = self._make_module(inputs)
        else:
            self.module, self.left_out = light_copy(module), module.left_out
            self.plain = light_copy(problem.model).eval()
        self.mergeable = self._is_mergeable(inputs)
        self.descent = self._descent()

    def _make_module(self, inputs: Any) -> Rank1Module:
        problem = self.problem
        switch_off_checkpointing(problem.model)
        earlier = _load_start(self.rank1, problem.model)
        # a plain copy of the network, into which `_found` loads the current weights
        self.plain = light_copy(problem.model).eval()
        others = () if self.rank1.weights is None else unselected(self.plain, problem.selection)
        found = find_layout(self.plain, self.rank1.factors, others)
        self.left_out = (*others, *without_batch_axis(self.plain, found, inputs))
        layout = find_layout(self.plain, self.rank1.factors, self.left_out)
        module = Rank1Module(problem.model, layout, self.rank1, generator=problem.generator)
        if earlier is not None:
            _continue_from(module, earlier)
        return module

    def inference(self) -> Inference:
        """Return the steps for the fit loop."""
        epochs = self.problem.training.epochs
        return Inference(self.descent.init, self.update, self.posterior, epochs=epochs, score=self.score)

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Take one optimizer step."""
        self.progress = self.problem.progress_at(state["step"])
        return self.descent.update(state, batch, generator)

    @torch.no_grad()
    def score(self, state: State, batch: Batch) -> Tensor:
        """Return the log-probability of validation targets under the mixture at the medians of the factors."""
        self.descent.load(state)
        found = self._found()
        outputs = found.networks(torch.arange(found.components), found.center())(batch.inputs)
        log_prob = [self.problem.likelihood.log_prob(out, batch.targets, state["hyper"]) for out in outputs]
        return expected_log_prob(torch.stack(log_prob), "mixture")

    @torch.no_grad()
    def posterior(self, state: State) -> Rank1Posterior:
        """Return the posterior at a state."""
        self.descent.load(state)
        if self.rank1.recalibrate:
            recalibrate(self.module, self.problem.source, call=self.module.all_components, rows=None)
        found = self._found()
        found.model = light_copy(found.model)
        hyper = {name: value.detach() for name, value in state["hyper"].items()}
        if "log_noise" in hyper:
            hyper["log_noise"] = self._log_noise(found)
        found.likelihood = self.problem.likelihood.resolved(hyper)
        return found

    def _descent(self) -> GradientDescent:
        problem, rank1 = self.problem, self.rank1
        hyper = fit_hyper(self.plain, problem)
        factors = ("loc", "log_scale")
        decay = dict.fromkeys(dict(self.module.named_parameters()), problem.training.weight_decay + rank1.weight_decay)
        rates = {**dict.fromkeys(factors, rank1.factor_rate), **{f"hyper.{name}": NOISE_RATE for name in hyper}}
        decay |= dict.fromkeys(factors, 0.0)  # factors have their own prior
        return GradientDescent(problem, self.module, self._loss, hyper=hyper, weight_decay=decay, rates=rates)

    def _loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        rank1, likelihood = self.rank1, self.problem.likelihood
        if rank1.batch == "split":
            first = int(torch.randint(rank1.components, ()))
            blocks = split_blocks(batch.num_rows, rank1.components, first)
            outputs = self.module.run(batch.inputs, blocks, once=True)
            explained = likelihood.log_prob(outputs, batch.targets, hyper)
        else:
            every = self.module.all_components(batch.inputs, once=True).flatten(0, 1)
            targets = batch.targets.repeat(rank1.components, *[1] * (batch.targets.ndim - 1))
            log_prob = likelihood.log_prob(every, targets, hyper).view(rank1.components, -1)
            explained = expected_log_prob(log_prob, rank1.bound)
        loss = -explained.sum() / batch.size
        if rank1.prior is None:
            return loss
        warm = kl_weight(self.progress, (0.0, rank1.kl_warmup))
        return loss + self.module.kl() * (warm * batch.num_rows / batch.size / self.problem.num_data)

    def _found(self) -> Rank1Posterior:
        """Return the posterior at the module's current weights; all such posteriors share the network `self.plain`."""
        module, norms = self.module, self.module.component_tensors()
        values = {**dict(module.network.named_parameters()), **dict(module.network.named_buffers())}
        shared = {name: value.detach().mean(0) if name in norms else value for name, value in values.items()}
        bias = module.biases().detach().clone()
        sizes = zip(module.layout.bias_names, bias.mean(0).split(module.layout.bias_sizes), strict=True)
        shared |= {name: value.view_as(values[name]) for name, value in sizes}
        params.load_(self.plain, shared)
        scale = None if module.scale is None else module.scale.detach()
        own = {name: value.clone() for name, value in norms.items()}
        mixture = Components(module.loc.detach().clone(), scale, bias, own, self.left_out, self.mergeable)
        return Rank1Posterior(self.plain, self.problem.likelihood, self.recipe, self.problem.num_data, mixture)

    def _log_noise(self, found: Rank1Posterior) -> Tensor:
        """Return the log of the noise that maximizes the likelihood: the root mean square over all components."""
        squares = []
        for k, factors in enumerate(found.center()):
            network = _Component(found, k, factors)
            squares.append((2 * fit_log_noise(network, self.problem)).exp())
        return torch.stack(squares).mean().log() / 2

    @torch.no_grad()
    def _is_mergeable(self, inputs: Any) -> bool:
        """Return whether a network with merged weights has the module's outputs on a few rows, at random factors."""
        layout, plain = self.module.layout, self.plain
        if self.rank1.perturbation == "additive" or not can_merge(plain, layout):
            return False
        few = batches.take(inputs, slice(0, 3))
        factors = 1 + 0.3 * torch.randn_like(self.module.loc[0])
        bias = self.module.bias[0].detach()
        rows = batches.num_rows(few)
        expected = self.module.eval().run_with(few, [(0, rows)], factors, bias)
        weights = merge(plain, layout, dict(plain.named_parameters()), factors, bias)
        own = {name: value[0] for name, value in self.module.component_tensors().items()}
        found = params.functional_call(plain, {**weights, **own}, few)
        return bool(torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())))


class _Component(nn.Module):
    """Wrap one component as a network."""

    def __init__(self, found: Rank1Posterior, component: int, factors: Tensor) -> None:
        super().__init__()
        self.outputs = found.networks(torch.tensor([component]), factors.unsqueeze(0))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return its outputs."""
        return next(iter(self.outputs(kwargs if kwargs else args)))


def _load_start(rank1: Rank1, network: nn.Module) -> Rank1Posterior | None:
    """Load the shared weights of the `start` posterior into the network; return the posterior if it has components."""
    start = rank1.start
    if isinstance(start, str):
        return None
    if isinstance(start, Absent):
        raise InputError("The posterior that this recipe started from was not saved with it: give it again as `start`.")
    if not isinstance(start, Rank1Posterior | PointPosterior):
        raise InputError(f"Rank1 can start from a MAP, Rank1 or BatchEnsemble posterior, got {start!r}.")
    params.load_(network, params.of(start.model), params.buffers_of(start.model))
    return start if isinstance(start, Rank1Posterior) else None


def _continue_from(module: Rank1Module, earlier: Posterior) -> None:
    """Copy the factors, biases and normalization of an earlier mixture, and its scales if it has any."""
    assert isinstance(earlier, Rank1Posterior)
    if earlier.components != module.recipe.components or earlier.layout != module.layout:
        raise InputError(
            f"The posterior to start from has {earlier.components} components with factors='{earlier.rank1.factors}': "
            "Rank1 must have the same number, on the same layers."
        )
    if earlier.rank1.perturbation != module.recipe.perturbation:
        raise InputError(
            f"The posterior to start from has {earlier.rank1.perturbation} factors: Rank1 must have "
            f"perturbation='{earlier.rank1.perturbation}', too."
        )
    with torch.no_grad():
        module.loc.copy_(families.location(module.recipe.family, earlier.center()))
        module.bias.copy_(earlier.mixture.bias)
        scale = earlier.mixture.scale
        if module.log_scale is not None and scale is not None:
            module.log_scale.copy_(scale.log() if len(scale) == len(module.log_scale) else scale.log().mean(0))
    if module.recipe.normalization == "component":
        params.load_(module.network, earlier.mixture.norms)


@setting
class FinishedRank1(Recipe):
    """A `Rank1` or `BatchEnsemble` fit without training.

    Args:
        module: The converted module.
    """

    setting_name = "rank1.Finished"
    module: Any

    def build(self, problem: Problem) -> Inference:
        """Return an inference without steps."""
        return Rank1Trainer(self.module.settings, problem, self.module).inference()
