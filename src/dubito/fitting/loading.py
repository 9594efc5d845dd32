"""Load posteriors and decision rules from files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import io, params
from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Natural, accepts
from dubito.core.errors import FileFormatError, InputError
from dubito.core.settings import Setting, load_all
from dubito.core.widest import computing_on
from dubito.fitting.auto_explanation import AutoExplanation
from dubito.fitting.decision_rule import DecisionRule
from dubito.fitting.fit_record import FitRecord
from dubito.fitting.posterior import Posterior, first_tensor
from dubito.fitting.recipe import Recipe
from dubito.networks.adapters import copied_beside_base
from dubito.networks.overwriting import keep_inputs
from dubito.networks.swapping import uncompile_parts


@checked_arguments
def load(path: str | os.PathLike[str], model: nn.Module | Posterior) -> Any:
    """Load a posterior or a decision rule from a file that `posterior.save(path)` or `rule.save(path)` wrote.

    Args:
        path: The file.
        model: A network of the same architecture. Its weights are not used, and it is not changed. For a decision rule
            it may be the posterior of the rule; it must be if the file was written without one.
    """
    tree = io.load(path, "posterior", "decision rule")
    if "rule" not in tree:
        if isinstance(model, Posterior):
            raise InputError(f"'{path}' holds a posterior: give the network that it belongs to, not a posterior.")
        return _posterior(path, tree, model)
    with io.reading(path):
        if not isinstance(model, Posterior):
            if "posterior" not in tree:
                raise InputError("it holds a decision rule without its posterior: give the posterior, not a network.")
            model = _posterior(path, tree["posterior"], model)
        elif model.digest() != tree["of"]:
            raise InputError("it holds a decision rule that was fitted with another posterior: give that one.")
        load_all()
        if tree["rule"] not in DecisionRule._kinds:
            raise FileFormatError(f"'{path}' holds a {tree['rule']!r}, which this version lacks: upgrade it.")
        return DecisionRule._kinds[tree["rule"]].from_state(model, tree["state"])


def load_posterior(path: str | os.PathLike[str], model: nn.Module) -> Posterior:
    """Load a posterior, and nothing else, from a file; see `load`."""
    return _posterior(path, io.load(path, "posterior"), model)


def _posterior(path: str | os.PathLike[str], tree: Mapping[str, Any], model: nn.Module) -> Posterior:
    model = params.unwrapped(model)
    with computing_on(first_tensor(model).device), io.reading(path):
        model = family_of(tree).network_for(model, tree)
        io.check_shapes(path, {**_base(path, tree, model), **tree["params"], **tree["buffers"]}, _tensors(model))
        found = restored({**tree, "state": io.clone(tree["state"], first_tensor(model).device)}, model)
        found._file = str(path)
        return found


def _base(path: Any, tree: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the model that a file leaves out: its frozen base, of which it has a digest."""
    if "base" not in tree:
        return {}
    base = {name: value.detach() for name, value in model.named_parameters() if name not in tree["params"]}
    if io.digest(base) != tree["base"]:
        raise FileFormatError(
            f"'{path}' holds adapters, and the weights beside them in this model are not those that they were fitted "
            "on: load the same base and add the same adapters to it."
        )
    return base


def restored(tree: Mapping[str, Any], model: nn.Module) -> Posterior:
    """Restore a posterior from its saved tree; weights that are not in the tree are taken from `model`."""
    family = family_of(tree)
    private = uncompile_parts(copied_beside_base(family.network_for(model, tree)))
    own = _tensors(private)
    for name, value in {**tree["params"], **tree["buffers"]}.items():
        if value.shape != own[name].shape or value.is_floating_point() != own[name].is_floating_point():
            raise FileFormatError(f"The weight '{name}' in the file does not fit the model in shape or type.")
        own[name].data = value.to(own[name].device)  # replaced, not copied into: the file determines the precision
    if tree.get("overwrites"):
        keep_inputs(private)
    recipe, likelihood = (
        Setting.from_json(json.loads(tree["settings"][name]), tree["tensors"]) for name in ("recipe", "likelihood")
    )
    kinds = (Recipe, recipe), (Likelihood, likelihood), (Natural, tree["num_data"])
    if not all(accepts(*pair) for pair in kinds):
        raise FileFormatError("The file does not hold a recipe, a likelihood and a number of examples.")
    found = family.from_state(private, likelihood, recipe, tree["num_data"], tree["state"])
    if "fit_record" in tree:  # files of the first version have none
        found.fit_record = FitRecord.from_dict(json.loads(tree["fit_record"]))
    if "explanation" in tree:
        found.explanation = AutoExplanation.from_dict(json.loads(tree["explanation"]))
    return found


def family_of(tree: Mapping[str, Any]) -> type[Posterior]:
    """Return the family of a saved posterior."""
    load_all()
    if tree["family"] not in Posterior._families:
        raise FileFormatError(f"The file holds a '{tree['family']}' posterior, which this version lacks: upgrade it.")
    return Posterior._families[tree["family"]]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
