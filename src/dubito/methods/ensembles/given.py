"""An ensemble of networks or posteriors that exist already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from dubito.beliefs import likelihoods
from dubito.beliefs.likelihoods import Likelihood
from dubito.core import params
from dubito.core.errors import InputError
from dubito.fitting.model_copies import private_copy
from dubito.fitting.posterior import Posterior
from dubito.methods.ensembles.posterior import EnsemblePosterior
from dubito.methods.map.posterior import PointPosterior
from dubito.methods.map.recipe import MAP

if TYPE_CHECKING:
    from dubito.core.batches import Data


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
