"""A network whose groups of weights share random scales, as a plain `nn.Module` for any training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import params
from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.methods.variational.groups.field import Draws, ScaledField
from dubito.methods.variational.groups.layout import AxisGroups
from dubito.methods.variational.groups.scales import Scales
from dubito.methods.variational.module import VariationalModule
from dubito.networks.selection import Selection


class GroupModule(VariationalModule):
    """The module that `dubito.variational.convert` returns for a group prior.

    `network` keeps the user's parameter names; its parameters are the means of the weights before scaling, and
    `posterior` holds everything else. Layers that multiply inputs by their weight sample new scales for every example;
    other weights (of recurrent and embedding layers, tied ones) are sampled once for a whole call.

    Args:
        network: A private copy of the network, with stochastic layers where possible.
        posterior: The posteriors by parameter name.
        selection: The random weights.
        estimator: ``"local"`` or ``"weight"``.
        kinds: The groups, each with its scales and the mask of the groups that have random weights.
    """

    def __init__(
        self,
        network: nn.Module,
        posterior: dict[str, ScaledField],
        selection: Selection,
        estimator: str,
        kinds: list[tuple[AxisGroups, Scales, Tensor]],
    ) -> None:
        super().__init__(network, posterior, selection, estimator)  # type: ignore[arg-type]
        self.kinds, self._scales = [kind for kind, _, _ in kinds], [scales for _, scales, _ in kinds]
        for number, (_, _, active) in enumerate(kinds):
            self.register_buffer(f"active_{number}", active)

    def groups(self) -> Iterator[tuple[AxisGroups, Scales, Tensor]]:
        """Yield the groups, their scales and the mask of those that have random weights."""
        for number, (kind, scales) in enumerate(zip(self.kinds, self._scales, strict=True)):
            yield kind, scales, getattr(self, f"active_{number}")

    def kl(self, *, generator: torch.Generator | None = None) -> Tensor:
        """Return the total KL divergence of weights and scales from their priors; each scale counts once."""
        means = self._means()
        weights = [part.kl(means[name]) for name, part in self.fields()]
        return torch.stack([*weights, *(scales.kl(active) for _, scales, active in self.groups())]).sum()

    @contextmanager
    def shared_moments(self) -> Iterator[Tensor]:
        """Yield the KL divergence for a training step."""
        yield self.kl()

    def sample_weights(self, *, generator: torch.Generator | None = None) -> Params:
        """Draw all random parameters, by name; differentiable."""
        means, drawn = self._means(), self._draw(generator)
        return {name: part.sample(means[name], drawn, generator=generator) for name, part in self.fields()}

    def expected_weights(self) -> Params:
        """Return the mean of every random parameter."""
        means = self._means()
        return {name: part.expected(means[name]) for name, part in self.fields()}

    def variances(self) -> Params:
        """Return the marginal variance of every random parameter."""
        means = self._means()
        return {name: part.variance(means[name]) for name, part in self.fields()}

    def log_ratio(self, weights: Params) -> Tensor:
        """Raise an error: many scales give the same weights, so their density has no closed form."""
        raise UnsupportedError("With a group prior the density of a weight sample has no closed form: use ELBO().")

    def mean_module(self) -> nn.Module:
        """Return the network at the means of the scaled weights, with the user's own classes."""
        return params.load_(super().mean_module(), self.expected_weights())

    def scales(self) -> Tensor:
        """Return the standard deviations of all random weights as one vector, in the order of the selection."""
        return self.selection.ravel({**self._means(), **self.variances()}).detach().sqrt()

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield the posteriors by parameter name, as `fields` does."""
        return self.fields()

    def fields(self) -> Iterator[tuple[str, ScaledField]]:
        """Yield the posteriors by parameter name, in the order of the selection."""
        for name, part in zip(self.selection.names, self.posterior.values(), strict=True):
            assert isinstance(part, ScaledField)
            yield name, part

    def _draw(self, generator: torch.Generator | None = None) -> Draws:
        return {scales: scales.sample(generator=generator) for scales in self._scales}

    def _sampled_weights(self) -> AbstractContextManager[Any]:
        """Load samples of the weights whose layers do not put the noise on their outputs."""
        if not self.sampled:
            return nullcontext()
        means, parts, generator = self._means(), dict(self.fields()), self.weight_noise
        drawn = self._draw(generator)
        weights = {name: parts[name].sample(means[name], drawn, generator=generator) for name in self.sampled}
        return params.swapped(self.network, weights)
