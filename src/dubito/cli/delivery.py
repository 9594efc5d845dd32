"""The experiment that a command line describes, and its results: a table or JSON, and a report; Ctrl-C keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from torch import Tensor, nn

import dubito
from dubito.beliefs.likelihoods import Likelihood
from dubito.cli.failures import FAILURE, INTERRUPTED, exit_code
from dubito.cli.output import command_line, note, print_columns, print_json
from dubito.core.errors import DubitoError
from dubito.data import DataSet
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.uses.comparison import Comparison, Failure, Run, compare
from dubito.uses.comparison.compare import Fits
from dubito.uses.reporting.page import write_page
from dubito.uses.reporting.parts import Section
from dubito.uses.reporting.verdict import equal_to_the_first
from dubito.uses.runs.default import training_for
from dubito.uses.runs.networks import NetworkSource
from dubito.uses.runs.table_fit import check_network


def deliver(experiment: Experiment, out: Path, as_json: bool) -> None:
    """Run an experiment; print its table or JSON, write its report, and exit with the code that fits."""
    deliver_all([experiment], out, as_json)


def deliver_all(
    experiments: Sequence[Experiment], out: Path, as_json: bool, *, first: Sequence[Section] = (), ranked: bool = False
) -> None:
    """Do the same for several experiments with the same methods.

    Args:
        experiments: The experiments, such as the same one on several splits of the data.
        out: The report.
        as_json: Whether JSON is printed.
        first: Sections that follow the verdict of the report.
        ranked: Whether the best method comes first.
    """
    experiment = experiments[0]
    outcomes: list[Run | Failure] = []

    def take(outcome: Run | Failure) -> None:
        outcomes.append(outcome)
        if isinstance(outcome, Run):
            words = f"fitted in {outcome.fit_seconds:.1f} s, evaluated in {outcome.evaluate_seconds:.1f} s"
        else:
            words = f"failed. {outcome.error}"
        seed = "" if experiment.seeds else f", seed {outcome.seed + 1} of {experiment.num_seeds}"
        note(f"  {outcome.name}{seed}: {words}")

    interrupted = False
    note(_opening(experiment))
    try:
        for each in experiments:
            experiment = each
            each.run(take)
    except KeyboardInterrupt:
        interrupted = True
        note(f"interrupted; {'what was finished is kept' if outcomes else 'nothing was finished'}")
    except DubitoError:
        if not outcomes:
            raise
    comparison = Comparison.of(outcomes).best_first() if ranked else Comparison.of(outcomes)
    if comparison.runs:
        write_page(
            comparison.evaluations, out, data_name=experiment.dataset.name, command=command_line(),
            facts=experiments[0].facts(), first=first,
        )  # fmt: skip
    if as_json:
        print_json({**_header(experiment, interrupted), **comparison.to_json()})
    elif comparison.runs:
        print_columns(list(comparison.evaluations), comparison.columns())
    if comparison.runs:
        _tell_equal(comparison, ranked)
        note(f"the report is in {out}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    _tell_untrusted(comparison)
    if comparison.failures:
        raise typer.Exit(FAILURE if comparison.runs else exit_code(comparison.failures[0].error))


def _tell_equal(comparison: Comparison, ranked: bool) -> None:
    """Name the methods that cannot be told from the best one by these data."""
    methods = comparison.evaluations
    equal = equal_to_the_first(methods) if ranked else []
    if equal:
        note(
            f"the order by NLL is partly chance: on these {next(iter(methods.values()))[0].count:,} targets, "
            f"{len(equal)} methods cannot be told from {next(iter(methods))} (two standard errors): {', '.join(equal)}"
        )


def _tell_untrusted(comparison: Comparison) -> None:
    """Name the methods whose predictions cannot be trusted; the exit code says only whether they were compared."""
    methods = comparison.evaluations
    bad = [name for name, runs in methods.items() if any(run.trust and run.trust.verdict == "no" for run in runs)]
    if bad:
        note(f"do not trust these, the report says why: {'; '.join(bad)}")


def _header(experiment: Experiment, interrupted: bool) -> dict[str, object]:
    dataset = experiment.dataset
    rows = {part: len(targets) for part, (_, targets) in dataset.parts.items()}
    return {
        "dubito": dubito.__version__,
        "finished": not interrupted,
        "data": {"name": dataset.name, "task": dataset.task, "rows": rows},
        "model": experiment.model,
        "likelihood": repr(experiment.likelihood),
    }


def _opening(experiment: Experiment) -> str:
    dataset = experiment.dataset
    sizes = ", ".join(f"{len(pair[1]):,} {part}" for part, pair in dataset.parts.items())
    return f"{dataset.name} ({dataset.task}; {sizes}) with {experiment.model}"


@dataclass(frozen=True, eq=False)
class Experiment:
    """What to compare, and on what.

    Attributes:
        dataset: The data; methods are fitted on its training part and evaluated on its test part.
        model: The network, as `dubito.models.build` reads it.
        recipes: The methods.
        likelihood: The likelihood.
        training: The training settings that were chosen; the others are each recipe's own.
        num_seeds: How often everything is repeated, with other initial weights and other randomness.
        ood: Out-of-distribution data by name.
        shifts: Shifted versions of the test part, as `dubito.data.shifts` makes them.
        seeds: The seeds, if they are not the first `num_seeds`.
        names: Readable names of the methods; by default they are named as they are typed.
    """

    dataset: DataSet
    model: str
    recipes: tuple[Recipe, ...]
    likelihood: Likelihood
    training: Mapping[str, Any] = field(default_factory=dict)
    num_seeds: int = 1
    ood: Mapping[str, Any] = field(default_factory=dict)
    shifts: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None

    def run(self, progress: Callable[[Run | Failure], None]) -> None:
        """Compare the methods; `progress` is called with every outcome."""
        data, names = self.dataset, self.names or tuple(repr(recipe) for recipe in self.recipes)
        compare(
            self.network, data.train, dict(zip(names, self.recipes, strict=True)), test=data.test,
            seeds=self.seeds or self.num_seeds, likelihood=self.likelihood, validation=data.validation,
            training=self.training_of, ood=self.ood, shifts=self.shifts, target_scale=data.target_scale,
            decode=self.decode, class_names=data.class_names, progress=progress,
        )  # fmt: skip

    def posterior(self, recipe: Recipe, seed: int) -> Posterior:
        """Fit one method; a network that it needs trained is trained first."""
        data = self.dataset
        fits = Fits(self.network, data.train, self.likelihood, data.validation, self.training_of)
        return fits.of_seed(seed).fit(recipe)[0]

    def check(self) -> None:
        """Raise, before any work is done, if data, network and likelihood do not fit together."""
        check_network(self.network(seed=0), self.dataset, self.likelihood)

    def decode(self, inputs: Tensor) -> Any:
        """Return inputs as a person recognizes them: pictures, texts, or columns in their own units."""
        found = self.dataset.encoder.decode(inputs)
        names = self.dataset.feature_names
        if isinstance(found, Tensor) and found.ndim == 2 and len(names) == found.shape[1]:
            return dict(zip(names, found.double().round(decimals=6).T.tolist(), strict=True))
        return found

    def facts(self) -> dict[str, str]:
        """Return what was run, for a report."""
        parts = ", ".join(f"{len(targets):,} {part}" for part, (_, targets) in self.dataset.parts.items())
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.training.items())
        return {
            "Data": f"{self.dataset.name}: {parts}",
            "Network": self.model,
            "Likelihood": repr(self.likelihood),
            "Training": chosen or "the defaults of each method",
            "Seeds": ", ".join(map(str, self.seeds)) if self.seeds else f"0 to {self.num_seeds - 1}",
        }

    def network(self, seed: int) -> nn.Module:
        """Return the network with new initial weights; the caller seeds the global generators."""
        return NetworkSource.of(self.model, self.dataset, self.likelihood).build()

    def training_of(self, recipe: Recipe) -> Training:
        """Return the training settings of a recipe: what was chosen, else its own."""
        return training_for(recipe, self.training)
