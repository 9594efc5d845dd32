r"""The curvature of some of the examples, inverted exactly: a preconditioner for the curvature of all.

With the rows `S` of the Jacobian at every `m`-th example, scaled by :math:`\sqrt{m}`, it is (Woodbury 1950)

$$\hat P = s\, S^\top S + \Lambda, \qquad \hat P^{-1} = \Lambda^{-1}
  - \Lambda^{-1} S^\top \big(s^{-1} I + S \Lambda^{-1} S^\top\big)^{-1} S \Lambda^{-1}.$$

Kronecker factors spread curvature over directions that no example determines; this matrix has none there. The rows are
kept in bfloat16: a preconditioner decides how fast samples converge, not to what.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.core import limits
from dubito.core.limits import numbers, slices
from dubito.curvature import matrices as linalg
from dubito.curvature.accumulator import Sums
from dubito.curvature.factor import Factor
from dubito.networks.selection import Selection

# The largest number of rows: the matrix of their products costs about one pass over the data.
MOST_ROWS = 1024
# If fewer rows fit into memory, none is kept: they would hardly help.
FEWEST_ROWS = 64


def blank_rows(selection: Selection, num_rows: int, like: Tensor) -> Sums:
    """Return room for rows of the Jacobian, of `num_rows` in all, and which examples they will come from."""
    size = selection.num_weights
    most = min(MOST_ROWS, limits.current().subset_rows // (2 * size))
    most = 0 if most < FEWEST_ROWS else min(most, num_rows)
    rows = like.new_zeros(most, size, dtype=torch.bfloat16)
    return {"rows": rows, "every": -(-num_rows // max(most, 1)), "start": 0, "examples": 0, "used": 0, "seen": 0}


def keep_rows(kept: Sums, factors: dict[str, Factor], selection: Selection, first: bool) -> None:
    """Keep the gradients of every n-th example, in place; `first` is said of the first columns of these examples."""
    some = next(iter(factors.values()))
    if first:
        kept["start"] = -kept["examples"] % kept["every"]
        kept["examples"] += some.size
    kept["seen"] += some.size * some.columns
    free = kept["rows"][kept["used"] :]
    examples, columns = slice(kept["start"], None, kept["every"]), slice(len(free))
    count = min(len(free), len(range(some.size)[examples]) * len(range(some.columns)[columns]))
    for name in selection.names if count else ():
        values, chosen = factors[name].per_sample(examples, columns).flatten(2), selection.indices[name]
        values = values if chosen is None else values[:, :, chosen.to(values.device)]
        free[:count, selection.slices[name]] = values.flatten(0, 1)[:count].to(free)
    kept["used"] += count


def forget_rows(kept: Sums) -> None:
    """Start again, in place."""
    kept["rows"].zero_()
    kept.update(start=0, examples=0, used=0, seen=0)


class SubsetInverse:
    r"""The inverse of the curvature of some examples.

    Args:
        kept: What `keep_rows` has kept.
        prior: The prior precisions ``[D]``, or one for all.
        scale: The factor `s` of the curvature.
    """

    def __init__(self, kept: Sums, prior: Tensor, scale: Tensor) -> None:
        self.rows = kept["rows"][: kept["used"]]
        self.root = prior.sqrt().expand(self.rows.shape[1])
        self.ratio = (kept["seen"] / kept["used"]) ** 0.5
        count = len(self.rows)
        products = torch.zeros(count, count, dtype=torch.float64)
        for part in self._parts():
            some = self._scaled(part, torch.float32)
            products += (some @ some.mT).cpu()
        values, self.vectors = linalg.base.eigh(products)
        self.inverse = 1 / (1 / scale.to(values) + values)

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
        weights = (self.vectors * self.inverse) @ (self.vectors.mT @ along)
        weights = weights.to(vectors.dtype).to(vectors.device)
        for part in self._parts():
            found[:, part] -= weights.mT @ self._scaled(part, vectors.dtype)
        return found / self.root.to(vectors)
