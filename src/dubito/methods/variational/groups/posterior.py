"""The posterior of `Variational` with a group prior, and how it is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import params
from dubito.core.batches import Batch, Data
from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.core.randomness import default_generator
from dubito.fitting.inference import State
from dubito.methods.variational.groups.layout import GroupedAxis
from dubito.methods.variational.groups.module import GroupModule, convert_groups
from dubito.methods.variational.groups.scales import GateScales
from dubito.methods.variational.posterior import Record, VariationalPosterior
from dubito.methods.variational.trainer import EVALUATION_DRAWS, VariationalTrainer
from dubito.networks.selection import Selection
from dubito.networks.twin import copied

# Below these a group is noise. For two statistics this is where noise exceeds signal. The mode of a horseshoe has no
# natural threshold; this one separates the relevant groups from the others on the digits data.
THRESHOLDS = {"-log_alpha": 0.0, "log_mode": -3.0, "log_snr": 0.0}


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of one kind, such as the inputs of one layer, and the relevance of each.

    Args:
        name: Such as ``"1.inputs"``, ``"features.0.outputs"`` or ``"lstm.gates_l0"``.
        members: The parameters, axes and sides (``"inputs"`` or ``"outputs"`` of their layer) of the groups.
        mean: The mean scale of each group ``[G]``.
        log_alpha: The logarithm of the variance of each scale over its squared mean ``[G]``.
        statistic: The quantity in `relevance`: ``"-log_alpha"``, ``"log_mode"`` of the scale, or ``"log_snr"``.
        relevance: The relevance of each group ``[G]``; groups with small values can be removed.
        threshold: The default relevance below which a group is noise.
        evidence_gain: For gates, the log evidence gained by removing each group, in nats ``[G]``; else None.
    """

    name: str
    members: tuple[GroupedAxis, ...]
    mean: Tensor
    log_alpha: Tensor
    statistic: str
    relevance: Tensor
    threshold: float
    evidence_gain: Tensor | None = None

    def needed(self, threshold: float | None = None) -> Tensor:
        """Return the mask of groups to keep ``[G]``: those above the threshold (by default `self.threshold`)."""
        return self.relevance > (self.threshold if threshold is None else threshold)

    def __len__(self) -> int:
        return len(self.relevance)


class GroupPosterior(VariationalPosterior):
    r"""The result of `Variational` with a group prior: $w = \tilde w \prod_k z_k$ with independent factors.

    Args:
        model: The network at the means.
        likelihood, recipe, num_data: As for `Posterior`.
        selection: Which weights are random.
        factors: The parameters of the posteriors of $\tilde w$ and z, by name, as in the state of a `GroupModule`.
        record: The measurements on the training data.
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
        network = copied(model).requires_grad_(False)
        module = convert_groups(network, selection, recipe.prior, "weight", recipe.initial_scale)
        self.factors, self.module = factors, module.requires_grad_(False)
        params.load_(self.module, factors)
        scale = selection.ravel(self._spread())
        prior = dict.fromkeys(selection.names, recipe.prior)
        super().__init__(model, likelihood, recipe, num_data, selection, scale, prior, record)

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights; the weights of a group share its scale."""
        generator = default_generator(generator)
        draws = params.stack([self.module.sample_weights(generator=generator) for _ in range(num_samples)])
        points = {name: value.expand(num_samples, *value.shape) for name, value in self.mean().items()}
        return {name: draws.get(name, value) for name, value in points.items()}

    def marginals(self) -> tuple[Params, Params]:
        """Return means and variances; the variance is 0 for weights that are not random."""
        mean = self.mean()
        return mean, {**params.zeros_like(mean), **self.module.variances()}

    def prior(self) -> tuple[Params, Params]:
        """Raise an error: scales with heavy tails give a weight no prior variance."""
        raise UnsupportedError(
            "With a group prior a single weight has no prior variance: use posterior.groups() to compare groups."
        )

    def groups(self) -> tuple[Groups, ...]:
        """Return the groups of each kind and their relevance, in the order of the network."""
        found = []
        for kind, scales, active in self.module.groups():
            gain = scales.evidence_gain() if isinstance(scales, GateScales) else None
            relevance = torch.where(active, scales.relevance(), torch.inf)  # groups without random weights stay
            values = (scales.mean().clone(), scales.log_alpha(), scales.statistic, relevance)
            found.append(Groups(kind.name, kind.members, *values, THRESHOLDS[scales.statistic], gain))
        return tuple(found)

    def divergences(self) -> None:
        """Return None: the KL divergence of a single weight is not defined."""
        return

    def _updated(self, data: Data, **options: Any) -> VariationalPosterior:
        """Raise an error: only posteriors over independent weights can be updated."""
        raise UnsupportedError(
            "A group posterior cannot be updated with new data: fit again on all data, or compress it first."
        )

    def state(self) -> dict[str, Any]:
        """Return the selection, the factors and the record."""
        return {"selection": self.selection.to_state(), "factors": self.factors, "record": asdict(self.record)}

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Undo `state`."""
        selection, record = Selection.from_state(state["selection"], model), Record(**state["record"])
        return cls(model, likelihood, recipe, num_data, selection, state["factors"], record)

    def _spread(self) -> Params:
        """Return the standard deviation of every weight."""
        spread = {name: value.sqrt() for name, value in self.module.variances().items()}
        return {**params.zeros_like(params.of(self.module.network)), **spread}


def factors_of(module: GroupModule) -> dict[str, Tensor]:
    """Return the parameters of the posterior: the means of the weights before scaling, and those in `posterior`."""
    random = {f"network.{name}" for name in module.selection.names}
    kept = {n: v for n, v in module.named_parameters() if n in random or n.startswith("posterior.")}
    return {name: value.detach().clone() for name, value in kept.items()}


class GroupTrainer(VariationalTrainer):
    """The steps of `Variational` with a group prior, whose network at the means has scaled weights."""

    @torch.no_grad()
    def score(self, state: State, batch: Batch) -> Tensor:
        """Return the log-probability of validation targets under the network at the means."""
        module = cast(GroupModule, self._loaded(state))
        values = dict(module.network.named_parameters()) | dict(module.network.named_buffers())
        outputs = params.functional_call(self.plain, {**values, **module.expected_weights()}, batch.inputs)
        return self.problem.likelihood.log_prob(outputs, batch.targets, state["hyper"])

    @torch.no_grad()
    def posterior(self, state: State) -> GroupPosterior:
        """Return the posterior, and measure how well it fits the training data."""
        module, problem = cast(GroupModule, self._loaded(state)), self.problem
        network = self._plain_network(module)
        draws = [module.sample_weights() for _ in range(EVALUATION_DRAWS)]
        likelihood = self._likelihood(state, network, draws)
        record = self._record(state, module, network, draws, likelihood)
        found = (module.selection, factors_of(module), record)
        return GroupPosterior(network, likelihood, self.recipe, problem.num_data, *found)
