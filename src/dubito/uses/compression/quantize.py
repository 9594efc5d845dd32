r"""Choose the precision at which weights are stored from the posterior: sharper marginals get more bits.

A weight that is stored in steps of $\Delta$ is off by up to $\Delta/2$, with variance $\Delta^2/12$. Rounding all
weights costs, in expectation and to second order, $\tfrac{1}{24} \sum_i P_{ii} \Delta_i^2$ nats of the log-posterior,
where $P_{ii}$ is the posterior's precision, $1/\sigma_i^2$ where weights are independent. So with one step per
parameter,

$$\Delta = c\, \Big(\tfrac1n \sum_i P_{ii}\Big)^{-1/2}, \qquad
  c = \min\!\Big(1, \sqrt{24\, \epsilon N / n_\text{all}}\Big) ,$$

over the n weights of it that stay: a step is at most one standard deviation, and rounding costs at most $\epsilon$ nats
for each of the N examples. The bits follow: $1 + \lceil \log_2(\max|\mu| / \Delta + 1) \rceil$, sign included.

The rule of the reference code of Bayesian compression (Louizos et al. 2017) is another: it compares twice the
*variance* with the unit round-off of a floating-point number. A variance is measured in squared units, so the bits
changed when all weights (and nothing else) were measured in another unit; a standard deviation has the unit of the
weight. It also ignores the size of a weight, and its exponent bits are undefined where every weight is below 1/2.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.networks.layers import weight_axis
from dubito.networks.twin import copied
from dubito.uses.compression.rules import Masks

# The nats per example that rounding may cost, unless another is given.
ROUNDING = 0.002
# Levels of parameters without a posterior (biases trained as points): those of 8 bits.
PLAIN_LEVELS = 127
# No parameter is stored with more levels than those of 16 bits.
MOST_LEVELS = 32767


def steps(mean: Params, precision: Params, keep: Masks, num_data: int, loss: float) -> dict[str, float]:
    """Return the step Δ of each parameter.

    Args:
        mean: The weights as they will be stored.
        precision: The diagonal of the posterior's precision, 0 where a weight is not random; in the shapes before
            compression.
        keep: Masks of the weights that stay, for some parameters, in the same shapes.
        num_data: The number N of examples.
        loss: The nats ε per example that rounding may cost.

    >>> steps({"w": torch.ones(2)}, {"w": torch.tensor([100.0, 100.0])}, {}, num_data=1000, loss=0.1)
    {'w': 0.1}
    """
    sharp = {n: p[keep[n].to(p.device)] if n in keep else p.flatten() for n, p in precision.items()}
    random = {name: value for name, value in sharp.items() if len(value) and bool((value > 0).all())}
    count = sum(len(value) for value in random.values())
    factor = min(1.0, math.sqrt(24 * loss * num_data / max(count, 1)))
    return {name: _step(value, random.get(name), factor) for name, value in mean.items()}


def _step(mean: Tensor, precision: Tensor | None, factor: float) -> float:
    largest = float(mean.abs().max()) if mean.numel() else 0.0
    if precision is None:
        step = largest / PLAIN_LEVELS
    else:
        step = max(factor * float(precision.double().mean().rsqrt()), largest / MOST_LEVELS)
    return float(f"{step:.6g}") or 1.0  # all weights are zero, so any step will do


def bits(mean: Tensor, step: float) -> int:
    """Return the bits of a weight in steps of `step`, sign included.

    >>> bits(torch.tensor([0.3, -0.7]), 0.1)
    4
    """
    levels = float(mean.abs().max()) / step if mean.numel() else 0.0
    return 1 + math.ceil(math.log2(max(round(levels), 1) + 1))


def rounded(mean: Tensor, step: float) -> Tensor:
    """Return the numbers of steps, as integers."""
    return torch.round(mean.double() / step).to(torch.int32)


@dataclass(frozen=True)
class Quantized:
    """A network whose weights are integers of few bits times a scale for each output channel, or for each parameter.

    Attributes:
        model: The network with the rounded weights, as plain floating-point numbers.
        bits: The bits of a weight, by parameter; others stay as they were.
        nats: What rounding costs in expectation, in nats per example.
        num_bytes: The bytes of all weights in these bits, with a scale of 2 bytes each; other parameters take 4 bytes.
        steps: The scales, by parameter: one number, or one for each channel in a shape that broadcasts.
    """

    model: nn.Module
    bits: dict[str, int]
    nats: float
    num_bytes: int
    steps: dict[str, Tensor]


def quantized(
    model: nn.Module,
    precision: Params,
    num_data: int,
    *,
    bits: int | None,
    choices: Sequence[int],
    by_channel: bool,
    loss: float,
) -> Quantized:
    r"""Round the weight matrices to few bits; of each parameter as many as the posterior asks for.

    A weight of $b$ bits is stored in steps of $\Delta = \max|\mu| / (2^{b-1} - 1)$, of its channel or parameter, which
    costs $\tfrac1{24} \sum_i P_{ii} \Delta_i^2$ nats. All parameters start with the fewest bits; the one whose next
    choice saves the most nats per bit gets it, until rounding costs at most `loss` nats for each example.

    Args:
        model: The network.
        precision: The diagonal of the posterior's precision in the shapes of the network, for every weight matrix.
        num_data: The number of examples.
        bits: The bits of every weight; None to choose.
        choices: What to choose from.
        by_channel: Whether every output channel has a scale of its own.
        loss: The nats per example that rounding may cost.
    """
    axes = {name: weight_axis(model.get_submodule(name.rpartition(".")[0]), "output") for name in precision}
    weights = {name: value.detach() for name, value in model.named_parameters() if name in precision}
    levels = sorted(choices) if bits is None else [bits]

    def largest(name: str) -> Tensor:
        axis, size = axes[name], weights[name].abs()
        if not by_channel or axis is None:
            return size.max()
        return size.amax([other for other in range(size.ndim) if other != axis], keepdim=True)

    def cost(name: str, count: int) -> float:
        step = largest(name).double() / (2 ** (count - 1) - 1)
        return float((precision[name].double() * step.square()).sum() / 24)

    costs = {name: [cost(name, count) for count in levels] for name in precision}
    chosen = _enough_bits(costs, levels, {name: value.numel() for name, value in weights.items()}, loss * num_data)
    found, num_bytes = copied(model), sum(4 * value.numel() for value in model.parameters())
    all_steps: dict[str, Tensor] = {}
    for name, place in chosen.items():
        all_steps[name] = step = (largest(name) / (2 ** (levels[place] - 1) - 1)).clamp_min(
            torch.finfo(weights[name].dtype).tiny
        )
        found.get_parameter(name).data = (weights[name] / step).round() * step
        num_bytes += math.ceil(levels[place] * weights[name].numel() / 8) + 2 * step.numel() - 4 * weights[name].numel()
    nats = sum(costs[name][place] for name, place in chosen.items()) / max(num_data, 1)
    return Quantized(found, {name: levels[place] for name, place in chosen.items()}, nats, num_bytes, all_steps)


def _enough_bits(
    costs: dict[str, list[float]], levels: Sequence[int], sizes: dict[str, int], most: float
) -> dict[str, int]:
    """Return the place of each parameter's number of bits in `levels`, such that all cost at most so many nats."""
    chosen = dict.fromkeys(costs, 0)
    while sum(costs[name][place] for name, place in chosen.items()) > most:
        gains = {
            name: (costs[name][place] - costs[name][place + 1]) / ((levels[place + 1] - levels[place]) * sizes[name])
            for name, place in chosen.items()
            if place + 1 < len(levels)
        }
        if not gains:
            break
        chosen[max(gains, key=lambda name: gains[name])] += 1
    return chosen


def int8(model: nn.Module) -> nn.Module:
    """Return a copy whose linear layers hold their weights in 8 bits (torchao, weight only); other layers stay."""
    logger = logging.getLogger("torchao")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it logs missing CUDA libraries, which a CPU does not need
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise UnsupportedError("8-bit layers need torchao: pip install 'dubito[quant]'.") from error
    finally:
        logger.setLevel(level)
    if not any(isinstance(module, nn.Linear) for module in model.modules()):
        raise UnsupportedError("Only linear layers are stored in 8 bits, and this network has none.")
    if any(value.dtype == torch.float64 for value in model.parameters()):
        raise UnsupportedError("torchao converts float32 and half-precision layers only: call .float() first.")
    private = copied(model).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about versions of its own settings
        quantize_(private, Int8WeightOnlyConfig())
    return private
