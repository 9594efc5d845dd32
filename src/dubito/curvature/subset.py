r"""The curvature of a few mixtures of gradients, inverted exactly: a preconditioner for the curvature of all.

Each example has rows :math:`X_n = H_n^{1/2} J_n`, one for each output. Mixtures :math:`\sqrt{V/p}\, Q_n X_n` of its `V`
rows, with `p` random orthonormal rows :math:`Q_n`, have the curvature of the example on average. With the mixtures `S`
of every `m`-th example, scaled by :math:`\sqrt{m}`, the preconditioner is (Woodbury 1950)

$$\hat P = s\, S^\top S + \Lambda, \qquad \hat P^{-1} = \Lambda^{-1}
  - \Lambda^{-1} S^\top \big(s^{-1} I + S \Lambda^{-1} S^\top\big)^{-1} S \Lambda^{-1}.$$

Kronecker factors spread curvature over directions that no example determines; this matrix has none there. The rows are
kept in bfloat16: a preconditioner decides how fast samples converge, not to what.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.core import distributed, limits
from dubito.core.limits import numbers, slices
from dubito.curvature.accumulator import Sums
from dubito.curvature.factor import Factor
from dubito.curvature.products import gram
from dubito.networks.selection import Selection

# What the products of all pairs of rows may cost, in units of the work of one pass over the data; so many cost nothing.
PASSES, CHEAP_ROWS = 1, 256
# If fewer rows fit into memory, none is kept: they would hardly help.
FEWEST_ROWS = 64
# What is added to the diagonal of products in float32, relative to its largest entry, until it is positive definite.
ROUNDING = (1e-7, 1e-5, 1e-3, 1e-1)


def fewest_fit(selection: Selection) -> bool:
    """Return whether rows will be kept: they fit into memory, and there is one process."""
    return not distributed.is_active() and limits.current().subset_rows >= 2 * selection.num_weights * FEWEST_ROWS


def blank_rows(factors: dict[str, Factor], selection: Selection, num_rows: int, num_outputs: int) -> Sums:
    """Return room for rows, and which mixtures will be kept.

    Args:
        factors: The gradients of some examples.
        selection: The weights.
        num_rows: The number of rows of the Jacobian.
        num_outputs: The number of outputs of each example.
    """
    some, size, examples = next(iter(factors.values())), selection.num_weights, -(-num_rows // num_outputs)
    # a pass computes about 2 V Σ_l T_l D_l products per example, the matrix of all pairs D / 2 for each
    work = sum(factor.num_positions * math.prod(factor.shape) for factor in factors.values())
    affordable = math.isqrt(4 * PASSES * some.columns * examples * work // max(size, 1))
    most = min(max(affordable, CHEAP_ROWS), limits.current().subset_rows // (2 * size), size, num_rows)
    most = 0 if most < min(FEWEST_ROWS, size, num_rows) else most
    whole = some.columns >= num_outputs - 1  # columns that come in several parts have one mixture
    each = min(max(most // examples, 1), some.columns) if whole else 1
    every = -(-examples * each // max(most, 1))
    count = each * -(-examples // every) if most else 0
    rows = torch.zeros(count, size, dtype=torch.bfloat16, device=some.like.device)
    return {"rows": rows, "each": each, "every": every, "examples": 0, "start": 0, "before": 0, "used": 0}


def keep_rows(kept: Sums, factors: dict[str, Factor], selection: Selection, seed: int, first: bool) -> None:
    """Keep mixtures of the gradients of every n-th example, in place.

    Args:
        kept: What is kept.
        factors: The gradients of some columns.
        selection: The weights.
        seed: Of the mixtures.
        first: Whether these are the first columns of the examples; further ones are added to their mixtures.
    """
    some, each, every = next(iter(factors.values())), kept["each"], kept["every"]
    if first:
        kept["start"], kept["before"] = -kept["examples"] % every, kept["used"]
        kept["examples"] += some.size
        room = (len(kept["rows"]) - kept["used"]) // each
        kept["used"] += each * min(room, len(range(some.size)[kept["start"] :: every]))
    free = kept["rows"][kept["before"] : kept["used"]].unflatten(0, (-1, each))
    if not len(free):
        return
    weights = mixing_weights(some.size, some.columns, each, seed).to(some.like)
    for name in selection.names:
        factor, chosen = factors[name], selection.indices[name]
        for part in slices(len(free), numbers(limits.current().chunk) // (some.columns * math.prod(factor.shape))):
            examples = slice(kept["start"] + part.start * every, kept["start"] + part.stop * every, every)
            values = factor.mixed(weights, examples)
            values = values if chosen is None else values[:, :, chosen.to(values.device)]
            free[part, :, selection.slices[name]] += values.to(free)


def mixing_weights(num_examples: int, num_columns: int, count: int, seed: int) -> Tensor:
    r"""Return the weights ``[B, V, p]`` of `p` mixtures of the columns of each example.

    They are orthonormalized random signs times :math:`\sqrt{V/p}`: the sum of outer products of the mixtures is that of
    the columns on average, and exactly for `p = V`.

    >>> mixing_weights(1, 2, 2, seed=0).square().sum()
    tensor(2.)
    """
    generator = torch.Generator().manual_seed(seed)
    signs = 2.0 * torch.randint(0, 2, (num_examples, num_columns, count), generator=generator) - 1
    return torch.linalg.qr(signs).Q * (num_columns / count) ** 0.5


def forget_rows(kept: Sums) -> None:
    """Start again, in place."""
    kept["rows"].zero_()
    kept.update(examples=0, start=0, before=0, used=0)


class SubsetInverse:
    r"""The inverse of the curvature of some mixtures.

    Args:
        kept: What `keep_rows` has kept.
        prior: The prior precisions ``[D]``, or one for all.
        scale: The factor `s` of the curvature.
    """

    def __init__(self, kept: Sums, prior: Tensor, scale: Tensor) -> None:
        self.rows = kept["rows"][: kept["used"]]
        self.root = prior.sqrt().expand(self.rows.shape[1])
        self.ratio = (kept["examples"] * kept["each"] / kept["used"]) ** 0.5
        count = len(self.rows)
        inner = torch.zeros(count, count, dtype=torch.float64)
        for part in self._parts():
            inner += gram(self._scaled(part, torch.float32).mT).cpu()
        largest = inner.diagonal().max()
        inner.diagonal().add_(1 / scale.to(inner))
        for error in ROUNDING:  # products in float32 may not be positive definite
            inner.diagonal().add_(error * largest)
            self.factor, failed = torch.linalg.cholesky_ex(inner)
            if not failed:
                break
        # of the preconditioner itself
        logs = self.root.double().log().sum().cpu() + self.factor.diagonal().log().sum()
        self.log_det = 2 * logs + count * scale.to(inner).log()

    def _parts(self) -> list[slice]:
        return slices(self.rows.shape[1], numbers(limits.current().chunk) // len(self.rows))

    def _scaled(self, part: slice, dtype: torch.dtype) -> Tensor:
        r"""Return some columns of :math:`S \Lambda^{-1/2}`."""
        rows = self.rows[:, part].to(dtype)
        return rows * (self.ratio / self.root[part].to(rows))

    def solve(self, vectors: Tensor) -> Tensor:
        """Return the inverse times vectors ``[K, D]``."""
        found = vectors / self.root.to(vectors)
        along = torch.zeros(len(self.rows), len(vectors), dtype=torch.float64)
        for part in self._parts():
            along += (self._scaled(part, vectors.dtype) @ found[:, part].mT).cpu()
        weights = torch.cholesky_solve(along, self.factor).to(vectors.dtype).to(vectors.device)
        for part in self._parts():
            found[:, part] -= weights.mT @ self._scaled(part, vectors.dtype)
        return found / self.root.to(vectors)
