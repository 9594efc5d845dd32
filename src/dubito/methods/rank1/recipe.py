"""The `Rank1` and `BatchEnsemble` recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from dubito.beliefs.priors import Normal, Prior
from dubito.core.errors import InputError
from dubito.core.settings import Absent, setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.methods.rank1.families import FAMILIES, Family, check_pair
from dubito.methods.rank1.layers import Perturbation
from dubito.methods.rank1.sites import Sides

Start = Literal["model", "fresh"] | Posterior | Absent


@setting
class Rank1(Recipe):
    r"""Train a mixture over cheap factors of one shared network (Dusenberry et al. 2020, arXiv 2005.07186).

    In component k every layer is $y = ((x \circ s_k) W) \circ r_k + b_k$: its weight is $W \circ r_k s_k^\top$. The
    matrix $W$ is shared and a point, with an L2 penalty, itself a normal prior; the vectors $r_k, s_k$ have a
    posterior, and are drawn for each example; biases are points of each component. Training maximizes

    $$\frac1K \sum_k \mathbb E_{q_k} \log p(D \mid r, s) - \mathrm{KL}(q \,\|\, p), \qquad
      q = \frac1K \sum_k q_k(r) q_k(s) .$$

    A component costs one vector per side of each layer, not another network.

    Args:
        components: K.
        prior: The prior of every factor; its mean of 1 is a factor that changes nothing.
        posterior: The family of each component: ``"normal"``, ``"cauchy"`` (heavy tails, clipped at ±10),
            ``"log-normal"`` (positive) or ``"delta"`` (points).
        factors: ``"both"`` s and r, or only those of the ``"input"`` or the ``"output"`` side.
        bound: ``"average"`` of the components' log-likelihoods, or the log-likelihood of the ``"mixture"``, which is at
            least as large and needs ``batch="repeat"``.
        mixture_kl: ``"mean"`` over components, a bound on the mixture's divergence, or their ``"sum"``, K times it,
            which is what the authors' code trains with.
        initial: Where factors start when the start is fresh: random signs ±1 (``"sign"``), or around 1 (``"normal"``).
        batch: ``"repeat"`` shows every example to every component, at K times the cost; ``"split"`` shows each
            component a part of the batch, at the cost of one network.
        sample: Draw factors for each ``"example"``, or once for a component and a ``"batch"``.
        perturbation: ``"multiplicative"`` factors, or ``"additive"`` ones, $y = (x + s - 1) W + r - 1 + b$.
        kl_warmup: The fraction of all steps over which the weight of the divergence rises from 0 to 1.
        weight_decay: λ of an L2 penalty $\frac\lambda2 \|W\|^2$ in the mean loss, on weights and biases, not factors
            (decoupled under ``Training(optimizer="adamw")``).
        start: ``"model"`` starts at the model's weights with factors near 1, ``"fresh"`` at newly drawn weights; a MAP,
            Rank1 or BatchEnsemble posterior starts at what it found.
        normalization: Whether normalization layers are ``"shared"`` by the components, or each ``"component"`` has its
            own gains and statistics.
        recalibrate: Take the statistics of BatchNorm layers again after training, in one pass at the final weights.
        scales: Whether the scales of the posterior are ``"shared"`` by the components, or each ``"component"`` has its
            own, for twice the parameters.
        initial_scale: The scale of every factor at the start.
        spread: The standard deviation of the components' locations around 1 at the start.
        factor_rate: A factor of the learning rate for the locations and scales of factors; 0 keeps them as they are.
    """

    setting_name = "Rank1"
    components: int = 4
    prior: Prior | None = Normal(1.0, 0.1)
    posterior: Family = "normal"
    factors: Sides = "both"
    bound: Literal["average", "mixture"] = "average"
    mixture_kl: Literal["mean", "sum"] = "mean"
    initial: Literal["sign", "normal"] = "sign"
    batch: Literal["repeat", "split"] = "repeat"
    sample: Literal["example", "batch"] = "example"
    perturbation: Perturbation = "multiplicative"
    kl_warmup: float = 0.0
    weight_decay: float = 1e-4
    start: Start = "model"
    normalization: Literal["shared", "component"] = "shared"
    recalibrate: bool = False
    scales: Literal["shared", "component"] = "shared"
    initial_scale: float = 0.03
    spread: float = 0.1
    factor_rate: float = 1.0

    def __post_init__(self) -> None:
        _check_choices(self, _CHOICES)
        _check_ranges(self, "components")
        if self.prior is not None and not isinstance(self.prior, Prior):
            raise InputError(f"Rank1(prior={self.prior!r}) must be one of dubito.priors.")
        check_pair(self.posterior, self.prior)
        if self.bound == "mixture" and self.batch == "split":
            raise InputError("bound='mixture' needs every component to see every example: use batch='repeat' with it.")

    def as_rank1(self) -> Rank1:
        """Return itself."""
        return self

    def starting(self, start: str) -> Recipe:
        """As in `Recipe.starting`; factors that were to start near 1 still do."""
        return _starting(self, start)

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training."""
        from dubito.methods.rank1.trainer import Trainer

        return Trainer(self, problem).inference()


@setting
class BatchEnsemble(Recipe):
    r"""Train an ensemble whose members share one matrix per layer (Wen et al. 2020, https://arxiv.org/abs/2002.06715).

    Member k has the weights $W \circ r_k s_k^\top$ and biases of its own: `Rank1` with point components and no prior on
    the factors.

    Args:
        members: K.
        factors: As in `Rank1`, like all that follows.
        initial: Random signs, or around 1, where the start is fresh.
        batch: ``"split"`` trains at the cost of one network, ``"repeat"`` at that of K.
        weight_decay: An L2 penalty on weights and biases.
        start: ``"model"``, ``"fresh"``, or a posterior.
        normalization: ``"shared"`` or one for each ``"component"``.
        recalibrate: Take BatchNorm statistics again after training.
        spread: The standard deviation of the members' factors around 1 at the start.
        factor_rate: A factor of the learning rate for factors.
    """

    setting_name = "BatchEnsemble"
    members: int = 4
    factors: Sides = "both"
    initial: Literal["sign", "normal"] = "sign"
    batch: Literal["repeat", "split"] = "split"
    weight_decay: float = 1e-4
    start: Start = "model"
    normalization: Literal["shared", "component"] = "shared"
    recalibrate: bool = False
    spread: float = 0.1
    factor_rate: float = 1.0

    def __post_init__(self) -> None:
        _check_choices(self, {name: allowed for name, allowed in _CHOICES.items() if hasattr(self, name)})
        _check_ranges(self, "members")

    def as_rank1(self) -> Rank1:
        """Return the mixture of points that this is."""
        fields = {name: value for name, value in self.fields().items() if name != "members"}
        return Rank1(components=self.members, prior=None, posterior="delta", **fields)

    def starting(self, start: str) -> Recipe:
        """As in `Recipe.starting`; factors that were to start near 1 still do."""
        return _starting(self, start)

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training."""
        from dubito.methods.rank1.trainer import Trainer

        return Trainer(self, problem).inference()


_CHOICES: dict[str, tuple[str, ...]] = {
    "posterior": FAMILIES,
    "factors": ("both", "input", "output"),
    "bound": ("average", "mixture"),
    "mixture_kl": ("mean", "sum"),
    "initial": ("sign", "normal"),
    "batch": ("repeat", "split"),
    "sample": ("example", "batch"),
    "perturbation": ("multiplicative", "additive"),
    "normalization": ("shared", "component"),
    "scales": ("shared", "component"),
}
_RANGES: dict[str, Callable[[Any], bool]] = {
    "kl_warmup": lambda value: 0 <= value <= 1,
    "weight_decay": lambda value: 0 <= value < float("inf"),
    "initial_scale": lambda value: 0 < value < float("inf"),
    "spread": lambda value: 0 <= value < float("inf"),
    "factor_rate": lambda value: 0 <= value < float("inf"),
}


def _starting(recipe: Recipe, start: str) -> Recipe:
    own = recipe.fields()["start"]
    if not isinstance(own, str):
        raise InputError(
            f"{recipe.setting_name} starts from one posterior here, but members need starts of their own: leave its "
            "`start` out."
        )
    near_one = {"initial": "normal"} if (own, start) == ("model", "fresh") else {}
    return recipe.replace(start=start, **near_one)


def _check_choices(recipe: Recipe, choices: dict[str, tuple[str, ...]]) -> None:
    name = recipe.setting_name
    for field, allowed in choices.items():
        if getattr(recipe, field) not in allowed:
            raise InputError(f"{name}({field}={getattr(recipe, field)!r}) is not one of {', '.join(allowed)}.")
    start = recipe.fields()["start"]
    if not isinstance(start, Posterior | Absent) and start not in ("model", "fresh"):
        raise InputError(f"{name}(start={start!r}) must be 'model', 'fresh' or a posterior to start from.")


def _check_ranges(recipe: Recipe, count: str) -> None:
    fields = recipe.fields()
    number = fields[count]
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise InputError(f"{recipe.setting_name}({count}={number!r}) must be a whole number, at least 1.")
    for field, good in _RANGES.items():
        value = fields.get(field)
        if field in fields and not (isinstance(value, int | float) and good(value)):
            raise InputError(f"{recipe.setting_name}({field}={value!r}) is out of range.")
