"""The arguments and options that several commands share, each with its help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dubito.cli.configuration import read_config

Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write the report to.")]

Target = Annotated[str | None, typer.Option("--target", metavar="COLUMN", help="The column of the table to predict.")]
Task = Annotated[
    str | None,
    typer.Option("--task", metavar="TASK", help="classification or regression.  [default: chosen from the target]"),
]
Sep = Annotated[
    str | None,
    typer.Option("--sep", metavar="CHARACTER", help="What separates the cells of a text file; tab for tabs."),
]
Encoding = Annotated[
    str | None, typer.Option("--encoding", metavar="NAME", help="The encoding of a text file, such as latin-1.")
]
Decimal = Annotated[str | None, typer.Option("--decimal", metavar="MARK", help="The decimal mark: '.' or ','.")]
Ignore = Annotated[
    list[str] | None, typer.Option("--ignore", metavar="COLUMN", help="A column to leave out; repeat for several.")
]
Keep = Annotated[
    list[str] | None, typer.Option("--keep", metavar="COLUMN", help="A column to use although it looks like an id.")
]
Categorical = Annotated[
    list[str] | None,
    typer.Option("--categorical", metavar="COLUMN", help="A column of numbers that are names of categories."),
]
Date = Annotated[
    list[str] | None,
    typer.Option("--date", metavar="COLUMN=FORMAT", help='A column of dates, as "sold=%d.%m.%Y"; most are recognised.'),
]

Epochs = Annotated[int | None, typer.Option("--epochs", metavar="N", help="Passes over the training data.")]
Rate = Annotated[float | None, typer.Option("--lr", metavar="RATE", help="The learning rate.")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", metavar="N", help="Examples per training step.")]
Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", help="Use at most N rows for training and validation.")
]
TrainingText = Annotated[
    str | None,
    typer.Option(
        "--training", metavar="SETTINGS", help='All training settings in one: "training(optimizer=sgd, lr=0.1)".'
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="The random seed.")]

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `dubito fit` wrote.")]
Risk = Annotated[
    float | None,
    typer.Option(
        "--risk", metavar="RISK", help="The largest error rate of answers, or for numbers their mean absolute error."
    ),
]
Coverage = Annotated[
    float, typer.Option("--coverage", metavar="SHARE", help="How often an interval holds the true number.")
]
OtherCoverage = Annotated[
    float | None, typer.Option("--coverage", metavar="SHARE", help="The coverage of intervals.  [default: the run's]")
]
MovedModel = Annotated[
    str | None,
    typer.Option("--model", metavar="FILE:FUNCTION", help="The network's function, if its file moved or changed."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run that is there already.")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", is_eager=True, callback=read_config,
        help="A .yaml, .toml or .json file with options; those that are typed take precedence.",
    ),
]  # fmt: skip


@dataclass(frozen=True)
class TableOptions:
    """How a table is written, and what its columns are, as the options of a command say."""

    target: str | None = None
    task: str | None = None
    sep: str | None = None
    encoding: str | None = None
    decimal: str | None = None
    ignore: Sequence[str] | None = None
    keep: Sequence[str] | None = None
    categorical: Sequence[str] | None = None
    date: Sequence[str] | None = None

    def text(self) -> dict[str, Any]:
        """Return how a text file is written, as `data.read_table` takes it."""
        separator = "\t" if self.sep in ("tab", "\\t") else self.sep
        return {"separator": separator, "encoding": self.encoding, "decimal": self.decimal}

    def columns(self) -> dict[str, Any]:
        """Return what the columns are, as `data.load_table` takes it."""
        return {
            "task": _task(self.task),
            "ignore": tuple(self.ignore or ()),
            "keep": tuple(self.keep or ()),
            "categorical": tuple(self.categorical or ()),
            "dates": _dates(self.date or ()),
        }

    @property
    def given(self) -> list[str]:
        """The options that were given, as they are typed."""
        return [f"--{name}" for name, value in vars(self).items() if value]


def _task(text: str | None) -> str | None:
    if text not in (None, "classification", "regression"):
        raise typer.BadParameter(f"'{text}' is neither classification nor regression", param_hint="'--task'")
    return text


def _dates(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        column, equals, form = text.partition("=")
        if not (column and equals and form):
            raise typer.BadParameter(f"'{text}' is not COLUMN=FORMAT, such as sold=%d.%m.%Y", param_hint="'--date'")
        found[column] = form
    return found
