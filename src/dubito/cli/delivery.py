"""Run an experiment and deliver its results: a table or JSON, and a report; Ctrl-C keeps what was finished."""

from __future__ import annotations

from pathlib import Path

import typer

import dubito
from dubito.cli.experiment import Experiment
from dubito.cli.failures import FAILURE, INTERRUPTED, exit_code
from dubito.cli.output import note, print_columns, print_json
from dubito.core.errors import DubitoError
from dubito.uses.comparison import Comparison, Failure, Run


def deliver(experiment: Experiment, out: Path, as_json: bool) -> None:
    """Run an experiment; print its table or JSON, write its report, and exit with the code that fits."""
    outcomes: list[Run | Failure] = []

    def take(outcome: Run | Failure) -> None:
        outcomes.append(outcome)
        if isinstance(outcome, Run):
            words = f"fitted in {outcome.fit_seconds:.1f} s, evaluated in {outcome.evaluate_seconds:.1f} s"
        else:
            words = f"failed. {outcome.error}"
        note(f"  {outcome.name}, seed {outcome.seed + 1} of {experiment.num_seeds}: {words}")

    interrupted = False
    note(_opening(experiment))
    try:
        experiment.run(take)
    except KeyboardInterrupt:
        interrupted = True
        note(f"interrupted; {'what was finished is kept' if outcomes else 'nothing was finished'}")
    except DubitoError:
        if not outcomes:
            raise
    comparison = Comparison.of(outcomes)
    if comparison.runs:
        comparison.report(out, data_name=experiment.dataset.name)
    if as_json:
        print_json({**_header(experiment, interrupted), **comparison.to_json()})
    elif comparison.runs:
        print_columns(list(comparison.evaluations), comparison.columns())
    if comparison.runs:
        note(f"the report is in {out}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if comparison.failures:
        raise typer.Exit(FAILURE if comparison.runs else exit_code(comparison.failures[0].error))


def _header(experiment: Experiment, interrupted: bool) -> dict[str, object]:
    dataset = experiment.dataset
    rows = {part: len(targets) for part, (_, targets) in dataset.parts.items()}
    return {
        "dubito": dubito.__version__,
        "finished": not interrupted,
        "data": {"name": dataset.name, "task": dataset.task, "rows": rows},
        "model": experiment.model,
        "likelihood": repr(experiment.likelihood),
    }


def _opening(experiment: Experiment) -> str:
    dataset = experiment.dataset
    sizes = ", ".join(f"{len(pair[1]):,} {part}" for part, pair in dataset.parts.items())
    return f"{dataset.name} ({dataset.task}; {sizes}) with {experiment.model}"
