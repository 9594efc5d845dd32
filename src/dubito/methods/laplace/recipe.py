"""The `Laplace` recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from dubito.beliefs.priors import FunctionSpace
from dubito.core.constraints import Count, FiniteValue, Positive, PositiveValue
from dubito.core.errors import InputError
from dubito.core.settings import setting
from dubito.curvature import output_columns
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.output_noise import with_known_numbers
from dubito.fitting.recipe import Recipe
from dubito.fitting.subspace_posterior import build_on_subspace
from dubito.fitting.training import Training
from dubito.methods.laplace.function_space import function_coordinates
from dubito.select import all as all_weights
from dubito.select.rule import SelectionRule

PositiveByName = Annotated[Mapping[str, Positive], "a dict of positive numbers"]


@setting
class Laplace(Recipe):
    r"""A Gaussian around the trained weights whose precision is the curvature of the loss plus that of the prior.

    $$q(w) = \mathcal N\Big(\hat w, \big(\tfrac1T \sum_n J_n^\top H_n J_n + \Lambda\big)^{-1}\Big)$$

    The network must be trained already; the fit makes one pass over the data (two for ``"ekfac"``, four for
    ``"low-rank"``, at most 1 + `steps` for ``"sampled"``) (MacKay 1992; Daxberger et al. 2021,
    https://arxiv.org/abs/2106.14806). The noise of a Gaussian likelihood, unless it is fixed, is chosen with the prior
    precision. A given precision comes with the noise of the highest evidence.

    Args:
        structure: ``"kron"`` (Kronecker factors per layer), ``"ekfac"`` (their eigenbases with measured eigenvalues),
            ``"full"``, ``"diag"``, ``"low-rank"``, or ``"sampled"`` (exact samples of ``"full"`` for any number of
            weights; see `dubito.curvature.sampled`).
        weights: Which weights are random; the others stay at their trained values.
        curvature: ``"ggn"`` (exact Gauss-Newton), ``"fisher-mc"`` (sampled targets), ``"fisher-empirical"`` (observed
            ones), or ``"hessian"`` (full structure only). ``"auto"`` is ``"ggn"``, except for more than 1,024 outputs
            of an example that each need a backward pass, as pixels or tokens have: then it is ``"fisher-mc"``.
        prior_precision: A number; a dict from parameter names (or parts of them) to numbers; a tensor with one value
            per random weight; or what chooses it: ``"validation"`` data, the ``"training"`` data or the ``"evidence"``.
            ``"auto"`` takes validation data where `fit` is given any, else the training data. See
            `dubito.methods.laplace.tuning`.
        prior: `priors.FunctionSpace`, a prior of the outputs instead of the weights; `prior_precision` then divides its
            variance: by 1 for ``"auto"``. The posterior is over the directions that change the outputs at the context
            points, with all their correlations, whatever the structure (`dubito.methods.laplace.function_space`).
        prior_mean: A number, or a tensor with one value per random weight.
        prior_groups: With ``"evidence"``: one precision for ``"all"`` weights, one per ``"layer"`` (each weight and
            each bias), or one per ``"weight"`` (diag only).
        temperature: The number by which the log-likelihood is divided; below 1 makes the posterior narrower.
        rank: The number of eigenpairs of ``"low-rank"``.
        draws: The number of samples of ``"sampled"``.
        steps: The largest number of solver steps of ``"sampled"``, each of which is a pass over the data.
        kron_mode: How ``"kron"`` and ``"ekfac"`` treat weights shared over positions: ``"expand"`` or ``"reduce"``.
        factor_rank: For ``"kron"``: of each factor keep so many leading eigenpairs and the exact diagonal of the rest,
            which makes files small (`dubito.curvature.kronecker`). ``"auto"`` does so for adapters: the wide side
            of their factors, from 64 on, keeps as many eigenpairs as the adapter has ranks. None keeps all.
        fisher_samples: Sampled targets per example for ``"fisher-mc"``.
        prior_scaling: ``"plain"``, or ``"S/D"`` to multiply a given precision by the fraction of random weights.
    """

    setting_name = "Laplace"
    needs_trained_model = True  # its weights are the mean of the posterior
    old_values: ClassVar[Mapping[str, Mapping[str, str]]] = {"structure": {"lowrank": "low-rank"}}
    structure: Literal["kron", "ekfac", "full", "diag", "low-rank", "sampled"] = "kron"
    weights: SelectionRule = all_weights()
    curvature: output_columns.Kind = "auto"
    prior_precision: PositiveValue | PositiveByName | Literal["auto", "evidence", "training", "validation"] = "auto"
    prior_mean: FiniteValue = 0.0
    prior_groups: Literal["all", "layer", "weight"] = "all"
    temperature: Positive = 1.0
    rank: Count = 50
    draws: Count = 16
    steps: Count = 20
    kron_mode: Literal["expand", "reduce"] = "expand"
    factor_rank: Count | Literal["auto"] | None = "auto"
    fisher_samples: Count = 1
    prior_scaling: Literal["plain", "S/D"] = "plain"
    prior: FunctionSpace | None = None

    def __post_init__(self) -> None:
        if self.prior_groups != "all" and self.prior_precision not in ("auto", "evidence"):
            raise InputError(f"prior_groups={self.prior_groups!r} needs prior_precision='evidence'.")
        if self.prior_groups == "weight" and self.structure != "diag":
            raise InputError("prior_groups='weight' needs structure='diag'.")
        if self.prior_scaling == "S/D" and isinstance(self.prior_precision, str):
            raise InputError("prior_scaling='S/D' needs a given prior_precision: a tuned one is not scaled.")
        if self.curvature == "hessian" and self.structure != "full":
            raise InputError("curvature='hessian' needs structure='full', as its negative eigenvalues are removed.")
        if self.curvature == "fisher-mc" and self.structure == "sampled":
            raise InputError("structure='sampled' needs curvature='ggn', which does not change between passes.")
        if self.prior is not None:
            self._check_function_space()

    def _check_function_space(self) -> None:
        """Raise an error for settings that describe a prior of weights."""
        if isinstance(self.prior_precision, Mapping | Tensor) or isinstance(self.prior_mean, Tensor) or self.prior_mean:
            raise InputError("priors.FunctionSpace takes no prior_mean, and one number as prior_precision, or none.")
        if self.prior_groups != "all" or self.prior_scaling != "plain":
            raise InputError("prior_groups and prior_scaling are for priors of weights, not for priors.FunctionSpace.")
        if not self.weights.is_set:
            raise InputError(
                f"{self.weights!r} chooses directions, and so does priors.FunctionSpace: drop one of them."
            )

    @property
    def assumed_precision(self) -> float:
        """The prior precision where it is one number, else 1."""
        return float(self.prior_precision) if isinstance(self.prior_precision, int | float) else 1.0

    def on_subspace(self) -> Laplace:
        """Return the recipe for a subspace: a full matrix, as one Kronecker factor would be a single number."""
        return self.replace(structure="full") if self.structure in ("kron", "ekfac", "sampled") else self

    def default_training(self) -> Training:
        """Return settings for one pass in larger batches, without training."""
        return Training(epochs=1, batch_size=1024, shuffle=False)

    def build(self, problem: Problem) -> Inference:
        """Return the steps that sum curvature over the data."""
        from dubito.methods.laplace.collect import Collector, SampledCollector

        if self.prior is not None:
            return self._build_on_functions(problem, self.prior)
        if self.prior_precision == "validation" and problem.validation is None:
            raise InputError("prior_precision='validation' needs validation data: pass `validation=` to fit.")
        problem = dataclasses.replace(problem, likelihood=with_known_numbers(problem))
        kind = SampledCollector if self.structure == "sampled" else Collector
        collector = kind(self, problem, problem.selection)
        return Inference(
            collector.init, collector.update, collector.posterior,
            epochs=collector.accumulator.passes, additive=collector.accumulator.additive, anytime=False,
            restore=collector.restore,
        )  # fmt: skip

    def _build_on_functions(self, problem: Problem, prior: FunctionSpace) -> Inference:
        """Return the steps of the recipe on the coordinates of a prior over functions."""
        subspace, mean = function_coordinates(prior.at_context(problem.source), problem)
        precision = 1.0 if self.prior_precision == "auto" else self.prior_precision
        inner = self.replace(prior=None, weights=all_weights(), prior_mean=mean.to("cpu"), prior_precision=precision)
        return build_on_subspace(self, problem, subspace, inner)
