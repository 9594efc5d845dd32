"""`Plan`: which weights and units are removed, before the network is changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from dubito.core.errors import InputError
from dubito.networks.twin import copied
from dubito.uses.compression.rules import Masks, Rule


def both(first: Masks, second: Masks) -> Masks:
    """Return masks that are true where both are; a missing mask counts as true everywhere."""
    return {**first, **second, **{name: first[name] & second[name] for name in first.keys() & second.keys()}}


@dataclass(frozen=True, eq=False)
class Plan:
    """Which weights, units and inputs of a network are kept.

    Args:
        keep: For each prunable parameter a mask in its shape, true where a weight stays.
        units: For each layer that loses whole outputs a mask over them, true where a unit stays; empty where single
            weights are removed.
        inputs: A mask over the input features, false where the network does not use one any more; None if the inputs
            are no plain features.
        rule: The rule that decided.
        silent: If units are removed, masks under which the dense network gives the outputs of the small one. The
            incoming weights of a removed unit are zero. Its outgoing weights stay, as the constant that the unit
            becomes is folded into the next bias; if that is impossible, its bias is zero too.
        counts: Integers of the small network's modules that the network's own code reads, such as numbers of heads, by
            module and attribute.
    """

    keep: Masks
    units: Masks = field(default_factory=dict)
    inputs: Tensor | None = None
    rule: Rule | None = None
    silent: Masks = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def num_weights(self) -> int:
        """The number of prunable weights."""
        return sum(mask.numel() for mask in self.keep.values())

    @property
    def num_kept(self) -> int:
        """The number of prunable weights that are kept."""
        return sum(int(mask.sum()) for mask in self.keep.values())

    @property
    def sparsity(self) -> float:
        """The fraction of prunable weights that are removed."""
        return 1 - self.num_kept / self.num_weights

    def layer_sparsity(self) -> dict[str, float]:
        """Return the fraction that is removed, by parameter."""
        return {name: 1 - float(mask.double().mean()) for name, mask in self.keep.items()}

    def removed_inputs(self, names: tuple[str, ...] = ()) -> list[str]:
        """Return the input features that the network does not use any more, by name or by number."""
        if self.inputs is None:
            return []
        if names and len(names) != len(self.inputs):
            raise InputError(f"There are {len(self.inputs)} input features, but {len(names)} names: give one each.")
        gone = (~self.inputs).nonzero().flatten().tolist()
        return [names[i] if names else str(i) for i in gone]

    def masked(self, model: nn.Module) -> nn.Module:
        """Return a copy of `model` in which the removed weights are zero; for units, those of `silent`."""
        masked = copied(model)
        parameters = dict(masked.named_parameters())
        with torch.no_grad():
            for name, mask in (self.silent or self.keep).items():
                parameters[name].mul_(mask.to(parameters[name].device))
        return masked

    def to_torch(self, model: nn.Module) -> nn.Module:
        """Return a copy of `model` pruned with `torch.nn.utils.prune`: masks as buffers, weights recomputed from them.

        `prune.remove` on its layers, or `Plan.from_torch`, goes the other way.
        """
        pruned = copied(model)
        named = dict(model.named_parameters(remove_duplicate=False))
        masks = self.silent or self.keep
        for name, value in named.items():  # all names of a tied weight get its mask
            mask = next((masks[known] for known in masks if named[known] is value), None)
            if mask is not None:
                layer, _, tensor = name.rpartition(".")
                prune.custom_from_mask(pruned.get_submodule(layer), tensor, mask)
        return pruned

    @classmethod
    def from_torch(cls, model: nn.Module) -> Plan:
        """Return the plan of a network that was pruned with `torch.nn.utils.prune`."""
        ending = "_mask"
        keep = {n.removesuffix(ending): m.detach().bool() for n, m in model.named_buffers() if n.endswith(ending)}
        if not keep:
            raise InputError("This model has no masks: prune a layer with torch.nn.utils.prune first.")
        return cls(keep)

    def check(self, allow_empty: bool = False, model: nn.Module | None = None) -> Plan:
        """Return the plan, or raise if a layer would keep nothing; weights of `model` that are all 0 already may go."""
        empty = [name for name, mask in {**self.units, **self.keep}.items() if not bool(mask.any())]
        if model is not None:  # an unused mask token, or a table of biases that was never trained
            own = dict(model.named_parameters())
            empty = [name for name in empty if bool(own[name].any())]
        if empty and not allow_empty:
            what = "unit" if empty[0] in self.units else "weight"
            raise InputError(
                f"{self.rule!r} would remove every {what} of '{empty[0]}', which leaves a constant network: remove "
                "less, or give a dict of amounts by layer (or allow_empty=True, if single weights are removed)."
            )
        return self

    def check_lengths(self, masked: nn.Module) -> Plan:
        """Return the plan, or raise if a row of `masked` is 0 / 0: weight normalization divides by its length."""
        for name, module in masked.named_modules():
            for attribute in module.parametrizations if parametrize.is_parametrized(module) else ():
                if not bool(getattr(module, attribute).isfinite().all()):
                    raise InputError(
                        f"{self.rule!r} would remove a whole row of '{name}', and weight normalization divides by its "
                        "length: remove less, or call torch.nn.utils.parametrize.remove_parametrizations first."
                    )
        return self

    def __repr__(self) -> str:
        lines = [f"Plan: {self.num_kept:,} of {self.num_weights:,} weights stay ({self.sparsity:.2%} go)"]
        for name, mask in self.keep.items():
            units = self.units.get(name.rpartition(".")[0])
            shown = "" if units is None else f"   {int(units.sum())} of {len(units)} units"
            lines.append(f"  {name:<28} {int(mask.sum()):>10,} of {mask.numel():>10,}{shown}")
        return "\n".join(lines)
