"""`dubito explain`, `report`, `doctor`, `methods` and `data`: look at runs, data and what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dubito.cli import arguments as args
from dubito.cli.failures import FAILURE
from dubito.cli.methods import METHODS


def explain(
    run: args.RunFolder,
    table: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="The table with the row.  [default: that of the fit]")
    ] = None,
    row: Annotated[int, typer.Option("--row", metavar="N", min=1, help="The row, counted from 1.")] = 1,
    model: args.MovedModel = None,
    sep: args.Sep = None,
    encoding: args.Encoding = None,
    decimal: args.Decimal = None,
    json: args.Json = False,
) -> None:
    """Say which columns made the prediction of a row uncertain."""
    from dubito.cli.changing import table_of
    from dubito.cli.output import print_json
    from dubito.data import read_table
    from dubito.uses import runs

    loaded = runs.load(run, model=model)
    text = args.TableOptions(sep=sep, encoding=encoding, decimal=decimal).text()
    found = runs.explain(loaded, read_table(table or table_of(loaded), **text), row)
    print_json(found.to_json()) if json else typer.echo(str(found))


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that `dubito fit` wrote.")],
    out: args.Out = Path("report.html"),
    json: args.Json = False,
) -> None:
    """Compare runs by their scores on held-out rows."""
    from dubito.cli.changing import report_runs

    report_runs(folders, out, json)


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A folder that `dubito fit` wrote.  [default: the machine]")
    ] = None,
    model: args.MovedModel = None,
    json: args.Json = False,
) -> None:
    """Look for what may be wrong with a run, or with the installation."""
    from dubito.cli.health import examine_machine
    from dubito.cli.output import print_json
    from dubito.uses import runs

    found = list(examine_machine() if run is None else runs.examine(runs.load(run, model=model)))
    if json:
        print_json([vars(finding) for finding in found])
    else:
        for finding in found:
            typer.echo(f"{finding.level + ':':<9} {finding.text}")
    if any(finding.level == "problem" for finding in found):
        raise typer.Exit(FAILURE)


def methods(json: args.Json = False) -> None:
    """List the methods."""
    from dubito.cli.options import read_methods
    from dubito.cli.output import print_json, print_methods

    rows = []
    for text, recipe in zip(METHODS, read_methods(METHODS), strict=True):
        said = (type(recipe).__doc__ or "").strip().splitlines()[0]
        rows.append({"method": text, "what": said, "trains": not recipe.needs_trained_model})
    print_json(rows) if json else print_methods(rows)


def data_list(json: args.Json = False) -> None:
    """List the data sets."""
    from dubito import data
    from dubito.cli.output import print_availability

    print_availability(data.available(), json)


def data_check(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Data sets to check.")] = None,
    json: args.Json = False,
) -> None:
    """Check data sets."""
    from dubito import data
    from dubito.cli.output import print_integrity

    wanted = names or [row.name for row in data.available() if row.found]
    rows = [data.check(name) for name in wanted]
    print_integrity(rows, json)
    if not all(row.ok for row in rows):
        raise typer.Exit(FAILURE)


def data_describe(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table; - for standard input.")],
    target: args.Target = None,
    task: args.Task = None,
    sep: args.Sep = None,
    encoding: args.Encoding = None,
    decimal: args.Decimal = None,
    ignore: args.Ignore = None,
    keep: args.Keep = None,
    categorical: args.Categorical = None,
    date: args.Date = None,
    json: args.Json = False,
) -> None:
    """Say what is understood of each column of a table."""
    from dubito import data
    from dubito.cli.output import print_description, print_json

    options = args.TableOptions(target, task, sep, encoding, decimal, ignore, keep, categorical, date)
    read = data.read_table(table, **options.text())
    if target is not None:
        read = data.tables.with_target(read, target)
    found = data.describe_table(read, target, **options.columns())
    print_json(found.to_json()) if json else print_description(found)
