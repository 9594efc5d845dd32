r"""Kronecker factors in little memory: leading eigenpairs and the diagonal of the rest, :math:`F \approx R R^\top + D`.

The diagonal of a factor stays exact, and so does a factor whose rank is not larger than the number of eigenpairs. For
adapters this makes the file of a posterior as small as the adapters: one side of their Kronecker blocks is as wide as
the network (Yang et al. 2024, https://arxiv.org/abs/2308.13111, keep the eigenpairs alone).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from dubito.core.precision import at_least_single
from dubito.curvature.accumulator import Sums
from dubito.curvature.matrices.base import eigh
from dubito.networks.adapters import adapter_names

FactorRank = int | Literal["auto"] | None
# By default the factors of adapters are reduced from this width on: smaller ones take little memory anyway.
WIDE = 64


def reduce_factors(sums: Sums, rank: FactorRank, model: nn.Module) -> Sums:
    """Return the sums of all parameters with wide factors reduced.

    Args:
        sums: Factors by parameter.
        rank: The number of eigenpairs that stay; ``"auto"`` reduces the wide side of adapters to as many as the narrow
            side has entries; None reduces nothing.
        model: The network, which shows what is an adapter.
    """
    if rank is None:
        return sums
    own = set(adapter_names(model)) if rank == "auto" else set(sums)
    dtypes = {name: at_least_single(model.get_parameter(name).dtype) for name in own & set(sums)}
    return {name: _reduced(part, rank, dtypes[name]) if name in own else part for name, part in sums.items()}


def whole_factors(sums: Sums) -> Sums:
    """Return the sums of one parameter with reduced factors written out."""
    found = {key: value for key, value in sums.items() if not key.endswith(("_root", "_rest"))}
    for key in ("left", "right"):
        if f"{key}_root" in sums:
            root, rest = (sums[f"{key}_{part}"].double() for part in ("root", "rest"))
            found[key] = root @ root.mT + torch.diag_embed(rest)
    return found


def _reduced(sums: Sums, rank: FactorRank, dtype: torch.dtype) -> Sums:
    factors = {key: sums[key] for key in ("left", "right") if key in sums and sums[key].ndim == 3}
    if rank == "auto":
        narrow = min((len(each[0]) for each in factors.values()), default=0)
        factors = {key: each for key, each in factors.items() if len(factors) == 2 and len(each[0]) >= WIDE}
        rank = narrow
    assert isinstance(rank, int)
    found = dict(sums)
    for key, factor in factors.items():
        if 2 * rank < factor.shape[-1]:
            root, rest = _leading(found.pop(key), rank, dtype)
            found |= {f"{key}_root": root, f"{key}_rest": rest}
    return found


def _leading(factor: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the root ``[Gr, W, rank]`` of the leading part, and the diagonal ``[Gr, W]`` of what is left."""
    values, vectors = eigh(factor)
    root = (vectors[..., -rank:] * values[..., None, -rank:].sqrt()).to(dtype)
    rest = factor.diagonal(dim1=-2, dim2=-1).double() - root.double().square().sum(-1)
    return root, rest.clamp_min(0.0).to(dtype)
