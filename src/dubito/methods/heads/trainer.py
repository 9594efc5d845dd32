"""Train a network with a random last layer: on the closed-form bound, or on the likelihood with a Laplace step last."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import batches, distributed, params
from dubito.core.batches import Batch
from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.curvature.output_columns import hessian_diagonal
from dubito.fitting.gradient_training import GradientDescent
from dubito.fitting.inference import Inference, Problem, State
from dubito.fitting.output_noise import fit_log_noise
from dubito.methods.heads.bound import expected_log_prob, expected_preference
from dubito.methods.heads.module import GaussianHead, check_size, linear_of
from dubito.methods.heads.posterior import HeadPosterior
from dubito.networks.heads import FeatureHead, attach, bound_layers, effective
from dubito.networks.output_layer import Tap, gives_outputs, last_layer
from dubito.networks.swapping import swap_class
from dubito.networks.twin import copied, light_copy, twin

# The initial standard deviation of a weight, as a share of that of its prior.
INITIAL = 0.1
# The learning rate factor of the layer behind a feature map, whose inputs have length 1: its weights are large.
HEAD_RATE = 10.0
# The number of examples whose features set lengthscales and inducing points.
EXAMPLES = 1024
# The learning rate factor of the noise of a regression, one number that all data inform.
NOISE_RATE = 10.0


class BoundTrainer:
    """The steps of `VBLL` and `DKL`: one update is one optimizer step on the bound."""

    def __init__(self, recipe: Any, problem: Problem) -> None:
        self.recipe, self.problem = recipe, problem
        network, self.layer = self._network()
        linear: Any = network.get_submodule(linear_of(network, self.layer)[0])
        size = linear.in_features + (linear_of(network, self.layer)[1] and linear.bias is not None)
        check_size(linear.out_features, size)
        self.prior_variance = recipe.prior_variance(size)
        roots = torch.eye(size).to(linear.weight).repeat(linear.out_features, 1, 1)
        self.plain = copied(network)  # the weights of a state are loaded into copies of it
        self.module = GaussianHead(network, self.layer, self.prior_variance**0.5 * INITIAL * roots)
        self.module.eval()
        self.check()
        if recipe.bound is not None:
            bound_layers(network, recipe.bound, self.layer)
        self.hyper = problem.likelihood.hyper()
        if "log_noise" in self.hyper:
            self.hyper["log_noise"] = fit_log_noise(network, problem)
        self.descent = self._descent()

    def check(self) -> None:
        """Raise an error for a likelihood that needs what the head does not know."""
        head = self.module.network.get_submodule(self.layer)
        if isinstance(head, FeatureHead) and self.module.compares(self.problem.likelihood):
            raise UnsupportedError(
                "DKL does not know how the scores of two items vary together, which preferences need: use VBLL() or "
                "SNGP()."
            )

    def _network(self) -> tuple[nn.Module, str]:
        """Return a private network with the head in place, and the name of its last layer."""
        model, source = self.problem.model, self.problem.source
        layer = last_layer(model, batches.take(source.first().inputs, slice(0, 1)))
        if type(model.get_submodule(layer)) is not nn.Linear:
            kind = type(model.get_submodule(layer)).__name__
            raise UnsupportedError(
                f"The last layer of the network, '{layer}', is of type {kind}; a random last layer needs nn.Linear."
            )
        if not gives_outputs(model, layer, batches.take(source.first().inputs, slice(0, 2))):
            raise UnsupportedError(
                f"The outputs of the network are not those of its last linear layer, '{layer}': something comes after "
                "it, such as a log-softmax or the noise of KnownNoise, so they have no closed form. Remove that from "
                "the network, or use Laplace(weights=select.last_layer())."
            )
        features = self.recipe.feature_map(self._features(layer))
        return (copied(model), layer) if features is None else (attach(model, layer, features), layer)

    @torch.no_grad()
    def _features(self, layer: str) -> Tensor:
        """Return the features ``[N, F]`` of some training examples."""
        network = twin(self.problem.model).eval()
        tap: Any = network.get_submodule(layer)
        swap_class(tap, Tap)
        found = []
        for batch in self.problem.source.spread(EXAMPLES):
            params.call(network, batch.inputs)
            found.append(tap.seen.flatten(0, -2))
        return distributed.rows_of_all(torch.cat(found))[:EXAMPLES]

    def _descent(self) -> GradientDescent:
        own = dict.fromkeys(self._own(), 0.0)
        return GradientDescent(
            self.problem, self.module, self.loss, hyper=self.hyper, weight_decay=own, rates=self._rates()
        )

    def _own(self) -> list[str]:
        """Return the names of the parameters of the last layer, which have a prior."""
        prefix = f"network.{self.layer}." if self.layer else "network."
        return ["roots", *(name for name, _ in self.module.named_parameters() if name.startswith(prefix))]

    def _rates(self) -> dict[str, float]:
        rates = {f"hyper.{name}": NOISE_RATE for name in self.hyper}
        own = [name for name in self._own() if name.endswith((".linear.weight", ".linear.bias", ".log_scale"))]
        return {**rates, **dict.fromkeys(own, HEAD_RATE)}

    def loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        """Return this process's share of the negative bound per example."""
        expected = self._expected(batch, hyper, generator).sum()
        kl = self.module.kl(self.prior_variance).to(expected.dtype)
        return (batch.num_rows * kl / self.problem.num_data - expected) / batch.size

    def _expected(self, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        """Return the expected log-likelihood of each example ``[B]``, or a lower bound."""
        likelihood = self.problem.likelihood
        if self.module.compares(likelihood):
            return expected_preference(*self.module.joint(batch.inputs, likelihood), batch.targets)
        moments = self.module.moments(batch.inputs)
        return expected_log_prob(likelihood, *moments, batch.targets, hyper, generator=generator)

    def inference(self) -> Inference:
        """Return the steps for the fit loop."""
        descent, epochs = self.descent, self.problem.training.epochs
        return Inference(descent.init, descent.update, self.posterior, epochs=epochs, score=self.score)

    @torch.no_grad()
    def score(self, state: State, batch: Batch) -> Tensor:
        """Return the log-probability of validation targets at the means."""
        self.descent.load(state)
        return self.problem.likelihood.log_prob(
            params.call(self.module.network, batch.inputs), batch.targets, state["hyper"]
        )

    @torch.no_grad()
    def posterior(self, state: State) -> HeadPosterior:
        """Return the posterior of a state."""
        self.descent.load(state)
        network = light_copy(self.plain)
        values = {name: effective(self.module.network, name) for name, _ in network.named_parameters()}
        kept = {name: effective(self.module.network, name) for name, _ in network.named_buffers()}
        params.load_(network, values, kept)
        likelihood = self.problem.likelihood.resolved({n: v.detach() for n, v in self.final_hyper(state).items()})
        roots = self.roots(network, likelihood)
        return HeadPosterior(
            network, likelihood, self.recipe, self.problem.num_data, self.layer, roots, self.prior_variance
        )

    def final_hyper(self, state: State) -> Params:
        """Return the hyper-parameters of the posterior."""
        return state["hyper"]

    def roots(self, network: nn.Module, likelihood: Likelihood) -> Tensor:
        """Return roots of the covariances ``[C, P, P]``."""
        return copy.deepcopy(self.module.roots.detach().tril())


class LaplaceTrainer(BoundTrainer):
    """The steps of `SNGP`: train the means, then sum the curvature of the last layer over the data."""

    def check(self) -> None:
        """Accept every likelihood."""

    def _descent(self) -> GradientDescent:
        decay = 1 / (self.prior_variance * self.problem.num_data)
        self.module.roots.requires_grad_(False)
        own = {**dict.fromkeys(self._own(), 0.0), f"network.{self.module.linear}.weight": decay}
        return GradientDescent(
            self.problem, self.module, self.loss, hyper=self.hyper, weight_decay=own, rates=self._rates()
        )

    def loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        """Return this process's share of the negative log-likelihood per example."""
        outputs = params.call(self.module.network, batch.inputs)
        return -self.problem.likelihood.log_prob(outputs, batch.targets, hyper).sum() / batch.size

    def final_hyper(self, state: State) -> Params:
        """Return the hyper-parameters, with the noise of the residuals."""
        found = dict(state["hyper"])
        if "log_noise" in found:
            found["log_noise"] = fit_log_noise(self.module.network, self.problem)
        return found

    def roots(self, network: nn.Module, likelihood: Likelihood) -> Tensor:
        r"""Return $R$ with $R R^\top = (\lambda I + \sum_n h_{nc} \phi_n \phi_n^\top)^{-1}$, in float64."""
        tapped = twin(network).eval()
        tap: Any = tapped.get_submodule(self.module.linear)
        swap_class(tap, Tap)
        size = len(self.module.roots[0])
        total = torch.zeros(len(self.module.roots), size, size, dtype=torch.float64, device=self.problem.source.device)
        for batch in self.problem.source.replay():
            if batch.num_rows:
                outputs = params.call(tapped, batch.inputs)
                mapped = tap.seen.double().flatten(0, -2)
                if self.module.compares(likelihood):  # the items of an example share all weights
                    columns = likelihood.hessian_root(outputs, batch.targets).double()
                    rows = torch.einsum("rbt,btp->rbp", columns, mapped.unflatten(0, columns.shape[1:])).flatten(0, 1)
                    total[0].addmm_(rows.mT, rows)
                    continue
                curvature = hessian_diagonal(likelihood, outputs, batch.targets).double().reshape(len(mapped), -1)
                for own, h in zip(total, curvature.mT, strict=True):
                    own.addmm_((mapped * h[:, None]).mT, mapped)
        distributed.sum_([total])
        total.diagonal(dim1=1, dim2=2).add_(1 / self.prior_variance)
        return _inverse_root(total).to(self.module.roots)


def _inverse_root(precision: Tensor) -> Tensor:
    """Return the lower triangular R with ``R Rᵀ`` the inverse of each matrix."""
    # with J the reversal of rows and columns, J P J = L Lᵀ gives P⁻¹ = (J L⁻ᵀ J)(J L⁻ᵀ J)ᵀ, and J L⁻ᵀ J is lower
    flipped = torch.linalg.cholesky(precision.flip(1, 2))
    identity = torch.eye(precision.shape[1], dtype=precision.dtype, device=precision.device).expand_as(precision)
    return torch.linalg.solve_triangular(flipped, identity, upper=False).mT.flip(1, 2)
