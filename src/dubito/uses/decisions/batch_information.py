r"""Choose batches of inputs by the joint information of their labels about the weights, $I[y_1, \dots, y_n; w]$.

Information that two inputs share counts once, so the joint information is at most the sum of the single ones, and
greedy maximization is within $1 - 1/e$ of the best batch (Kirsch et al. 2019, BatchBALD, https://arxiv.org/abs/1906.08158).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.beliefs.prediction import ClassPrediction, Prediction, RegressionPrediction
from dubito.core import limits
from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError, UnsupportedError

# The most candidates of one matrix product; more would often be computed in vain.
ROWS = 128


def greedy_batch(prediction: Prediction, num: int, *, max_labellings: int = 1000, generator: torch.Generator) -> Tensor:
    """Return `num` inputs, chosen one by one: each adds most to the information of those before.

    Args:
        prediction: A prediction in which sample s of every input comes from the same weights.
        num: The number of inputs.
        max_labellings: The most joint labellings that are enumerated; if there are more, this many are drawn.
        generator: The source of randomness of drawn labellings.
    """
    if isinstance(prediction, ClassPrediction):
        if prediction.samples is None or prediction.samples.ndim != 3:
            raise UnsupportedError(
                "'batchbald' needs several samples of one label per input: use 'entropy' with a single network, else "
                "lower num_samples or use 'bald'."
            )
        return _greedy_classes(prediction.samples.double().exp(), num, max_labellings, generator)
    assert isinstance(prediction, RegressionPrediction)
    if len(prediction.means) < 2 or prediction.means.shape[-1] != 1:
        raise UnsupportedError("'batchbald' needs several samples of one output per input: use 'bald' instead.")
    return _greedy_numbers(prediction.means[..., 0].double(), prediction.aleatoric[:, 0].double(), num)


@checked_arguments
def joint_information(probs: Tensor) -> Tensor:
    r"""Return $I[y_1, \dots, y_n; w]$ of class probabilities ``[S, n, C]``, by enumerating all $C^n$ labellings.

    >>> certain_but_split = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
    >>> round(joint_information(certain_but_split.expand(2, 3, 2)).item(), 6) == round(math.log(2), 6)
    True
    """
    if probs.ndim != 3 or not probs.is_floating_point() or not probs.numel():
        raise InputError(f"`probs` must be a floating tensor [S, n, C], got {probs.dtype} {tuple(probs.shape)}.")
    joint = probs.new_ones(1, len(probs))
    for n in range(probs.shape[1]):
        joint = _extended(joint, probs[:, n])
    return torch.special.entr(joint.mean(dim=1)).sum() - conditional_entropies(probs).sum()


def _greedy_classes(probs: Tensor, num: int, max_labellings: int, generator: torch.Generator) -> Tensor:
    r"""Choose inputs greedily for class probabilities ``[S, N, C]``.

    Labellings y of the batch so far are rows of `joint` $p(y \mid w_s)$ with weights ω: 1 if all are enumerated, and
    $1 / (M \bar p(y))$ if M were drawn from $\bar p$. The entropy of the batch with a candidate is then
    $-\sum_y \omega_y \sum_c \bar p(y, c) \log \bar p(y, c)$.

    The gain of a candidate can only fall as the batch grows, so its last gain is a bound, and it is computed again only
    if that bound is above the best gain.
    """
    num_samples, num_inputs, classes = probs.shape
    conditional = conditional_entropies(probs)
    joint, weights = probs.new_ones(1, num_samples), probs.new_ones(1)
    gains = probs.new_full((num_inputs,), math.inf)
    chosen: list[int] = []
    for _ in range(num):
        before, best = weights @ torch.special.entr(joint.mean(dim=1)), -math.inf
        step = max(1, min(ROWS, limits.current().chunk // (8 * len(joint) * classes)))
        for rows in gains.argsort(descending=True).split(step):
            if float(gains[rows[0]]) <= best:
                break
            gains[rows] = joint_entropies(probs[:, rows], joint, weights) - conditional[rows] - before
            gains[chosen] = -math.inf
            best = max(best, float(gains[rows].max()))
        chosen.append(int(gains.argmax()))
        gains[chosen] = -math.inf
        if len(joint) * classes <= max_labellings and bool((weights == 1).all()):
            joint, weights = _extended(joint, probs[:, chosen[-1]]), probs.new_ones(len(joint) * classes)
        else:
            joint, weights = draw_labellings(probs[:, chosen], max_labellings, generator)
    return torch.tensor(chosen)


def conditional_entropies(probs: Tensor) -> Tensor:
    """Return the mean entropy of the samples at each input ``[N]``."""
    return torch.special.entr(probs).sum(dim=-1).mean(dim=0)


def _extended(joint: Tensor, probs: Tensor) -> Tensor:
    """Extend labellings ``[M, S]`` by one more label ``[S, C]``, to ``[M·C, S]``."""
    return torch.einsum("ms,sc->mcs", joint, probs).flatten(0, 1)


def joint_entropies(probs: Tensor, joint: Tensor, weights: Tensor) -> Tensor:
    """Return the entropy of the batch together with each candidate ``[S, n, C]``."""
    together = joint @ probs.flatten(1) / len(probs)  # [M, n·C]
    return (weights @ torch.special.entr(together)).unflatten(0, probs.shape[1:]).sum(dim=-1)


def draw_labellings(probs: Tensor, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw at least `num` labellings of ``[S, n, C]``, equally many given each sample of the weights."""
    num_samples = len(probs)
    per_sample = math.ceil(num / num_samples)
    flat = probs.flatten(0, 1).to(generator.device)
    labels = torch.multinomial(flat, per_sample, replacement=True, generator=generator).to(probs.device)
    labels = labels.unflatten(0, probs.shape[:2]).transpose(1, 2).flatten(0, 1)  # [M, n]
    joint = probs.new_ones(len(labels), num_samples)
    for n in range(probs.shape[1]):
        joint *= probs[:, n].T[labels[:, n]]
    return joint, 1 / (len(labels) * joint.mean(dim=1))


def _greedy_numbers(functions: Tensor, noise: Tensor, num: int) -> Tensor:
    r"""Maximize greedily $\tfrac12 \log\det(I + K / \sigma^2)$ for functions ``[S, N]``, as a pivoted Cholesky."""
    centred = (functions - functions.mean(dim=0)) / math.sqrt(len(functions))
    variance, columns = centred.square().sum(dim=0), functions.new_zeros(0, functions.shape[1])
    chosen: list[int] = []
    for _ in range(num):
        gains = (variance / noise).log1p()
        gains[chosen] = -math.inf
        best = int(gains.argmax())
        covariance = centred[:, best] @ centred - columns[:, best] @ columns
        column = covariance / (variance[best] + noise[best]).sqrt()
        columns = torch.cat([columns, column[None]])
        variance = (variance - column.square()).clamp_min(0)
        chosen.append(best)
    return torch.tensor(chosen)
