"""The commands. Heavy modules are imported inside the functions, so that ``--help`` is fast."""

from __future__ import annotations

from typing import Annotated

import typer

from dubito.cli import comparing, compressing, inspecting, manual, running, serving
from dubito.cli.failures import CommandGroup

_STYLE = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

app = typer.Typer(
    cls=CommandGroup, help=manual.MAIN, context_settings=_STYLE, rich_markup_mode=None, pretty_exceptions_enable=False
)
data_app = typer.Typer(context_settings=_STYLE, rich_markup_mode=None)
app.add_typer(data_app, name="data", help=manual.DATA, short_help="List, check and describe data.")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no notes.")] = False,
) -> None:
    """Show the help if no command is given; `CommandGroup` has already handled ``--debug`` and ``--quiet``."""
    _help_if_alone(context)


@data_app.callback(invoke_without_command=True)
def data_root(context: typer.Context) -> None:
    """Show the help if no command is given."""
    _help_if_alone(context)


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def version() -> None:
    """Print the version."""
    import dubito

    typer.echo(f"dubito {dubito.__version__}")


app.command(help=manual.FIT, short_help="Learn to predict a column of a table.")(running.fit)
app.command(help=manual.PREDICT, short_help="Predict the rows of a table.")(running.predict)
app.command(help=manual.EVALUATE, short_help="Score the predictions for labelled rows.")(running.evaluate)
app.command(help=manual.UPDATE, short_help="Learn from more rows.")(running.update)
app.command(help=manual.EXPLAIN, short_help="Say which columns made a row uncertain.")(inspecting.explain)
app.command(help=manual.REPORT, short_help="Compare runs by their scores.")(inspecting.report)
app.command(help=manual.DOCTOR, short_help="Look for what may be wrong.")(inspecting.doctor)
app.command(help=manual.EXPORT, short_help="Write the network of a run for other programs.")(running.export)
app.command(help=manual.SERVE, short_help="Answer requests for predictions over HTTP.")(serving.serve)
app.command(help=manual.PLAY, short_help="Play with a run in the browser.")(serving.play)
app.command(help=manual.LIST_METHODS, short_help="List the methods.")(inspecting.methods)
app.command(help=manual.DEMO, short_help="Compare every method on handwritten digits.")(comparing.demo)
app.command(help=manual.COMPARE, short_help="Compare methods on a data set or a table.")(comparing.compare)
app.command(help=manual.COMPRESS, short_help="Make a network smaller.")(compressing.compress)
app.command(help="Print the version.")(version)

data_app.command("list", help=manual.DATA_LIST, short_help="List all data sets and where each was found.")(
    inspecting.data_list
)
data_app.command("check", help=manual.DATA_CHECK, short_help="Read data sets completely and check them.")(
    inspecting.data_check
)
data_app.command("describe", help=manual.DATA_DESCRIBE, short_help="Say what is understood of a table's columns.")(
    inspecting.data_describe
)
