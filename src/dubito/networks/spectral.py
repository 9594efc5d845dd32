r"""Bound the largest singular value of linear layers while they are trained, so that distances survive in features."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dubito.networks.layers import class_rule


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
