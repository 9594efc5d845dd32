"""`dubito fit`, `predict` and `evaluate`: from a table to predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dubito.cli import arguments as args
from dubito.cli.failures import interruptible

_Table = Annotated[
    str,
    typer.Argument(
        metavar="TABLE", help="The table, a folder or .npz file of pictures, a data set by name; - for standard input."
    ),
]
_Target = Annotated[
    str | None, typer.Option("--target", metavar="COLUMN", help="The column to predict.  [default for pictures: label]")
]
_Method = Annotated[
    str | None,
    typer.Option("--method", metavar="METHOD", help="The method.  [default: auto(), the best on held-out rows]"),
]
_Model = Annotated[
    str, typer.Option("--model", metavar="NETWORK", help="A network by name, or a function: net.py:build.")
]
_Weights = Annotated[
    Path | None,
    typer.Option("--weights", metavar="FILE", help="Weights of the network (safetensors); it is not trained."),
]
_Likelihood = Annotated[
    str | None,
    typer.Option(
        "--likelihood",
        metavar="NAME",
        help="Noise model, such as poisson or student-t.  [default: chosen from the target]",
    ),
]
_NoiseColumn = Annotated[
    str | None,
    typer.Option("--noise-column", metavar="COLUMN", help="The known standard deviation of each row's target."),
]
_HeldOut = Annotated[
    float | None,
    typer.Option("--held-out", metavar="SHARE", help="The share of rows that is not trained on.  [default: 0.2]"),
]
_Scale = Annotated[
    bool | None,
    typer.Option(
        "--scale/--no-scale",
        help="Standardise numbers before the network sees them.  [default: --scale, but not for pictures]",
    ),
]


def fit(
    table: _Table,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="RUN", help="The folder to write.")],
    target: _Target = None,
    method: _Method = None,
    model: _Model = "mlp",
    weights: _Weights = None,
    likelihood: _Likelihood = None,
    noise_column: _NoiseColumn = None,
    risk: args.Risk = None,
    coverage: args.Coverage = 0.9,
    held_out: _HeldOut = None,
    epochs: args.Epochs = None,
    lr: args.Rate = None,
    batch_size: args.BatchSize = None,
    training: args.TrainingText = None,
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
    scale: _Scale = None,
    overwrite: args.Overwrite = False,
    config: args.Config = None,
    json: args.Json = False,
) -> None:
    """Fit a run."""
    from dubito.cli import options
    from dubito.cli.fitting import fit_run

    how = options.read_training(training, epochs=epochs, lr=lr, batch_size=batch_size)
    columns = args.TableOptions(target, task, sep, encoding, decimal, ignore, keep, categorical, date)
    with interruptible("the same command goes on from the last checkpoint, if there is one yet"):
        fit_run(
            table, columns, out, method=method, network=model, weights=weights, likelihood=likelihood,
            noise_column=noise_column, risk=risk, coverage=coverage, held_out=held_out, training=how, limit=limit,
            seed=seed, scale=scale, overwrite=overwrite, as_json=json,
        )  # fmt: skip


def predict(
    run: args.RunFolder,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The rows to predict; - for standard input.")],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="A .csv, .tsv or .parquet file; - for standard output.")
    ],
    risk: args.Risk = None,
    coverage: args.OtherCoverage = None,
    model: args.MovedModel = None,
    sep: args.Sep = None,
    encoding: args.Encoding = None,
    decimal: args.Decimal = None,
    config: args.Config = None,
    json: args.Json = False,
) -> None:
    """Predict the rows of a table."""
    from dubito.cli.fitting import predict_rows

    text = args.TableOptions(sep=sep, encoding=encoding, decimal=decimal).text()
    with interruptible("nothing was written"):
        predict_rows(run, table, out, model=model, risk=risk, coverage=coverage, text=text, as_json=json)


def evaluate(
    run: args.RunFolder,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Rows with the target column; - for standard input.")],
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Also write a report, an HTML page.")
    ] = None,
    model: args.MovedModel = None,
    sep: args.Sep = None,
    encoding: args.Encoding = None,
    decimal: args.Decimal = None,
    config: args.Config = None,
    json: args.Json = False,
) -> None:
    """Score the predictions for rows whose target is known."""
    from dubito.cli.fitting import evaluate_rows

    text = args.TableOptions(sep=sep, encoding=encoding, decimal=decimal).text()
    evaluate_rows(run, table, model=model, text=text, report=report, as_json=json)


def update(
    run: args.RunFolder,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="More rows with the target; - for standard input.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="RUN", help="Another folder.  [default: replace the run]")
    ] = None,
    epochs: args.Epochs = None,
    lr: args.Rate = None,
    batch_size: args.BatchSize = None,
    seed: args.Seed = 0,
    model: args.MovedModel = None,
    sep: args.Sep = None,
    encoding: args.Encoding = None,
    decimal: args.Decimal = None,
    overwrite: args.Overwrite = False,
    config: args.Config = None,
    json: args.Json = False,
) -> None:
    """Learn from more rows."""
    from dubito.cli import options
    from dubito.cli.changing import update_run

    text = args.TableOptions(sep=sep, encoding=encoding, decimal=decimal).text()
    how = options.read_training(None, epochs=epochs, lr=lr, batch_size=batch_size)
    with interruptible("the run is as it was"):
        update_run(run, table, out, model=model, text=text, training=how, seed=seed, overwrite=overwrite, as_json=json)


def export(
    run: args.RunFolder,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="An .onnx or .pt2 file.")],
    plain: Annotated[
        bool, typer.Option("--plain", help="The network alone; it takes features and returns logits or numbers.")
    ] = False,
    model: args.MovedModel = None,
    json: args.Json = False,
) -> None:
    """Write a run to one file for other programs, which takes rows and returns predictions with their uncertainty.

    A row is one number per column: a category is the place of its level, a date its days since 1970-01-01, and a
    missing cell NaN. The file's metadata list the columns and levels. It is compared with `dubito predict` on held-out
    rows before it is written.
    """
    from dubito.cli.changing import export_run

    export_run(run, out, plain=plain, model=model, as_json=json)
