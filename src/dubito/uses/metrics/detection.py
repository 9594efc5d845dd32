"""How well a score separates two groups: out-of-distribution inputs from known ones, or errors from correct answers.

Positives (label 1) are what is to be detected, such as out-of-distribution inputs, and a higher score means "more
likely positive". All three metrics come from the counts at every distinct threshold, so ties are exact and the order of
the rows is irrelevant. Risk against coverage is the mean loss when only the most certain inputs are answered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError
from dubito.core.tensor_checks import check_same_shape


@checked_arguments
def auroc(scores: Tensor, labels: Tensor) -> Tensor:
    r"""Return the area under the ROC curve, $P(s_+ > s_-) + \frac12 P(s_+ = s_-)$.

    Args:
        scores: One score per input; higher means more likely positive.
        labels: 1 or True for positives, such as out-of-distribution inputs, else 0; same shape as `scores`.

    >>> float(auroc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])))
    0.875
    """
    true_positives, false_positives = _threshold_counts(scores, labels)
    # Integers keep twice the trapezoidal area exact up to the one division.
    heights = true_positives + _shifted(true_positives)
    twice_area = ((false_positives - _shifted(false_positives)) * heights).sum()
    return twice_area.double() / (2 * true_positives[-1] * false_positives[-1])


@checked_arguments
def aupr(scores: Tensor, labels: Tensor) -> Tensor:
    r"""Return the area under the precision-recall curve as average precision, $\sum_i (R_i - R_{i-1}) P_i$.

    The sum steps through the distinct thresholds from high to low; precision is not interpolated. A random score gives
    the fraction of positives. Arguments are those of `auroc`.

    >>> round(float(aupr(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1]))), 6)
    0.833333
    """
    true_positives, false_positives = _threshold_counts(scores, labels)
    precision = true_positives.double() / (true_positives + false_positives)
    return ((true_positives - _shifted(true_positives)) * precision).sum() / true_positives[-1]


@checked_arguments
def fpr95(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the false positive rate at the highest threshold that still finds at least 95 % of the positives.

    Arguments are those of `auroc`.

    >>> float(fpr95(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])))
    0.5
    """
    true_positives, false_positives = _threshold_counts(scores, labels)
    # 20 TP >= 19 P in integers: 0.95 has no exact floating-point value.
    first = torch.searchsorted(20 * true_positives, 19 * true_positives[-1:])
    return (false_positives[first].double() / false_positives[-1])[0]


def _threshold_counts(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Count true and false positives (int64) at every distinct threshold `score >= t`, from high to low."""
    check_same_shape(scores=scores, labels=labels)
    positive = (labels == 1).flatten()
    num_positive = int(positive.sum())
    if num_positive + int((labels == 0).sum()) != labels.numel():
        raise InputError("`labels` must be 0 or 1 (1 for inputs to detect), but it has other values.")
    if num_positive in (0, labels.numel()):
        raise InputError("`labels` has only one value: detection needs at least one positive and one negative.")
    ordered, order = scores.detach().flatten().sort(descending=True)
    last_of_ties = torch.cat([(ordered[1:] != ordered[:-1]).nonzero()[:, 0], order.new_tensor([len(order) - 1])])
    true_positives = positive[order].cumsum(0)[last_of_ties]
    return true_positives, last_of_ties + 1 - true_positives


def _shifted(counts: Tensor) -> Tensor:
    """Return the counts at the threshold before; nothing is counted before the first."""
    return torch.cat([counts.new_zeros(1), counts[:-1]])


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
