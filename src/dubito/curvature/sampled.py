r"""Exact samples of the full-covariance posterior, without its covariance: sample, then optimize.

$$\delta = P^{-1}\Big(\Lambda^{1/2} \varepsilon_0 + \sum_n J_n^\top (s H_n)^{1/2} \varepsilon_n\Big)
  \sim \mathcal N(0, P^{-1}), \qquad P = s \sum_n J_n^\top H_n J_n + \Lambda,$$

because the right-hand side has covariance `P` (Papandreou & Yuille 2010; Antorán et al. 2022,
https://arxiv.org/abs/2210.04994, by stochastic gradients). All samples are solved for together by block conjugate
gradients (O'Leary 1980) with two preconditioners, the Kronecker approximation of `P` and the exact `P` of some examples
(`curvature/subset`): a step is exact in the span of the directions that both propose (Bridson & Greif 2006). Every step
is one pass over the data and one product of the exact Gauss-Newton matrix with all directions. Neither `P` nor `J` is
formed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dubito.core import distributed, io
from dubito.core.precision import widened
from dubito.core.randomness import derive_seed, draw_seed
from dubito.curvature import matrices as linalg
from dubito.curvature.accumulator import Accumulator, Sums, back_along, curvature_product
from dubito.curvature.engine import Engine, Tape
from dubito.curvature.factor import Factor
from dubito.curvature.kronecker import KroneckerAccumulator
from dubito.curvature.subset import SubsetInverse, blank_rows, forget_rows, keep_rows
from dubito.networks.selection import Selection

# The error of the outputs at the training inputs, relative to their standard deviation, at which the solver stops.
TOLERANCE = 0.03
# Variances of outputs below this fraction of a sample's norm count as zero.
NEGLIGIBLE = 1e-6


class SampledAccumulator(Accumulator):
    """Kronecker factors and right-hand sides in the first pass, a step of conjugate gradients in each further one.

    Between the first two passes `begin` must be given the prior and the scale of the curvature. When the solver has
    converged, `add` does nothing any more.

    Args:
        engine: Computes gradients in factored form.
        selection: The weights.
        mode: How the preconditioner treats weights shared over positions.
        draws: The number of samples.
        steps: The largest number of solver steps.
        generator: The source of randomness.
    """

    additive = False

    def __init__(
        self, engine: Engine, selection: Selection, mode: str, draws: int, steps: int, generator: torch.Generator
    ) -> None:
        super().__init__(engine, selection)
        self.factors = KroneckerAccumulator(engine, selection, mode)
        self.draws, self.generator, self.passes = draws, generator, 1 + steps
        self._covariance: linalg.Covariance | None = None
        self._inverse: SubsetInverse | None = None

    @property
    def extra(self) -> int:
        """The products of each column with all directions."""
        return 2 * self.draws

    def zeros(self) -> Sums:
        """Return no factors, and right-hand sides of zero."""
        return {"factors": self.factors.zeros(), "right": self._blank(), "seed": draw_seed(self.generator), "parts": 0}

    def _blank(self) -> Tensor:
        like = widened(next(iter(self.engine.parameters.values())).detach())
        return like.new_zeros(self.draws, self.selection.num_weights)

    def add(self, sums: Sums, tape: Tape, columns: Iterable[Tensor], targets: Tensor | None = None) -> None:
        """Add the factors and ``Jᵀ ε``; in later passes ``Jᵀ J`` times the directions, until they have converged."""
        if "draws" in sums and "directions" not in sums:
            return
        directions = self.selection.fill(sums["directions"].to(tape.outputs)) if "directions" in sums else None
        for turn, some in enumerate(columns):
            with tape.lend() as memory:
                factors = tape.pull(some, memory)
                if directions is None:
                    self.factors.add_pulled(sums["factors"], factors, first=turn == 0)
                    noise = self._noise(sums, len(some), tape.outputs)
                    sums["right"] += back_along(factors, self.selection, noise)
                    self._keep(sums, factors, first=turn == 0)
                else:
                    sums["products"] += curvature_product(factors, self.selection, directions)

    def _noise(self, sums: Sums, num_columns: int, outputs: Tensor) -> Tensor:
        """Return standard normal numbers ``[V, B, K]``; a resumed pass draws the same ones."""
        own = ("data", distributed.rank()) if distributed.rank() else ("data",)  # other rows have other noise
        generator = torch.Generator().manual_seed(derive_seed(sums["seed"], *own, sums["parts"]))
        sums["parts"] += 1
        return torch.randn(num_columns, len(outputs), self.draws, generator=generator, dtype=outputs.dtype).to(outputs)

    def _keep(self, sums: Sums, factors: dict[str, Factor], first: bool) -> None:
        """Keep the gradients of some examples; several processes have no rows in common, and keep none."""
        if distributed.is_active():
            return
        if "subset" not in sums:
            sums["subset"] = blank_rows(self.selection, self.num_data * self.engine.num_outputs, sums["right"])
        keep_rows(sums["subset"], factors, self.selection, first)

    def reset(self, sums: Sums) -> None:
        """Forget all examples, and draw the same noise again."""
        super().reset(sums)
        sums["parts"] = 0
        if "subset" in sums:
            forget_rows(sums["subset"])

    def begin(self, sums: Sums, prior: Tensor, scale: Tensor) -> None:
        """Set the prior precision and the factor of the curvature, and complete the right-hand sides."""
        right: Tensor = sums["right"]
        generator = torch.Generator().manual_seed(derive_seed(sums["seed"], "prior"))
        sums["prior"], sums["scale"] = prior, scale
        right *= scale.sqrt().to(right)
        noise = torch.randn(right.shape, generator=generator, dtype=right.dtype).to(right)
        right += prior.sqrt().to(right) * noise
        sums["draws"], sums["residual"], sums["error"] = self._blank(), right.clone(), 1.0
        sums["directions"] = orthonormal(torch.cat(self._precondition(sums, right)))
        sums["products"] = torch.zeros_like(sums["directions"])

    def _precondition(self, sums: Sums, vectors: Tensor) -> list[Tensor]:
        """Return what each preconditioner makes of vectors ``[K, D]``."""
        if self._covariance is None:
            self._covariance = self.factors.matrix(sums["factors"]).covariance(sums["prior"], sums["scale"])
        found = [self._covariance.solve(vectors).to(vectors)]
        if "subset" in sums and sums["subset"]["used"]:
            self._inverse = self._inverse or SubsetInverse(sums["subset"], sums["prior"], sums["scale"])
            found.append(self._inverse.solve(vectors))
        return found

    def partial(self, sums: Sums) -> list[Tensor]:
        """Return the factors and right-hand sides, then the products; nothing once the samples have converged."""
        if "draws" not in sums:
            return [*io.tensors(sums["factors"]), sums["right"]]
        return [sums["products"]] if "products" in sums else []

    def next_pass(self, sums: Sums) -> None:
        """Take one step of block conjugate gradients: exact in the span of all directions so far."""
        if "directions" not in sums:
            return
        directions, residual, prior = sums["directions"], sums["residual"], sums["prior"].to(sums["right"])
        products = sums["products"] * sums["scale"].to(prior) + prior * directions
        inner = directions @ products.mT
        inner = torch.linalg.cholesky((inner + inner.mT) / 2)
        step = torch.cholesky_solve(directions @ residual.mT, inner).mT
        sums["draws"] += step @ directions
        residual -= step @ products
        turned = self._precondition(sums, residual)
        sums["error"] = min(self._error(sums, each) for each in turned)
        if sums["error"] <= TOLERANCE:
            self.finish(sums)
            return
        both = torch.cat(turned)
        sums["directions"] = orthonormal(both - torch.cholesky_solve(products @ both.mT, inner).mT @ directions)
        sums["products"].zero_()

    def _error(self, sums: Sums, turned: Tensor) -> float:
        """Return the error of the outputs at the training inputs, relative to their standard deviation.

        The squared error of a sample in the norm of `P`, of which the first is a part, is estimated by a preconditioner
        (the smaller estimate is still above the error in docs/laplace.md). The sum of the outputs' variances is
        ``δᵀ (P − Λ) δ``, at least `NEGLIGIBLE` of that norm.
        """
        draws, residual = sums["draws"], sums["residual"]
        prior = sums["prior"].to(draws)
        total = (draws * (sums["right"] - residual - prior * draws)).double().sum()
        missing = (residual * turned).double().sum()
        return float((missing / total.clamp_min(NEGLIGIBLE * draws.numel())).sqrt())

    def later_form(self, sums: Sums, saved: Sums) -> Sums:
        """Return blank samples, with what solving for them needs unless they have converged."""
        found: Sums = {"draws": self._blank(), "error": 1.0}
        if "directions" not in saved:
            return found
        directions = found["draws"].new_zeros(saved["directions"].shape)
        blank = {"residual": found["draws"], "directions": directions, "products": directions}
        return {**sums, **found, **io.clone(blank), "prior": saved["prior"], "scale": saved["scale"]}

    @staticmethod
    def finish(sums: Sums) -> None:
        """Keep the draws and the error only."""
        for key in set(sums) - {"draws", "error"}:
            del sums[key]

    def matrix(self, sums: Sums) -> linalg.Sampled:
        """Return the draws."""
        return linalg.Sampled(sums["draws"])


def orthonormal(rows: Tensor) -> Tensor:
    """Return orthonormal rows ``[min(K, D), D]`` of the same span; rows of very different lengths are no problem."""
    lengths = rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    return torch.linalg.qr((rows / lengths).mT).Q.mT.contiguous()
