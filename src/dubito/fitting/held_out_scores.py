"""Judge what a search saw on held-out examples: how long to train, and whether anything was learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.core import distributed
from dubito.core.batches import Source
from dubito.fitting.search import KEPT_SCORES, Curve, cautious_total

# Fewer epochs are preferred if they lose less than this many standard errors of the paired difference, within these
# limits in nats: more can matter however uncertain it is, less never does.
DOUBT, NEGLIGIBLE, LARGE = 0.5, 0.002, 0.02
# The degrees of freedom of the Student-t distributions that are tried on the errors of a regression.
DEGREES = (1.0, 2.0, 3.0, 5.0)


def best_epochs(curves: Sequence[Curve], *, few: bool) -> int:
    """Return the number of epochs with the best score; if `few`, the fewest that are not clearly worse."""
    best = max(curves[0].epochs, key=lambda epochs: cautious_total(curves, epochs))
    return fewest_epochs(curves, best) if few else best


def fewest_epochs(curves: Sequence[Curve], best: int) -> int:
    """Return the fewest epochs, at least one, whose score is less than `DOUBT` standard errors below the best one.

    Few held-out examples that happen to be easy otherwise let training go on until the network is sure of everything.
    On classes that are easy to tell apart the score rises forever: what is left to gain is then `NEGLIGIBLE`.
    """
    num_rows = sum(curve.num_rows for curve in curves)
    for epochs in sorted({epochs for curve in curves for epochs in curve.epochs if 0 < epochs < best}):
        losses = torch.cat([curve.scores_at(best) - curve.scores_at(epochs) for curve in curves])
        sums = torch.stack([losses.sum(), losses.square().sum(), torch.tensor(len(losses), dtype=losses.dtype)])
        distributed.sum_([sums])
        mean, square = (sums[:2] / sums[2]).tolist()
        error = math.sqrt(max(square - mean**2, 0.0) / num_rows)
        if mean <= min(max(DOUBT * error, NEGLIGIBLE), LARGE):
            return epochs
    return best


def gain_over_constant(
    curves: Sequence[Curve], sources: Sequence[Source], epochs: int, likelihood: Likelihood, *, at_unit_noise: bool
) -> tuple[float, float] | None:
    """Return by how many nats per example the network beats the best constant prediction, and the standard error.

    Args:
        curves: The scores of held-out examples.
        sources: These examples.
        epochs: After how many epochs.
        likelihood: The likelihood; others than of one label per example, and of numbers, give None.
        at_unit_noise: Whether this is a regression whose scores are at noise 1; it is judged at the best noise.
    """
    if distributed.is_active() or not (at_unit_noise or isinstance(likelihood, Categorical)):
        return None
    scores = torch.cat([curve.scores_at(epochs) for curve in curves])
    targets = torch.cat([_first_targets(source) for source in sources]).to(scores.device)
    if len(targets) != len(scores) or len(scores) < 2 or not bool(scores.isfinite().all()):
        return None
    if at_unit_noise:
        values = targets.double().reshape(len(targets), -1)
        squares = -2 * scores - values.shape[1] * math.log(2 * math.pi)
        others = (values - values.mean(0)).square().sum(1)
        if not float(others.mean()) > 0 or not float(squares.mean()) > 0:
            return None
        gain = 0.5 * values.shape[1] * math.log(float(others.mean() / squares.mean()))
        gains = 0.5 * values.shape[1] * (others / others.mean() - squares / squares.mean())
    elif targets.ndim == 1:
        counts = targets.unique(return_inverse=True, return_counts=True)
        gains = scores - (counts[2][counts[1]] / len(targets)).double().log()
        gain = float(gains.mean())
    else:
        return None
    return gain, float(gains.std() / math.sqrt(sum(curve.num_rows for curve in curves)))


def gain_of_heavy_tails(curves: Sequence[Curve], epochs: int) -> float | None:
    """Return by how many nats per held-out example a Student-t distribution fits the errors better than a normal one.

    Args:
        curves: The scores of held-out examples of a regression on one number, at noise 1.
        epochs: After how many epochs.
    """
    scores = torch.cat([curve.scores_at(epochs) for curve in curves])
    squares = (-2 * scores - math.log(2 * math.pi)).clamp_min(0)
    if distributed.is_active() or not bool(squares.isfinite().all()) or not float(squares.mean()) > 0:
        return None
    dof = torch.tensor(DEGREES, dtype=scores.dtype, device=scores.device)[:, None, None]
    variance = torch.logspace(-3, 0, 31, dtype=scores.dtype, device=scores.device)[:, None]
    normal = -0.5 * (math.log(2 * math.pi) + 1)
    constant = ((dof + 1) / 2).lgamma() - (dof / 2).lgamma() - 0.5 * (dof * math.pi * variance).log()
    logs = constant - (dof + 1) / 2 * (squares / squares.mean() / (dof * variance)).log1p()
    return float(logs.mean(-1).max()) - normal


def best_variance(score: float, outputs: int) -> float:
    """Return the noise variance of a regression whose mean log score at the best noise is this one."""
    return math.exp(-2 * score / outputs - 1) / (2 * math.pi)


def _first_targets(source: Source) -> Tensor:
    """Return the targets of the examples whose scores are kept."""
    found, count = [], 0
    for batch in source.replay():
        found.append(batch.targets)
        count += batch.num_rows
        if count >= KEPT_SCORES:
            break
    return torch.cat(found)[:KEPT_SCORES]
