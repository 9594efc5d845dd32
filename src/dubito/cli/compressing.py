"""`dubito compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dubito.cli import arguments as args
from dubito.cli.failures import interruptible

METHOD = "variational(prior=priors.LogUniform(), kl_warmup=0.5)"


def compress(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A folder that `dubito fit` wrote.")] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="NAME|TABLE", help="A data set by name, or a table; see above.")
    ] = None,
    target: args.Target = None,
    at_most: Annotated[
        str | None,
        typer.Option("--at-most", metavar="SHARE", help="With RUN: what it may cost.  [default: 0.5%]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="RUN", help="With RUN: the folder to write.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NETWORK", help="The network.  [default: mlp]")] = None,
    method: Annotated[
        str | None, typer.Option(metavar="METHOD", help="The method that finds the posterior.  [default: see above]")
    ] = None,
    rule: Annotated[
        str | None, typer.Option(metavar="RULE", help="Which weights to remove.  [default: chosen from the posterior]")
    ] = None,
    structure: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="Remove 'weights' or 'units'.  [default: units of a RUN, else weights]"),
    ] = None,
    finetune: Annotated[int, typer.Option(metavar="N", min=0, help="Epochs of fine-tuning after the removal.")] = 0,
    epochs: args.Epochs = None,
    lr: args.Rate = None,
    batch_size: args.BatchSize = None,
    limit: args.Limit = None,
    seed: args.Seed = 0,
    task: args.Task = None,
    sep: args.Sep = None,
    encoding: args.Encoding = None,
    decimal: args.Decimal = None,
    ignore: args.Ignore = None,
    keep: args.Keep = None,
    categorical: args.Categorical = None,
    date: args.Date = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the compressed network to this file.")] = None,
    out_page: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="With --data: write a report with pictures.")
    ] = None,
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="Export it to an .onnx or .pt2 file.")] = None,
    overwrite: args.Overwrite = False,
    config: args.Config = None,
    json: args.Json = False,
) -> None:
    """Compress the network of a run, or train a network and compress it."""
    if run is not None:
        _compress_run(
            run, at_most or "0.5%", out, table=data, rule=rule, structure=structure or "units", method=method,
            finetune=finetune, model=model, seed=seed, overwrite=overwrite, as_json=json,
        )  # fmt: skip
        return
    for option, value in (("--at-most", at_most), ("--out", out)):
        if value is not None:
            raise typer.BadParameter("it is for a RUN, which was not given", param_hint=f"'{option}'")
    if data is None:
        raise typer.BadParameter("give a RUN that `dubito fit` wrote, or --data", param_hint="'RUN'")
    from dubito.cli import options
    from dubito.cli.fit_and_compress import fit_and_compress, read_rule
    from dubito.cli.output import command_line, print_json
    from dubito.core.atomic import check_place
    from dubito.uses.export import find_format

    for path in (save, export, out_page):
        if path is not None:
            check_place(path, "The network")
    if export is not None:
        find_format(export)
    chosen = options.read_training(None, epochs=epochs, lr=lr, batch_size=batch_size)
    wanted = read_rule(rule)
    table = args.TableOptions(target, task, sep, encoding, decimal, ignore, keep, categorical, date)
    dataset = options.read_data(data, table, split=0, gap=False, limit=limit, limit_test=None)
    made = fit_and_compress(
        dataset, model=model or "mlp", method=method or METHOD, rule=wanted, structure=structure or "weights",
        training=chosen, finetune=finetune, seed=seed,
    )  # fmt: skip
    report = made.report(dataset.test, feature_names=dataset.feature_names, target_scale=dataset.target_scale)
    if out_page is not None:
        report.page(out_page, data_name=dataset.name, command=command_line())
    if save is not None:
        made.save(save)
    if export is not None:
        made.export(export)
    print_json(report.to_json()) if json else typer.echo(str(report))


def _compress_run(run: Path, at_most: str, out: Path | None, *, table: str | None, **options: Any) -> None:
    from dubito.cli.changing import compress_run

    if out is None:
        raise typer.BadParameter("say where to write the smaller run", param_hint="'--out'")
    with interruptible("the run is as it was"):
        compress_run(run, at_most, out, table=None if table is None else Path(table), **options)
