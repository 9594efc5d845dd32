"""Accuracy and the two proper scores of a classifier: negative log-likelihood and Brier."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.tensor_checks import check_confidence, class_rows, top_class


@checked_arguments
def accuracy(probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """Return the fraction of rows whose most probable class is the target; of equal classes the first counts.

    Args:
        probs: Probabilities [..., C].
        targets: Class indices [...].
        ignore_index: A target whose rows are left out.

    >>> float(accuracy(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0])))
    0.5
    """
    rows, labels = class_rows("probs", probs, targets, ignore_index)
    _, prediction = top_class(rows)
    return (prediction == labels).double().mean()


@checked_arguments
def nll(log_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> Tensor:
    r"""Return the mean negative log-likelihood $-\frac1N \sum_n \log p(y_n)$ in nats.

    A target of probability zero makes it infinite.

    Args:
        log_probs: Log-probabilities [..., C].
        targets: Class indices [...].
        ignore_index: A target whose rows are left out.

    >>> round(float(nll(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0]))), 6)
    0.693147
    """
    rows, labels = class_rows("log_probs", log_probs, targets, ignore_index)
    check_confidence("log_probs", rows.amax(dim=-1).exp(), rows.shape[-1])
    return nll_per_row(rows, labels).mean()


@checked_arguments
def brier(probs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> Tensor:
    r"""Return the Brier score $\frac1N \sum_n \sum_c (p_{nc} - [y_n = c])^2$, between 0 and 2.

    It sums over classes, so for two classes it is twice the binary score of one probability (Brier, 1950).

    Args:
        probs: Probabilities [..., C].
        targets: Class indices [...].
        ignore_index: A target whose rows are left out.

    >>> float(brier(torch.tensor([[0.75, 0.25]]), torch.tensor([0])))
    0.125
    """
    rows, labels = class_rows("probs", probs, targets, ignore_index)
    check_confidence("probs", rows.amax(dim=-1), rows.shape[-1])
    return brier_sum(rows, labels) / len(labels)


def nll_per_row(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Return -log p(y) [N] in float64 from checked rows [N, C]."""
    return -log_probs.gather(1, targets[:, None])[:, 0].double()


def brier_sum(probs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared distance to the one-hot targets, summed over checked rows, in float64."""
    # Subtracting the one-hot first loses no digits for confident rows, as Σp² - 2p_y + 1 would.
    residual = probs.scatter_add(1, targets[:, None], probs.new_full((len(targets), 1), -1.0))
    return residual.square_().sum(dtype=torch.float64)
