"""What tests of several rooms share: closed forms that methods are compared with, in float64, and how to compare."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dubito import Laplace, Posterior
from dubito.beliefs.likelihoods import Gaussian, Likelihood
from dubito.core import params
from dubito.methods.laplace import LaplacePosterior
from dubito.networks.selection import Selection


def design(inputs: Tensor, num_outputs: int = 1, bias: bool = True) -> Tensor:
    """The matrix ``[N·O, D]`` of `nn.Linear`: its flattened outputs are this times its weights, in their flat order."""
    identity = torch.eye(num_outputs, dtype=inputs.dtype)
    weight = torch.einsum("ni,op->nopi", inputs, identity).reshape(len(inputs) * num_outputs, -1)
    return torch.cat([weight, identity.repeat(len(inputs), 1)], dim=1) if bias else weight


@dataclass(frozen=True)
class LinearRegression:
    r"""Bayesian linear regression: $y = X w + \varepsilon$, noise $N(0, \sigma^2)$, prior $N(m_0, \Lambda^{-1})$.

    Args:
        inputs: ``[N, I]``.
        targets: ``[N, O]``.
        noise: The standard deviation σ.
        prior_precision: A number or ``[D]``, in the order of `nn.Linear`: weight, then bias.
        prior_mean: A number or ``[D]``.
        temperature: By which the log-likelihood is divided.
    """

    inputs: Tensor
    targets: Tensor
    noise: float = 1.0
    prior_precision: Any = 1.0
    prior_mean: Any = 0.0
    temperature: float = 1.0

    @property
    def matrix(self) -> Tensor:
        return design(self.inputs, self.targets.shape[1])

    @property
    def prior(self) -> tuple[Tensor, Tensor]:
        """Mean and precision, ``[D]`` each."""
        size = self.matrix.shape[1]
        expand = lambda value: torch.as_tensor(value, dtype=torch.float64).expand(size)  # noqa: E731
        return expand(self.prior_mean), expand(self.prior_precision)

    @property
    def precision(self) -> Tensor:
        return self.matrix.mT @ self.matrix / (self.noise**2 * self.temperature) + torch.diag(self.prior[1])

    @property
    def covariance(self) -> Tensor:
        return torch.linalg.inv(self.precision)

    @property
    def mean(self) -> Tensor:
        center, precision = self.prior
        pull = self.matrix.mT @ self.targets.flatten() / (self.noise**2 * self.temperature) + precision * center
        return torch.linalg.solve(self.precision, pull)

    @property
    def log_evidence(self) -> float:
        r"""From the marginal $N(y; X m_0, \sigma^2 T I + X \Lambda^{-1} X^\top)$, not from any posterior."""
        center, precision = self.prior
        matrix, flat = self.matrix, self.targets.flatten()
        spread = self.noise**2 * self.temperature
        covariance = spread * torch.eye(len(flat), dtype=torch.float64) + (matrix / precision) @ matrix.mT
        marginal = torch.distributions.MultivariateNormal(matrix @ center, covariance).log_prob(flat)
        tempering = (
            0.5
            * len(flat)
            * (math.log(2 * math.pi * spread) - math.log(2 * math.pi * self.noise**2) / self.temperature)
        )
        return float(marginal) + tempering

    def predict(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[N, O]`` and joint covariance ``[N·O, N·O]`` of the function, without noise."""
        rows = design(inputs, self.targets.shape[1])
        return (rows @ self.mean).reshape(len(inputs), -1), rows @ self.covariance @ rows.mT

    def model(self) -> nn.Linear:
        """The network at the posterior mean."""
        layer = nn.Linear(self.inputs.shape[1], self.targets.shape[1], dtype=torch.float64)
        nn.utils.vector_to_parameters(self.mean, layer.parameters())
        return layer


def regression_data(num: int = 40, inputs: int = 3, outputs: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A linear function with noise 0.3, in float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x = draw(num, inputs)
    return x, x @ draw(inputs, outputs) + 0.5 + 0.3 * draw(num, outputs)


def weights_of(posterior: Posterior) -> Tensor:
    """All parameters and buffers of the network of a posterior as one vector."""
    tensors = (*posterior.model.parameters(), *posterior.model.buffers())
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def normal(*shape: int) -> Tensor:
    """Standard normal numbers from torch's own generator."""
    return torch.randn(*shape, dtype=torch.float64)


def fixed_normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seeded(make: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Make a module whose initial weights are the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().to(dtype)


def seeded_layers(*layers: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Any:
    """Make a chain of layers, each by a function, whose initial weights are the same each time."""
    return seeded(lambda: nn.Sequential(*(make() for make in layers)), seed=1, dtype=dtype)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Compare by one tolerance, relative and absolute."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


class Case(NamedTuple):
    """A small network and its data."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    likelihood: Likelihood

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets

    def weights(self) -> Selection:
        return Selection.all_of(self.model)

    def fit(self, **settings: Any) -> LaplacePosterior:
        return Laplace(**settings).fit(self.model, self.data, likelihood=self.likelihood)


def jacobian(case: Case, inputs: Tensor | None = None, selection: Selection | None = None) -> Tensor:
    """``[B, *positions, C, D]`` of the canonical outputs by the weights, by `torch.func`."""
    inputs = case.inputs if inputs is None else inputs
    weights, base = case.weights() if selection is None else selection, params.of(case.model)
    if any(isinstance(module, nn.RNNBase) for module in case.model.modules()):
        return _jacobian_by_loop(case, inputs, weights)

    def outputs(flat: Tensor) -> Tensor:
        return case.likelihood.canonical(params.functional_call(case.model, weights.merge(base, flat), inputs))

    return torch.func.jacrev(outputs)(weights.ravel(base))


def _jacobian_by_loop(case: Case, inputs: Tensor, weights: Selection) -> Tensor:
    """For recurrent kernels, which cannot be vmapped."""
    outputs = case.likelihood.canonical(case.model(inputs))
    own = dict(case.model.named_parameters())
    rows = []
    for entry in outputs.flatten():
        gradients = torch.autograd.grad(entry, list(own.values()), retain_graph=True)
        rows.append(weights.ravel(dict(zip(own, gradients, strict=True))))
    return torch.stack(rows).reshape(*outputs.shape, -1)


def curvature(case: Case, selection: Selection | None = None) -> Tensor:
    """The Gauss-Newton matrix ``[D, D]``, at the noise that the residuals have where it is unknown."""
    outputs, likelihood = case.model(case.inputs).detach(), case.likelihood
    if isinstance(likelihood, Gaussian) and isinstance(likelihood.noise, str):
        likelihood = Gaussian(noise=float((outputs - case.targets).square().mean().sqrt()))
    rows = jacobian(case, selection=selection)
    return torch.einsum("...cd,...ce,...ef->df", rows, likelihood.hessian(outputs, case.targets), rows)


def class_data(rows: int = 60) -> tuple[Tensor, Tensor]:
    """Four features, of which two decide between three classes."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1)
