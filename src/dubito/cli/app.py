"""The commands. Heavy modules are imported inside the functions, so that ``--help`` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dubito.cli import manual
from dubito.cli.failures import FAILURE, CommandGroup
from dubito.cli.methods import METHODS

_STYLE = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

app = typer.Typer(
    cls=CommandGroup,
    help=manual.MAIN,
    context_settings=_STYLE,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(context_settings=_STYLE, rich_markup_mode=None)
app.add_typer(data_app, name="data", help=manual.DATA, short_help="List the available data sets, and check them.")

Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write the report to.")]


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
) -> None:
    """Show the help if no command is given; `CommandGroup` has already handled ``--debug``."""
    _help_if_alone(context)


@data_app.callback(invoke_without_command=True)
def data_root(context: typer.Context) -> None:
    """Show the help if no command is given."""
    _help_if_alone(context)


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(help=manual.DEMO, short_help="Compare every method on handwritten digits.")
def demo(
    out: Out = Path("report.html"),
    fast: Annotated[
        bool, typer.Option("--fast", help="One seed, few epochs, few shifts; takes about a minute.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare every method on digits."""
    import torch

    from dubito.cli.delivery import deliver
    from dubito.cli.options import check_writable, demo_experiment

    check_writable(out)
    torch.set_num_threads(1)  # for networks this small, threads cost more than they save
    deliver(demo_experiment(fast), out, json)


@app.command(help=manual.COMPARE, short_help="Compare methods on a data set or a table.")
def compare(
    data: Annotated[str, typer.Option("--data", metavar="NAME|TABLE", help="The name of a data set, or a table.")],
    target: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column of the table to predict.")] = None,
    model: Annotated[str, typer.Option(metavar="NETWORK", help="The network; see the list above.")] = "mlp",
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD", help="A method; repeat for several.  [default: all methods above]"),
    ] = None,
    likelihood: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Noise model: categorical for classes, gaussian for numbers.  [default: chosen from the target]",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="Number of repetitions with new initial weights.")
    ] = 3,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the training data; see above.")] = None,
    lr: Annotated[float | None, typer.Option(metavar="RATE", help="The learning rate.")] = None,
    batch_size: Annotated[int | None, typer.Option(metavar="N", help="Examples per training step.")] = None,
    training: Annotated[
        str | None,
        typer.Option(
            metavar="SETTINGS", help='All training settings in one: "training(optimizer=sgd, lr=0.1, epochs=50)".'
        ),
    ] = None,
    split: Annotated[int, typer.Option(metavar="N", min=0, help="The number of the train/test split.")] = 0,
    gap: Annotated[
        bool, typer.Option("--gap", help="UCI sets: test on the middle third of the feature with number --split.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Use at most N rows for training and validation.")
    ] = None,
    limit_test: Annotated[
        int | None, typer.Option(metavar="N", help="Use at most N test rows of each data set.")
    ] = None,
    shifts: Annotated[bool, typer.Option("--shifts", help="Images: also test on corrupted images.")] = False,
    ood: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Unfamiliar data; the report shows how well it is flagged. Repeat for several."
        ),
    ] = None,
    out: Out = Path("report.html"),
    json: Json = False,
) -> None:
    """Compare methods on a data set."""
    from dubito import data as datasets
    from dubito.cli import options
    from dubito.cli.delivery import deliver
    from dubito.cli.experiment import Experiment

    options.check_writable(out)
    recipes = options.read_methods(method or METHODS)
    chosen = options.read_training(training, epochs=epochs, lr=lr, batch_size=batch_size)
    dataset = options.read_data(data, target, split=split, gap=gap, limit=limit, limit_test=limit_test)
    experiment = Experiment(
        dataset,
        model=model,
        recipes=recipes,
        likelihood=options.read_likelihood(likelihood, dataset),
        training=chosen,
        num_seeds=seeds,
        ood=options.foreign(ood or (), dataset, limit_test),
        shifts=datasets.shifts(dataset) if shifts else {},
    )
    experiment.check()
    deliver(experiment, out, json)


@app.command("compress", help=manual.COMPRESS, short_help="Train a network and compress it.")
def compress_command(
    data: Annotated[str, typer.Option("--data", metavar="NAME|TABLE", help="The name of a data set, or a table.")],
    target: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column of the table to predict.")] = None,
    model: Annotated[str, typer.Option(metavar="NETWORK", help="The network, as for compare.")] = "mlp",
    method: Annotated[
        str, typer.Option(metavar="METHOD", help="The method that finds the posterior.")
    ] = "variational(prior=priors.LogUniform(), kl_warmup=0.5)",
    rule: Annotated[
        str | None, typer.Option(metavar="RULE", help="Which weights to remove.  [default: chosen from the posterior]")
    ] = None,
    structure: Annotated[
        str, typer.Option(metavar="WHAT", help="Remove single 'weights' or whole 'units'.")
    ] = "weights",
    finetune: Annotated[int, typer.Option(metavar="N", min=0, help="Epochs of fine-tuning after the removal.")] = 0,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the training data.")] = None,
    lr: Annotated[float | None, typer.Option(metavar="RATE", help="The learning rate.")] = None,
    batch_size: Annotated[int | None, typer.Option(metavar="N", help="Examples per training step.")] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Use at most N rows for training and validation.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The random seed.")] = 0,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the compressed network to this file.")] = None,
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="Export it to an .onnx or .pt2 file.")] = None,
    json: Json = False,
) -> None:
    """Train a network and compress it."""
    from dubito.cli import options
    from dubito.cli.compressing import fit_and_compress, read_rule
    from dubito.cli.output import print_json

    for path in (save, export):
        if path is not None:
            options.check_writable(path)
    chosen = options.read_training(None, epochs=epochs, lr=lr, batch_size=batch_size)
    wanted = read_rule(rule)
    dataset = options.read_data(data, target, split=0, gap=False, limit=limit, limit_test=None)
    made = fit_and_compress(
        dataset, model=model, method=method, rule=wanted, structure=structure, training=chosen, finetune=finetune,
        seed=seed,
    )  # fmt: skip
    report = made.report(dataset.test, feature_names=dataset.feature_names)
    if save is not None:
        made.save(save)
    if export is not None:
        made.export(export)
    print_json(report.to_json()) if json else typer.echo(str(report))


@data_app.command("list", help=manual.DATA_LIST, short_help="List all data sets and where each was found.")
def data_list(json: Json = False) -> None:
    """List the data sets."""
    from dubito import data
    from dubito.cli.output import print_availability

    print_availability(data.available(), json)


@data_app.command("check", help=manual.DATA_CHECK, short_help="Read data sets completely and check them.")
def data_check(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Data sets to check.")] = None,
    json: Json = False,
) -> None:
    """Check data sets."""
    from dubito import data
    from dubito.cli.output import print_integrity

    wanted = names or [row.name for row in data.available() if row.found]
    rows = [data.check(name) for name in wanted]
    print_integrity(rows, json)
    if not all(row.ok for row in rows):
        raise typer.Exit(FAILURE)


@app.command(help="Print the version.")
def version() -> None:
    """Print the version."""
    import dubito

    typer.echo(f"dubito {dubito.__version__}")
