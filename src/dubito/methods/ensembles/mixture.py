r"""The equally weighted mixture of several predictions: the prediction of an ensemble.

$$p(y) = \frac1K \sum_k p_k(y)$$
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.prediction import ClassPrediction, DistributionPrediction, Prediction, RegressionPrediction
from dubito.beliefs.prediction.classification import log_mean_exp
from dubito.core.errors import UnsupportedError


def mixture(parts: list[Any]) -> Prediction:
    r"""Return the mixture of the members' predictions for the same data; one member's prediction stays as it is.

    For classes the decomposition of the uncertainty is exact, including the members' own epistemic uncertainty:

    $$\text{aleatoric} = \frac1K \sum_k a_k, \qquad
      \text{epistemic} = \frac1K \sum_k e_k + H\Big(\frac1K \sum_k p_k\Big) - \frac1K \sum_k H(p_k)$$

    The samples of all members are concatenated on the sample axis; a member without samples counts as one.

    >>> import math
    >>> sure = [ClassPrediction.from_logits(torch.tensor([logits])) for logits in ([50.0, 0.0], [0.0, 50.0])]
    >>> prediction = mixture(sure)
    >>> prediction.probs.tolist(), round(prediction.epistemic.item() / math.log(2), 6)
    ([[0.5, 0.5]], 1.0)
    """
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, ClassPrediction) for part in parts):
        return _of_classes(parts)
    if all(isinstance(part, RegressionPrediction) for part in parts):
        return _of_numbers(parts)
    raise UnsupportedError(f"Predictions of the kind {type(parts[0]).__name__} cannot be mixed.")


def _of_classes(parts: list[ClassPrediction]) -> ClassPrediction:
    members = torch.stack([part.log_probs for part in parts])
    log_probs = log_mean_exp(members)
    aleatoric = torch.stack([part.aleatoric for part in parts]).mean(dim=0)
    within = torch.stack([part.epistemic for part in parts]).mean(dim=0)
    between = (_entropy(log_probs) - _entropy(members).mean(dim=0)).clamp_min(0.0)  # Jensen: below 0 is rounding
    samples = [part.log_probs.unsqueeze(0) if part.samples is None else part.samples for part in parts]
    return ClassPrediction(log_probs, aleatoric, within + between, torch.cat(samples))


def _of_numbers(parts: list[RegressionPrediction]) -> RegressionPrediction:
    if all(isinstance(part, DistributionPrediction) for part in parts):
        return DistributionPrediction.mixed(parts)  # type: ignore[arg-type]
    fields = ("means", "noise_variance", "function_variance")
    means, noise, function = (torch.cat([getattr(part, name) for part in parts]) for name in fields)
    return RegressionPrediction(means, noise, function, noise_covariance=parts[0].noise_covariance)


def _entropy(log_probs: Tensor) -> Tensor:
    return -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(dim=-1)
