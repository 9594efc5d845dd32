"""From any network to one whose weights are random."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from torch import Tensor, nn

from dubito.errors import InputError
from dubito.fitting import private_copy
from dubito.layers import rule_for
from dubito.layers.norm import NormRule
from dubito.priors import GroupPrior, Normal, Prior
from dubito.priors.base import require_real
from dubito.select import all as all_weights
from dubito.selection import Selection, SelectionRule
from dubito.variational.correlations import FAMILIES
from dubito.variational.joint import JointModule
from dubito.variational.layer import StochasticLayer, make_stochastic
from dubito.variational.mean_field import MeanField
from dubito.variational.module import VariationalModule

ESTIMATORS = ("local", "flipout", "weight")
BIASES = ("deterministic", "random")


def convert(
    model: nn.Module,
    *,
    prior: Prior = Normal(),  # noqa: B008 - a frozen setting
    estimator: Literal["local", "flipout", "weight"] = "local",
    initial_scale: float | dict[str, Tensor] = 0.03,
    biases: Literal["deterministic", "random"] = "deterministic",
    weights: SelectionRule | Selection = all_weights(),  # noqa: B008 - a frozen setting
    rest: Literal["train", "hold"] = "train",
    family: Literal["mean-field", "low-rank", "full"] = "mean-field",
    rank: int = 10,
) -> VariationalModule:
    r"""Return a copy of any network with a posterior $\mathcal N(\mu, \sigma^2)$ over its weights, as a plain module.

    Train it with any loop on ``-log_likelihood.mean() + module.kl() / num_data``, or with an objective from
    `dubito.objectives`. The model itself is not changed; the means start at its weights.

    Args:
        model: Any network.
        prior: The prior of every weight.
        estimator: How noise reaches the outputs: ``"local"`` reparameterization (lowest variance), ``"flipout"``, or
            ``"weight"`` sampling (one weight sample per call, cheapest for convolutions).
        initial_scale: σ at the start: a number, or a tensor of each random parameter's random entries by name.
        biases: Whether vectors (biases, gains of normalization layers) are random too, or trained as points.
        weights: Which weights are random.
        rest: Whether weights that are not selected can be trained, as points, or are held at their value.
        family: ``"mean-field"``: independent weights. ``"low-rank"`` and ``"full"``: correlated ones, for small
            selections; all weights are then sampled together, whatever the estimator.
        rank: The rank of the correlations of ``"low-rank"``.

    >>> import torch
    >>> module = convert(nn.Linear(3, 2), initial_scale=1.0)
    >>> means = module.mean_module().weight
    >>> torch.testing.assert_close(module.kl(), 0.5 * means.square().sum())  # N(μ, 1) under N(0, 1)
    """
    _check(model, prior, estimator, initial_scale, biases, rest)
    check_family(family, rank, prior)
    network = private_copy(model)
    chosen = weights if isinstance(weights, Selection) else weights.resolve(network)
    selection = random_weights(network, chosen, biases)
    parameters = dict(network.named_parameters())
    if rest == "hold":
        for name, value in parameters.items():
            value.requires_grad_(value.requires_grad and (name in selection.indices or chosen.is_whole(name)))
    if isinstance(prior, GroupPrior):
        from dubito.variational.groups.convert import convert_groups

        groups = convert_groups(network, selection, prior, estimator, initial_scale, rest == "hold")
        return groups.train(model.training)
    posterior = _fields(parameters, selection, prior, initial_scale, rest == "hold")
    if family != "mean-field":
        return JointModule(network, posterior, selection, family, rank).train(model.training)
    if estimator != "weight":
        _put_noise_on_outputs(network, posterior, estimator)
    return VariationalModule(network, posterior, selection, estimator).train(model.training)


def _fields(
    parameters: dict[str, nn.Parameter],
    selection: Selection,
    prior: Prior,
    initial_scale: float | dict[str, Tensor],
    hold_rest: bool,
) -> dict[str, MeanField]:
    """Scales and priors of each parameter."""
    fields = {}
    for name in selection.names:
        mean, index = parameters[name], selection.indices[name]
        entries = mean.detach() if index is None else mean.detach().flatten()[index.to(mean.device)]
        scale = initial_scale[name] if isinstance(initial_scale, dict) else initial_scale
        fields[name] = MeanField(mean, index, prior.resolve(name, entries), scale, hold_rest)
    return fields


def random_weights(network: nn.Module, chosen: Selection, biases: str) -> Selection:
    """Return the chosen weights that can be random: no constants, and no vectors where biases are deterministic."""
    masks = chosen.masks()
    points = {name for name, mask in masks.items() if mask.ndim < 2}
    names = {id(value): name for name, value in network.named_parameters()}
    for module in network.modules():
        rule = rule_for(module)
        constant = None if rule is None else rule.constant_weights(module)
        if constant is not None:  # the row of an embedding's padding
            masks[names[id(module.weight)]] &= ~constant.cpu()
        if isinstance(rule, NormRule):
            points |= {names[id(value)] for value in module.parameters(recurse=False)}
    kept = {name: mask for name, mask in masks.items() if biases == "random" or name not in points}
    selection = Selection.from_masks(chosen.shapes, kept)
    if selection.num_weights == 0:
        raise InputError("Only biases or constants are selected, and they are not random: pass biases='random'.")
    return selection


def _put_noise_on_outputs(network: nn.Module, posterior: dict[str, MeanField], estimator: str) -> None:
    """Make stochastic every layer that has a rule, a weight of its own and inputs that the weight multiplies."""
    names = {id(value): name for name, value in network.named_parameters()}
    owners = Counter(id(value) for module in network.modules() for value in module._parameters.values())
    for module in list(network.modules()):
        rule = rule_for(module)
        if rule is None:
            continue
        own = {n: value for n, value in module.named_parameters(recurse=False) if names[id(value)] in posterior}
        tied = any(owners[id(value)] > 1 for value in own.values())
        # the gain of a normalization layer is sampled: it is small, and the layer's own forward keeps its statistics
        if "weight" in own and own["weight"].ndim >= 2 and not tied and not isinstance(rule, NormRule):
            make_stochastic(module, rule, estimator, {n: posterior[names[id(value)]] for n, value in own.items()})


def check_family(family: str, rank: int, prior: Prior) -> None:
    """Raise unless there is such a family, and it goes with the prior."""
    if family not in FAMILIES:
        raise InputError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}.")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise InputError(f"rank must be a whole number, at least 1, got {rank!r}.")
    if family != "mean-field" and isinstance(prior, GroupPrior):
        raise InputError(f"{prior!r} has scales of groups and independent weights: use family='mean-field' with it.")


def _check(
    model: nn.Module, prior: Prior, estimator: str, initial_scale: float | dict[str, Tensor], biases: str, rest: str
) -> None:
    if not isinstance(prior, Prior):
        raise InputError(f"prior must be one of dubito.priors, such as priors.Normal(0, 1), not {prior!r}.")
    require_real(prior)
    choices = {"estimator": (estimator, ESTIMATORS), "biases": (biases, BIASES), "rest": (rest, ("train", "hold"))}
    for name, (given, allowed) in choices.items():
        if given not in allowed:
            raise InputError(f"{name} must be one of {', '.join(allowed)}, got {given!r}.")
    if not isinstance(initial_scale, dict) and not 0 < initial_scale < float("inf"):
        raise InputError(f"initial_scale is a standard deviation and must be positive, got {initial_scale!r}.")
    if any(isinstance(module, VariationalModule | StochasticLayer) for module in model.modules()):
        raise InputError("The model is converted already: convert the plain network, or take its mean_module().")
