"""One pass over the data: sum the curvature of the loss, and how well the network fits the targets."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Gaussian, Likelihood
from dubito.core import batches
from dubito.core.batches import Batch, Source
from dubito.core.errors import NonFiniteError
from dubito.core.once import warn_once
from dubito.core.widest import compensated_sum, has_double
from dubito.curvature import output_columns, positions
from dubito.curvature.engine import Engine
from dubito.curvature.evidence import DataFit
from dubito.curvature.kronecker import is_wide
from dubito.curvature.linearized import MOST_COLUMNS, MOST_EXACT, SampledWarning
from dubito.curvature.output_columns import few_columns, is_one_linear
from dubito.curvature.sampled import SampledAccumulator
from dubito.curvature.structures import KroneckerAccumulator, Sums, make_accumulator
from dubito.networks.selection import Selection


class PassKind(NamedTuple):
    """How the columns of a batch are made."""

    kind: output_columns.Kind  # the curvature
    few: bool = False  # whether only a last layer with many outputs is random, whose curvature needs few columns
    by_position: bool = False  # whether the positions of the outputs are treated as examples


class CurvaturePass:
    """The sum of the curvature of one structure over batches, at the model's weights and at unit noise.

    Args:
        structure: ``"diag"``, ``"full"``, ``"kron"``, ``"ekfac"``, ``"low-rank"`` or ``"sampled"``.
        model: The network.
        selection: Which weights are random.
        likelihood: The likelihood.
        curvature: ``"ggn"``, ``"fisher-mc"``, ``"fisher-empirical"`` or ``"hessian"``; ``"auto"`` is ``"ggn"`` up to
            `MOST_EXACT` columns for each example, ``"fisher-mc"`` above.
        num_samples: Sampled targets per example for ``"fisher-mc"``.
        mode: How ``"kron"`` treats weights shared over positions.
        options: Those of other structures; see `make_accumulator`.
    """

    def __init__(
        self,
        structure: str,
        model: nn.Module,
        selection: Selection,
        likelihood: Likelihood,
        *,
        curvature: output_columns.Kind = "auto",
        num_samples: int = 1,
        mode: str = "expand",
        **options: Any,
    ) -> None:
        self.structure, self.curvature, self.num_samples = structure, curvature, num_samples
        self.carries: list[Tensor] = []  # what rounding left out of the sums of this pass, on a device without float64
        self.expands = mode == "expand"
        self._pass_kind: PassKind | None = None
        # the noise of a Gaussian only scales the curvature
        self.likelihood = Gaussian(noise=1.0) if isinstance(likelihood, Gaussian) else likelihood
        self.engine = Engine(model, selection.names)
        hessian_of = self.likelihood if curvature == "hessian" else None
        self.accumulator = make_accumulator(
            structure, self.engine, selection, mode=mode, hessian_of=hessian_of, **options
        )

    def zeros(self, source: Source) -> Sums:
        """Return the sums before the first batch; all processes have the same ones."""
        self.accumulator.num_data = source.num_data
        sums = self.accumulator.zeros()
        if isinstance(self.accumulator, KroneckerAccumulator | SampledAccumulator):
            # one example shows which factors exist
            first = source.first()
            self.engine.try_out(first.inputs)  # on several examples: after one alone, it would be tried again
            one = Batch(batches.take(first.inputs, slice(0, 1)), first.targets[:1], 1)
            self.add(sums, one, torch.Generator().manual_seed(0))
            self.accumulator.reset(sums)
        self.carries = []
        return sums

    def no_fit(self) -> Tensor:
        """Return the fit ``[2]`` before the first batch; see `add`."""
        return torch.zeros(2, dtype=torch.float64, device=self.accumulator.home)

    def add(self, sums: Sums, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        """Add a batch to `sums`, in place, and return its fit ``[2]``; see `data_fit`.

        Args:
            sums: The sums.
            batch: The batch.
            generator: The source of randomness of sampled targets.
        """
        if not batch.num_rows or self.accumulator.is_complete(sums):
            return self.no_fit()
        if self.is_wide:
            return self._add(sums, batch, generator)
        totals = self.accumulator.partial(sums)
        before = [total.clone() for total in totals]
        for total in totals:
            total.zero_()
        fit = self._add(sums, batch, generator)
        is_first = len(self.carries) != len(totals)
        carries = [torch.zeros_like(total) for total in totals] if is_first else self.carries
        self.carries = []
        for total, old, carry in zip(totals, before, carries, strict=True):
            found, left_out = compensated_sum(old, total, carry.to(total))
            total.copy_(found)
            self.carries.append(left_out)
        return fit

    @property
    def is_wide(self) -> bool:
        """Whether the device of the sums has float64; otherwise they are compensated."""
        return has_double(self.accumulator.home)

    def next_pass(self, sums: Sums) -> None:
        """Prepare `sums`, in place, for the next pass over the data."""
        self.accumulator.next_pass(sums)
        self.carries = []

    def _add(self, sums: Sums, batch: Batch, generator: torch.Generator | None) -> Tensor:
        """Add a batch by plain additions."""
        fit = self.no_fit()
        how = self._pass_kind = self._pass_kind or self._chosen(batch)
        kind = self.accumulator.first_columns(sums) or how.kind
        if (every := self.accumulator.every(sums)) > 1:
            some = slice(None, None, every)
            batch = Batch(batches.take(batch.inputs, some), batch.targets[some], batch.size)
        num_columns = 1 if how.few else self._num_columns(kind)
        with self.accumulator.gathered(sums):
            for rows, tape in self.engine.chunks(batch.inputs, num_columns, self.accumulator.extra):
                targets, likelihood = batch.targets[rows], self.likelihood
                fit += self._fit(tape.outputs.detach(), targets)
                if how.by_position and (flat := positions.by_position(tape, likelihood)) is not None:
                    targets = positions.targets_by_position(likelihood, targets)
                    tape, likelihood = flat, flat.likelihood(likelihood)
                outputs = tape.outputs.detach()
                columns = output_columns.columns(
                    kind, likelihood, outputs, targets,
                    num_samples=self.num_samples, most=self.engine.columns_at_once(MOST_COLUMNS), generator=generator,
                )  # fmt: skip
                merged = [few_columns(self._merged(outputs), likelihood, outputs, targets)] if how.few else columns
                self.accumulator.add(sums, tape, merged, targets)
        return fit

    def data_fit(self, fit: Tensor) -> DataFit:
        """Return the fit that numbers ``[2]`` of `add`, summed over batches, stand for."""
        total, count = fit.tolist()
        _check_finite(total)
        if isinstance(self.likelihood, Gaussian):
            power = 4 if self.curvature == "fisher-empirical" else 2
            return DataFit(squared_error=total, num_residuals=int(count), noise_power=power)
        return DataFit(log_likelihood=total)

    def _chosen(self, batch: Batch) -> PassKind:
        """Choose how columns are made, from the first batch."""
        if self.curvature not in ("auto", "ggn"):
            return PassKind(self.curvature)
        first = self.engine.run(batches.take(batch.inputs, slice(0, 2)))
        flat = None
        if self.expands and first.outputs.ndim > 2:
            flat = positions.by_position(first, self.likelihood)
        outputs = (first if flat is None else flat).outputs
        many = outputs[0].numel() > MOST_COLUMNS
        if many and (flat is not None or is_one_linear(first)) and self.structure in ("diag", "kron"):
            return PassKind("ggn", few=True, by_position=flat is not None)
        repeats = self.structure == "sampled"  # its passes multiply with one and the same matrix
        if self.curvature == "ggn" or repeats or outputs[0].numel() <= MOST_EXACT:
            return PassKind("ggn", by_position=flat is not None)
        warn_once(
            f"The exact curvature of {first.outputs[0].numel():,} outputs per example takes a backward pass for each, "
            "so it is estimated from sampled targets (curvature='fisher-mc'). Choose curvature='ggn' for the exact "
            "one, or weights=select.last_layer(), where it is fast.",
            SampledWarning,
        )
        return PassKind("fisher-mc")

    def _merged(self, outputs: Tensor) -> str:
        """Return which part of output Hessians few columns must give: the diagonal also for a factor too wide."""
        return "diag" if self.structure == "kron" and is_wide(outputs.shape[-1]) else self.structure

    def _fit(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log-likelihood and the number of examples; for a Gaussian the squared error and the residuals."""
        if isinstance(self.likelihood, Gaussian):
            residuals = self.likelihood.gradient(outputs, targets)  # the noise is 1 here
            total, count = residuals.double().square().sum(), residuals.numel()
        else:
            total, count = self.likelihood.log_prob(outputs, targets).double().sum(), len(outputs)
        if total.device.type == "cpu":  # an accelerator is read at the end
            _check_finite(float(total))
        return torch.stack([total, torch.tensor(float(count), dtype=total.dtype, device=total.device)])

    def _num_columns(self, kind: output_columns.Kind) -> int:
        """Return the number of columns in one vector-Jacobian product."""
        sampled = {"fisher-mc": self.num_samples, "fisher-empirical": 1}
        return min(sampled.get(kind, MOST_COLUMNS), MOST_COLUMNS)


def _check_finite(total: float) -> None:
    if not math.isfinite(total):
        raise NonFiniteError(
            "The likelihood of some of the data is NaN or 0: check for extreme inputs, and for outputs that "
            "are not finite."
        )
