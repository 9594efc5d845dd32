"""Estimate how much more frequent inputs are among new data than among old data: weights for covariate shift."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import NonNegative
from dubito.core.errors import InputError


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
