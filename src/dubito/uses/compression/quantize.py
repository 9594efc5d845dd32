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

import torch
from torch import Tensor, nn

from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.networks.twin import copied
from dubito.uses.compression.rules import Masks

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
