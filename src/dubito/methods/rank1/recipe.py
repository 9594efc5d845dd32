"""The `Rank1` and `BatchEnsemble` recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from dubito.beliefs.priors import Normal, Prior
from dubito.core.constraints import Count, NonNegative, Positive, Probability
from dubito.core.errors import InputError
from dubito.core.settings import Absent, setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.methods.rank1.families import Family, check_pair
from dubito.methods.rank1.layers import Perturbation
from dubito.methods.rank1.sites import Sides
from dubito.select.rule import SelectionRule

Start = Annotated[
    Literal["model", "fresh", "head"] | Posterior | Absent, "'model', 'fresh', 'head' or a posterior to start from"
]


@setting
class _FactorRecipe(Recipe):
    """What `Rank1` and `BatchEnsemble` share."""

    def starting(self, start: str) -> Recipe:
        """As in `Recipe.starting`; factors that were to start near 1 still do."""
        own = self.fields()["start"]
        if not isinstance(own, str):
            raise InputError(
                f"{self.setting_name} starts from one posterior here, but each member needs its own start: leave out "
                "its `start`."
            )
        near_one = {"initial": "normal"} if (own, start) == ("model", "fresh") else {}
        return self.replace(start=start, **near_one)

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training."""
        from dubito.methods.rank1.trainer import Rank1Trainer

        return Rank1Trainer(self, problem).inference()  # type: ignore[arg-type]


@setting
class Rank1(_FactorRecipe):
    r"""Train a mixture over cheap factors of one shared network (Dusenberry et al. 2020, arXiv 2005.07186).

    In component k every layer is $y = ((x \circ s_k) W) \circ r_k + b_k$: its weight is $W \circ r_k s_k^\top$. The
    matrix $W$ is shared by all components and has an L2 penalty. The vectors $r_k, s_k$ have a posterior, which is
    sampled for each example. Each component has its own biases. Training maximizes

    $$\frac1K \sum_k \mathbb E_{q_k} \log p(D \mid r, s) - \mathrm{KL}(q \,\|\, p), \qquad
      q = \frac1K \sum_k q_k(r) q_k(s) .$$

    Another component adds one vector per side of each layer, not another network.

    Args:
        components: K.
        prior: The prior of every factor; a factor of 1 changes nothing.
        family: The family of each component: ``"normal"``, ``"cauchy"`` (heavy tails, clipped at ±10),
            ``"log-normal"`` (positive) or ``"delta"`` (point estimates).
        factors: ``"both"`` s and r, or only those of the ``"input"`` or the ``"output"`` side.
        bound: ``"average"`` of the components' log-likelihoods, or the log-likelihood of the ``"mixture"``, which is at
            least as large and needs ``batch="repeat"``.
        mixture_kl: The ``"mean"`` over components, a bound on the mixture's KL divergence; or their ``"sum"``, K times
            the mean, as in the authors' code.
        initial: Initial factors for ``start="fresh"``: random signs ±1 (``"sign"``), or values near 1 (``"normal"``).
        batch: ``"repeat"`` trains every component on every example, at K times the cost; ``"split"`` trains each
            component on a part of the batch, at the cost of one network.
        sample: Draw factors for each ``"example"``, or once for a component and a ``"batch"``.
        perturbation: ``"multiplicative"`` factors, or ``"additive"`` ones, $y = (x + s - 1) W + r - 1 + b$.
        kl_warmup: The fraction of all steps over which the weight of the KL divergence rises from 0 to 1.
        weight_decay: λ of an L2 penalty $\frac\lambda2 \|W\|^2$ in the mean loss, on weights and biases, not factors
            (decoupled under ``Training(optimizer="adamw")``). ``Training(weight_decay=...)`` is added to it.
        start: ``"model"`` starts at the model's weights with factors near 1, ``"fresh"`` at newly drawn weights,
            ``"head"`` at a newly drawn output layer; a MAP, Rank1 or BatchEnsemble posterior starts from its weights.
        normalization: Whether normalization layers are ``"shared"`` by the components, or each ``"component"`` has its
            own gains and statistics.
        recalibrate: Recompute the running statistics of normalization layers after training, at the final weights.
        scales: Whether the scales of the posterior are ``"shared"`` by the components, or each ``"component"`` has its
            own, for twice the parameters.
        initial_scale: The scale of every factor at the start.
        spread: The standard deviation of the components' locations around 1 at the start.
        factor_rate: A factor of the learning rate for the locations and scales of factors; 0 keeps them fixed.
        weights: Which layers have factors, by the weights in them; by default all of them.
    """

    setting_name = "Rank1"
    old_fields: ClassVar[Mapping[str, str]] = {"posterior": "family"}
    components: Count = 4
    prior: Prior | None = Normal(1.0, 0.1)
    family: Family = "normal"
    factors: Sides = "both"
    bound: Literal["average", "mixture"] = "average"
    mixture_kl: Literal["mean", "sum"] = "mean"
    initial: Literal["sign", "normal"] = "sign"
    batch: Literal["repeat", "split"] = "repeat"
    sample: Literal["example", "batch"] = "example"
    perturbation: Perturbation = "multiplicative"
    kl_warmup: Probability = 0.0
    weight_decay: NonNegative = 1e-4
    start: Start = "model"
    normalization: Literal["shared", "component"] = "shared"
    recalibrate: bool = False
    scales: Literal["shared", "component"] = "shared"
    initial_scale: Positive = 0.03
    spread: NonNegative = 0.1
    factor_rate: NonNegative = 1.0
    weights: SelectionRule | None = None

    def __post_init__(self) -> None:
        check_pair(self.family, self.prior)
        if self.bound == "mixture" and self.batch == "split":
            raise InputError("bound='mixture' needs every component to see every example: use batch='repeat' with it.")

    def as_rank1(self) -> Rank1:
        """Return itself."""
        return self


@setting
class BatchEnsemble(_FactorRecipe):
    r"""Train an ensemble whose members share one matrix per layer (Wen et al. 2020, https://arxiv.org/abs/2002.06715).

    Member k has the weights $W \circ r_k s_k^\top$ and biases of its own: `Rank1` with point components and no prior on
    the factors.

    Args:
        members: K.
        factors: As in `Rank1`, like all other arguments.
        initial: Random signs, or values near 1, for ``start="fresh"``.
        batch: ``"split"`` trains at the cost of one network, ``"repeat"`` at that of K.
        weight_decay: An L2 penalty on weights and biases.
        start: ``"model"``, ``"fresh"``, ``"head"``, or a posterior.
        normalization: ``"shared"`` or one for each ``"component"``.
        recalibrate: Recompute the running statistics of normalization layers after training.
        spread: The standard deviation of the members' factors around 1 at the start.
        factor_rate: A factor of the learning rate for factors.
        weights: Which layers have factors.
    """

    setting_name = "BatchEnsemble"
    members: Count = 4
    factors: Sides = "both"
    initial: Literal["sign", "normal"] = "sign"
    batch: Literal["repeat", "split"] = "split"
    weight_decay: NonNegative = 1e-4
    start: Start = "model"
    normalization: Literal["shared", "component"] = "shared"
    recalibrate: bool = False
    spread: NonNegative = 0.1
    factor_rate: NonNegative = 1.0
    weights: SelectionRule | None = None

    def as_rank1(self) -> Rank1:
        """Return the equivalent `Rank1` recipe."""
        fields = {name: value for name, value in self.fields().items() if name != "members"}
        return Rank1(components=self.members, prior=None, family="delta", **fields)
