"""Calibration errors and reliability diagrams: is a confidence of 80 % right 80 % of the time?

Bins are half-open, [lower, upper), and the last one includes its upper edge, so that a saturated confidence of exactly
1 shares the last bin (torchmetrics counts it in a bin of its own, one more than requested).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError
from dubito.core.tensor_checks import check_confidence, check_num_bins, class_rows, top_class

Binning = Literal["equal-width", "equal-mass"]


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """The data of a reliability diagram, as sums per bin: sums of two data sets over the same edges just add.

    Attributes:
        edges: Bin edges [num_bins + 1].
        counts: Rows in each bin [num_bins], float64.
        confidence_sums: Sum of the predicted probabilities in each bin [num_bins], float64.
        correct_sums: Number of correct rows in each bin [num_bins], float64.
    """

    edges: Tensor
    counts: Tensor
    confidence_sums: Tensor
    correct_sums: Tensor

    @property
    def confidence(self) -> Tensor:
        """Mean predicted probability of each bin; NaN where the bin is empty."""
        return self.confidence_sums / self.counts

    @property
    def accuracy(self) -> Tensor:
        """Fraction of correct rows of each bin; NaN where the bin is empty."""
        return self.correct_sums / self.counts

    @property
    @checked_arguments
    def ece(self) -> Tensor:
        r"""Expected calibration error, $\sum_b \frac{n_b}{N} |\text{acc}_b - \text{conf}_b|$."""
        return (self.confidence_sums - self.correct_sums).abs().sum() / self.counts.sum()

    @property
    @checked_arguments
    def mce(self) -> Tensor:
        r"""Maximum calibration error, $\max_b |\text{acc}_b - \text{conf}_b|$ over the bins with rows."""
        return ((self.confidence_sums - self.correct_sums).abs() / self.counts.clamp(min=1)).max()


@checked_arguments
def reliability(
    probs: Tensor,
    targets: Tensor,
    *,
    num_bins: int = 15,
    binning: Binning = "equal-width",
    ignore_index: int | None = None,
) -> ReliabilityBins:
    """Sort rows into bins by the probability of their most probable class.

    Args:
        probs: Probabilities [..., C].
        targets: Class indices [...].
        num_bins: Number of bins.
        binning: `"equal-width"` cuts [0, 1] evenly. `"equal-mass"` cuts at the quantiles of the confidences, so bins
            hold equally many rows; equal confidences stay together, whatever the order of the rows.
        ignore_index: A target whose rows are left out.

    >>> bins = reliability(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]), num_bins=2)
    >>> bins.counts.tolist(), bins.accuracy.tolist()
    ([0.0, 2.0], [nan, 0.5])
    """
    rows, labels = class_rows("probs", probs, targets, ignore_index)
    confidence, prediction = top_class(rows)
    return bin_rows(confidence, prediction == labels, num_bins, binning)


def ece(
    probs: Tensor,
    targets: Tensor,
    *,
    num_bins: int = 15,
    binning: Binning = "equal-width",
    ignore_index: int | None = None,
) -> Tensor:
    r"""Return the expected calibration error $\sum_b \frac{n_b}{N} |\text{acc}_b - \text{conf}_b|$.

    With equal-width bins as in Guo et al. (2017, https://arxiv.org/abs/1706.04599), with equal-mass bins as in Nixon et
    al. (2019, https://arxiv.org/abs/1904.01685). Arguments are those of `reliability`.

    >>> round(float(ece(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 1]))), 6)
    0.2
    """
    return reliability(probs, targets, num_bins=num_bins, binning=binning, ignore_index=ignore_index).ece


def mce(
    probs: Tensor,
    targets: Tensor,
    *,
    num_bins: int = 15,
    binning: Binning = "equal-width",
    ignore_index: int | None = None,
) -> Tensor:
    r"""Return the maximum calibration error $\max_b |\text{acc}_b - \text{conf}_b|$ over the bins with rows.

    Arguments are those of `reliability`.

    >>> round(float(mce(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 1]))), 6)
    0.3
    """
    return reliability(probs, targets, num_bins=num_bins, binning=binning, ignore_index=ignore_index).mce


@checked_arguments
def classwise_ece(
    probs: Tensor,
    targets: Tensor,
    *,
    num_bins: int = 15,
    binning: Binning = "equal-width",
    ignore_index: int | None = None,
) -> Tensor:
    r"""Return the class-wise calibration error: the mean over classes of the ECE of "is it class c?".

    Unlike `ece` it sees all probabilities of a row, not only the largest (Kull et al. 2019,
    https://arxiv.org/abs/1910.12656). Arguments are those of `reliability`.

    >>> round(float(classwise_ece(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 1]))), 6)
    0.2
    """
    rows, labels = class_rows("probs", probs, targets, ignore_index)
    check_confidence("probs", rows.amax(dim=-1), rows.shape[-1])
    if float(rows.min()) < 0:
        raise InputError(f"`probs` has the negative value {float(rows.min()):.4g}: apply softmax first.")
    per_class = [
        bin_rows(
            rows[:, c].clamp(max=1), labels == c, num_bins, binning
        ).ece  # one class at a time: memory is N, not NC
        for c in range(rows.shape[1])
    ]
    return torch.stack(per_class).mean()


def bin_rows(confidence: Tensor, correct: Tensor, num_bins: int, binning: Binning = "equal-width") -> ReliabilityBins:
    """Sum rows per bin, from checked confidences in [0, 1] and whether each was right."""
    check_num_bins(num_bins)
    if binning == "equal-width":
        edges = torch.linspace(0, 1, num_bins + 1, dtype=confidence.dtype, device=confidence.device)
        index = _equal_width_index(confidence, edges)
    elif binning == "equal-mass":
        edges = _equal_mass_edges(confidence, num_bins)
        index = torch.bucketize(confidence, edges[1:-1].contiguous(), right=True)
    else:
        raise InputError(f'`binning` must be "equal-width" or "equal-mass", got {binning!r}.')
    return ReliabilityBins(
        edges=edges,
        counts=torch.bincount(index, minlength=num_bins).double(),
        confidence_sums=torch.bincount(index, confidence.double(), minlength=num_bins),
        correct_sums=torch.bincount(index, correct.double(), minlength=num_bins),
    )


def _equal_width_index(confidence: Tensor, edges: Tensor) -> Tensor:
    """Return `torch.bucketize(confidence, edges[1:-1], right=True)`, but six times faster, by scaling.

    Scaling alone puts a confidence at an edge into the wrong bin where the product rounds, so it is scaled a little
    short, which is at most one bin too low, and then compared with the upper edge of that bin.
    """
    num_bins = len(edges) - 1
    index = (confidence * (num_bins * (1 - 1e-6))).int()
    index += confidence >= edges[1:].index_select(0, index)
    return index.clamp_(max=num_bins - 1)


def _equal_mass_edges(confidence: Tensor, num_bins: int) -> Tensor:
    """Return the smallest confidence, each ⌈kN/num_bins⌉-th one in order, and the largest."""
    ordered = confidence.sort().values
    starts = -(-torch.arange(num_bins + 1, device=ordered.device) * len(ordered) // num_bins)
    return ordered[starts.clamp_(max=len(ordered) - 1)]
