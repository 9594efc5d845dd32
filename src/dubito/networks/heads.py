r"""Feature maps that give a network's last layer a Gaussian process: `RandomFeatures` and `InducingPoints`.

With the features $z$ of the network, the outputs are $f_c(x) = w_c^\top \phi(z) + b_c$ under independent normal weights
$w_c$. `attach` puts such a map and a new linear layer in the place of the last layer. `SpectralBound` bounds the
other layers while they are trained, so that distances survive in the features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dubito.core.tensor_checks import at_least_float32
from dubito.networks.layers import class_rule
from dubito.networks.swapping import put
from dubito.networks.twin import copied

# What is added to the diagonal of a kernel matrix, as a share of it, in float32 and in float64.
JITTER = {torch.float32: 1e-4, torch.float64: 1e-8}


class FeatureMap(nn.Module):
    """A map of features ``[..., F]`` to ``[..., M]``, whose scalar products are a kernel, exactly or nearly."""

    size: int

    def missing(self, mapped: Tensor) -> Tensor:
        """Return the part of the kernel's variance ``[...]`` that the mapped features do not have."""
        return mapped.new_zeros(mapped.shape[:-1])

    def prepare(self) -> None:
        """Compute once what does not depend on inputs; the parameters must not change from then on."""


class RandomFeatures(FeatureMap):
    r"""Random Fourier features of the kernel $\exp(-\|z - z'\|^2 / 2\ell^2)$ (Rahimi & Recht 2007).

    $$\phi(z) = \sqrt{2/M}\,\cos(\Omega z / \ell + \beta), \qquad
      \Omega_{ij} \sim \mathcal N(0, 1), \; \beta_i \sim U(0, 2\pi)$$

    Args:
        num_inputs: The number F of features of the network.
        size: The number M of random features.
        lengthscale: The initial ℓ, which is trained.
    """

    omega: Tensor
    phase: Tensor

    def __init__(self, num_inputs: int, size: int, lengthscale: float = 1.0) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("omega", torch.randn(size, num_inputs))
        self.register_buffer("phase", 2 * math.pi * torch.rand(size))
        self.log_lengthscale = nn.Parameter(torch.tensor(math.log(lengthscale)))

    def forward(self, features: Tensor) -> Tensor:
        """Return the random features."""
        angles = (features / self.log_lengthscale.exp()) @ self.omega.mT + self.phase
        return math.sqrt(2 / self.size) * angles.cos()


class InducingPoints(FeatureMap):
    r"""The features of a sparse Gaussian process with M inducing points $Z$ (Titsias 2009; Hensman et al. 2015).

    $$\phi(z) = L^{-1} k(Z, z), \quad L L^\top = k(Z, Z), \qquad
      k(z, z') = s^2 \exp(-\|z - z'\|^2 / 2\ell^2)$$

    At an inducing point $\phi^\top \phi = k(z, z) = s^2$; elsewhere $s^2 - \phi^\top \phi$ is missing. It is the
    variance of the process that the inducing points do not determine, and returns far from them.

    Args:
        points: The initial inducing points ``[M, F]``, which are trained.
        lengthscale: The initial ℓ, which is trained, like s.
    """

    def __init__(self, points: Tensor, lengthscale: float = 1.0) -> None:
        super().__init__()
        self.size = len(points)
        self.points = nn.Parameter(points.detach().clone())
        self.log_lengthscale = nn.Parameter(torch.tensor(math.log(lengthscale)).to(points))
        self.log_scale = nn.Parameter(torch.zeros((), dtype=points.dtype, device=points.device))
        self.register_buffer("inverse_root", None, persistent=False)
        self.inverse_root: Tensor | None

    @torch.no_grad()
    def prepare(self) -> None:
        r"""Invert $L$, in float64: predictions need no decomposition then, which ONNX lacks."""
        points, dtype = self.points.double(), at_least_float32(self.points).dtype
        root = torch.linalg.cholesky_ex(self.kernel(points, points, JITTER[dtype])).L
        identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
        self.inverse_root = torch.linalg.solve_triangular(root, identity, upper=False).to(dtype)

    def forward(self, features: Tensor) -> Tensor:
        """Return the whitened kernel values."""
        points, rows = at_least_float32(self.points), at_least_float32(features.reshape(-1, features.shape[-1]))
        found = self.whitened(self.kernel(points, rows))
        return found.mT.reshape(*features.shape[:-1], self.size).to(features.dtype)

    def whitened(self, values: Tensor) -> Tensor:
        r"""Return $L^{-1}$ times values at the inducing points ``[M, ...]``."""
        if self.inverse_root is not None:
            return self.inverse_root @ values
        points = at_least_float32(self.points)
        root = torch.linalg.cholesky_ex(self.kernel(points, points, JITTER[points.dtype])).L
        return torch.linalg.solve_triangular(root, values, upper=False)

    def missing(self, mapped: Tensor) -> Tensor:
        """Return the variance that the inducing points do not determine."""
        return ((2 * self.log_scale).exp() - mapped.square().sum(-1)).clamp_min(0)

    def kernel(self, a: Tensor, b: Tensor, jitter: float = 0.0) -> Tensor:
        """Return the kernel between rows, with a jitter on the diagonal."""
        a, b = (each / self.log_lengthscale.exp() for each in (a, b))
        squares = a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.mT
        values = (-0.5 * squares.clamp_min(0)).exp()
        if jitter:
            values = values + jitter * torch.eye(len(values), dtype=values.dtype, device=values.device)
        return (2 * self.log_scale).exp() * values


class FeatureHead(nn.Module):
    """A feature map and a linear layer on it, in the place of the last layer of a network."""

    def __init__(self, features: FeatureMap, num_outputs: int) -> None:
        super().__init__()
        self.features = features
        self.linear = nn.Linear(features.size, num_outputs)
        nn.init.normal_(self.linear.weight, std=0.05)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs."""
        return self.linear(self.features(features))


class PathHead(nn.Module):
    r"""A head with inducing points as one function of its process: with what the inducing points leave undetermined.

    $$f_c(z) = w_c^\top \phi(z) + g_c(z) - \phi(z)^\top L^{-1} g_c(Z)$$

    for a function $g_c$ of the prior, a sum of random waves (Wilson et al. 2020, https://arxiv.org/abs/2002.09309).

    Args:
        head: The head; its modules are shared.
        size: The number of waves; those of every function are drawn anew, so that variances are right on average.
    """

    omega: Tensor
    phase: Tensor
    paths: Tensor

    def __init__(self, head: FeatureHead, size: int = 512) -> None:
        super().__init__()
        assert isinstance(head.features, InducingPoints)
        self.features, self.linear = head.features, head.linear
        for name, value in self.drawn(size, head, torch.Generator()).items():
            self.register_buffer(name, value)

    @staticmethod
    def drawn(size: int, head: Any, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the waves of one function."""
        options: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": generator.device}
        omega = torch.randn(size, head.features.points.shape[1], **options)
        phase = 2 * math.pi * torch.rand(size, **options)
        paths = torch.randn(head.linear.out_features, size, **options)
        found = {"omega": omega, "phase": phase, "paths": paths}
        return {name: value.to(head.linear.weight) for name, value in found.items()}

    def prior(self, features: Tensor) -> Tensor:
        """Return the function of the prior ``[..., C]``."""
        kernel = self.features
        angles = (features / kernel.log_lengthscale.exp()) @ self.omega.mT + self.phase
        return kernel.log_scale.exp() * math.sqrt(2 / len(self.phase)) * angles.cos() @ self.paths.mT

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs."""
        mapped = self.features(features)
        known = self.features.whitened(at_least_float32(self.prior(self.features.points))).to(mapped.dtype)
        return self.linear(mapped) + self.prior(features) - mapped @ known


def attach(model: nn.Module, layer: str, features: FeatureMap) -> nn.Module:
    """Return a copy of a network with a feature map and a new linear layer in the place of its last layer.

    Args:
        model: The network; it is not changed.
        layer: The name of its last layer, an `nn.Linear`.
        features: The feature map.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> attach(model, "2", RandomFeatures(4, 100))(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    old = model.get_submodule(layer)
    assert isinstance(old, nn.Linear)
    return replaced(model, layer, FeatureHead(features, old.out_features).to(old.weight))


def replaced(model: nn.Module, layer: str, head: nn.Module) -> nn.Module:
    """Return a copy of a network with another last layer."""
    return put(copied(model), layer, head) if layer else head


def mean_distance(features: Tensor) -> float:
    """Return the root mean square distance between rows of features ``[N, F]``, as a first lengthscale."""
    found = float((2 * features.double().var(0, correction=0).sum()).sqrt())
    return found if found > 1e-6 else 1.0


class SpectralBound(nn.Module):
    r"""The parametrization $W \mapsto W \min(1, c / \sigma(W))$, with one power iteration per training step.

    $\sigma$ is the largest singular value of the weight as a matrix with one row per output (Miyato et al. 2018,
    https://arxiv.org/abs/1802.05957). Unlike torch's `spectral_norm`, it does not enlarge smaller weights (Liu et al.
    2020, https://arxiv.org/abs/2006.10108).

    Args:
        weight: The weight.
        bound: c.
    """

    right: Tensor

    def __init__(self, weight: Tensor, bound: float) -> None:
        super().__init__()
        self.bound = bound
        matrix = weight.detach().flatten(1)
        self.register_buffer("right", nn.functional.normalize(torch.randn(matrix.shape[1]).to(matrix), dim=0))
        for _ in range(15):
            self._iterate(matrix)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the bounded weight."""
        matrix = weight.flatten(1)
        if self.training:
            self._iterate(matrix.detach())
        largest = (matrix @ self.right.clone()).norm()
        return weight * (self.bound / largest.clamp_min(self.bound))

    @torch.no_grad()
    def _iterate(self, matrix: Tensor) -> None:
        self.right.copy_(nn.functional.normalize(matrix.mT @ (matrix @ self.right), dim=0))


def bound_layers(network: nn.Module, bound: float, but: str) -> None:
    """Bound the weights of all linear layers and convolutions of a private network but one, in place."""
    for name, module in list(network.named_modules()):
        rule = class_rule(module)
        weight = getattr(module, "weight", None)
        is_linear = rule is not None and rule.linear_in_input and not rule.normalizes
        inside = name == but or name.startswith(f"{but}.")
        if is_linear and not inside and isinstance(weight, nn.Parameter) and weight.ndim > 1:
            parametrize.register_parametrization(module, "weight", SpectralBound(weight, bound))


def effective(network: nn.Module, name: str) -> Tensor:
    """Return the value of a parameter of a network, also of one that is bounded, under its plain name."""
    parent, _, own = name.rpartition(".")
    value = getattr(network.get_submodule(parent), own)
    assert isinstance(value, Tensor)
    return value.detach()
