"""Layer rules: everything that methods need to know about a layer type, one file per type.

`rule_for(module)` finds the rule, `LayerRule` is the contract, `register` adds a layer of your own.
"""

from dubito.networks.layers import (  # noqa: F401 - they register their rules
    conv,
    conv_transpose,
    embedding,
    instance_norm,
    linear,
    norm,
    rms_norm,
    transposed_linear,
)
from dubito.networks.layers.base import LayerRule, Side
from dubito.networks.layers.registry import (
    channel_axis,
    class_rule,
    is_norm,
    register,
    require_rule,
    rule_for,
    weight_axis,
)
from dubito.networks.layers.rows import (
    DenseRows,
    ElementwiseRows,
    GroupedRows,
    IndexRows,
    Rows,
    per_sample_gradient,
    summed_gradient,
)

__all__ = [
    "DenseRows",
    "ElementwiseRows",
    "GroupedRows",
    "IndexRows",
    "LayerRule",
    "Rows",
    "Side",
    "channel_axis",
    "class_rule",
    "is_norm",
    "per_sample_gradient",
    "register",
    "require_rule",
    "rule_for",
    "summed_gradient",
    "weight_axis",
]
