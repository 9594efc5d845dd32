"""The units of adapters: the ranks of LoRA products ``B A``, each a row of `A` and a column of `B`."""

from __future__ import annotations

import torch
from torch import nn

from dubito.networks.adapters import low_rank_pairs
from dubito.networks.layers import rule_for
from dubito.uses.compression.units_by_fx import LayerChannels, UnitGroup


def adapter_ranks(model: nn.Module) -> list[UnitGroup]:
    """Return one group of units for every LoRA product; the frozen network beside them keeps its units."""
    groups = []
    for first, second in low_rank_pairs(model):
        if all(rule_for(model.get_submodule(name)) is not None for name in (first, second)):
            ranks = torch.arange(len(model.get_parameter(f"{first}.weight")))
            parts = (LayerChannels.whole(name, ranks) for name in (first, second))
            producer, consumer = parts
            groups.append(UnitGroup(len(ranks), (producer,), (), (consumer,), biases=False))
    return groups
