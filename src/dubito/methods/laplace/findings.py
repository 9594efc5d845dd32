"""What can be wrong with a posterior of `Laplace`, besides what any posterior is checked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from dubito.curvature.sampled import tolerance
from dubito.fitting.diagnosis import Finding


class Tuning(NamedTuple):
    """How the prior precision was chosen.

    Attributes:
        by: ``"given"``, ``"evidence"``, ``"validation"``, ``"training"``, or ``"weights"`` if nothing was scored.
        at_edge: Whether it is at the end of the range that was searched.
        num_rows: The number of examples that decided.
    """

    by: str = "given"
    at_edge: bool = False
    num_rows: int = 0


def findings(tuning: Tuning, prior_precision: Tensor, error: float, num_draws: int) -> Iterator[Finding]:
    """Yield what is wrong.

    Args:
        tuning: How the prior precision was chosen.
        prior_precision: What was chosen.
        error: The error of the solver of ``structure="sampled"``; 0 for others.
        num_draws: The number of its samples.
    """
    if tuning.at_edge:
        yield Finding(
            "prior at an edge", "care",
            f"The prior precision, {float(prior_precision.mean()):.1e}, is at the edge of the range that was searched, "
            "so the data do not determine it: give a number, or more validation data.",
        )  # fmt: skip
    if error > tolerance(num_draws):
        yield Finding(
            "samples not converged", "care",
            f"The solver of structure='sampled' stopped at an error of {error:.0%} of the outputs' standard "
            "deviations: raise `steps`, `draws` or prior_precision.",
        )  # fmt: skip
