r"""The variance of the outputs in closed form if only the layer that gives them is random.

With the input $a$ of the linear layer, the variance of every output (or of the centred outputs) is a quadratic form
$a^\top M_v a$, because the Jacobian is $e_v \otimes a$. Here it is brought into the form

$$v(a) = \sum_j (a A_j + \alpha_j)^{\circ 2}\, W_j + c ,$$

which takes two matrix products. For a Kronecker or diagonal covariance all outputs share one basis $A$.

The data say nothing of most directions of wide layers. These keep nearly the prior's variance $w$, and are not needed
one by one:

$$\sum_i W_i\, (a A_i)^2 \approx w\, \lVert a \rVert^2 - \sum_{i \le k} (w - W_i)\, (a A_i)^2 ,$$

with an error of at most a share `tolerance` of the sum if $w - W_i \le \mathtt{tolerance} \cdot w$ for $i > k$.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dubito.core.errors import UnsupportedError
from dubito.curvature import matrices as linalg
from dubito.networks.selection import Selection

# Directions whose variance is below this fraction of the largest one are left out.
NEGLIGIBLE = 1e-14
# Columns of a root that are worked on at a time.
AT_ONCE = 256
# Directions are joined if that saves as many numbers as this of the basis: for fewer, two more operations cost more.
WORTH_JOINING = 32_768
# Directions are joined unless variances differ more than this: a difference of large numbers would lose digits.
LARGEST_RATIO = 1000.0


class Squares(NamedTuple):
    """One term ``(a A + α)² W``; without a basis it is ``a² W``, and with `used` only these entries of `a` count."""

    basis: Tensor | None
    offset: Tensor | None
    weights: Tensor
    used: Tensor | None = None

    def add_to(self, total: Tensor, a: Tensor) -> Tensor:
        """Return a total, ``[V]`` or ``[B, V]``, plus the term ``[B, V]`` for inputs ``[B, I]``."""
        turned = a if self.used is None else a[:, self.used]
        if self.basis is not None and self.offset is not None:
            turned = torch.addmm(self.offset, turned, self.basis)
        elif self.basis is not None:
            turned = turned @ self.basis
        return torch.addmm(total, turned * turned, self.weights)

    def to(self, like: Tensor) -> Squares:
        """Return the term in the precision and on the device of a tensor."""
        basis, offset = (None if part is None else part.to(like) for part in (self.basis, self.offset))
        return Squares(basis, offset, self.weights.to(like), self.used)


class LastLayer:
    """The variances of the outputs, given the input of the last layer.

    Args:
        covariance: The covariance of the random weights.
        selection: Which weights are random: some or all of one weight matrix and its bias.
        bias: The name of the bias, or None if none of it is random.
        shape: Outputs and inputs, ``(O, I)``.
        columns: The directions of the outputs whose variance is wanted, ``[V, O]``.
        tolerance: The relative error that variances may have, so that directions are joined; None: none are.

    Attributes:
        is_joined: Whether directions with nearly the prior's variance are joined, so that variances have an error.
    """

    def __init__(
        self,
        covariance: linalg.Covariance,
        selection: Selection,
        bias: str | None,
        shape: tuple[int, int],
        columns: Tensor,
        tolerance: float | None = None,
    ) -> None:
        self.selection, self.bias, self.shape, self.columns = selection, bias, shape, columns.double()
        self.tolerance, self.is_joined = tolerance, False
        self.terms: list[Squares] = []
        self.constant = self.columns.new_zeros(len(columns))
        self.subtracts = isinstance(covariance, linalg.LowRankCovariance)
        self._add(covariance)
        self.constant, self.terms = self.constant.to(columns), [term.to(columns) for term in self.terms]

    def __call__(self, a: Tensor) -> Tensor:
        """Return the variances ``[B, V]`` for inputs ``[B, I]`` of the layer."""
        found = self.constant if self.terms else self.constant.expand(a.shape[0], -1)
        for term in self.terms:
            found = term.add_to(found, a)
        return found.clamp_min(0) if self.subtracts else found

    def _add(self, covariance: linalg.Covariance) -> None:
        names = self.selection.names
        match covariance:
            case linalg.DenseCovariance() | linalg.SampledCovariance():
                self._add_root(covariance.root, names)
            case linalg.DiagonalCovariance():
                self._add_diagonal(covariance.values, names)
            case linalg.LowRankCovariance():
                self._add_diagonal(covariance.spread.square(), names)
                basis = covariance.spread[:, None] * covariance.basis
                self._add_root(basis * covariance.shrink.sqrt(), names, sign=-1)
            case linalg.KroneckerCovariance():
                for name, part in zip(names, covariance.parts, strict=True):
                    if isinstance(part, linalg.DenseCovariance):
                        self._add_root(part.root, [name])
                    elif isinstance(part, linalg.DiagonalCovariance):
                        self._add_diagonal(part.values, [name])
                    else:
                        assert isinstance(part, tuple)
                        self._add_block(name, *part)
            case _:
                raise UnsupportedError(f"No closed form is known for {type(covariance).__name__}.")

    def _add_block(self, name: str, block: linalg.Block, variances: Tensor) -> None:
        """Add a Kronecker block: both sides in their eigenbases."""
        turned = self.columns if block.left is None else self.columns @ block.left[0].double()
        weights = turned.square() @ variances[0].double()
        if name == self.bias:
            self.constant = self.constant + weights.sum(1)
        else:
            self._add_basis(None if block.right is None else block.right[0], weights.mT)

    def _add_basis(self, basis: Tensor | None, weights: Tensor) -> None:
        """Add the weights ``[I, V]`` of directions, of which those with nearly the largest variance are joined."""
        most = weights.amax(0)
        needed = (weights < (1 - (self.tolerance or 0.0)) * most).any(1)
        is_worth_it = int((~needed).sum()) * len(weights) >= WORTH_JOINING
        loses_digits = bool((LARGEST_RATIO * weights.amin(0) < most).any())
        if basis is None or self.tolerance is None or not is_worth_it or loses_digits:
            self.terms.append(Squares(basis, None, weights))
            return
        self.is_joined = True
        self.terms.append(Squares(None, None, most.expand_as(weights)))
        if bool(needed.any()):
            self.terms.append(Squares(basis[:, needed], None, weights[needed] - most))

    def _add_diagonal(self, variances: Tensor, names: list[str]) -> None:
        """Add independent weights."""
        weights = self.columns.square() @ self._whole(variances[:, None], names)[..., 0]
        self.terms.append(Squares(None, None, weights[:, :-1].mT))
        self.constant = self.constant + weights[:, -1]

    def _add_root(self, root: Tensor, names: list[str], sign: int = 1) -> None:
        """Add (or subtract) weights with the covariance ``R Rᵀ``."""
        size = self.shape[1] + 1
        if root.shape[1] <= size:
            roots = list(torch.tensordot(self.columns, self._whole(root, names), dims=1))
        else:
            roots = self._small_roots(root, names)
        width = max(1, *(each.shape[1] for each in roots))
        padded = torch.stack([torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in roots])
        flat = padded.permute(1, 0, 2).flatten(1)  # [I + 1, V · width]
        weights = sign * torch.eye(len(roots), dtype=flat.dtype, device=flat.device).repeat_interleave(width, dim=0)
        used = flat[:-1].count_nonzero(dim=1).nonzero().flatten()
        few = 0 < len(used) < size // 2
        basis = flat[:-1][used] if few else flat[:-1]
        self.terms.append(Squares(basis, flat[-1] if self.bias in names else None, weights, used if few else None))

    def _small_roots(self, root: Tensor, names: list[str]) -> list[Tensor]:
        """Return for each column of the outputs a root ``[I + 1, R]`` of its quadratic form, from many columns of R."""
        size = self.shape[1] + 1
        forms = self.columns.new_zeros(len(self.columns), size, size)
        for some in root.split(AT_ONCE, dim=1):
            rows = torch.tensordot(self.columns, self._whole(some, names), dims=1)  # [V, I + 1, K]
            forms.baddbmm_(rows, rows.mT)
        return [_root_of(form) for form in forms]

    def _whole(self, values: Tensor, names: list[str]) -> Tensor:
        """Put the rows ``[D, K]`` of random weights into ``[O, I + 1, K]``, with the bias as the last input."""
        outputs, inputs = self.shape
        whole = values.new_zeros(outputs, inputs + 1, values.shape[1], dtype=torch.float64)
        start = 0
        for name in names:
            positions = self.selection.positions(name).to(values.device)
            part = values[start : start + len(positions)].double()
            start += len(positions)
            if name == self.bias:
                whole[positions, -1] = part
            else:
                whole[positions // inputs, positions % inputs] = part
        return whole


def _root_of(form: Tensor) -> Tensor:
    """Return ``L [I, R]`` with ``L Lᵀ = form`` and as few columns as there are directions."""
    values, vectors = torch.linalg.eigh(form)
    kept = values > NEGLIGIBLE * values[-1].clamp_min(torch.finfo(values.dtype).tiny)
    return vectors[:, kept] * values[kept].sqrt()
