r"""Propagate means and variances through a network with independent random weights, in one deterministic pass.

Activations are taken to be independent Gaussians. A linear layer with weights $W$ of variance $\sigma^2$ gives

$$\mathbb E[y] = W m + b, \qquad \mathrm{Var}[y] = W^{\circ 2} v + \sigma^{\circ 2} (m^{\circ 2} + v) + \sigma_b^2 ,$$

a ReLU has closed forms, and other activations are integrated numerically (Wu et al. 2019,
https://arxiv.org/abs/1810.03958; Hernández-Lobato & Adams 2015, https://arxiv.org/abs/1502.05336). What is lost are the
correlations between units.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from dubito.core import batches, params
from dubito.core.errors import UnsupportedError
from dubito.core.tracing import export_any_batch, recording, returned

# Points of the numerical integration over an activation.
POINTS = 9
# The smallest variance whose square root is taken.
TINY = 1e-20


class Gauss(NamedTuple):
    """Independent Gaussians; without a variance they are numbers."""

    mean: Any
    variance: Tensor | None = None


Rule = Callable[..., Gauss]


def propagated(model: nn.Module, variances: dict[str, Tensor], example: Any) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """Return the function from inputs to mean and variance of the outputs; raise an error if a layer has no rule.

    Args:
        model: The network at the means of its weights.
        variances: The variances of random parameters, by name, in their shapes.
        example: A batch of inputs of at least two rows.
    """
    with recording(), torch.no_grad():
        program = export_any_batch(_Flat(model, example), tuple(batches.leaves(example))).run_decompositions({})
    held = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target is not None}
    tensors = {**program.state_dict, **program.constants}
    own = {f"model.{name}": value for name, value in variances.items()}
    if missing := own.keys() - set(held.values()):
        raise UnsupportedError(f"The network does not use '{min(missing)}' by itself: use weight samples.")

    def run(inputs: Any) -> tuple[Tensor, Tensor]:
        given, known = iter(batches.leaves(inputs)), dict[fx.Node, Gauss]()
        for node in program.graph.nodes:
            if node.op == "placeholder":
                name = held.get(node.name)
                known[node] = Gauss(next(given)) if name is None else Gauss(tensors[name], own.get(name))
            elif node.op == "output":
                return _output(known[returned(program, node)[0]])
            else:
                known[node] = _apply(node, known)
        raise UnsupportedError("The network has no output.")

    return run


class _Flat(nn.Module):
    """A network that takes its tensors one after the other."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()
        self.model, self.example = model, example

    def forward(self, *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        return params.call(self.model, batches.map_leaves(lambda _: next(given), self.example))


def _output(found: Gauss) -> tuple[Tensor, Tensor]:
    return found.mean, torch.zeros_like(found.mean) if found.variance is None else found.variance


def _apply(node: fx.Node, known: dict[fx.Node, Gauss]) -> Gauss:
    """Apply one operation: its rule if something is random, else the operation itself."""
    inputs: list[Gauss] = []
    fx.node.map_arg((node.args, node.kwargs), lambda each: inputs.append(known[each]))
    if all(each.variance is None for each in inputs):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: known[each].mean)
        return Gauss(node.target(*args, **kwargs))  # type: ignore[operator]
    name = getattr(node.target, "__name__", str(node.target)).removeprefix("aten.").partition(".")[0]
    if name not in RULES:
        raise UnsupportedError(f"There is no rule for the moments of '{name}': use weight samples.")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: known[each])
    return RULES[name](node.target, *args, **kwargs)


def _plain(value: Any) -> Any:
    """Return an argument that must not be random."""
    if isinstance(value, Gauss):
        if value.variance is not None:
            raise UnsupportedError("An operation on two random tensors has no rule: use weight samples.")
        return value.mean
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value


def _linear(target: Any, x: Gauss, weight: Gauss, bias: Gauss | None = None, *rest: Any) -> Gauss:
    """Linear layers and convolutions: everything that is linear in input and weight."""
    rest = _plain(rest)
    mean = target(x.mean, weight.mean, None if bias is None else bias.mean, *rest)
    terms = []
    if x.variance is not None:
        terms.append(target(x.variance, weight.mean.square(), None, *rest))
    if weight.variance is not None:
        squares = x.mean.square() if x.variance is None else x.mean.square() + x.variance
        terms.append(target(squares, weight.variance, None, *rest))
    if bias is not None and bias.variance is not None:
        shape = [1, -1, *[1] * (mean.ndim - 2)] if "conv" in str(target) else [-1]
        terms.append(bias.variance.reshape(shape).expand_as(mean))
    return Gauss(mean, torch.stack(terms).sum(0) if len(terms) > 1 else terms[0])


def _relu(target: Any, x: Gauss) -> Gauss:
    r"""$\mathbb E[x_+] = m \Phi(z) + s \varphi(z)$ and $\mathbb E[x_+^2] = (m^2 + v) \Phi(z) + m s \varphi(z)$."""
    assert x.variance is not None
    scale = x.variance.clamp_min(TINY).sqrt()
    z = x.mean / scale
    below = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    peak = scale * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    mean = x.mean * below + peak
    square = (x.mean * x.mean + x.variance) * below + x.mean * peak
    return Gauss(mean, (square - mean * mean).clamp_min(0))


def _activation(target: Any, x: Gauss, *rest: Any, **options: Any) -> Gauss:
    """Integrate any function of one number by Gauss–Hermite quadrature."""
    assert x.variance is not None
    points, weights = np.polynomial.hermite_e.hermegauss(POINTS)
    weights = weights / weights.sum()
    scale = x.variance.clamp_min(TINY).sqrt()
    values = [target(x.mean + float(point) * scale, *_plain(rest), **options) for point in points]
    mean = sum(float(weight) * value for weight, value in zip(weights, values, strict=True))
    spread = [float(weight) * (value - mean).square() for weight, value in zip(weights, values, strict=True)]
    return Gauss(mean, sum(spread))


def _both(target: Any, x: Gauss, *rest: Any, **options: Any) -> Gauss:
    """Operations that only move numbers."""
    rest = _plain(rest)
    return Gauss(target(x.mean, *rest, **options), None if x.variance is None else target(x.variance, *rest, **options))


def _max_pool(target: Any, x: Gauss, *rest: Any) -> Gauss:
    """Take the unit with the largest mean, and its variance."""
    assert x.variance is not None
    mean, where = torch.ops.aten.max_pool2d_with_indices(x.mean, *_plain(rest))
    return Gauss(mean, x.variance.flatten(2).gather(2, where.flatten(2)).reshape(where.shape))


def _mean(target: Any, x: Gauss, *rest: Any, **options: Any) -> Gauss:
    """Average independent units: of n variances the mean, divided by n."""
    mean, variance = _both(target, x, *rest, **options)
    assert variance is not None
    count = math.prod(x.mean.shape[1:]) / math.prod(mean.shape[1:])
    return Gauss(mean, variance / count)


def _avg_pool(target: Any, x: Gauss, kernel: Any, *rest: Any) -> Gauss:
    mean, variance = _both(target, x, kernel, *rest)
    assert variance is not None
    return Gauss(mean, variance / math.prod(kernel if len(kernel) > 1 else [*kernel, *kernel]))


def _add(target: Any, x: Any, y: Any, **options: Any) -> Gauss:
    parts = [one if isinstance(one, Gauss) else Gauss(one) for one in (x, y)]
    mean = target(parts[0].mean, parts[1].mean, **options)
    spreads = [part.variance for part in parts if part.variance is not None]
    return Gauss(mean, sum(spreads[1:], spreads[0]).expand_as(mean))


def _mul(target: Any, x: Any, y: Any) -> Gauss:
    random, number = (x, _plain(y)) if isinstance(x, Gauss) and x.variance is not None else (y, _plain(x))
    divides = "div" in str(target)
    if divides and random is y:
        raise UnsupportedError("A random divisor has no rule: use weight samples.")
    mean = target(random.mean, number)
    factor = 1 / number if divides else number
    return Gauss(mean, (random.variance * factor * factor).expand_as(mean))


def _first(target: Any, x: Gauss, index: int) -> Gauss:
    """Return the first of several results, the only one whose moments are known."""
    if index != 0:
        raise UnsupportedError("An operation with several random results has no rule: use weight samples.")
    return x


def _batch_norm(target: Any, x: Gauss, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any) -> Gauss:
    """Normalize by running statistics; the batch's own are random and have no rule."""
    weight, bias, mean, variance, rest = (_plain(each) for each in (weight, bias, mean, variance, rest))
    if x.variance is None:
        raise UnsupportedError("Random gains have no rule: use weight samples.")
    eps = rest[1]
    factor = (1 if weight is None else weight) / (variance + eps).sqrt()
    shape = [1, -1, *[1] * (x.mean.ndim - 2)]
    return Gauss(target(x.mean, weight, bias, mean, variance, *rest)[0], x.variance * factor.square().reshape(shape))


def _layer_norm(target: Any, x: Gauss, shape: Any, weight: Any = None, bias: Any = None, *rest: Any) -> Gauss:
    """Normalize by the statistics of the means."""
    weight, bias = _plain(weight), _plain(bias)
    if x.variance is None:
        raise UnsupportedError("Random gains have no rule: use weight samples.")
    eps = rest[0] if rest else 1e-5
    axes = list(range(-len(shape), 0))
    scale = (x.mean.var(dim=axes, keepdim=True, correction=0) + eps).rsqrt()
    factor = scale if weight is None else scale * weight
    return Gauss(target(x.mean, list(shape), weight, bias, *rest), x.variance * factor.square())


RULES: dict[str, Rule] = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), _linear),
    "relu": _relu,
    **dict.fromkeys(
        ("tanh", "sigmoid", "gelu", "silu", "leaky_relu", "elu", "selu", "softplus", "hardtanh", "relu6", "mish"),
        _activation,
    ),
    **dict.fromkeys(
        ("flatten", "view", "reshape", "permute", "transpose", "squeeze", "unsqueeze", "clone", "contiguous", "detach",
         "alias", "dropout", "feature_dropout", "slice", "select", "unflatten", "_unsafe_view", "numpy_T", "mT"), _both,
    ),
    "max_pool2d": _max_pool,
    "avg_pool2d": _avg_pool,
    **dict.fromkeys(("mean", "adaptive_avg_pool2d", "adaptive_avg_pool1d"), _mean),
    **dict.fromkeys(("add", "sub"), _add),
    **dict.fromkeys(("mul", "div"), _mul),
    "_native_batch_norm_legit_no_training": _batch_norm,
    "getitem": _first,
    "layer_norm": _layer_norm,
}  # fmt: skip
