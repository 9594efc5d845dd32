"""Risk against coverage: the mean loss when only the most certain inputs are answered."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.tensor_checks import check_same_shape


class RiskCoverage(NamedTuple):
    """A risk-coverage curve; entry n is about answering the n + 1 least uncertain of N inputs.

    Attributes:
        coverage: Fraction of inputs answered [N], 1/N to 1.
        risk: Mean loss over the answered inputs [N], float64.
        thresholds: The uncertainty up to which inputs are answered [N].
    """

    coverage: Tensor
    risk: Tensor
    thresholds: Tensor


@checked_arguments
def risk_coverage(uncertainty: Tensor, losses: Tensor) -> RiskCoverage:
    r"""Return the mean loss $\frac1n \sum_{i \le n} \ell_{(i)}$ of the n least uncertain inputs, for every n.

    For inputs of equal uncertainty the risk is its expectation over all their orders, so the order of the rows is
    irrelevant (El-Yaniv & Wiener 2010; Geifman & El-Yaniv 2017, https://arxiv.org/abs/1705.08500).

    Args:
        uncertainty: One number per input; higher is answered later.
        losses: The loss of each input, such as `prediction != targets` or a squared error; same shape.

    >>> risk_coverage(torch.tensor([0.1, 0.3, 0.2]), torch.tensor([False, True, False])).risk.tolist()[:2]
    [0.0, 0.0]
    """
    check_same_shape(uncertainty=uncertainty, losses=losses)
    thresholds, order = uncertainty.detach().flatten().sort()
    ordered = losses.detach().flatten()[order].double()
    _, group, sizes = torch.unique_consecutive(thresholds, return_inverse=True, return_counts=True)
    group_means = ordered.new_zeros(len(sizes)).index_add_(0, group, ordered) / sizes
    answered = torch.arange(1, len(ordered) + 1, dtype=torch.float64, device=ordered.device)
    risk = group_means[group].cumsum(0) / answered
    return RiskCoverage(answered / len(ordered), risk, thresholds)


@checked_arguments
def aurc(uncertainty: Tensor, losses: Tensor) -> Tensor:
    r"""Return the area under the risk-coverage curve, $\frac1N \sum_n \text{risk}(n/N)$; lower is better.

    Arguments are those of `risk_coverage`; the sum over the N coverages is that of Geifman et al. (2019,
    https://arxiv.org/abs/1805.08206).

    >>> float(aurc(torch.tensor([0.1, 0.2]), torch.tensor([0.0, 1.0])))
    0.25
    """
    return risk_coverage(uncertainty, losses).risk.mean()
