"""`dubito compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dubito.cli import arguments as args
from dubito.cli.failures import interruptible

_Data = Annotated[
    str | None, typer.Option("--data", metavar="NAME|TABLE", help="A data set by name, or a table; see above.")
]
_AtMost = Annotated[
    str | None, typer.Option("--at-most", metavar="SHARE", help="With RUN: what it may cost.  [default: 0.5%]")
]
_Explore = Annotated[
    bool, typer.Option("--explore", help="With RUN: measure twenty smaller networks, and draw them in a page.")
]
_Pick = Annotated[int | None, typer.Option(metavar="N", min=1, max=20, help="With RUN: make candidate N of --explore.")]
_Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="RUN", help="With RUN: the folder to write.")]
_Method = Annotated[
    str | None, typer.Option(metavar="METHOD", help="The method that finds the posterior.  [default: see above]")
]
_Rule = Annotated[
    str | None, typer.Option(metavar="RULE", help="Which weights to remove.  [default: chosen from the posterior]")
]
_Structure = Annotated[
    str | None,
    typer.Option(metavar="WHAT", help="Remove 'weights' or 'units'.  [default: units of a RUN, else weights]"),
]
_Save = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Save it to one file; of a table, `dubito predict` reads it.")
]
_OutPage = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="With --data or --explore: the page to write.")
]


def compress(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A folder that `dubito fit` wrote.")] = None,
    data: _Data = None,
    target: args.Target = None,
    at_most: _AtMost = None,
    explore: _Explore = False,
    pick: _Pick = None,
    out: _Out = None,
    model: Annotated[str | None, typer.Option(metavar="NETWORK", help="The network.  [default: mlp]")] = None,
    method: _Method = None,
    rule: _Rule = None,
    structure: _Structure = None,
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
    save: _Save = None,
    out_page: _OutPage = None,
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="Export it to an .onnx or .pt2 file.")] = None,
    overwrite: args.Overwrite = False,
    config: args.Config = None,
    json: args.Json = False,
) -> None:
    """Compress the network of a run, or train a network and compress it."""
    table = args.TableOptions(target, task, sep, encoding, decimal, ignore, keep, categorical, date)
    training = {"epochs": epochs, "lr": lr, "batch_size": batch_size}
    common: dict[str, Any] = {"rule": rule, "method": method, "model": model, "seed": seed, "as_json": json}
    made: dict[str, Any] = {"structure": structure, "finetune": finetune, "save": save, "export": export}
    if run is not None:
        if table != args.TableOptions() or any(each is not None for each in (limit, *training.values())):
            raise typer.BadParameter("a RUN knows its table and training: leave out options of these, such as --target")
        common["table"] = None if data is None else Path(data)
        if explore:
            _explore(run, out_page, {"--pick": pick, "--out": out, "--at-most": at_most, **made}, common)
        elif out_page is not None:
            raise typer.BadParameter("the report of a RUN is written to the folder of --out", param_hint="'--report'")
        else:
            _compress_run(run, at_most, out, candidate=pick, overwrite=overwrite, **made, **common)
        return
    for option, value in (("--at-most", at_most), ("--out", out), ("--explore", explore or None), ("--pick", pick)):
        if value is not None:
            raise typer.BadParameter("it is for a RUN, which was not given", param_hint=f"'{option}'")
    if data is None:
        raise typer.BadParameter("give a RUN that `dubito fit` wrote, or --data", param_hint="'RUN'")
    from dubito.cli.shrinking import compress_data

    compress_data(data, table, training, limit=limit, page=out_page, **made, **common)


def _explore(run: Path, page: Path | None, others: dict[str, Any], options: dict[str, Any]) -> None:
    from dubito.cli.shrinking import explore_run

    for name, value in others.items():
        if value:
            raise typer.BadParameter(f"it only measures: leave out --{name.strip('-')}", param_hint="'--explore'")
    with interruptible("the run is as it was"):
        explore_run(run, page, **options)


def _compress_run(run: Path, at_most: str | None, out: Path | None, **options: Any) -> None:
    from dubito.cli.shrinking import compress_run

    if out is None and options["save"] is None and options["export"] is None:
        raise typer.BadParameter("say where to write the smaller run", param_hint="'--out'")
    with interruptible("the run is as it was"):
        compress_run(run, at_most, out, **options)
