"""Layer rules: what each method knows of each layer type, one file per type.

`rule_for(module)` finds the rule, `LayerRule` is the contract, `register` adds a layer of your own.
"""

from __future__ import annotations

from dubito.networks.layers import conv, conv_transpose, embedding, linear, norm  # noqa: F401 - they register their rules
from dubito.networks.layers.base import Cost, LayerRule, Side
from dubito.networks.layers.registry import register, require_rule, rule_for
from dubito.networks.layers.rows import Dense, Elementwise, Grouped, Index, Rows, per_sample_gradient, summed_gradient

__all__ = [
    "Cost",
    "Dense",
    "Elementwise",
    "Grouped",
    "Index",
    "LayerRule",
    "Rows",
    "Side",
    "per_sample_gradient",
    "register",
    "require_rule",
    "rule_for",
    "summed_gradient",
]
