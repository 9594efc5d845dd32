r"""Symmetric positive semi-definite matrices over the selected weights, one structure per file.

Each holds a curvature `H` and computes for the precision :math:`P = s\,H + \mathrm{diag}(\lambda)`: its log-determinant
(`log_det`, differentiable in `s` and `λ`) and its inverse (`covariance`, which samples, solves and gives marginal
variances). `λ` is a number (a 0-dimensional tensor) or one value per weight.
"""

from dubito.curvature.matrices.base import Covariance, Covariances, Matrix
from dubito.curvature.matrices.dense import Dense, DenseCovariance, DenseCovariances
from dubito.curvature.matrices.diagonal import Diagonal, DiagonalCovariance
from dubito.curvature.matrices.kronecker import Block, Kronecker, KroneckerCovariance, KroneckerCovariances
from dubito.curvature.matrices.low_rank import LowRank, LowRankCovariance
from dubito.curvature.matrices.sampled import Sampled, SampledCovariance

__all__ = [
    "Block",
    "Covariance",
    "Covariances",
    "Dense",
    "DenseCovariance",
    "DenseCovariances",
    "Diagonal",
    "DiagonalCovariance",
    "Kronecker",
    "KroneckerCovariance",
    "KroneckerCovariances",
    "LowRank",
    "LowRankCovariance",
    "Matrix",
    "Sampled",
    "SampledCovariance",
]
