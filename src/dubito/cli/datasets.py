"""`dubito data`: list and check data sets, and describe tables."""

from __future__ import annotations

from typing import Annotated

import typer

from dubito.cli import arguments as args
from dubito.cli.failures import FAILURE


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
