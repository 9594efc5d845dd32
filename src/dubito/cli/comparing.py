"""`dubito compare` and `dubito demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dubito.cli import arguments as args
from dubito.cli.methods import METHODS

_Method = Annotated[
    list[str] | None, typer.Option(metavar="METHOD", help="A method; repeat for several.  [default: all methods above]")
]
_Likelihood = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Noise model: categorical for classes, gaussian for numbers.  [default: chosen from the target]",
    ),
]
_Seeds = Annotated[
    int, typer.Option(metavar="N", min=1, max=100_000, help="Number of repetitions with new initial weights.")
]
_Training = Annotated[
    str | None,
    typer.Option(
        metavar="SETTINGS", help='All training settings in one: "training(optimizer=sgd, lr=0.1, epochs=50)".'
    ),
]
_Split = Annotated[int, typer.Option(metavar="N", min=0, max=2**63 - 1, help="The number of the train/test split.")]
_Gap = Annotated[
    bool, typer.Option("--gap", help="UCI sets: test on the middle third of the feature with number --split.")
]
_LimitTest = Annotated[int | None, typer.Option(metavar="N", help="Use at most N test rows of each data set.")]
_Ood = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Unfamiliar data; the report shows how well it is flagged. Repeat for several."),
]


def demo(
    out: args.Out = Path("report.html"),
    fast: Annotated[
        bool, typer.Option("--fast", help="Fewer digits and too few epochs for good numbers; takes half a minute.")
    ] = False,
    seed: args.Seed = 0,
    json: args.Json = False,
) -> None:
    """Show on digits what a posterior is good for, and compare every method."""
    import torch

    from dubito.cli.delivery import deliver_all
    from dubito.cli.options import demo_data, demo_experiment
    from dubito.cli.output import note
    from dubito.cli.story import tell
    from dubito.core.atomic import check_place
    from dubito.core.randomness import Stream
    from dubito.uses.runs.networks import NetworkSource

    check_place(out, "The report")
    torch.set_num_threads(1)  # for networks this small, threads cost more than they save
    experiment = demo_experiment(seed, 1, fast)
    with Stream(seed).active():
        network = NetworkSource.of(experiment.model, experiment.dataset, experiment.likelihood).build()
    note("One network learns handwritten digits, and gets a posterior.")
    story = tell(demo_data(seed, fast), network, seed, epochs=10 if fast else None, progress=not json)
    for line in story.lines():
        note(line)
    note("")
    deliver_all([demo_experiment(seed, story.epochs, fast)], out, json, first=story.sections, ranked=True)


def compare(
    data: Annotated[str, typer.Option("--data", metavar="NAME|TABLE", help="The name of a data set, or a table.")],
    target: args.Target = None,
    model: Annotated[str, typer.Option(metavar="NETWORK", help="The network; see the list above.")] = "mlp",
    method: _Method = None,
    likelihood: _Likelihood = None,
    seeds: _Seeds = 3,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the training data; see above.")] = None,
    lr: args.Rate = None,
    batch_size: args.BatchSize = None,
    training: _Training = None,
    split: _Split = 0,
    gap: _Gap = False,
    limit: args.Limit = None,
    limit_test: _LimitTest = None,
    shifts: Annotated[bool, typer.Option("--shifts", help="Images: also test on corrupted images.")] = False,
    ood: _Ood = None,
    task: args.Task = None,
    sep: args.Sep = None,
    encoding: args.Encoding = None,
    decimal: args.Decimal = None,
    ignore: args.Ignore = None,
    keep: args.Keep = None,
    categorical: args.Categorical = None,
    date: args.Date = None,
    out: args.Out = Path("report.html"),
    json: args.Json = False,
) -> None:
    """Compare methods on a data set."""
    from dubito import data as datasets
    from dubito.cli import options
    from dubito.cli.delivery import Experiment, deliver
    from dubito.core.atomic import check_place
    from dubito.uses.runs.table_fit import likelihood_for

    check_place(out, "The report")
    recipes = options.read_methods(method or METHODS)
    chosen = options.read_training(training, epochs=epochs, lr=lr, batch_size=batch_size)
    table = args.TableOptions(target, task, sep, encoding, decimal, ignore, keep, categorical, date)
    dataset = options.read_data(data, table, split=split, gap=gap, limit=limit, limit_test=limit_test)
    experiment = Experiment(
        dataset,
        model=model,
        recipes=recipes,
        likelihood=likelihood_for(likelihood, dataset),
        training=chosen,
        num_seeds=seeds,
        ood=options.foreign(ood or (), dataset, limit_test),
        shifts=datasets.shifts(dataset) if shifts else {},
    )
    experiment.check()
    deliver(experiment, out, json)
