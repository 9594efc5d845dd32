"""The posterior that `Variational` finds under a prior of groups."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import params
from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.core.randomness import default_generator
from dubito.methods.variational.groups.convert import convert_groups
from dubito.methods.variational.groups.layout import Member
from dubito.methods.variational.groups.module import GroupModule
from dubito.methods.variational.groups.scales import GateScales
from dubito.methods.variational.posterior import Record, VariationalPosterior
from dubito.networks.selection import Selection

if TYPE_CHECKING:
    from dubito.core.batches import Data
    from dubito.fitting.training import Training


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of one kind, such as the inputs of one layer, and how much each is needed.

    Args:
        name: Such as ``"1.inputs"``, ``"features.0.outputs"`` or ``"lstm.gates_l0"``.
        members: The parameters, axes and sides (``"inputs"`` or ``"outputs"`` of their layer) that the groups are of.
        mean: The mean scale of each group ``[G]``.
        log_alpha: The logarithm of the variance of each scale over its squared mean ``[G]``.
        statistic: What `relevance` is: ``"-log_alpha"``, ``"log_mode"`` of the scale, or ``"log_snr"``.
        relevance: How much each group is needed ``[G]``: the larger, the more.
        threshold: The relevance below which a group is noise, by default.
        evidence_gain: Gates only: by how many nats the evidence grows if the group is removed ``[G]``; else None.
    """

    name: str
    members: tuple[Member, ...]
    mean: Tensor
    log_alpha: Tensor
    statistic: str
    relevance: Tensor
    threshold: float
    evidence_gain: Tensor | None = None

    def needed(self, threshold: float | None = None) -> Tensor:
        """Return the mask of groups to keep ``[G]``, by the given threshold of relevance or the default one."""
        return self.relevance > (self.threshold if threshold is None else threshold)

    def __len__(self) -> int:
        return len(self.relevance)


# Below these a group is noise. Two of them are where noise exceeds signal; the mode of a horseshoe has no such natural
# level, and this one lies between the groups that are needed and those that are not on digits.
THRESHOLDS = {"-log_alpha": 0.0, "log_mode": -3.0, "log_snr": 0.0}


class GroupPosterior(VariationalPosterior):
    r"""The result of `Variational` under a prior of groups: $w = \tilde w \prod_k z_k$ with independent factors.

    Args:
        model: The network at the means.
        likelihood: The likelihood.
        recipe: The recipe.
        num_data: The number of examples seen in all.
        selection: Which weights are random.
        factors: The numbers of the posteriors of $\tilde w$ and z, by name, as in the state of a `GroupModule`.
        record: What was measured on the training data.
    """

    family = "GroupVariational"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        recipe: Any,
        num_data: int,
        selection: Selection,
        factors: dict[str, Tensor],
        record: Record,
    ) -> None:
        network = copy.deepcopy(model).requires_grad_(False)
        module = convert_groups(network, selection, recipe.prior, "weight", recipe.initial_scale)
        self.factors, self.module = factors, module.requires_grad_(False)
        params.load_(self.module, factors)
        scale = selection.ravel(self._spread())
        prior = dict.fromkeys(selection.names, recipe.prior)
        super().__init__(model, likelihood, recipe, num_data, selection, scale, prior, record)

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights; those of a group share its scale."""
        generator = default_generator(generator)
        draws = params.stack([self.module.sample_weights(generator=generator) for _ in range(num_samples)])
        points = {name: value.expand(num_samples, *value.shape) for name, value in self.mean().items()}
        return {name: draws.get(name, value) for name, value in points.items()}

    def marginals(self) -> tuple[Params, Params]:
        """Return means and variances; the variance is 0 where a weight is not random."""
        mean = self.mean()
        return mean, {**params.zeros_like(mean), **self.module.variances()}

    def prior(self) -> tuple[Params, Params]:
        """There is none: scales with heavy tails leave a weight without moments."""
        raise UnsupportedError(
            "Under a prior of groups a weight has no prior variance of its own; judge groups by posterior.groups()."
        )

    def groups(self) -> tuple[Groups, ...]:
        """Return the groups of each kind and how much each group is needed, in the order of the network."""
        found = []
        for kind, scales, active in self.module.groups():
            gain = scales.evidence_gain() if isinstance(scales, GateScales) else None
            relevance = torch.where(active, scales.relevance(), torch.inf)  # a group of points is never noise
            values = (scales.mean().clone(), scales.log_alpha(), scales.statistic, relevance)
            found.append(Groups(kind.name, kind.members, *values, THRESHOLDS[scales.statistic], gain))
        return tuple(found)

    def divergences(self) -> None:
        """There is none for a weight by itself."""
        return

    def update(
        self,
        data: Data,
        *,
        training: Training | None = None,
        generator: torch.Generator | None = None,
        progress: bool = True,
    ) -> VariationalPosterior:
        """Learning on is for independent weights."""
        raise UnsupportedError(
            "A posterior over groups cannot be the prior of new data: fit again on all of it, or compress it first."
        )

    def state(self) -> dict[str, Any]:
        """Return selection, factors and record."""
        return {"selection": self.selection.to_state(), "factors": self.factors, "record": asdict(self.record)}

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Undo `state`."""
        selection, record = Selection.from_state(state["selection"], model), Record(**state["record"])
        return cls(model, likelihood, recipe, num_data, selection, state["factors"], record)

    def _spread(self) -> Params:
        """The standard deviation of every weight."""
        spread = {name: value.sqrt() for name, value in self.module.variances().items()}
        return {**params.zeros_like(params.of(self.module.network)), **spread}


def factors_of(module: GroupModule) -> dict[str, Tensor]:
    """Return the numbers that make the posterior: the means of the weights before scaling, and all of `posterior`."""
    random = {f"network.{name}" for name in module.selection.names}
    kept = {n: v for n, v in module.named_parameters() if n in random or n.startswith("posterior.")}
    return {name: value.detach().clone() for name, value in kept.items()}
