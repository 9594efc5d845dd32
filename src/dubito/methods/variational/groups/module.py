"""A network whose groups of weights share random scales, as a plain `nn.Module` for any training loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.priors import GroupPrior
from dubito.core import params
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params
from dubito.methods.variational.groups.field import Draws, ScaledField
from dubito.methods.variational.groups.layout import AxisGroups, find_groups
from dubito.methods.variational.groups.scales import Scales, make_scales
from dubito.methods.variational.layer import make_stochastic
from dubito.methods.variational.module import VariationalModule
from dubito.networks.layers import rule_for
from dubito.networks.selection import Selection

# The estimator of layers that sample the scales of their weight.
SCALED = "scaled"


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


def convert_groups(
    network: nn.Module,
    selection: Selection,
    prior: GroupPrior,
    estimator: str,
    initial_scale: float | dict[str, Tensor],
    hold_rest: bool = True,
) -> GroupModule:
    """Convert a network in place to a posterior over weights and the scales of their groups.

    Args:
        network: A private copy of the network.
        selection: The random weights.
        prior: The group prior.
        estimator: ``"local"`` or ``"weight"``.
        initial_scale: The initial standard deviation of weights and of scales, whose mean starts at 1.
        hold_rest: Whether entries that are not random stay fixed; otherwise they are trained as points.
    """
    if estimator == "flipout":
        raise InputError("A group prior needs estimator='local' or 'weight', got 'flipout'.")
    if isinstance(initial_scale, dict):
        raise InputError("A group prior needs one number as initial_scale, not a tensor per parameter.")
    parameters = dict(network.named_parameters())
    masks = selection.masks()
    vectors = [name for name in selection.names if parameters[name].ndim < 2]
    if vectors:
        raise InputError(f"A group prior is for matrices, and '{vectors[0]}' is a vector: use biases='deterministic'.")
    kinds, owned = [], {name: [] for name in selection.names}  # type: ignore[var-annotated]
    for kind in find_groups(network, list(selection.names), prior.groups):
        scales = make_scales(kind.size, prior, initial_scale, parameters[kind.members[0].parameter].detach())
        kinds.append((kind, scales, _active(kind, masks).to(parameters[kind.members[0].parameter].device)))
        for member in kind.members:
            owned[member.parameter].append((member.axis, member.side, scales))
    width = initial_scale if prior.random_weights else None
    posterior = {
        name: ScaledField(parameters[name], parts, None if selection.is_whole(name) else masks[name], width, hold_rest)
        for name, parts in owned.items()
    }
    if estimator == "local":
        _scale_on_the_fly(network, posterior)
    return GroupModule(network, posterior, selection, estimator, kinds)


def _active(kind: AxisGroups, masks: dict[str, Tensor]) -> Tensor:
    """Return the mask of groups with at least one random weight."""
    found = torch.zeros(kind.size, dtype=torch.bool)
    for member in kind.members:
        found |= masks[member.parameter].movedim(member.axis, 0).flatten(1).any(1)
    return found


def _scale_on_the_fly(network: nn.Module, posterior: dict[str, ScaledField]) -> None:
    """Make every layer stochastic whose weight is untied, fully random and multiplies its inputs."""
    names = {id(value): name for name, value in network.named_parameters()}
    owners = Counter(id(value) for module in network.modules() for value in module._parameters.values())
    for module in list(network.modules()):
        rule, weight = rule_for(module), module._parameters.get("weight")
        if rule is None or weight is None or not rule.linear_in_input or owners[id(weight)] > 1:
            continue
        part = posterior.get(names[id(weight)])
        if part is not None and part.mask is None:
            make_stochastic(module, rule, SCALED, {"weight": part})  # type: ignore[dict-item]
