"""Run an experiment and deliver its results: a table or JSON, and a report; Ctrl-C keeps what was finished."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

import dubito
from dubito.cli.experiment import Experiment
from dubito.cli.failures import FAILURE, INTERRUPTED, exit_code
from dubito.cli.output import command_line, note, print_columns, print_json
from dubito.core.errors import DubitoError
from dubito.uses.comparison import Comparison, Failure, Run
from dubito.uses.reporting.page import write_page
from dubito.uses.reporting.parts import Section
from dubito.uses.reporting.verdict import equal_to_the_first


def deliver(experiment: Experiment, out: Path, as_json: bool) -> None:
    """Run an experiment; print its table or JSON, write its report, and exit with the code that fits."""
    deliver_all([experiment], out, as_json)


def deliver_all(
    experiments: Sequence[Experiment], out: Path, as_json: bool, *, first: Sequence[Section] = (), ranked: bool = False
) -> None:
    """Do the same for several experiments with the same methods.

    Args:
        experiments: The experiments, such as the same one on several splits of the data.
        out: The report.
        as_json: Whether JSON is printed.
        first: Sections that follow the verdict of the report.
        ranked: Whether the best method comes first.
    """
    experiment = experiments[0]
    outcomes: list[Run | Failure] = []

    def take(outcome: Run | Failure) -> None:
        outcomes.append(outcome)
        if isinstance(outcome, Run):
            words = f"fitted in {outcome.fit_seconds:.1f} s, evaluated in {outcome.evaluate_seconds:.1f} s"
        else:
            words = f"failed. {outcome.error}"
        seed = "" if experiment.seeds else f", seed {outcome.seed + 1} of {experiment.num_seeds}"
        note(f"  {outcome.name}{seed}: {words}")

    interrupted = False
    note(_opening(experiment))
    try:
        for each in experiments:
            experiment = each
            each.run(take)
    except KeyboardInterrupt:
        interrupted = True
        note(f"interrupted; {'what was finished is kept' if outcomes else 'nothing was finished'}")
    except DubitoError:
        if not outcomes:
            raise
    comparison = Comparison.of(outcomes).best_first() if ranked else Comparison.of(outcomes)
    if comparison.runs:
        write_page(
            comparison.evaluations, out, data_name=experiment.dataset.name, command=command_line(),
            facts=experiments[0].facts(), first=first,
        )  # fmt: skip
    if as_json:
        print_json({**_header(experiment, interrupted), **comparison.to_json()})
    elif comparison.runs:
        print_columns(list(comparison.evaluations), comparison.columns())
    if comparison.runs:
        _tell_equal(comparison, ranked)
        note(f"the report is in {out}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    _tell_untrusted(comparison)
    if comparison.failures:
        raise typer.Exit(FAILURE if comparison.runs else exit_code(comparison.failures[0].error))


def _tell_equal(comparison: Comparison, ranked: bool) -> None:
    """Name the methods that cannot be told from the best one by these data."""
    methods = comparison.evaluations
    equal = equal_to_the_first(methods) if ranked else []
    if equal:
        note(
            f"the order by NLL is partly chance: on these {next(iter(methods.values()))[0].count:,} targets, "
            f"{len(equal)} methods cannot be told from {next(iter(methods))} (two standard errors): {', '.join(equal)}"
        )


def _tell_untrusted(comparison: Comparison) -> None:
    """Name the methods whose predictions cannot be trusted; the exit code says only whether they were compared."""
    methods = comparison.evaluations
    bad = [name for name, runs in methods.items() if any(run.trust and run.trust.verdict == "no" for run in runs)]
    if bad:
        note(f"do not trust these, the report says why: {'; '.join(bad)}")


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
