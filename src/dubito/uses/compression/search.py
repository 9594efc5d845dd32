"""Search how much can be removed: scores of smaller networks, sweeps over sparsities, and accuracy budgets."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dubito.beliefs.likelihoods.kinds import ClassLikelihood
from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction
from dubito.core.batches import Data, Source
from dubito.core.errors import InputError
from dubito.fitting.checks import outputs_of
from dubito.fitting.posterior import Posterior
from dubito.methods.map.posterior import PointPosterior
from dubito.methods.map.recipe import MAP
from dubito.uses.compression.rules import Rule
from dubito.uses.compression.storage import load

if TYPE_CHECKING:
    from dubito.uses.compression.pruner import Pruner
    from dubito.uses.compression.result import Compression

Score = Callable[[nn.Module], float]

# Halvings by which a budget is searched: to 1/256 of the weights.
HALVINGS = 8
# How often weights in a file are rounded less until it keeps the score.
FINER = 5


def point(model: nn.Module, posterior: Posterior) -> PointPosterior:
    """Return the network as a point posterior with the likelihood of `posterior`."""
    return PointPosterior(model, posterior.likelihood, MAP(), posterior.num_data)


def score_of(posterior: Posterior, data: Data) -> Score:
    """Return the function from a network to its accuracy on all of `data`; for regression, minus the RMSE."""
    place: dict[str, Any] = {"device": posterior.device, "dtype": posterior.dtype}
    source = Source(data, batch_size=1024, must_count=False, shard=False, **place)
    classes = isinstance(posterior.likelihood, ClassLikelihood)

    if source.first().targets is None:
        raise InputError("The held-out data has no targets: give (inputs, targets).")

    @torch.no_grad()
    def score(model: nn.Module) -> float:
        total, count = 0.0, 0
        for batch in source.replay():
            outputs = outputs_of(model, batch.inputs)
            posterior.likelihood.check(outputs, batch.targets)
            prediction = posterior.likelihood.predict(outputs)
            if isinstance(prediction, ClassPrediction):
                given = batch.targets.reshape(prediction.mode.shape)
                kept = posterior.likelihood.observed(given)
                hits = prediction.mode == posterior.likelihood.aligned(given)
                total += float((hits if kept is None else hits[kept]).sum())
                count += hits.numel() if kept is None else int(kept.sum())
            else:
                assert isinstance(prediction, RegressionPrediction)
                total += float((prediction.mean - batch.targets.reshape(prediction.mean.shape)).square().sum())
                count += prediction.mean.numel()
        if count == 0:
            raise InputError("The held-out data is empty: give at least one example.")
        return total / count if classes else -((total / count) ** 0.5)

    return score


def growth(before: float, after: float) -> float:
    """Return by how much the error grows from one score to another; of negative scores as a fraction of itself."""
    return before - after if before >= 0 else (before - after) / max(-before, 1e-30)


def fine_enough(made: Compression, score: Score, most: float) -> float:
    """Return the rounding with which the error in the entropy-coded file grows by at most `most`.

    If the error of the network itself grows by more, it is that which the file must keep. What rounding costs follows
    from the curvature of the large network, which says less of a much smaller one: so it is measured.
    """
    whole, rounding = score(made.dense), made.rounding
    most = max(most, growth(whole, score(made.model))) + 1e-12
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(FINER):
            made.save(Path(folder) / "network", rounding=rounding)
            if growth(whole, score(load(Path(folder) / "network", made.dense))) <= most:
                break
            rounding /= 16  # a quarter of the steps
    return rounding


def largest_within(pruner: Pruner, rule: Rule, score: Score) -> Rule:
    """Return the rule with the largest target whose network loses no more than `rule.max_drop`, by halving."""
    whole = score(pruner.center)
    budget = rule.max_drop or 0.0
    allowed = budget if whole >= 0 else budget * -whole
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        try:
            _, model = pruner.at(rule.replace(target=middle, max_drop=None))
        except InputError:  # a layer would become empty
            high = middle
            continue
        low, high = (middle, high) if score(model) >= whole - allowed else (low, middle)
    return rule.replace(target=low, max_drop=None)


@dataclass(frozen=True)
class Sweep:
    """A curve of score against sparsity.

    Attributes:
        sparsity: The fraction of weights that are gone, at each point.
        score: The accuracy there (for regression, minus the root mean squared error).
        target: The fraction of weights or units that the rule was set to remove.
        rule: The rule.
    """

    sparsity: tuple[float, ...]
    score: tuple[float, ...]
    target: tuple[float, ...]
    rule: Rule

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the curve, and write it if a path is given; returns the matplotlib figure."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.plot([100 * s for s in self.sparsity], self.score, marker="o", markersize=3)
        axes.set_xlabel("weights removed (%)")
        axes.set_ylabel("accuracy" if max(self.score) >= 0 else "−RMSE")
        axes.set_title(repr(self.rule.replace(target=None, threshold=None, max_drop=None)), fontsize=9)
        axes.grid(alpha=0.3)
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self) -> str:
        rows = [f"{100 * s:9.2f} %  {v:10.4f}" for s, v in zip(self.sparsity, self.score, strict=True)]
        return "\n".join(["   removed       score", *rows])


def sweep(pruner: Pruner, rule: Rule, score: Score, targets: Sequence[float]) -> Sweep:
    """Measure the network at each target, up to the first that would leave a layer empty."""
    found: list[tuple[float, float, float]] = []
    for target in sorted(targets):
        try:
            plan, model = pruner.at(rule.replace(target=target, threshold=None, max_drop=None))
        except InputError:
            if not found:
                raise
            break
        found.append((plan.sparsity, score(model), target))
    if not found:
        raise InputError("`targets` is empty: give fractions to remove, such as (0.5, 0.9), or leave it out.")
    columns = tuple(zip(*found, strict=True))
    return Sweep(columns[0], columns[1], columns[2], rule)
