"""Curvature: one batched vector-Jacobian product, then contractions."""

from dubito.curvature.engine import Engine, FallbackWarning, Tape
from dubito.curvature.factor import Factor
from dubito.curvature.structures import (
    Accumulator,
    DiagonalAccumulator,
    FullAccumulator,
    KroneckerAccumulator,
    LowRankAccumulator,
    jacobian,
)

__all__ = [
    "Accumulator",
    "DiagonalAccumulator",
    "Engine",
    "Factor",
    "FallbackWarning",
    "FullAccumulator",
    "KroneckerAccumulator",
    "LowRankAccumulator",
    "Tape",
    "jacobian",
]
