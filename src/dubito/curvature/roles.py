"""Which parameter each layer of a network uses as its weight and which as its bias."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from dubito.core.errors import UnsupportedError
from dubito.networks.layers import require_rule, rule_for

# What each layer with a rule does with which parameter: {layer: {"weight": name, "bias": name}}.
Roles = dict[nn.Module, dict[str, str]]


def find_roles(model: nn.Module, names: list[str]) -> tuple[Roles, dict[str, str]]:
    """Return the roles of the named parameters, and why others have none: some layer uses them without a rule."""
    parameters = dict(model.named_parameters())
    canonical = {id(parameters[name]): name for name in names}
    roles: Roles = {}
    reasons: dict[str, str] = {}
    for module in model.modules():
        for role, value in module._parameters.items():
            if value is None or id(value) not in canonical:
                continue
            name, obstacle = canonical[id(value)], _obstacle(module, role)
            if obstacle is None:
                roles.setdefault(module, {})[role] = name
            else:
                reasons.setdefault(name, obstacle)
    return without(roles, set(reasons)), reasons


def without(roles: Roles, names: set[str]) -> Roles:
    """Return the roles of all parameters but some."""
    return {layer: {r: name for r, name in own.items() if name not in names} for layer, own in roles.items()}


def shared_biases(roles: Roles) -> dict[str, str]:
    """Return each bias that multiplies the same rows of gradients as the weight of its layer, with that weight.

    Its Kronecker factor is that weight's output factor, which need not be computed again.
    """
    users = Counter(name for own in roles.values() for name in own.values())
    found = {}
    for layer, own in roles.items():
        rule = rule_for(layer)
        alone = len(own) == 2 and all(users[name] == 1 for name in own.values())
        if alone and rule is not None and rule.bias_shares_rows(layer):
            found[own["bias"]] = own["weight"]
    return found


def matrix_order(roles: Roles, name: str) -> Tensor | None:
    """Return the flat position in the stored weight of each entry of its matrix form; None if the order is the same."""
    for layer, own in roles.items():
        if own.get("weight") == name:
            weight, rule = layer.get_parameter("weight"), rule_for(layer)
            order = torch.arange(weight.numel(), device=weight.device).reshape(weight.shape)
            flat = order if rule is None else rule.to_matrix(layer, order)
            return None if torch.equal(flat.flatten(), order.flatten()) else flat.flatten()
    return None


def _obstacle(module: nn.Module, role: str) -> str | None:
    """Return why the layer rules do not cover this use of a parameter; None if they do."""
    try:
        require_rule(module, "the fast method")
    except UnsupportedError as error:
        return f"{error}."
    return None if role in ("weight", "bias") else f"the rule of {type(module).__name__} does not know its '{role}'."
