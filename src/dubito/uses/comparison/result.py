"""`Comparison`: the evaluations of several recipes, as a table, as JSON and as a report."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito.core.errors import DubitoError
from dubito.uses.reporting import Evaluation, report
from dubito.uses.reporting.tables import Column, align, score_column

_HEADLINES = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "nll", "crps", "coverage@0.95")}


@dataclass(frozen=True)
class Run:
    """One recipe, fitted and evaluated with one seed.

    Attributes:
        name: The name of the recipe in the comparison.
        seed: The seed.
        evaluation: What `dubito.evaluate` measured.
        fit_seconds: Wall-clock seconds of the fit; training a network that several recipes share is not counted.
        evaluate_seconds: Wall-clock seconds of the evaluation.
    """

    name: str
    seed: int
    evaluation: Evaluation
    fit_seconds: float
    evaluate_seconds: float


@dataclass(frozen=True)
class Failure:
    """One recipe that could not be fitted or evaluated; its later seeds were skipped.

    Attributes:
        name: The name of the recipe in the comparison.
        seed: The seed.
        error: What was raised.
    """

    name: str
    seed: int
    error: DubitoError


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `dubito.compare` found; ``print`` it for a table.

    Attributes:
        runs: Every recipe and seed that was finished.
        failures: The recipes that could not be fitted or evaluated.
    """

    runs: tuple[Run, ...]
    failures: tuple[Failure, ...] = ()

    @classmethod
    def of(cls, outcomes: Iterable[Run | Failure]) -> Comparison:
        """Return the comparison that some outcomes make."""
        found = list(outcomes)
        runs = tuple(outcome for outcome in found if isinstance(outcome, Run))
        return cls(runs, tuple(outcome for outcome in found if isinstance(outcome, Failure)))

    @property
    def evaluations(self) -> dict[str, tuple[Evaluation, ...]]:
        """The evaluations by name, one per seed."""
        names = dict.fromkeys(run.name for run in self.runs)
        return {name: tuple(run.evaluation for run in self.runs if run.name == name) for name in names}

    def best_first(self) -> Comparison:
        """Return the same with the recipes in the order of their mean negative log-likelihood, best first."""
        means = {
            name: sum(evaluation.scores["nll"] for evaluation in group) / len(group)
            for name, group in self.evaluations.items()
        }
        return Comparison(tuple(sorted(self.runs, key=lambda run: means[run.name])), self.failures)

    def report(
        self,
        path: str | os.PathLike[str] = "report.html",
        *,
        title: str | None = None,
        data_name: str | None = None,
        command: str | None = None,
    ) -> Path:
        """Write the comparison as one HTML page; see `dubito.report`."""
        return report(self.evaluations, path, title=title, data_name=data_name, command=command)

    def columns(self) -> list[Column]:
        """Return the main scores as columns, one cell per recipe: the mean over seeds and its standard deviation."""
        groups = list(self.evaluations.values())

        def column(name: str, title: str | None, value: Callable[[Evaluation], float]) -> Column:
            return score_column(name, [[value(evaluation) for evaluation in group] for group in groups], title=title)

        first = groups[0][0]
        columns = [column(name, None, lambda e, name=name: e.scores[name]) for name in _HEADLINES[first.task]]  # type: ignore[misc]
        if first.shifts:
            columns.append(column("nll", "shifted NLL", lambda e: _mean_over_shifts(e, "nll")))
        for name, by_score in first.ood.items():
            score = next(iter(by_score))
            columns.append(column("auroc", f"AUROC {name}", lambda e, n=name, s=score: e.ood[n][s]["auroc"]))  # type: ignore[misc]
        return columns

    def to_json(self) -> dict[str, Any]:
        """Return everything as a value that strict JSON can hold."""
        return {
            "summary": {name: _summary(group) for name, group in self.evaluations.items()},
            "runs": [
                {"method": r.name, "seed": r.seed, "fit_seconds": r.fit_seconds, "evaluation": r.evaluation.to_json()}
                for r in self.runs
            ],
            "failures": [{"method": f.name, "seed": f.seed, "error": str(f.error)} for f in self.failures],
        }

    def __str__(self) -> str:
        lines = [f"{failure.name}, seed {failure.seed}, failed: {failure.error}" for failure in self.failures]
        if self.runs:
            columns = {f"{column.title} {column.hint}".strip(): column for column in self.columns()}
            numbers = {title: [cell.whole for cell in column.cells] for title, column in columns.items()}
            lines.insert(0, align({"": list(self.evaluations)}, numbers))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.evaluations)}: {len(self.runs)} runs, {len(self.failures)} failures>"


def _mean_over_shifts(evaluation: Evaluation, score: str) -> float:
    return statistics.fmean(scores[score] for _, _, scores in evaluation.shift_rows())


def _summary(group: tuple[Evaluation, ...]) -> dict[str, Any]:
    """Return mean and standard deviation over seeds of every score on the test data."""
    values = {
        name: torch.tensor([evaluation.scores[name] for evaluation in group], dtype=torch.float64)
        for name in group[0].scores
    }
    means = {name: _plain(value.mean()) for name, value in values.items()}
    stddevs = {name: _plain(value.std()) for name, value in values.items()} if len(group) > 1 else None
    return {"seeds": len(group), "mean": means, "stddev": stddevs}


def _plain(value: Tensor) -> float | str:
    return float(value) if value.isfinite() else str(float(value))
