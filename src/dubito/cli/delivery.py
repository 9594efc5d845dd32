"""Run a comparison and deliver what it found: a table or JSON, and a report; Ctrl-C keeps what was finished."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

import dubito
from dubito.cli.comparison import Comparison, Failure, Run
from dubito.cli.failures import FAILURE, INTERRUPTED, exit_code
from dubito.cli.output import note, print_columns, print_json
from dubito.uses.reporting import Evaluation, report
from dubito.uses.reporting.tables import Column, compare

_HEADLINES = {
    "classification": ("accuracy", "nll", "ece"),
    "regression": ("rmse", "nll", "crps", "coverage@0.95"),
}


def deliver(comparison: Comparison, out: Path, as_json: bool) -> None:
    """Run a comparison; print its table or JSON, write its report, and exit with what that means."""
    runs: list[Run] = []
    failures: list[Failure] = []
    interrupted = False
    note(_opening(comparison))
    try:
        for step in comparison.runs():
            if isinstance(step, Run):
                runs.append(step)
                outcome = f"fitted in {step.fit_seconds:.1f} s, judged in {step.judge_seconds:.1f} s"
            else:
                failures.append(step)
                outcome = f"failed. {step.error}"
            note(f"  {step.method}, seed {step.seed + 1} of {comparison.num_seeds}: {outcome}")
    except KeyboardInterrupt:
        interrupted = True
        note(f"interrupted; {'what was finished is kept' if runs else 'nothing was finished'}")
    if runs:
        report(by_method(runs), out, data_name=comparison.dataset.name)
    if as_json:
        print_json(as_document(comparison, runs, failures, interrupted))
    elif runs:
        print_columns(list(by_method(runs)), headline_columns(runs))
    if runs:
        note(f"the report is in {out}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if failures:
        raise typer.Exit(FAILURE if runs else exit_code(failures[0].error))


def by_method(runs: Sequence[Run]) -> dict[str, list[Evaluation]]:
    """Return the evaluations of each method, one per seed."""
    grouped: dict[str, list[Evaluation]] = {}
    for run in runs:
        grouped.setdefault(run.method, []).append(run.evaluation)
    return grouped


def headline_columns(runs: Sequence[Run]) -> list[Column]:
    """Return the few columns that fit a terminal; the report and the JSON have all."""
    groups = list(by_method(runs).values())

    def column(name: str, title: str | None, value: Callable[[Evaluation], float]) -> Column:
        return compare(name, [[value(evaluation) for evaluation in group] for group in groups], title=title)

    first = groups[0][0]
    columns = [column(name, None, lambda e, name=name: e.scores[name]) for name in _HEADLINES[first.task]]  # type: ignore[misc]
    if first.shifts:
        columns.append(column("nll", "shifted NLL", lambda e: mean_over_shifts(e, "nll")))
    for name, by_doubt in first.ood.items():
        doubt = next(iter(by_doubt))
        columns.append(column("auroc", f"AUROC {name}", lambda e, n=name, d=doubt: e.ood[n][d]["auroc"]))  # type: ignore[misc]
    return columns


def mean_over_shifts(evaluation: Evaluation, score: str) -> float:
    """Return the mean of a score over all kinds and severities of shift."""
    return statistics.fmean(scores[score] for _, _, scores in evaluation.shift_rows())


def as_document(
    comparison: Comparison, runs: Sequence[Run], failures: Sequence[Failure], interrupted: bool
) -> dict[str, Any]:
    """Return everything that was found as one JSON value."""
    dataset = comparison.dataset
    rows = {part: len(targets) for part, (_, targets) in dataset.parts.items()}
    return {
        "dubito": dubito.__version__,
        "finished": not interrupted,
        "data": {"name": dataset.name, "task": dataset.task, "rows": rows},
        "model": comparison.model,
        "likelihood": repr(comparison.likelihood),
        "summary": {method: _summary(group) for method, group in by_method(runs).items()},
        "runs": [
            {"method": r.method, "seed": r.seed, "fit_seconds": r.fit_seconds, "evaluation": r.evaluation.to_json()}
            for r in runs
        ],
        "failures": [{"method": f.method, "seed": f.seed, "error": str(f.error)} for f in failures],
    }


def _summary(group: Sequence[Evaluation]) -> dict[str, Any]:
    """Return mean and standard deviation over seeds of every score on the test part."""
    values = {
        name: torch.tensor([evaluation.scores[name] for evaluation in group], dtype=torch.float64)
        for name in group[0].scores
    }
    means = {name: _plain(value.mean()) for name, value in values.items()}
    stddevs = {name: _plain(value.std()) for name, value in values.items()} if len(group) > 1 else None
    return {"seeds": len(group), "mean": means, "stddev": stddevs}


def _plain(value: Tensor) -> float | str:
    return float(value) if value.isfinite() else str(float(value))


def _opening(comparison: Comparison) -> str:
    dataset = comparison.dataset
    sizes = ", ".join(f"{len(pair[1]):,} {part}" for part, pair in dataset.parts.items())
    return f"{dataset.name} ({dataset.task}; {sizes}) with {comparison.model}"
