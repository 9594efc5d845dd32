"""Convert a network into one with random weights."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.beliefs.priors import GroupPrior, Normal, Prior
from dubito.beliefs.priors.base import require_real
from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count, Positive, check
from dubito.core.errors import InputError
from dubito.fitting.working_copies import private_copy
from dubito.methods.variational.joint import Family, JointModule
from dubito.methods.variational.layer import StochasticLayer, make_stochastic
from dubito.methods.variational.mean_field import MeanField
from dubito.methods.variational.module import VariationalModule
from dubito.networks.adapters import adapter_names
from dubito.networks.layers import is_norm, rule_for
from dubito.networks.selection import Selection
from dubito.networks.swapping import switch_off_checkpointing
from dubito.select import SelectionWarning
from dubito.select import all as all_weights
from dubito.select.rule import SelectionRule

Estimator = Literal["local", "flipout", "weight"]
Biases = Literal["deterministic", "random"]

_KINDS = {
    "prior": Prior,
    "estimator": Estimator,
    "initial_scale": Positive | dict[str, Tensor],
    "biases": Biases,
    "weights": SelectionRule | Selection,
    "rest": Literal["train", "hold"],
    "family": Family,
    "rank": Count,
}


@checked_arguments
def convert(
    model: nn.Module,
    *,
    prior: Prior = Normal(),  # noqa: B008 - a frozen setting
    estimator: Estimator = "local",
    initial_scale: float | dict[str, Tensor] = 0.03,
    biases: Biases = "deterministic",
    weights: SelectionRule | Selection = all_weights(),  # noqa: B008 - a frozen setting
    rest: Literal["train", "hold"] = "train",
    family: Family = "mean-field",
    rank: int = 10,
) -> VariationalModule:
    r"""Return a copy of any network with a posterior $\mathcal N(\mu, \sigma^2)$ over its weights, as a plain module.

    Train it with any loop on ``-log_likelihood.mean() + module.kl() / num_data``, or with an objective from
    `dubito.objectives`. The model itself is not changed; the means start at its weights.

    Args:
        model: Any network.
        prior: The prior of every weight.
        estimator: How calls are sampled: ``"local"`` reparameterization (lowest variance), ``"flipout"``, or
            ``"weight"`` sampling (one weight sample per call, cheapest for convolutions).
        initial_scale: The initial σ: a number, or for each parameter name a tensor for its random entries.
        biases: Whether vectors (biases, gains of normalization layers) are random too, or trained as points.
        weights: Which weights are random.
        rest: Whether weights that are not selected are trained as points or kept fixed.
        family: ``"mean-field"``: independent weights. ``"low-rank"`` and ``"full"``: correlated weights, for small
            selections; they always sample weights, whatever the estimator.
        rank: The rank of the correlations of ``"low-rank"``.

    >>> import torch
    >>> module = convert(nn.Linear(3, 2), initial_scale=1.0)
    >>> means = module.mean_module().weight
    >>> torch.testing.assert_close(module.kl(), 0.5 * means.square().sum())  # N(μ, 1) under N(0, 1)
    """
    _check(
        model, prior=prior, estimator=estimator, initial_scale=initial_scale, biases=biases, weights=weights,
        rest=rest, family=family, rank=rank,
    )  # fmt: skip
    check_family(family, prior)
    network = private_copy(model)
    switch_off_checkpointing(network)
    chosen = weights if isinstance(weights, Selection) else weights.resolve(network)
    selection = random_weights(network, chosen, biases)
    module = _converted(network, chosen, selection, prior, estimator, initial_scale, rest == "hold", family, rank)
    module.settings = {
        "prior": prior, "estimator": estimator, "initial_scale": initial_scale, "biases": biases, "weights": weights,
        "family": family, "rank": rank,
    }  # fmt: skip
    return module.train(model.training)


def _converted(
    network: nn.Module,
    chosen: Selection,
    selection: Selection,
    prior: Prior,
    estimator: str,
    initial_scale: float | dict[str, Tensor],
    hold_rest: bool,
    family: str,
    rank: int,
) -> VariationalModule:
    """Convert a network in place; `selection` holds those of the `chosen` weights that can be random."""
    parameters = dict(network.named_parameters())
    if hold_rest:
        for name, value in parameters.items():
            value.requires_grad_(value.requires_grad and (name in selection.indices or chosen.is_whole(name)))
    if isinstance(prior, GroupPrior):
        from dubito.methods.variational.groups.module import convert_groups

        return convert_groups(network, selection, prior, estimator, initial_scale, hold_rest)
    posterior = _fields(parameters, selection, prior, initial_scale, hold_rest)
    if family != "mean-field":
        return JointModule(network, posterior, selection, family, rank)
    if estimator != "weight":
        _put_noise_on_outputs(network, posterior, estimator)
    return VariationalModule(network, posterior, selection, estimator)


def _fields(
    parameters: dict[str, nn.Parameter],
    selection: Selection,
    prior: Prior,
    initial_scale: float | dict[str, Tensor],
    hold_rest: bool,
) -> dict[str, MeanField]:
    """Return the scales and the prior of each parameter."""
    fields = {}
    for name in selection.names:
        mean, index = parameters[name], selection.indices[name]
        entries = mean.detach() if index is None else mean.detach().flatten()[index.to(mean.device)]
        scale = _scale_of(name, entries.shape, initial_scale) if isinstance(initial_scale, dict) else initial_scale
        fields[name] = MeanField(mean, index, prior.resolve(name, entries), scale, hold_rest)
    return fields


def _scale_of(name: str, shape: tuple[int, ...], scales: dict[str, Tensor]) -> Tensor:
    """Return the scales of one parameter's random entries."""
    if name not in scales:
        raise InputError(f"initial_scale has no entry for '{name}', which is random: add a tensor, or pass a number.")
    scale = torch.as_tensor(scales[name])
    if scale.shape not in ((), shape) or not bool((scale >= 0).all()):  # a fitted scale may underflow to 0
        raise InputError(f"The initial_scale of '{name}' must have shape {tuple(shape)} and no negative values.")
    return scale


def random_weights(network: nn.Module, chosen: Selection, biases: str) -> Selection:
    """Return the chosen weights that can be random: no constants, and no vectors if biases are deterministic.

    The vectors of adapters (VeRA, the magnitudes of DoRA) are no biases: they are all that such an adapter learns.
    """
    masks = chosen.masks()
    vectors = {name for name in adapter_names(network) if not name.endswith("bias")}
    points = {name for name, mask in masks.items() if mask.ndim < 2 and name not in vectors}
    names = {id(value): name for name, value in network.named_parameters()}
    for module in network.modules():
        rule = rule_for(module)
        constant = None if rule is None else rule.constant_weights(module)
        if constant is not None:  # the padding row of an embedding
            masks[names[id(module.weight)]] &= ~constant.cpu()
        if is_norm(module):
            points |= {names[id(value)] for value in module.parameters(recurse=False)}
    kept = {name: mask for name, mask in masks.items() if biases == "random" or name not in points}
    selection = Selection.from_masks(chosen.shapes, kept)
    if selection.num_weights == 0:
        raise InputError("Only biases or constants are selected, which are not random here: pass biases='random'.")
    _warn_of_points({name: int(mask.sum()) for name, mask in masks.items() if name not in kept}, chosen)
    return selection


def _warn_of_points(left_out: dict[str, int], chosen: Selection) -> None:
    """Warn that some single weights are not random. No warning if a whole bias was selected."""
    count = sum(left_out.values())
    if any(chosen.indices.get(name) is not None for name, number in left_out.items() if number):
        warnings.warn(
            f"{count:,} of the {chosen.num_weights:,} chosen weights are biases or gains of normalization layers and "
            "not random: pass biases='random', or select among the others, as with "
            "select.subnetwork(size, candidates='weights').",
            SelectionWarning, stacklevel=4,
        )  # fmt: skip


def _put_noise_on_outputs(network: nn.Module, posterior: dict[str, MeanField], estimator: str) -> None:
    """Make every layer stochastic that has a layer rule, an untied weight, and inputs that the weight multiplies."""
    names = {id(value): name for name, value in network.named_parameters()}
    owners = Counter(id(value) for module in network.modules() for value in module._parameters.values())
    for module in list(network.modules()):
        rule = rule_for(module)
        if rule is None:
            continue
        own = {n: value for n, value in module.named_parameters(recurse=False) if names[id(value)] in posterior}
        tied = any(owners[id(value)] > 1 for value in own.values())
        # a normalization layer samples its gain instead, so that its own forward updates the running statistics
        if "weight" in own and own["weight"].ndim >= 2 and not tied and not rule.normalizes:
            make_stochastic(module, rule, estimator, {n: posterior[names[id(value)]] for n, value in own.items()})


def check_family(family: str, prior: Prior) -> None:
    """Raise an error unless the family supports the prior."""
    if family != "mean-field" and isinstance(prior, GroupPrior):
        raise InputError(f"{prior!r} has group scales and needs independent weights: use family='mean-field'.")


def _check(model: nn.Module, **arguments: Any) -> None:
    check("model", nn.Module, model)
    for name, kind in _KINDS.items():
        check(name, kind, arguments[name])
    require_real(arguments["prior"])
    if any(isinstance(module, VariationalModule | StochasticLayer) for module in model.modules()):
        raise InputError("The model is converted already: convert the plain network, or its mean_module().")
