r"""Dropout masks: on the inputs of layers, or in place of the network's dropout layers.

$$h \leftarrow h \circ \frac{z}{1 - p}, \qquad z_c \sim \mathrm{Bernoulli}(1 - p)$$

A mask of the input channels of a layer is equivalent to a mask of the columns of its weight, so a sample of masks is a
sample of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dubito.core.randomness import derive_seed
from dubito.networks.layers import rule_for
from dubito.networks.watching import call_order, first_argument, watch

OWN = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

# Maps the name of a site, the shape of its mask and the activations (for their dtype and device) to the mask.
Draw = Callable[[str, tuple[int, ...], Tensor], Tensor]


def own_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the network's own dropout layers with a rate above 0, by name."""
    return {name: m for name, m in model.named_modules() if type(m) in OWN and m.p > 0}


def inner_layers(model: nn.Module, inputs: Any) -> list[str]:
    """Return the layers with weights in the order of a forward pass, without the first, whose input is the data."""
    takes_masks = {n: m for n, m in model.named_modules() if (rule := rule_for(m)) is not None and rule.linear_in_input}
    # these can be the first layer, but their own inputs (tokens, states) are never masked
    kinds = nn.Embedding | nn.EmbeddingBag | nn.RNNBase
    others = {n: m for n, m in model.named_modules() if isinstance(m, kinds) or is_parametrized(m)}
    called = list(dict.fromkeys(call_order(model.eval(), takes_masks | others, inputs)))
    return [name for name in called[1:] if name in takes_masks]


@contextmanager
def dropping(model: nn.Module, sites: list[str], draw: Draw, *, filterwise: bool, shared: bool) -> Iterator[None]:
    """Apply dropout masks at `sites` inside the block.

    Args:
        model: The network; its own dropout layers must be off.
        sites: Names of layers, whose inputs are masked, and of dropout layers, which are replaced by masks.
        draw: Draws a mask; a mask that is used several times in a forward pass is drawn once.
        filterwise: Drop whole channels instead of single activations.
        shared: Whether all examples share one mask, or each has its own.
    """
    drawn: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def masked(name: str, layer: nn.Module, x: Tensor) -> Tensor:
        axis = channel_axis(layer, x.ndim) if filterwise else None
        size = tuple(x.shape[1:]) if axis is None else (x.shape[axis],)
        key = (name, size if shared else (len(x), *size))
        if key not in drawn:
            drawn[key] = draw(*key, x)
        mask = drawn[key].unsqueeze(0) if shared else drawn[key]
        return x * (mask if axis is None else mask.reshape(len(mask), *_broadcast(size[0], axis, x.ndim)))

    def mask_input(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = masked(name, layer, first_argument(args, kwargs))
        return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): given})

    def mask_output(name: str, layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        return masked(name, layer, output)

    layers = {name: model.get_submodule(name) for name in sites}
    own = {name: layer for name, layer in layers.items() if type(layer) in OWN}
    with (
        watch({"": model}, before=lambda *_: drawn.clear()),
        watch(own, after=mask_output),
        watch({name: layer for name, layer in layers.items() if name not in own}, before=mask_input),
    ):
        yield


def channel_axis(layer: nn.Module, ndim: int) -> int:
    """Return the channel axis of activations with `ndim` axes.

    >>> channel_axis(nn.Conv2d(3, 8, 3), 4), channel_axis(nn.Linear(3, 8), 4)
    (1, 3)
    """
    rule = rule_for(layer)
    if rule is not None:
        return rule.channel_axis(layer, ndim)
    # for a dropout layer it is a guess: channels are first in images, last in sequences
    return 1 if ndim > 3 or type(layer) is not nn.Dropout else ndim - 1


def _broadcast(size: int, axis: int, ndim: int) -> tuple[int, ...]:
    return tuple(size if place == axis else 1 for place in range(1, ndim))


def bernoulli(rates: dict[str, float], seed: int | None = None) -> Draw:
    """Return Bernoulli masks with these rates, drawn from torch's global generator, or determined by a seed."""
    known: dict[tuple[Any, ...], Tensor] = {}

    def draw(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if seed is None:
            return (torch.rand(shape, device=like.device) >= rates[name]).to(like) / (1 - rates[name])
        if (name, *shape) not in known:
            own = torch.Generator().manual_seed(derive_seed(seed, name, *shape))
            known[name, *shape] = torch.rand(shape, generator=own) >= rates[name]
        return known[name, *shape].to(like) / (1 - rates[name])

    return draw


def concrete(logits: dict[str, Tensor], temperature: float = 0.1) -> Draw:
    r"""Return nearly binary masks that are differentiable with respect to the rate.

    $$z = 1 - \sigma\Big(\frac{\operatorname{logit} p + \operatorname{logit} u}{t}\Big), \qquad u \sim U(0, 1)$$

    (Gal et al. 2017, https://arxiv.org/abs/1705.07832).
    """

    def draw(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        logit = logits[name]
        noise = torch.rand(shape, dtype=logit.dtype, device=logit.device).clamp(1e-7, 1 - 1e-7)
        dropped = torch.sigmoid((logit + noise.logit()) / temperature)
        return (1 - dropped) / torch.sigmoid(-logit)

    return draw
