"""Find the weight matrices of a network that get rank-1 factors, and arrange all factors in one vector.

A `LinearMap` is one weight matrix, whose input and output channels can be scaled. Linear layers,
convolutions and embeddings have one, attention has four (query, key, value, output), an LSTM two or three for each
layer and direction. A `Site` is a module with its maps and biases. A `Layout` defines which part of one vector of
factors belongs to which map, so that one sample of the vector is one sample of the whole network.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.errors import InputError
from dubito.networks.layers import LayerRule, rule_for
from dubito.networks.selection import Selection
from dubito.networks.watching import first_argument, watch

Sides = Literal["both", "input", "output"]
Kind = Literal["layer", "attention", "lstm"]


@dataclass(frozen=True)
class LinearMap:
    """One weight matrix.

    Args:
        weight: The name of its parameter.
        rows: Its range of rows if it is only a part of the parameter (a packed projection); else None.
        inputs: The number of input factors; 0 for none.
        outputs: The number of output factors; 0 for none.
    """

    weight: str
    rows: tuple[int, int] | None
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Site:
    """A module whose channels are scaled: its name, its kind, its maps, and its biases with their sizes."""

    name: str
    kind: Kind
    maps: tuple[LinearMap, ...]
    biases: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class SiteValues:
    """The values of one site: a pair of input and output factors for each map, and its biases.

    A tensor is ``[C]``, shared by all examples; ``[N, C]``, one row per example; or ``[M, C]``, one row for each of M
    blocks of equal size. With `once` the pass is differentiated at most once, as in a training step.
    """

    factors: tuple[tuple[Tensor | None, Tensor | None], ...]
    biases: tuple[Tensor, ...]
    once: bool = False


@dataclass(frozen=True)
class Layout:
    """All sites of a network, in the order of their factors."""

    sites: tuple[Site, ...]

    @property
    def factor_sizes(self) -> list[int]:
        """The lengths of the parts of the vector of factors."""
        return [size for site in self.sites for map_ in site.maps for size in (map_.inputs, map_.outputs) if size]

    @property
    def bias_sizes(self) -> list[int]:
        """The lengths of the parts of the vector of biases."""
        return [size for site in self.sites for _, size in site.biases]

    @property
    def bias_names(self) -> list[str]:
        """The parameters in the vector of biases."""
        return [name for site in self.sites for name, _ in site.biases]

    def split(self, factors: Tensor, biases: Tensor, *, once: bool = False) -> Iterator[tuple[Site, SiteValues]]:
        """Split vectors ``[..., D]`` of factors and ``[..., E]`` of biases into the values of each site."""
        of_factors = iter(factors.split(self.factor_sizes, dim=-1))
        of_biases = iter(biases.split(self.bias_sizes, dim=-1) if self.bias_sizes else ())
        for site in self.sites:
            pairs = tuple(
                (next(of_factors) if map_.inputs else None, next(of_factors) if map_.outputs else None)
                for map_ in site.maps
            )
            yield site, SiteValues(pairs, tuple(next(of_biases) for _ in site.biases), once)

    def biases_of(self, model: nn.Module) -> Tensor:
        """Return the model's own biases as one vector ``[E]``."""
        own = dict(model.named_parameters())
        like = next(model.parameters())
        return torch.cat([like.new_empty(0), *(own[name].detach().flatten() for name in self.bias_names)])


def find_layout(network: nn.Module, sides: Sides, leave_out: tuple[str, ...] = ()) -> Layout:
    """Find every site of a network.

    Args:
        network: Any network.
        sides: Which channels have factors.
        leave_out: Names of modules without factors.
    """
    names = {id(value): name for name, value in network.named_parameters()}
    inside = {id(part) for m in network.modules() if isinstance(m, nn.MultiheadAttention) for part in m.children()}
    sites = []
    for name, module in network.named_modules():
        if id(module) in inside or name in leave_out:
            continue
        site = _site(name, module, names, sides)
        if site is not None and any(map_.inputs or map_.outputs for map_ in site.maps):
            sites.append(site)
    if not sites:
        raise InputError(
            f"The model has no layer for rank-1 factors (factors='{sides}'): it needs a linear layer, a convolution, "
            "an embedding, attention or an LSTM that is not parametrized."
        )
    return Layout(tuple(sites))


def scalable_rule(module: nn.Module) -> LayerRule[Any] | None:
    """Return the rule of a layer whose channels can be scaled; None for others, and for normalization layers."""
    rule = rule_for(module)
    if rule is None or rule.normalizes or module._parameters.get("weight") is None:
        return None
    knows_channels = type(rule).num_outputs is not LayerRule.num_outputs
    return rule if knows_channels and type(rule).channel_axis is not LayerRule.channel_axis else None


def _site(name: str, module: nn.Module, names: dict[int, str], sides: Sides) -> Site | None:
    kind, maps = _maps(module)
    if kind is None:
        return None

    def parameter(value: Any) -> str:
        return names[id(value)]

    biases = [(parameter(bias), bias.numel()) for bias in _biases(kind, module)]
    kept = tuple(
        LinearMap(parameter(weight), rows, inputs if sides != "output" else 0, outputs if sides != "input" else 0)
        for weight, rows, inputs, outputs in maps
    )
    return Site(name, kind, kept, tuple(biases))


_Maps = list[tuple[Tensor, tuple[int, int] | None, int, int]]


def _maps(module: nn.Module) -> tuple[Kind | None, _Maps]:
    """Return the kind of a module, and its weight matrices: parameter, rows, inputs, outputs."""
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        return "attention", _attention_maps(module)
    if isinstance(module, nn.LSTM) and type(module).forward is nn.LSTM.forward and len(module._parameters):
        weights = [value for key, value in module.named_parameters() if key.startswith("weight")]
        return "lstm", [(value, None, value.shape[1], value.shape[0]) for value in weights]
    rule = scalable_rule(module)
    if rule is None:
        return None, []
    inputs = rule.num_inputs(module) if rule.linear_in_input else 0
    weight: Any = module.weight
    return "layer", [(weight, None, inputs, rule.num_outputs(module))]


def _attention_maps(module: nn.MultiheadAttention) -> _Maps:
    width = module.embed_dim
    if module.in_proj_weight is not None:
        packed: _Maps = [(module.in_proj_weight, (i * width, (i + 1) * width), width, width) for i in range(3)]
    else:
        parts: list[Any] = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        packed = [(weight, None, weight.shape[1], width) for weight in parts]
    return [*packed, (module.out_proj.weight, None, width, width)]


def _biases(kind: Kind, module: nn.Module) -> list[Tensor]:
    if kind == "attention":
        assert isinstance(module, nn.MultiheadAttention)
        return [bias for bias in (module.in_proj_bias, module.out_proj.bias) if bias is not None]
    return [value for key, value in module.named_parameters(recurse=False) if key.startswith("bias")]


def batch_axis(module: nn.Module) -> int:
    """Return the batch axis of a module's inputs."""
    return 0 if getattr(module, "batch_first", True) else 1


def unselected(network: nn.Module, selection: Selection) -> tuple[str, ...]:
    """Return the modules with weights of their own that have none in a selection."""
    partial = next((name for name in selection.names if not selection.is_whole(name)), None)
    if partial is not None:
        raise InputError(
            f"Rank-1 factors change whole layers, and the selection has only some weights of '{partial}': choose "
            "layers, as with select.layers(...)."
        )
    names = {id(value): name for name, value in network.named_parameters()}
    chosen = set(selection.names)
    own = {name: list(module.parameters(recurse=False)) for name, module in network.named_modules()}
    return tuple(
        name for name, values in own.items() if values and not any(names[id(value)] in chosen for value in values)
    )


@torch.no_grad()
def without_batch_axis(network: nn.Module, layout: Layout, inputs: Any) -> tuple[str, ...]:
    """Find the sites that cannot have factors per example, by calling the network on two and on three examples.

    These are modules that are never called (only their weights are read), and modules whose inputs have no batch axis,
    such as an embedding of positions that all examples share.

    Args:
        network: The network, in evaluation mode.
        layout: Its sites.
        inputs: A batch of inputs; only the first row is used.
    """
    modules, calls = dict(network.named_modules()), {site.name: 0 for site in layout.sites}
    wrong: set[str] = set()
    for rows in (2, 3):
        with watch({name: modules[name] for name in calls}, before=_check_rows(rows, calls, wrong)):
            params.call(network, batches.take(inputs, [0] * rows))
    found = tuple(name for name, count in calls.items() if name in wrong or count == 0)
    if found:
        shown = ", ".join(f"'{name}'" for name in found[:5])
        warnings.warn(
            f"The layers {shown} get no rank-1 factors: they are never called, or the first axis of their inputs is "
            "not the batch. All components share their weights.",
            stacklevel=2,
        )
    return found


def _check_rows(rows: int, calls: dict[str, int], wrong: set[str]) -> Callable[..., None]:
    """Return a callback that counts calls and notes the modules whose inputs do not have `rows` examples."""

    def check(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[name] += 1
        given, axis = first_argument(args, kwargs), batch_axis(module)
        if not isinstance(given, Tensor) or given.ndim <= axis or given.shape[axis] != rows:
            wrong.add(name)

    return check
