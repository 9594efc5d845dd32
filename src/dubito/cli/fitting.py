"""Fit runs and predict with them, as the commands ask: notes and progress on stderr, results on stdout."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer

from dubito import data
from dubito.cli.arguments import TableOptions
from dubito.cli.failures import FAILURE, QUIET
from dubito.cli.options import read_methods, read_table
from dubito.cli.output import command_line, note, print_json
from dubito.core.atomic import check_place
from dubito.core.constraints import OpenProbability, Positive, check
from dubito.core.errors import InputError
from dubito.data import DataSet, TableTransform
from dubito.data.table_files import STANDARD_INPUT, default_target
from dubito.uses import runs
from dubito.uses.reporting import report as write_report
from dubito.uses.runs.folder import REPORT, check_folder
from dubito.uses.runs.networks import NetworkSource
from dubito.uses.runs.prediction import column_names
from dubito.uses.runs.run import TableEvaluation, TableRun
from dubito.uses.runs.stream import check_output, predict_file
from dubito.uses.runs.table_fit import VALIDATION, implied_task, likelihood_for, share_held_out, with_noise_column


def fit_run(
    table: str,
    options: TableOptions,
    out: Path,
    *,
    method: str | None,
    network: str,
    weights: Path | None,
    likelihood: str | None,
    noise_column: str | None,
    risk: float | None,
    coverage: float,
    held_out: float | None,
    training: dict[str, Any],
    limit: int | None,
    seed: int,
    scale: bool | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Fit a run to a table and write it; everything that can be wrong is checked before training."""
    check_folder(out, overwrite=overwrite)
    recipe = None if method is None else read_methods([method])[0]
    check("coverage", OpenProbability, coverage)
    check("risk", Positive | None, risk)
    task = options.task or implied_task(likelihood)
    options = replace(options, target=options.target or default_target(table), task=task)
    if noise_column is not None:
        options = replace(options, keep=(*(options.keep or ()), noise_column))  # many numbers look like an id
    rows = data.read_table(table, **options.text())
    dataset = read_table(
        table, options, rows=rows, test=share_held_out(len(rows)) if held_out is None else held_out,
        validation=VALIDATION, limit=limit, standardize=scale, generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    check_names(dataset)
    chosen = likelihood_for(likelihood, dataset)
    if noise_column is not None:
        with_noise_column(dataset, noise_column)
    NetworkSource.of(network, dataset, chosen)
    sizes = {part: f"{len(pair[1]):,}" for part, pair in dataset.parts.items()}
    note(f"training on {sizes['train']} rows; {sizes['validation']} choose settings, {sizes['test']} are held out")
    remembered = {
        "table": table, "sha256": file_digest(table), "options": vars(options), "limit": limit, "scale": scale,
        "held_out": held_out, "command": command_line(),
    }  # fmt: skip
    run = runs.fit_dataset(
        dataset, recipe=recipe, network=network, weights=weights, likelihood=chosen, noise_column=noise_column,
        training=training, coverage=coverage, risk=risk, seed=seed, checkpoint=out.with_name(f"{out.name}.checkpoint"),
        progress=not QUIET.get(), settings=remembered,
    )  # fmt: skip
    run.save(out, overwrite=overwrite)
    tell_run(run, out, as_json)


def check_names(dataset: DataSet) -> None:
    """Raise, before training, if an input has the name of a column that `dubito predict` would add."""
    assert isinstance(dataset.encoder, TableTransform)
    twice = [name for name in dataset.encoder.column_names if name in column_names(dataset.class_names)]
    if twice:
        raise InputError(
            f"The table has a column {twice[0]!r}, and so have the predictions: rename it, or leave it out with "
            f"--ignore {twice[0]}."
        )


def tell_run(run: TableRun, out: Path, as_json: bool) -> None:
    """Print the scores of a run that was written; if its predictions are useless, exit with a code that says so."""
    found = run.evaluate_pair(run.parts["held_out"])
    if as_json:
        print_json({"run": str(out), "settings": dict(run.settings), **found.to_json()})
    else:
        _tell_scores(run, out, found)
    if found.scores.trust is not None and found.scores.trust.verdict == "no":
        sys.stderr.write("the exit code is 1, because the predictions of this run cannot be trusted\n")  # even if quiet
        raise typer.Exit(FAILURE)


def _tell_scores(run: TableRun, out: Path, found: TableEvaluation) -> None:
    if run.unguarded.explanation is not None:
        print(f"{run.unguarded.explanation}\n")
    print(found)
    _tell_decisions(run)
    note(f"the run is in {out}, its report in {out / REPORT}")


def _tell_decisions(run: TableRun) -> None:
    rows = run.calibration.num_rows
    if run.task == "regression":
        if run.calibration.reach(run.coverage) is None:
            note(f"{rows} held-out rows are too few to calibrate intervals: they are the posterior's own")
        else:
            note(f"intervals of {run.coverage:.0%} are calibrated on {rows} held-out rows")
    if not run.unguarded.has_spread:
        note("one network was chosen, with no posterior: epistemic uncertainty is 0 except for unseen categories and "
             "numbers outside of the training range; --method \"auto(goal=ood)\" chooses a method for it")  # fmt: skip
    if run.risk is None:
        note("no --risk was stated: only unfamiliar rows get the decision 'ask'")


def predict_rows(
    folder: Path,
    table: str,
    out: str,
    *,
    model: str | None,
    risk: float | None,
    coverage: float | None,
    text: dict[str, Any],
    as_json: bool,
) -> None:
    """Predict the rows of a table and write them; say what was odd about them."""
    check_output(table, out)
    if as_json and out == STANDARD_INPUT:
        raise InputError("--json prints a summary on standard output, where -o - writes the rows: choose one of them.")
    check("coverage", OpenProbability | None, coverage)
    check("risk", Positive | None, risk)
    run = runs.load(folder, model=model)
    with _rows_bar() as progress:
        found = predict_file(run, table, out, coverage=coverage, risk=risk, text=text, progress=progress)
    for sentence in found.tally.sentences():
        note(sentence)
    if found.tally.odd_rows:
        note(f"{found.tally.odd_rows:,} of {found.num_rows:,} rows hold such cells")
    if as_json:
        print_json({"run": str(folder), "out": out, **found.to_json()})
    else:
        place = "on standard output" if out == STANDARD_INPUT else f"in {out}"
        note(f"predicted {found.num_rows:,} rows, {found.num_asked:,} of them to ask about; they are {place}")


def evaluate_rows(
    folder: Path, table: str, *, model: str | None, text: dict[str, Any], report: Path | None, as_json: bool
) -> None:
    """Score the predictions for rows whose target is known."""
    if report is not None:
        check_place(report, "The report")
    run = runs.load(folder, model=model)
    found = run.evaluate(data.read_table(table, **text))
    if report is not None:
        write_report(
            {str(run.settings.get("name", "run")): found.scores}, report, data_name=table, command=command_line()
        )
    for sentence in found.tally.sentences() if found.tally is not None else ():
        note(sentence)
    print_json({"run": str(folder), "table": table, **found.to_json()}) if as_json else print(found)


@contextmanager
def _rows_bar() -> Iterator[Callable[[int, float | None], None] | None]:
    """Provide a function that shows how many rows were predicted, on a terminal."""
    from tqdm import tqdm

    bar = tqdm(unit=" rows", unit_scale=True, disable=True if QUIET.get() else None, leave=False)

    def show(num_rows: int, fraction: float | None) -> None:
        if fraction:
            bar.total = max(num_rows, round(num_rows / fraction))
        bar.update(num_rows - bar.n)

    with bar:
        yield show


def file_digest(table: str) -> str | None:
    """Return the digest of a file, by which it is recognized later; None for standard input."""
    if table == STANDARD_INPUT or not Path(table).is_file():
        return None
    with Path(table).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
