"""A network whose last layer has a Gaussian posterior, as a module that returns means and variances of outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import BradleyTerry, Likelihood
from dubito.core import params
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.limits import current, numbers
from dubito.networks.heads import FeatureHead
from dubito.networks.output_layer import Tap
from dubito.networks.swapping import swap_class
from dubito.networks.twin import twin


def linear_of(network: nn.Module, layer: str) -> tuple[str, bool]:
    """Return the name of the random linear layer, and whether its bias is random too: not behind a feature map."""
    if isinstance(network.get_submodule(layer), FeatureHead):
        return f"{layer}.linear" if layer else "linear", False
    return layer, True


def check_size(num_outputs: int, size: int) -> None:
    """Raise an error if the covariances of the last layer would be too large."""
    most = numbers(current().covariance_factor)
    if num_outputs * size**2 > most:
        raise InputError(
            f"The last layer has {num_outputs:,} outputs of {size:,} inputs, too many for a covariance matrix of each "
            f"({most:,} numbers at most): use Laplace(weights=select.last_layer(), structure='kron')."
        )


class GaussianHead(nn.Module):
    r"""A network with $w_c \sim \mathcal N(\mu_c, R_c R_c^\top)$ for output c of its last layer.

    The means are the weights of the layer itself.

    Args:
        network: The network; it becomes a part of this module, and its last layer is tapped.
        layer: The name of the last layer: a linear one or a `FeatureHead`.
        roots: R ``[C, P, P]``; P counts the inputs of the layer, and 1 for a random bias.
    """

    def __init__(self, network: nn.Module, layer: str, roots: Tensor) -> None:
        super().__init__()
        self.network, self.layer = network, layer
        self.linear, self.has_bias = linear_of(network, layer)
        if not isinstance(network.get_submodule(self.linear), Tap):
            swap_class(network.get_submodule(self.linear), Tap)
        self.roots = nn.Parameter(roots)

    def moments(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the outputs, both in the network's layout."""
        outputs, turned = self._turned(inputs)
        variance = turned.square().sum(-1)
        head = self.network.get_submodule(self.layer)
        if isinstance(head, FeatureHead):
            tap: Any = self.network.get_submodule(self.linear)
            variance = variance + head.features.missing(tap.seen).unsqueeze(-1)
        return outputs, variance.reshape(outputs.shape)

    def joint(self, inputs: Any, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
        """Return the scores ``[B, T]`` of T items by the same weights, and roots ``[B, T, P]`` of their covariances."""
        outputs, turned = self._turned(inputs)
        scores = likelihood.canonical(outputs)
        return scores, turned.reshape(*scores.shape, turned.shape[-1])

    def compares(self, likelihood: Likelihood) -> bool:
        """Return whether the outputs that a target depends on are scores of several items by the same weights."""
        return isinstance(likelihood, BradleyTerry) and len(self.roots) == 1

    def _turned(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the outputs and the inputs of the last layer times the roots, ``[..., C, P]``."""
        outputs = params.call(self.network, inputs)
        tap: Any = self.network.get_submodule(self.linear)
        mapped = tap.seen
        if outputs.numel() != tap.given.numel():
            raise UnsupportedError(
                "The outputs of the network are not those of its last linear layer, so they have no closed form: use "
                "Laplace(weights=select.last_layer())."
            )
        if self.has_bias and tap.bias is not None:
            mapped = torch.cat([mapped, torch.ones_like(mapped[..., :1])], dim=-1)
        return outputs, torch.einsum("...p,cpq->...cq", mapped, self.roots.tril().to(mapped.dtype))

    def means(self) -> Tensor:
        """Return the means ``[C, P]`` of the random weights."""
        linear: Any = self.network.get_submodule(self.linear)
        if not self.has_bias or linear.bias is None:
            return linear.weight
        return torch.cat([linear.weight, linear.bias.unsqueeze(1)], dim=1)

    def kl(self, prior_variance: float) -> Tensor:
        r"""Return the KL divergence from $\mathcal N(0, s^2 I)$, in float64, for lower triangular roots."""
        means, roots = self.means().double(), self.roots.double().tril()
        squares = (means.square().sum() + roots.square().sum()) / prior_variance
        log_det = 2 * roots.diagonal(dim1=1, dim2=2).abs().log().sum()
        log_prior = means.numel() * torch.tensor(prior_variance, dtype=torch.float64).log()
        return 0.5 * (squares - means.numel() - log_det + log_prior.to(squares.device))


def tapped_twin(network: nn.Module, layer: str, roots: Tensor) -> GaussianHead:
    """Return a `GaussianHead` that shares the memory of a network, for prediction."""
    head = GaussianHead(twin(network), layer, roots.detach()).requires_grad_(False).eval()
    last = head.network.get_submodule(layer)
    if isinstance(last, FeatureHead):
        last.features.prepare()
    return head
