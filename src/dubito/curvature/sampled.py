r"""Exact samples of the full-covariance posterior, without its covariance: sample, then optimize.

$$\delta = P^{-1}\Big(\Lambda^{1/2} \varepsilon_0 + \sum_n J_n^\top (s H_n)^{1/2} \varepsilon_n\Big)
  \sim \mathcal N(0, P^{-1}), \qquad P = s \sum_n J_n^\top H_n J_n + \Lambda,$$

because the right-hand side has covariance `P` (Papandreou & Yuille 2010; Antorán et al. 2022,
https://arxiv.org/abs/2210.04994, by stochastic gradients). All samples are solved for together by block conjugate
gradients (O'Leary 1980), preconditioned by the curvature of some mixtures of gradients (`curvature/subset`) or by the
Kronecker approximation of `P`, whichever is nearer to `P`. Every step is one pass over the data and one product of the
exact Gauss-Newton matrix with all directions. Neither `P` nor `J` is formed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dubito.core import distributed, io
from dubito.core.precision import widened
from dubito.core.randomness import derive_seed, draw_seed
from dubito.curvature import matrices as linalg
from dubito.curvature.accumulator import Accumulator, Sums, add_back_along, along
from dubito.curvature.engine import Engine, Tape
from dubito.curvature.factor import Factor
from dubito.curvature.kronecker import KroneckerAccumulator
from dubito.curvature.subset import SubsetInverse, blank_rows, forget_rows, keep_rows, mixing_weights
from dubito.networks.selection import Selection

# The error of the outputs at the training inputs, relative to their standard deviation, at which the solver stops: so
# many times the Monte Carlo error of variances, within these limits.
SHARE_OF_NOISE, LEAST_ERROR, MOST_ERROR = 0.6, 0.03, 0.2
# Where Kronecker factors may be estimates, they come from every n-th part of the batches.
EVERY = 4
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
        thin: Whether the Kronecker factors may be estimates, because nothing but the preconditioner depends on them.
    """

    additive = False

    def __init__(
        self,
        engine: Engine,
        selection: Selection,
        mode: str,
        draws: int,
        steps: int,
        generator: torch.Generator,
        thin: bool = False,
    ) -> None:
        super().__init__(engine, selection)
        self.factors = KroneckerAccumulator(engine, selection, mode)
        self.thin = thin
        self.draws, self.generator, self.passes = draws, generator, 1 + steps
        self._covariance: linalg.Covariance | None = None
        self._inverse: SubsetInverse | None = None

    @property
    def extra(self) -> int:
        """The products of each column with all directions."""
        return self.draws

    def zeros(self) -> Sums:
        """Return no factors, and right-hand sides of zero."""
        counts = {"parts": 0, "chunks": 0, "seen": 0, "used": 0}
        return {"factors": self.factors.zeros(), "right": self._blank(), "seed": draw_seed(self.generator), **counts}

    def _blank(self) -> Tensor:
        like = widened(next(iter(self.engine.parameters.values())).detach())
        return like.new_zeros(self.draws, self.selection.num_weights)

    def add(self, sums: Sums, tape: Tape, columns: Iterable[Tensor], targets: Tensor | None = None) -> None:
        """Add the factors and ``Jᵀ ε``; in later passes ``Jᵀ J`` times the directions, until they have converged."""
        directions = self.selection.fill(sums["directions"].to(tape.outputs)) if "directions" in sums else None
        for turn, some in enumerate(columns):
            with tape.lend() as memory:
                factors = tape.pull(some, memory)
                if directions is None:
                    self._first_pass(sums, tape, some, factors, first=turn == 0)
                else:
                    found = along(factors, self.selection, directions)
                    add_back_along(sums["products"], factors, self.selection, found)

    def is_complete(self, sums: Sums) -> bool:
        """Return whether the samples have converged."""
        return "draws" in sums and "directions" not in sums

    def _first_pass(self, sums: Sums, tape: Tape, columns: Tensor, factors: dict[str, Factor], first: bool) -> None:
        """Add ``Jᵀ ε``, keep mixtures, and add Kronecker factors: of all, or of a mixture of some examples' columns."""
        seed = derive_seed(sums["seed"], "rows", sums["parts"])
        noise = self._noise(sums, len(columns), tape.outputs)
        add_back_along(sums["right"], factors, self.selection, noise)
        if not distributed.is_active():  # several processes have no rows in common, and keep none
            self._keep(sums, factors, tape.outputs[0].numel(), seed, first)
        if not self.thin:
            self.factors.add_pulled(sums["factors"], factors, first)
            return
        size = columns.shape[1] if first else 0
        sums["seen"], sums["chunks"] = sums["seen"] + size, sums["chunks"] + first
        if sums["chunks"] % EVERY == 1:
            sums["used"] += size
            weights = mixing_weights(columns.shape[1], len(columns), 1, seed).to(columns)
            with tape.lend() as memory:
                mixed = tape.pull(torch.einsum("bvp,vb...->pb...", weights, columns), memory)
                self.factors.add_pulled(sums["factors"], mixed, first)

    def complete_factors(self, sums: Sums) -> None:
        """Let factors of some examples stand for all, in place, after the first pass."""
        if self.thin and sums["used"]:
            for part in sums["factors"].values():
                for key in {"left", "diagonal"} & set(part):
                    part[key] *= sums["seen"] / sums["used"]

    def _noise(self, sums: Sums, num_columns: int, outputs: Tensor) -> Tensor:
        """Return standard normal numbers ``[V, B, K]``; a resumed pass draws the same ones."""
        own = ("data", distributed.rank()) if distributed.rank() else ("data",)  # other rows have other noise
        generator = torch.Generator().manual_seed(derive_seed(sums["seed"], *own, sums["parts"]))
        sums["parts"] += 1
        return torch.randn(num_columns, len(outputs), self.draws, generator=generator, dtype=outputs.dtype).to(outputs)

    def _keep(self, sums: Sums, factors: dict[str, Factor], num_outputs: int, seed: int, first: bool) -> None:
        """Keep mixtures of gradients."""
        if "subset" not in sums:
            num_rows = self.num_data * self.engine.num_outputs
            sums["subset"] = blank_rows(factors, self.selection, num_rows, num_outputs)
        keep_rows(sums["subset"], factors, self.selection, seed, first)

    def reset(self, sums: Sums) -> None:
        """Forget all examples, and draw the same noise again."""
        super().reset(sums)
        sums.update(parts=0, chunks=0, seen=0, used=0)
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
        sums["directions"] = orthonormal(self._choose(sums))
        sums["products"] = torch.zeros_like(sums["directions"])

    def _choose(self, sums: Sums) -> Tensor:
        r"""Drop the kept rows unless they precondition better than the Kronecker factors; return the first directions.

        The better preconditioner `M` has the smaller KL divergence of its normal distribution from that of `P`, up to a
        constant $\frac12(\operatorname{tr} M^{-1} P + \log\det M)$. The right-hand sides have covariance `P`.
        """
        right, prior, scale = sums["right"], sums["prior"], sums["scale"]
        kept = sums.pop("subset", None)
        by_factors = self._precondition(sums, right)
        if kept is None or not kept["used"]:
            return by_factors
        inverse, factors = SubsetInverse(kept, prior, scale), self.factors.matrix(sums["factors"])
        by_rows = inverse.solve(right)
        scores = [(right * by_rows).double().sum(1).mean() + inverse.log_det]
        scores.append((right * by_factors).double().sum(1).mean() + factors.log_det(prior, scale))
        if not float(scores[0]) < float(scores[1]):
            return by_factors
        sums["subset"], self._inverse, self._covariance = kept, inverse, None
        return by_rows

    def _precondition(self, sums: Sums, vectors: Tensor) -> Tensor:
        """Return what the preconditioner makes of vectors ``[K, D]``."""
        if "subset" in sums:
            self._inverse = self._inverse or SubsetInverse(sums["subset"], sums["prior"], sums["scale"])
            return self._inverse.solve(vectors)
        if self._covariance is None:
            self._covariance = self.factors.matrix(sums["factors"]).covariance(sums["prior"], sums["scale"])
        return self._covariance.solve(vectors).to(vectors)

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
        sums["error"] = self._error(sums, turned)
        if sums["error"] <= tolerance(self.draws):
            self.finish(sums)
            return
        sums["directions"] = orthonormal(turned - torch.cholesky_solve(products @ turned.mT, inner).mT @ directions)
        sums["products"].zero_()

    def _error(self, sums: Sums, turned: Tensor) -> float:
        """Return the error of the outputs at the training inputs, relative to their standard deviation.

        The squared error of a sample in the norm of `P`, of which the first is a part, is estimated by the
        preconditioner. The sum of the outputs' variances is ``δᵀ (P − Λ) δ``, at least `NEGLIGIBLE` of that norm.
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
        kept = {key: value for key, value in sums.items() if key != "subset" or key in saved}
        return {**kept, **found, **io.clone(blank), "prior": saved["prior"], "scale": saved["scale"]}

    @staticmethod
    def finish(sums: Sums) -> None:
        """Keep the draws and the error only."""
        for key in set(sums) - {"draws", "error"}:
            del sums[key]

    def matrix(self, sums: Sums) -> linalg.Sampled:
        """Return the draws."""
        return linalg.Sampled(sums["draws"])


def tolerance(num_draws: int) -> float:
    r"""Return the error at which the solver stops; variances from `K` samples have the relative error $\sqrt{2/K}$.

    >>> tolerance(16), tolerance(10_000)
    (0.2, 0.03)
    """
    return min(max(SHARE_OF_NOISE * math.sqrt(2 / num_draws), LEAST_ERROR), MOST_ERROR)


def orthonormal(rows: Tensor) -> Tensor:
    """Return orthonormal rows ``[min(K, D), D]`` of the same span; rows of very different lengths are no problem."""
    lengths = rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    return torch.linalg.qr((rows / lengths).mT).Q.mT.contiguous()
