"""How unusual a target is under a prediction: the scores of conformal prediction, higher is more unusual."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dubito.beliefs.prediction import Prediction, RegressionPrediction
from dubito.core.errors import InputError
from dubito.core.tracing import is_tracing
from dubito.uses.fixed_draws import check_scores, of_classes

SetMethod = Literal["thr", "aps", "raps"]
IntervalMethod = Literal["stddev", "quantile"]


def of_every_class(
    prediction: Prediction, method: SetMethod, u: Tensor | None, penalty: float, free_classes: int
) -> Tensor:
    r"""Return the nonconformity of every class ``[B, *positions, C]``, float64; see `ConformalSets`.

    Args:
        prediction: A prediction of classes.
        method: ``"thr"``, ``"aps"`` or ``"raps"``.
        u: Uniform numbers ``[B, *positions, 1]``, or None for 1.
        penalty: λ of ``"raps"``.
        free_classes: k of ``"raps"``.
    """
    probs = check_scores(of_classes(prediction, "A conformal set").probs, "probability")
    if method == "thr":
        return 1 - probs
    if is_tracing():  # file formats have no stable sort
        ordered, order = probs.topk(probs.shape[-1], dim=-1)
    else:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    above = ordered.cumsum(-1)
    if u is None:
        above = above / above[..., -1:]  # so that the sum of all is 1, and a threshold of 1 takes every class
    else:
        above = above - (1 - u) * ordered
    if method == "raps":
        ranks = torch.arange(1, probs.shape[-1] + 1, device=probs.device, dtype=probs.dtype)
        above = above + penalty * (ranks - free_classes).clamp_min(0)
    return torch.empty_like(probs).scatter_(-1, order, above)


def of_numbers(prediction: RegressionPrediction, truth: Tensor, method: IntervalMethod, coverage: float) -> Tensor:
    """Return the nonconformity of numbers ``[B, O]``; see `ConformalIntervals`."""
    if method == "stddev":
        scores = (truth - prediction.mean).abs() / prediction.stddev
    else:
        low, high = prediction.interval(coverage)
        scores = torch.maximum(low - truth, truth - high)
    return check_scores(scores, "nonconformity")


def numbers_of(prediction: Prediction, target_scale: tuple[Tensor, Tensor] | None) -> RegressionPrediction:
    """Return a prediction of numbers in float64 and in original units; raise if it is one of classes."""
    if not isinstance(prediction, RegressionPrediction):
        raise InputError("A conformal interval is for regression: use ConformalSets for classes.")
    wide = prediction.to(torch.float64)
    return wide if target_scale is None else wide.rescale(*target_scale)
