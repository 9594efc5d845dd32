"""Split the uncertainty of class predictions into an aleatoric and an epistemic part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError
from dubito.core.limits import current, numbers
from dubito.core.tensor_checks import check_confidence, widen
from dubito.core.tracing import is_tracing
from dubito.core.widest import widest

# In a graph, logarithms of probabilities are at least this, so that a probability of 0 adds nothing to an entropy.
LOWEST_LOG = -1e4


class EntropyDecomposition(NamedTuple):
    """Entropies in nats, float64, one per input; `total == aleatoric + epistemic` to the last bit.

    Attributes:
        total: Entropy of the mean prediction.
        aleatoric: Mean entropy of the samples, which more data cannot reduce.
        epistemic: Mutual information of label and weights, at least 0: the disagreement of the samples.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


@checked_arguments
def entropy_decomposition(log_probs: Tensor) -> EntropyDecomposition:
    r"""Split the entropy of the mean prediction, $H[\bar p] = \mathbb E_s H[p_s] + I[y; w]$.

    A class of probability zero (log-probability -inf) adds nothing. See Houlsby et al. (2011,
    https://arxiv.org/abs/1112.5745) and Depeweg et al. (2018, https://arxiv.org/abs/1710.07283).

    Args:
        log_probs: Log-probabilities of S posterior samples, [S, ..., C].

    Returns:
        Three tensors of shape [...].

    >>> samples = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]).log()  # two samples, each certain, that disagree
    >>> [round(float(part), 6) for part in entropy_decomposition(samples)]
    [0.693147, 0.0, 0.693147]
    """
    if not log_probs.is_floating_point() or log_probs.ndim < 2 or log_probs.numel() == 0 or log_probs.shape[-1] < 2:
        raise InputError(
            "log_probs must be floating point of shape [samples, ..., classes] with at least one sample, one input and "
            f"two classes, but it is {log_probs.dtype} of shape {tuple(log_probs.shape)}."
        )
    samples = widen(log_probs)
    check_confidence("log_probs", samples.amax(dim=-1).exp(), samples.shape[-1])
    return split_entropy(samples)


def split_entropy(samples: Tensor) -> EntropyDecomposition:
    """Split the entropy like `entropy_decomposition`, without checking the log-probabilities except for NaN."""
    samples = widen(samples)
    if is_tracing():
        return _split_in_one_piece(samples)
    dtype = widest(samples.device)
    mean_probs = samples.new_zeros(samples.shape[1:], dtype=dtype)
    aleatoric = samples.new_zeros(samples.shape[1:-1], dtype=dtype)
    # a few at a time: a float64 copy of all S would be the largest tensor of an evaluation
    at_once = numbers(current().exponentials) // max(1, mean_probs.numel())
    for some in samples.split(max(1, at_once)):
        logs = some.to(dtype).clamp(min=-800, max=0)  # below −800 the probability is 0; above 0 is a rounding error
        probs = logs.exp()  # in float32, rounding errors would look like an epistemic uncertainty of 1e-7
        for own_probs, own_sum in zip(probs, logs.mul_(probs).sum(-1), strict=True):
            mean_probs += own_probs
            aleatoric -= own_sum
    mean_probs /= len(samples)
    aleatoric /= len(samples)
    # not read from an accelerator: every prediction is checked as a whole, once
    if aleatoric.device.type == "cpu" and bool(aleatoric.isnan().any()):
        raise InputError("log_probs contains NaN; check the model's outputs before measuring them.")
    epistemic = (torch.special.entr(mean_probs).sum(-1) - aleatoric).clamp_(min=0)
    if len(samples) == 1:
        epistemic.zero_()  # a single sample cannot disagree; remove rounding errors
    return EntropyDecomposition(aleatoric + epistemic, aleatoric, epistemic)


def _split_in_one_piece(samples: Tensor) -> EntropyDecomposition:
    """Split the entropy with few operations and in the precision of the samples, for a graph."""
    probs = samples.exp()
    products = probs * samples.clamp_min(LOWEST_LOG)
    if samples.shape[0] == 1:
        aleatoric = products.sum((0, -1)) * -1
        return EntropyDecomposition(aleatoric, aleatoric, aleatoric * 0)
    return _split_means(products.mean(0), probs.mean(0).clamp_min(torch.finfo(samples.dtype).tiny))


def split_rows(logits: Tensor, num_samples: int) -> EntropyDecomposition:
    """Split the entropy of finite logits ``[B, S·C]``, all samples of an example in one row, for a graph.

    The mean over samples is a product with a constant matrix, which runtimes compute faster than sums over short axes.
    """
    classes = logits.shape[1] // num_samples
    logs = logits.unflatten(1, (num_samples, classes)).log_softmax(-1).flatten(1)
    probs = logs.exp()
    average = torch.eye(classes, dtype=logits.dtype, device=logits.device).repeat(num_samples, 1) / num_samples
    tiny = torch.full((classes,), torch.finfo(logits.dtype).tiny, dtype=logits.dtype, device=logits.device)
    return _split_means((probs * logs) @ average, torch.addmm(tiny, probs, average))  # tiny: log 0 adds nothing


def _split_means(products: Tensor, probs: Tensor) -> EntropyDecomposition:
    r"""Split the entropy, given means over samples ``[..., C]`` of $p \log p$ and of positive $p$, for a graph.

    $p \log p$ is convex, so its mean is at least that of the mean p, for every class: the sum of their distances needs
    no clamping.
    """
    aleatoric, epistemic = absolute_sum(products), absolute_sum(products - probs * probs.log())
    return EntropyDecomposition(aleatoric + epistemic, aleatoric, epistemic)


def absolute_sum(values: Tensor) -> Tensor:
    """Return the sum of absolute values over the last axis, one operation of a graph; without signs none is needed."""
    return torch.linalg.vector_norm(values, ord=1, dim=-1)
