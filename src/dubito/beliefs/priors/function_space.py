r"""A prior over functions instead of weights: a Gaussian process, seen at context points.

$$-\log p(f) = \tfrac12 \sum_o (f_o(C) - m)^\top K^{-1} (f_o(C) - m) + \text{const}, \qquad K = k(C, C) + \epsilon I$$

(Cinquin et al. 2024, https://arxiv.org/abs/2407.13711). As more context points are added, it becomes the squared norm
of $f - m$ in the kernel's Hilbert space.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.beliefs.kernels import RBF, Kernel
from dubito.core import distributed
from dubito.core.batches import Source
from dubito.core.constraints import Count, Finite, Positive
from dubito.core.errors import InputError
from dubito.core.settings import Setting, setting

# By how much of its width the box of the training inputs is widened, on each side, for context points.
MARGIN = 0.5
# The number of training inputs that show the box.
SEEN = 2048


@setting
class FunctionSpace(Setting):
    """A Gaussian process as the prior of the network's outputs, for `MAP` and `Laplace`.

    Each output has the same prior, independently of the others.

    Args:
        kernel: One of `dubito.kernels`.
        context: The inputs at which the prior is imposed, ``[M, ...]``; they should cover where predictions will be
            asked for. By default `num_context` points: half are training inputs, half are spread evenly over the box
            that holds the training inputs, widened by half its width on each side.
        num_context: The number of these points.
        mean: m, the mean of the function.
        jitter: ε as a share of the mean variance. Functions may leave the kernel's by so much at each point; a small
            value makes training slow.
    """

    setting_name = "priors.FunctionSpace"
    described = "priors.FunctionSpace(...)"
    kernel: Kernel = RBF()
    context: Tensor | None = None
    num_context: Count = 100
    mean: Finite = 0.0
    jitter: Positive = 1e-2

    def __post_init__(self) -> None:
        if self.context is None:
            return
        if self.context.ndim < 2 or not len(self.context):
            raise InputError(
                f"`context` must hold inputs of the network, one per row, got shape {tuple(self.context.shape)}."
            )
        if not self.context.is_floating_point() or not bool(self.context.isfinite().all()):
            raise InputError("`context` must hold finite floating-point numbers.")

    def at_context(self, source: Source) -> ContextPrior:
        """Return the prior of the outputs at the context points, the same in all processes."""
        rows = source.first().inputs
        if not isinstance(rows, Tensor) or not rows.is_floating_point():
            raise InputError("A prior over functions needs inputs that are one tensor of floating-point numbers.")
        if self.context is not None and self.context.shape[1:] != rows.shape[1:]:
            raise InputError(
                f"`context` has points of shape {tuple(self.context.shape[1:])}, but the inputs have shape "
                f"{tuple(rows.shape[1:])}."
            )
        points = self._spread(source) if self.context is None else self.context.to(rows)
        points = distributed.tensors_from_first([points])[0]
        flat = points.flatten(1)
        matrix = self.kernel.resolve(flat).matrix(flat, flat)
        matrix.diagonal().add_(self.jitter * matrix.diagonal().mean())
        values, vectors = torch.linalg.eigh(matrix)
        if not bool((values > 0).all()):
            raise InputError(
                f"{self.kernel!r} has no inverse at the context points, even with jitter={self.jitter:g}: raise jitter."
            )
        return ContextPrior(points, (vectors * values.rsqrt()).mT.contiguous(), self.mean, float(values.sum()))

    def _spread(self, source: Source) -> Tensor:
        """Return training inputs and points of a Sobol sequence in their widened box."""
        seen = torch.cat([batch.inputs for batch in source.spread(SEEN)])
        count = min(-(-self.num_context // 2), len(seen))
        own = seen[[i * len(seen) // count for i in range(count)]]
        low, high = seen.flatten(1).amin(0), seen.flatten(1).amax(0)
        width = high - low
        if len(width) > torch.quasirandom.SobolEngine.MAXDIM:
            drawn = torch.rand(self.num_context - count, len(width), generator=torch.Generator().manual_seed(0))
        else:
            sobol = torch.quasirandom.SobolEngine(len(width), scramble=True, seed=0)
            drawn = sobol.draw(self.num_context - count, dtype=torch.float64)
        box = (low - MARGIN * width) + (1 + 2 * MARGIN) * width * drawn.to(low)
        return torch.cat([own, box.reshape(-1, *seen.shape[1:])])


@dataclass(frozen=True)
class ContextPrior:
    """The prior of the outputs at the context points."""

    points: Tensor  # C ``[M, ...]``
    whitener: Tensor  # W ``[M, M]`` in float64, with ``W K Wᵀ = I``
    mean: float  # m
    trace: float  # the trace of K

    def whiten(self, outputs: Tensor) -> Tensor:
        """Return ``W (f(C) − m)`` ``[M, O]``, whose entries are independent standard normal under the prior."""
        rows = outputs.flatten(1)
        return self.whitener.to(rows) @ (rows - self.mean)

    def energy(self, outputs: Tensor) -> Tensor:
        """Return the negative log-density of the outputs at the context points, up to a constant."""
        return 0.5 * self.whiten(outputs).square().sum()
