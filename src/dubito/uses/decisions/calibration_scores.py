r"""How unusual a target is under a prediction: nonconformity scores, and the thresholds of conformal prediction.

With scores $s_1, \dots, s_n$ of weights $w_i$ and a new datum of weight $w$, the threshold of a level $\ell$ is the
smallest score with

$$\sum_{i: s_i \le s} w_i \ \ge\ \ell \Big(\sum_i w_i + w\Big),$$

and infinite where there is none. With equal weights it is the $\lceil (n + 1)\,\ell \rceil$-th smallest score. Weights
that are the density ratio of new and old inputs keep the coverage under covariate shift (Tibshirani et al. 2019,
https://arxiv.org/abs/1904.06019). Groups have thresholds of their own, so that the coverage holds in each (Mondrian
conformal prediction; Vovk et al. 2005).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dubito.beliefs.prediction import Prediction, RegressionPrediction
from dubito.core.arguments import checked_arguments
from dubito.core.constraints import NonNegative
from dubito.core.errors import InputError
from dubito.core.tracing import is_tracing
from dubito.uses.fixed_draws import check_scores, of_classes, rank_for

SetMethod = Literal["thr", "aps", "raps"]
IntervalMethod = Literal["stddev", "quantile"]


@dataclass(frozen=True, eq=False)
class CalibrationScores:
    """The nonconformity of calibration data."""

    scores: Tensor  # one number per datum and output ``[n, O]``, float64
    groups: Tensor | None = None  # the group of each datum ``[n]``, or None for one group
    weights: Tensor | None = None  # the weight of each datum ``[n]``, or None for equal ones

    def __post_init__(self) -> None:
        if self.scores.ndim != 2 or self.scores.numel() == 0:
            raise InputError(f"`scores` must be numbers [n, O], got shape {tuple(self.scores.shape)}.")
        for name in ("groups", "weights"):
            given = getattr(self, name)
            if given is not None and given.shape != self.scores.shape[:1]:
                raise InputError(
                    f"`{name}` must have one value for each of the {len(self.scores)} calibration data, got shape "
                    f"{tuple(given.shape)}."
                )
        if self.groups is not None and self.groups.is_floating_point():
            raise InputError(f"`groups` must be whole numbers, got {self.groups.dtype}.")
        if self.weights is not None and not bool((check_weights(self.weights) > 0).any()):
            raise InputError("All `weights` of the calibration data are 0: one must be above 0.")

    def check_level(self, level: float) -> None:
        """Raise if there are too few data for a level, in any group; with weights a threshold is then infinite."""
        if self.weights is not None:
            return
        if self.groups is None:
            rank_for(level, len(self.scores), f"A coverage of {level:g}")
            return
        for group, count in zip(*(part.tolist() for part in self.groups.unique(return_counts=True)), strict=True):
            rank_for(level, count, f"A coverage of {level:g} in group {group}")

    def threshold(self, level: float) -> Tensor:
        """Return the threshold of each output ``[O]`` of a level, for equal weights and one group.

        A level above the largest possible one has an infinite threshold, and one of 0 or less minus infinity.
        """
        return self._of(self.scores, None, level, self.scores.new_ones(1))[0]

    def thresholds(self, level: float, num: int, groups: Tensor | None, weights: Tensor | None) -> Tensor:
        """Return the thresholds ``[num, O]`` for new data with their groups and weights."""
        self._check_given("groups", self.groups, groups, num)
        self._check_given("weights", self.weights, weights, num)
        new = self.scores.new_ones(num) if weights is None else check_weights(weights).to(self.scores)
        if self.groups is None or groups is None:
            return self._of(self.scores, self.weights, level, new)
        found, own = self.scores.new_empty(num, self.scores.shape[1]), groups.to(self.groups.device)
        for group in own.unique().tolist():
            known = self.groups == group
            if not bool(known.any()):
                raise InputError(f"No calibration datum is in group {group}: there is no threshold for it.")
            weights_there = None if self.weights is None else self.weights[known]
            found[own == group] = self._of(self.scores[known], weights_there, level, new[own == group])
        return found

    def _check_given(self, name: str, own: Tensor | None, given: Tensor | None, num: int) -> None:
        if (own is None) != (given is None):
            told = "none were given with the calibration data" if own is None else "they were for the calibration data"
            raise InputError(f"`{name}` must {'not ' * (own is None)}be given for new data, because {told}.")
        if given is not None and given.shape != (num,):
            raise InputError(f"`{name}` must have one value for each of the {num} rows, got {tuple(given.shape)}.")

    @staticmethod
    def _of(scores: Tensor, weights: Tensor | None, level: float, new: Tensor) -> Tensor:
        columns = []
        for column in scores.unbind(1):
            ordered, order = column.sort()
            own = (torch.ones_like(ordered) if weights is None else weights.to(ordered)[order]).cumsum(0)
            needed = level * (own[-1] + new)
            place = torch.searchsorted(own, needed - 1e-9 * (own[-1] + new).clamp(max=1.0))
            ends = torch.cat([ordered, ordered.new_tensor([math.inf])])
            columns.append(torch.where(needed > 0, ends[place], -math.inf))
        return torch.stack(columns, dim=1)

    def to_tree(self) -> dict[str, Any]:
        """Return what to save."""
        return {"scores": self.scores, "groups": self.groups, "weights": self.weights}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], device: torch.device) -> CalibrationScores:
        """Undo `to_tree`."""
        groups, weights = (None if tree[name] is None else tree[name].to(device) for name in ("groups", "weights"))
        return cls(tree["scores"].double().to(device), groups, weights)


def check_weights(weights: Tensor) -> Tensor:
    """Return weights that are finite and not negative, or raise."""
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise InputError("`weights` must be finite and at least 0.")
    return weights


@checked_arguments
def density_ratio(old: Tensor, new: Tensor, *inputs: Tensor, penalty: NonNegative = 1.0) -> tuple[Tensor, ...]:
    r"""Return $p_\text{new}(x) / p_\text{old}(x)$ at the old inputs, at the new ones, and at further `inputs`.

    A logistic regression tells new from old inputs; the odds of its probability, divided by the odds of the numbers of
    rows, are the ratio (Sugiyama et al. 2012). It is exact where the logarithm of the ratio is linear in the inputs.

    Args:
        old: Inputs like the calibration data ``[N, F]``.
        new: Inputs like the data to predict ``[M, F]``; no labels are needed.
        inputs: Further inputs ``[B, F]``.
        penalty: The precision of a normal prior on the standardised coefficients.
    """
    from sklearn.linear_model import LogisticRegression

    parts = [_rows(part) for part in (old, new, *inputs)]
    if len({part.shape[1] for part in parts}) > 1:
        raise InputError(f"Old and new inputs differ in their shapes: {[tuple(part.shape) for part in parts]}.")
    rows, labels = np.concatenate(parts[:2]), np.repeat([0, 1], [len(parts[0]), len(parts[1])])
    loc, scale = rows.mean(axis=0), rows.std(axis=0)
    scale[scale == 0] = 1.0
    told = LogisticRegression(C=1 / penalty if penalty else np.inf, max_iter=1000).fit((rows - loc) / scale, labels)
    share = np.log(len(parts[1]) / len(parts[0]))
    return tuple(torch.from_numpy(np.exp(told.decision_function((part - loc) / scale) - share)) for part in parts)


def _rows(part: Tensor) -> Any:
    rows = part.detach().double().cpu().numpy()
    if not rows.ndim or not rows.size or not np.isfinite(rows).all():
        raise InputError("Inputs for a density ratio must not be empty, and hold no NaN and no infinite values.")
    return rows.reshape(len(rows), -1)


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
