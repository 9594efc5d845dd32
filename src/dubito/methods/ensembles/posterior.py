r"""The posterior of an ensemble: an equally weighted mixture, $p(y) = \frac1K \sum_k p_k(y)$, of posteriors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from dubito.beliefs import likelihoods
from dubito.beliefs.likelihoods import Gaussian, Likelihood
from dubito.beliefs.prediction import ClassPrediction, DistributionPrediction, Prediction, RegressionPrediction
from dubito.beliefs.prediction.classification import log_mean_exp
from dubito.core import params
from dubito.core.batches import Data
from dubito.core.constraints import Count, check
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params, frozen_names
from dubito.core.randomness import default_generator, derive_seed, draw_seed
from dubito.fitting.functions import Functions
from dubito.fitting.loading import family_of, restored
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.traceable import Traceable
from dubito.fitting.training import Training
from dubito.fitting.working_copies import private_copy
from dubito.methods.map.posterior import PointPosterior
from dubito.methods.map.recipe import MAP


class EnsemblePosterior(Posterior):
    """An equal mixture of posteriors. Each member has weights, buffers, likelihood and uncertainty of its own.

    Attributes:
        members: The posteriors; each can be used on its own.
        model: The network of the first member: several modes have no common centre.
    """

    family = "Ensemble"
    more_spread = "Use members that differ: new weights (start='fresh') or data of their own."
    passes_options = True

    def __init__(self, members: list[Posterior], recipe: Any) -> None:
        super().__init__(members[0].model, members[0].likelihood, recipe, members[0].num_data)
        self.members = members

    @property
    def default_samples(self) -> int:
        """As many of each member as it would draw on its own."""
        return self.members[0].default_samples

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights, an equal share from each member: sample s is from member ``s % K``.

        A member's buffers (BatchNorm statistics) belong to its weights; they are in ``members[k].model``.
        """
        generator, count = default_generator(generator), len(self.members)
        shares = [(num_samples + count - 1 - k) // count for k in range(count)]
        drawn = [m.sample(n, generator=generator) for m, n in zip(self.members, shares, strict=True) if n]
        return {
            name: torch.stack([drawn[s % count][name][s // count] for s in range(num_samples)]) for name in drawn[0]
        }

    def functions(self, num_functions: Count, *, generator: torch.Generator | None = None) -> Functions:
        """Draw functions, an equal share from each member, as `sample`; each with its member's buffers."""
        check("num_functions", Count, num_functions)
        generator, count = default_generator(generator), len(self.members)
        members = [self.members[s % count] for s in range(num_functions)]
        return Functions([member.functions(1, generator=generator)[0] for member in members])

    def marginals(self) -> tuple[Params, Params]:
        """Return those of the only member; several modes have no common mean."""
        if len(self.members) == 1:
            return self.members[0].marginals()
        raise UnsupportedError(
            "An ensemble has several modes, and the mean of their weights is no useful network: use one of "
            "`posterior.members` for its marginals."
        )

    def prior(self) -> tuple[Params, Params]:
        """Return the prior, where all members share it."""
        mean, variance = self.members[0].prior()
        for member in self.members[1:]:
            other = member.prior()
            same = all(torch.equal(mean[n], other[0][n]) and torch.equal(variance[n], other[1][n]) for n in mean)
            if not same:
                raise UnsupportedError(
                    "The members of this ensemble have different priors: use one of `posterior.members`."
                )
        return mean, variance

    def log_evidence(self) -> Tensor:
        """Return that of the only member; an ensemble is no approximation of one posterior."""
        if len(self.members) == 1:
            return self.members[0].log_evidence()
        raise UnsupportedError(
            "An ensemble has no evidence of its own: use one of `posterior.members`, if its recipe gives one."
        )

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the mixture of the members' predictions.

        Args:
            num_samples: How many samples of each member, where it draws any.
            generator: The source of randomness.
            options: Passed on to every member, such as `link` for an ensemble of Laplace posteriors.
        """
        predictors = [member.predictor(num_samples, generator, **options) for member in self.members]

        def predict(inputs: Any) -> Prediction:
            return mixture([predict_member(inputs) for predict_member in predictors])

        return predict

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield the mixture of the members' forms; layers that members have in common are computed once."""
        if together := _as_samples(self.members):
            yield together
            return
        for members in zip(*(m.forms(example, num_samples, generator, **options) for m in self.members), strict=False):
            yield _mixed(members)

    def _updated(self, data: Data, **options: Any) -> EnsemblePosterior:
        """Let every member learn on from new data in its own way. Returns a new ensemble; this one stays as it was."""
        seed, members = draw_seed(default_generator(options["generator"])), []
        for k, member in enumerate(self.members):
            training = training_of_member(options["training"], k)
            generator = torch.Generator().manual_seed(derive_seed(seed, k))
            members.append(member.update(data, **options | {"training": training, "generator": generator}))
        return type(self)(members, self.recipe)

    def with_likelihood(self, likelihood: Likelihood) -> EnsemblePosterior:
        """Return the ensemble with this likelihood for every member."""
        return type(self)([member.with_likelihood(likelihood) for member in self.members], self.recipe)

    def state(self) -> dict[str, Any]:
        """Return the members; the weights of the first are those of `model`."""
        trees = [member._tree() for member in self.members]
        trees[0] = {**trees[0], "params": {}, "buffers": {}}
        return {"members": trees}

    @classmethod
    def network_for(cls, model: nn.Module, tree: Mapping[str, Any]) -> nn.Module:
        """Return the network of the members."""
        first = tree["state"]["members"][0]
        return family_of(first).network_for(model, {**first, "params": tree["params"]})

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Undo `state`."""
        names, base = {*params.of(model), *params.buffers_of(model)}, set(frozen_names(model))
        for tree in state["members"][1:]:  # else a small file could ask for any number of copies of the model
            if {*tree["params"], *tree["buffers"]} != (names - base if "base" in tree else names):
                raise InputError("The weights of a member of the ensemble are not complete.")
        return cls([restored(tree, model) for tree in state["members"]], recipe)

    def __repr__(self) -> str:
        weights = params.num_weights(self.mean())
        return f"<Ensemble of {len(self.members)} posteriors over {weights:,} weights by {self.recipe!r}>"


def _as_samples(members: Sequence[Posterior]) -> Traceable | None:
    """Return the mixture of plain networks as that of weight samples, which takes fewer steps; None for others."""
    points = [member for member in members if type(member) is PointPosterior and member.temperature == 1]
    likelihoods = [member.likelihood for member in members]
    if len(points) < max(2, len(members)):
        return None
    likelihood, hyper = likelihoods[0], None
    if any(other != likelihood for other in likelihoods):
        if not all(isinstance(each, Gaussian) for each in likelihoods):
            return None
        noise = torch.tensor([each.noise for each in likelihoods], dtype=torch.float64)  # type: ignore[attr-defined]
        likelihood, hyper = likelihood.replace(noise="learn"), {"log_noise": noise.log()}
    models = [point.model for point in points]
    return Traceable(
        lambda inputs: likelihood.predict_samples(torch.stack([params.call(model, inputs) for model in models]), hyper),
        f"{len(models)} networks",
    )


def _mixed(members: tuple[Traceable, ...]) -> Traceable:
    found = dict.fromkeys(member.form for member in members)
    return Traceable(
        lambda inputs: mixture([member.predict(inputs) for member in members]),
        f"{len(members)} members, each: {' or '.join(found)}",
        tuple(dict.fromkeys(note for member in members for note in member.approximations)),
        members[0].reference_samples,
        any(member.makes_weights for member in members),
    )


def training_of_member(training: Training | None, k: int) -> Training | None:
    """Return the settings with a checkpoint of the member's own."""
    if training is None or training.checkpoint is None:
        return training
    return training.replace(checkpoint=f"{training.checkpoint}.member-{k}")


def as_member(member: nn.Module | Posterior, likelihood: Likelihood, data: Data | None) -> Posterior:
    """Return a posterior as it is, and a trained network as a point; `data` is for a noise that is not given."""
    if isinstance(member, Posterior):
        return member
    recipe = MAP(train=False)
    if data is not None:
        return recipe.fit(member, data, likelihood=likelihood, progress=False)
    if likelihood.hyper():
        raise InputError(
            f"{likelihood!r} has a noise that must be found from data: give its value, as in "
            "likelihoods.Gaussian(noise=0.1), or pass `data=`."
        )
    return PointPosterior(private_copy(member).eval(), likelihood, recipe, 0)


def ensemble_of(
    recipe_class: type, members: Sequence[nn.Module | Posterior], likelihood: str | Likelihood, data: Data | None
) -> EnsemblePosterior:
    """Return the ensemble of given members; see `Ensemble.of`."""
    if not members or not all(isinstance(member, nn.Module | Posterior) for member in members):
        raise InputError("An ensemble is made of a list of at least one trained network or posterior.")
    found = [as_member(member, likelihoods.resolve(likelihood), data) for member in members]
    first = params.of(found[0].model)
    for number, member in enumerate(found[1:], start=1):
        try:
            params.check_same(first, dict(member.model.named_parameters()))
        except InputError as error:
            raise InputError(f"Member {number} is another network than member 0. {error}") from error
        if type(member.likelihood) is not type(found[0].likelihood):
            raise InputError(f"Member {number} has the likelihood {member.likelihood!r}, member 0 another one.")
    return EnsemblePosterior(found, recipe_class(members=len(found), recipe=found[0].recipe, start="model"))


def mixture(parts: list[Any]) -> Prediction:
    r"""Return the mixture of the members' predictions for the same data; one member's prediction stays as it is.

    For classes the decomposition of the uncertainty is exact, including the members' own epistemic uncertainty:

    $$\text{aleatoric} = \frac1K \sum_k a_k, \qquad
      \text{epistemic} = \frac1K \sum_k e_k + H\Big(\frac1K \sum_k p_k\Big) - \frac1K \sum_k H(p_k)$$

    The samples of all members are concatenated on the sample axis; a member without samples counts as one.

    >>> import math
    >>> sure = [ClassPrediction.from_logits(torch.tensor([logits])) for logits in ([50.0, 0.0], [0.0, 50.0])]
    >>> prediction = mixture(sure)
    >>> prediction.probs.tolist(), round(prediction.epistemic.item() / math.log(2), 6)
    ([[0.5, 0.5]], 1.0)
    """
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, ClassPrediction) for part in parts):
        return _of_classes(parts)
    if all(isinstance(part, RegressionPrediction) for part in parts):
        return _of_numbers(parts)
    raise UnsupportedError(f"Predictions of the kind {type(parts[0]).__name__} cannot be mixed.")


def _of_classes(parts: list[ClassPrediction]) -> ClassPrediction:
    members = torch.stack([part.log_probs for part in parts])
    log_probs = log_mean_exp(members)
    aleatoric = torch.stack([part.aleatoric for part in parts]).mean(dim=0)
    within = torch.stack([part.epistemic for part in parts]).mean(dim=0)
    between = (_entropy(log_probs) - _entropy(members).mean(dim=0)).clamp_min(0.0)  # Jensen: below 0 is rounding
    samples = [part.log_probs.unsqueeze(0) if part.samples is None else part.samples for part in parts]
    return ClassPrediction(log_probs, aleatoric, within + between, torch.cat(samples))


def _of_numbers(parts: list[RegressionPrediction]) -> RegressionPrediction:
    if all(isinstance(part, DistributionPrediction) for part in parts):
        return DistributionPrediction.mixed(parts)  # type: ignore[arg-type]
    fields = ("means", "noise_variance", "function_variance")
    means, noise, function = (torch.cat([getattr(part, name) for part in parts]) for name in fields)
    return RegressionPrediction(means, noise, function, noise_covariance=parts[0].noise_covariance)


def _entropy(log_probs: Tensor) -> Tensor:
    return -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(dim=-1)
