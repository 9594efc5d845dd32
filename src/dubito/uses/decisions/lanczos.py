r"""How much an input's gradients leave the directions that the training data determine: higher is farther.

$$s(x) = \| J(x) \|_F^2 - \| J(x)\, U \|_F^2 ,$$

where $J$ is the Jacobian of the outputs in all weights and $U$ an orthonormal basis of the Krylov space of the
Gauss-Newton matrix of the training data, from k steps of Lanczos' method. It is the predictive variance of a
linearized posterior of low rank, up to a factor, as the data have infinite precision in these directions.

The k Lanczos vectors of D weights are never kept: each is multiplied by a random S of few rows as soon as it is known,
and the basis is one of $S U$ (Miani et al. 2024, https://arxiv.org/abs/2409.15008). Memory is a few vectors of D, and k
of `ROWS` numbers. S flips random signs, takes a Hartley transform and keeps some of its entries, so that lengths and
angles within any k-dimensional space survive with an error of about $\sqrt{k / \text{rows}}$.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from dubito.core import batches, limits, params
from dubito.core.batches import Data
from dubito.core.limits import numbers
from dubito.core.params import differentiable_twice
from dubito.curvature.per_example import by_loop, by_vmap
from dubito.fitting.functions import jacobian_product
from dubito.fitting.posterior import Posterior
from dubito.networks.twin import twin
from dubito.uses.fixed_draws import check_scores, labelled_groups

LanczosScore = Literal["lanczos"]

# Steps of Lanczos' method, each a pass over the training data, and rows of the random matrix.
STEPS, ROWS = 50, 2000
# Directions shorter than this, relative to the longest, are those of others that came twice.
REPEATED = 1e-2


class Sketch:
    r"""The random matrix $S = \sqrt{D / r}\, R\, H\, \mathrm{diag}(\pm 1)$ of r rows, as a function of vectors of D.

    Args:
        size: D.
        rows: r; with r = D, S is orthogonal.
        seed: The seed of signs and rows.
    """

    def __init__(self, size: int, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.signs = 2 * torch.randint(2, (size,), generator=generator, dtype=torch.int8) - 1
        self.rows = torch.randperm(size, generator=generator)[:rows]

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return the products ``[..., r]`` with vectors ``[..., D]``."""
        turned = torch.fft.fft(vectors * self.signs.to(vectors), norm="ortho")
        kept = turned[..., self.rows.to(vectors.device)]
        return math.sqrt(len(self.signs) / len(self.rows)) * (kept.real - kept.imag)


class SketchedLanczos:
    """A basis of the directions that training data determine, as a `Detector` keeps it.

    Args:
        posterior: The posterior; its network at the mean is used.
        training: The training data.
        steps: The number of steps.
        rows: The number of rows of the random matrix.
    """

    score: LanczosScore = "lanczos"

    def __init__(self, posterior: Posterior, training: Data, steps: int = STEPS, rows: int = ROWS) -> None:
        groups = labelled_groups(posterior, training, "training data")
        model = _differentiable(posterior.model)
        size = sum(value.numel() for value in _weights(model).values())
        self.size, self.rows = size, min(rows, size)
        self.basis = self._basis(posterior, model, groups, steps).to(posterior.dtype).cpu()

    @property
    def sketch(self) -> Sketch:
        """The random matrix."""
        return Sketch(self.size, self.rows, seed=0)

    def _basis(self, posterior: Posterior, model: nn.Module, groups: Any, steps: int) -> Tensor:
        """Return an orthonormal basis ``[r, k]`` of the sketched Ritz vectors; two Lanczos vectors are kept at a time.

        Without orthogonalization against vectors that are gone, some directions come twice, and at last directions
        without curvature come in by rounding: a decomposition removes the first, Ritz values near 0 tell the others.
        """
        sketch, like = self.sketch, next(iter(_weights(model).values()))
        vector = torch.randn(self.size, generator=torch.Generator().manual_seed(1)).to(like)
        vector = _curvature_product(posterior, model, groups, vector)  # without directions of no curvature
        vector, before = vector / vector.norm(), torch.zeros_like(vector)
        seen, diagonal, beside = [], [], [0.0]
        for _ in range(min(steps, self.size)):
            seen.append(sketch(vector).double())
            product = _curvature_product(posterior, model, groups, vector) - beside[-1] * before
            diagonal.append(float(product @ vector))
            product -= diagonal[-1] * vector
            beside.append(float(product.norm()))
            if beside[-1] <= torch.finfo(like.dtype).eps * max(diagonal):
                break
            vector, before = product / beside[-1], vector
        off = torch.tensor(beside[1:-1], dtype=torch.float64)
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(matrix)
        curved = values > torch.finfo(like.dtype).eps ** 0.5 * values[-1]
        kept = curved & (beside[-1] * vectors[-1].abs() <= values)
        found = torch.stack(seen, dim=1) @ vectors[:, kept].to(like.device)
        basis, lengths, _ = torch.linalg.svd(found, full_matrices=False)
        return basis[:, lengths > REPEATED * lengths[0]]

    def scores(self, posterior: Posterior, x: Any) -> Tensor:
        """Return the part of the gradients' squared length outside of the basis ``[B]``."""
        found = []
        model, sketch = _differentiable(posterior.model), self.sketch
        basis = self.basis.to(posterior.device, posterior.dtype)
        for inputs in posterior._input_batches(x, 1024):
            for gradients in _gradients(model, inputs):  # [C, B, D]
                along = sketch(gradients) @ basis
                found.append((gradients.square().sum(-1) - along.square().sum(-1)).sum(0).clamp_min(0))
        return check_scores(torch.cat(found), self.score)

    def to_tree(self) -> dict[str, Any]:
        """Return what to save."""
        return {"basis": self.basis, "size": self.size, "rows": self.rows}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self:
        """Undo `to_tree`."""
        found = object.__new__(cls)
        found.basis, found.size, found.rows = tree["basis"], tree["size"], tree["rows"]
        return found


def _differentiable(model: nn.Module) -> nn.Module:
    return twin(model).eval()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


@torch.enable_grad()
def _curvature_product(posterior: Posterior, model: nn.Module, groups: Any, vector: Tensor) -> Tensor:
    r"""Return $\sum_n J_n^\top H_n J_n v$, one pass over the data."""
    weights, total = _weights(model), torch.zeros_like(vector)
    parts = vector.split([value.numel() for value in weights.values()])
    directions = [part.view_as(value) for part, value in zip(parts, weights.values(), strict=True)]
    for inputs, _ in groups:
        for rows in limits.slices(batches.num_rows(inputs), 256):
            with differentiable_twice():
                outputs = params.call(model, batches.take(inputs, rows))
            along = jacobian_product(outputs, list(weights.values()))(directions).detach()
            likelihood = posterior.likelihood
            hessian = likelihood.hessian(outputs.detach())
            back = torch.einsum("...cd,...d->...c", hessian, likelihood.canonical(along))
            options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
            found = torch.autograd.grad(outputs, list(weights.values()), likelihood.restore(back, outputs), **options)
            total += torch.cat([each.flatten() for each in found])
    return total


def _gradients(model: nn.Module, inputs: Any) -> Iterator[Tensor]:
    """Yield the gradients of all outputs of some examples ``[C, b, D]`` at a time."""
    names = list(_weights(model))
    size = sum(value.numel() for value in _weights(model).values())
    with torch.no_grad():
        outputs = params.call(model, inputs)
    width = outputs[0].numel()
    at_once = max(1, numbers(limits.current().chunk) // max(1, 4 * width * size))
    for rows in limits.slices(len(outputs), at_once):
        some = batches.take(inputs, rows)
        each = torch.eye(width).to(outputs).reshape(width, 1, *outputs.shape[1:])
        columns = each.expand(width, rows.stop - rows.start, *outputs.shape[1:])
        try:
            found = by_vmap(model, names, some, columns)
        except RuntimeError:
            found = by_loop(model, names, some, columns)
        yield torch.cat([found[name].reshape(*found[name].shape[:2], -1) for name in names], dim=2)
