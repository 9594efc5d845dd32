"""Change runs as the commands ask: update, export, report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dubito import data
from dubito.cli.arguments import TableOptions
from dubito.cli.failures import QUIET
from dubito.cli.fitting import file_digest, tell_run
from dubito.cli.output import command_line, note, print_columns, print_json
from dubito.core.atomic import check_place
from dubito.core.errors import InputError, MissingDataError
from dubito.data import DataSet
from dubito.data.table_files import STANDARD_INPUT
from dubito.uses import runs
from dubito.uses.comparison import Comparison, Run
from dubito.uses.runs.folder import check_folder, load_summary
from dubito.uses.runs.run import TableRun
from dubito.uses.runs.table_fit import VALIDATION, share_held_out


def update_run(
    folder: Path,
    table: str,
    out: Path | None,
    *,
    model: str | None,
    text: dict[str, Any],
    training: dict[str, Any],
    seed: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Learn from more rows; without another folder the run is replaced."""
    target = folder if out is None else out
    check_folder(target, overwrite=overwrite or out is None)
    run = runs.load(folder, model=model)
    rows = data.read_table(table, **text)
    new = runs.update(run, rows, training=training or None, seed=seed, progress=not QUIET.get())
    new = replace(new, settings={**new.settings, "command": command_line()})
    new.save(target, overwrite=overwrite or out is None)
    tell_run(new, target, as_json)


def export_run(folder: Path, out: Path, *, plain: bool, model: str | None, as_json: bool) -> None:
    """Write a run for other programs: all of it, or with `plain` its network alone."""
    from dubito.uses.export import export_network, find_format

    check_place(out, "The file")
    find_format(out)
    run = runs.load(folder, model=model)
    if not plain:
        whole = runs.export(run, out)
        columns = list(run.encoder.column_names)
        told = {"out": str(out), "bytes": whole.num_bytes, "difference": whole.difference, "form": whole.form,
                "inputs": columns, "outputs": list(whole.outputs)}  # fmt: skip
        if as_json:
            print_json(told)
            return
        note(f"{out}: {whole.num_bytes:,} bytes; differs from predict by at most {whole.difference:.1g}")
        note(
            f"it takes one number for each of the columns {', '.join(columns)}, and returns {', '.join(whole.outputs)}"
        )
        return
    made = export_network(run.unguarded.model, out, run.parts["held_out"][0][:128])
    found = {"out": str(out), "bytes": made.num_bytes, "difference": made.difference,
             "inputs": list(run.encoder.feature_names)}  # fmt: skip
    print_json(found) if as_json else note(f"{out}: {made.num_bytes:,} bytes; it takes the features of encoder.json")


def report_runs(folders: list[Path], out: Path, as_json: bool) -> None:
    """Compare the scores of runs on their held-out rows, in a table and a report."""
    check_place(out, "The report")
    found = [load_summary(folder) for folder in folders]
    names = [folder.name or str(folder.resolve().name) for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    differ = {(settings.get("sha256"), settings.get("seed"), settings.get("held_out")) for settings, _ in found}
    if len(differ) > 1:
        note("these runs were scored on different rows; compare them with `dubito evaluate` on one table")
    comparison = Comparison.of(Run(name, 0, scores, 0.0, 0.0) for name, (_, scores) in zip(names, found, strict=True))
    tables = ", ".join(sorted({str(settings.get("table")) for settings, _ in found}))
    comparison.report(out, data_name=tables, command=command_line())
    if as_json:
        print_json({name: scores.to_json() for name, (_, scores) in zip(names, found, strict=True)})
    else:
        print_columns(list(comparison.evaluations), comparison.columns())
    note(f"the report is in {out}")


def training_rows(run: TableRun, table: Path | None) -> DataSet:
    """Return the data set that a run was fitted to, with the same parts."""
    path = Path(table_of(run)) if table is None else table
    if not path.exists() and str(path) not in data.names():
        raise MissingDataError(f"The table of this run, '{path}', is not there: give it as --data.")
    settings = run.settings
    if settings.get("updates"):
        raise InputError("This run has learnt from more rows than its table holds: fit it again to all rows first.")
    if settings.get("sha256") not in (None, file_digest(str(path))):
        raise InputError(f"'{path}' is not the table that this run was fitted to: its content differs.")
    options = TableOptions(**settings.get("options", {"target": run.target}))
    rows = data.read_table(path, **options.text())
    held_out = settings.get("held_out")
    found = data.load_table(
        rows, run.target, **options.columns(), test=share_held_out(len(rows)) if held_out is None else held_out,
        validation=VALIDATION, limit=settings.get("limit"), standardize=settings.get("scale"),
        generator=torch.Generator().manual_seed(settings.get("seed", 0)),
    )  # fmt: skip
    if found.feature_names != run.encoder.feature_names or found.class_names != run.encoder.class_names:
        raise InputError(f"'{path}' is not the table that this run was fitted to: its columns or classes differ.")
    return found


def table_of(run: TableRun) -> str:
    """Return the path of the table that a run was fitted to."""
    named = run.settings.get("table")
    if not named or named == STANDARD_INPUT:
        raise InputError("This run was not fitted to a file: give the table.")
    return str(named)
