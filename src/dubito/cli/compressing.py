"""`dubito compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dubito.cli import arguments as args


def compress(
    data: Annotated[str, typer.Option("--data", metavar="NAME|TABLE", help="The name of a data set, or a table.")],
    target: args.Target = None,
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
    epochs: args.Epochs = None,
    lr: args.Rate = None,
    batch_size: args.BatchSize = None,
    limit: args.Limit = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The random seed.")] = 0,
    task: args.Task = None,
    sep: args.Sep = None,
    encoding: args.Encoding = None,
    decimal: args.Decimal = None,
    ignore: args.Ignore = None,
    keep: args.Keep = None,
    categorical: args.Categorical = None,
    date: args.Date = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the compressed network to this file.")] = None,
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="Export it to an .onnx or .pt2 file.")] = None,
    json: args.Json = False,
) -> None:
    """Train a network and compress it."""
    from dubito.cli import options
    from dubito.cli.fit_and_compress import fit_and_compress, read_rule
    from dubito.cli.output import print_json
    from dubito.core.atomic import check_place

    for path in (save, export):
        if path is not None:
            check_place(path, "The network")
    chosen = options.read_training(None, epochs=epochs, lr=lr, batch_size=batch_size)
    wanted = read_rule(rule)
    table = args.TableOptions(target, task, sep, encoding, decimal, ignore, keep, categorical, date)
    dataset = options.read_data(data, table, split=0, gap=False, limit=limit, limit_test=None)
    made = fit_and_compress(
        dataset, model=model, method=method, rule=wanted, structure=structure, training=chosen, finetune=finetune,
        seed=seed,
    )  # fmt: skip
    report = made.report(dataset.test, feature_names=dataset.feature_names, target_scale=dataset.target_scale)
    if save is not None:
        made.save(save)
    if export is not None:
        made.export(export)
    print_json(report.to_json()) if json else typer.echo(str(report))
