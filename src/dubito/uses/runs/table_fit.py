"""Fit a run: from a table to a posterior whose intervals and decisions are calibrated on held-out rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dubito
from dubito.beliefs import likelihoods
from dubito.beliefs.likelihoods import Dirichlet, Gaussian, HeteroscedasticGaussian, Likelihood, Ordinal, Quantile
from dubito.beliefs.likelihoods.kinds import ClassLikelihood, RegressionLikelihood
from dubito.core import grammar
from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError
from dubito.core.randomness import Stream
from dubito.data import DataSet, Pair, Standardizer, TableTransform, load_table
from dubito.data.columns import NumberColumn
from dubito.data.tables import as_table, with_target
from dubito.fitting.checks import outputs_of
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.uses.runs.default import default_recipe, fit_posterior
from dubito.uses.runs.networks import IN_MEMORY, NetworkSource, load_weights
from dubito.uses.runs.run import TableRun, Texts, calibrated

# The share of the rows that calibrates decisions; more of a small table, for intervals need nine rows at least.
HELD_OUT, FEWEST_HELD_OUT, MOST_HELD_OUT = 0.2, 10, 1 / 3
VALIDATION = 0.1
# How many training rows a run keeps, to show those that are nearest to a new one.
KEPT_TRAINING = 1000

_TEXT = ("separator", "encoding", "decimal")


@checked_arguments
def fit(
    table: Any,
    target: str,
    *,
    recipe: Recipe | None = None,
    network: str = "mlp",
    weights: str | os.PathLike[str] | None = None,
    likelihood: str | Likelihood | None = None,
    noise_column: str | None = None,
    training: Mapping[str, Any] | None = None,
    coverage: float = 0.9,
    risk: float | None = None,
    held_out: float | None = None,
    validation: float = VALIDATION,
    seed: int = 0,
    progress: bool = True,
    **columns: Any,
) -> TableRun:
    """Train a network on a table, find its posterior, and calibrate its decisions.

    A part of the rows is held out: it is not trained on, but scores the predictions and sets the width of intervals and
    the thresholds of decisions. Another part, for validation, chooses settings such as the prior precision.

    Args:
        table: A pandas frame, a dict of columns, a `Table`, or the path of a file.
        target: The column to predict.
        recipe: How to find the posterior; by default `Auto` chooses the method that predicts held-out rows best.
        network: A network by name, such as ``"mlp(hidden=[50, 50])"``, or a function ``"net.py:build"``, which is
            called with the numbers of inputs and outputs.
        weights: A safetensors file with the weights of the network, which is then not trained.
        likelihood: The likelihood, or its name; by default chosen from the target.
        noise_column: The column with the known standard deviation of each row's target, in the target's unit. Rows to
            predict need it, too: it is the noise of the measurement that is predicted.
        training: Training settings in place of the recipe's own, such as ``{"epochs": 50}``.
        coverage: The probability with which an interval holds the truth.
        risk: The largest risk of an answer: an error rate, or for numbers a mean absolute error in original units.
            Without one only unfamiliar rows are to be asked about.
        held_out: The share of the rows to hold out; by default a fifth, and more of a small table.
        validation: The share of the other rows that chooses settings.
        seed: The seed of all randomness.
        progress: Whether to show progress bars on a terminal.
        columns: What the columns are, and how a text file is written; see `dubito.data.load_table`.
    """
    rows = with_target(as_table(table, **{name: columns.pop(name, None) for name in _TEXT}), target)
    columns["task"] = columns.get("task") or implied_task(likelihood)
    if noise_column is not None:
        columns["keep"] = (*columns.get("keep", ()), noise_column)  # many different numbers look like an id
    dataset = load_table(
        rows, target, test=share_held_out(len(rows)) if held_out is None else held_out, validation=validation,
        generator=torch.Generator().manual_seed(seed), **columns,
    )  # fmt: skip
    return fit_dataset(
        dataset, recipe=recipe, network=network, weights=weights, likelihood=likelihood, noise_column=noise_column,
        training=training, coverage=coverage, risk=risk, seed=seed, progress=progress,
    )  # fmt: skip


def fit_dataset(
    dataset: DataSet,
    *,
    recipe: Recipe | None = None,
    network: str | nn.Module = "mlp",
    weights: str | os.PathLike[str] | None = None,
    likelihood: str | Likelihood | None = None,
    noise_column: str | None = None,
    training: Mapping[str, Any] | None = None,
    coverage: float = 0.9,
    risk: float | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    progress: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> TableRun:
    """Fit a run to a table that `dubito.data.load_table` has loaded; its test part is held out.

    An interrupted fit continues from the file `checkpoint`, which is removed in the end. `settings` is what else to
    remember of how the run was made. The other arguments are those of `fit`.
    """
    recipe = recipe or default_recipe(dataset, trained=weights is not None)
    chosen = likelihood_for(likelihood, dataset)
    if isinstance(chosen, RegressionLikelihood) and not chosen.standardizes:
        dataset = unscaled(dataset, chosen)
    noise = None
    if noise_column is not None:
        chosen = noise_likelihood(chosen)
        dataset, noise = with_noise_column(dataset, noise_column)
        if not isinstance(network, str):
            raise InputError("With a noise column the network is built for the other columns: give it by name.")
    source = NetworkSource.of(network if isinstance(network, str) else IN_MEMORY, dataset, chosen, noise)
    made = new_network(source, seed) if isinstance(network, str) else network
    if weights is not None:
        load_weights(made, Path(weights))
    check_network(made, dataset, chosen)
    posterior = fit_posterior(
        recipe, made, dataset, chosen, trained=weights is not None, training=training, checkpoint=checkpoint,
        seed=seed, progress=progress,
    )  # fmt: skip
    remembered = {
        "dubito": dubito.__version__, "name": repr(recipe), "recipe": repr(recipe), "likelihood": repr(chosen),
        "training": dict(training or {}), "seed": seed, "coverage": coverage, "risk": risk,
        "weights": None if weights is None else os.fspath(weights), "noise_column": noise_column,
        **facts_of(dataset, posterior), **(settings or {}),
    }  # fmt: skip
    parts, texts = kept_rows(dataset, seed)
    assert isinstance(dataset.encoder, TableTransform)
    run = replace(calibrated(posterior, dataset.encoder, source, parts, remembered), texts=texts)
    warn_if_useless(run, dataset)
    return run


def facts_of(dataset: DataSet, posterior: Posterior) -> dict[str, Any]:
    """Return what to remember of the table and of the choice of the method."""
    rows = {part: len(pair[1]) for part, pair in dataset.parts.items()}
    found: dict[str, Any] = {"table": dataset.name, "rows": rows}
    if posterior.explanation is not None:
        found["chosen"] = posterior.explanation.words
    if dataset.description is not None and dataset.description.dialect is not None:
        found["dialect"] = asdict(dataset.description.dialect)
    return found


def kept_rows(dataset: DataSet, seed: int) -> tuple[dict[str, Pair], dict[str, Texts]]:
    """Return the rows that a run keeps, by part: held-out and validation rows, some training rows; and their texts."""
    chosen = sample_rows(len(dataset.train[1]), seed)
    parts = {"held_out": dataset.test, "train": take_rows(dataset.train, chosen)} | (
        {"validation": dataset.validation} if dataset.validation else {}
    )
    texts = {"train": take_texts(dataset.texts.get("train", {}), chosen), "held_out": dataset.texts.get("test", {})}
    return parts, texts


def sample_rows(num_rows: int, seed: int) -> Tensor:
    """Return at most `KEPT_TRAINING` rows, drawn at random; they are compared with new rows, and not learnt from."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[:KEPT_TRAINING]


def take_rows(pair: Pair, rows: Tensor) -> Pair:
    """Return some rows of a pair."""
    return pair[0][rows], pair[1][rows]


def take_texts(texts: Texts, rows: Tensor) -> Texts:
    """Return the texts of some rows."""
    return {name: [column[row] for row in rows.tolist()] for name, column in texts.items()}


def share_held_out(num_rows: int) -> float:
    """Return the share of rows to hold out: a fifth, but at least ten rows as long as that is at most a third."""
    return max(HELD_OUT, min(MOST_HELD_OUT, FEWEST_HELD_OUT / max(num_rows, 1)))


def new_network(source: NetworkSource, seed: int) -> nn.Module:
    """Return the network with initial weights drawn from a seed."""
    with Stream(seed, libraries=True).active():
        return source.build()


def likelihood_for(likelihood: str | Likelihood | None, dataset: DataSet) -> Likelihood:
    """Return the likelihood, given as such or as text, or the default for the data set's task."""
    if likelihood is None:
        return likelihoods.resolve("categorical" if dataset.task == "classification" else "gaussian")
    found = _read_likelihood(likelihood)
    if isinstance(found, ClassLikelihood) != (dataset.task == "classification"):
        raise InputError(
            f"The likelihood '{likelihood}' does not fit '{dataset.name}', which is a {dataset.task} data set."
        )
    if isinstance(found, Dirichlet):
        raise InputError(
            f"A Dirichlet likelihood needs two target columns or more, shares that sum to 1, but {dataset.name!r} has "
            "one: fit a network to tensors instead, as in MAP().fit(network, (x, shares), likelihood='dirichlet')."
        )
    if isinstance(found, Ordinal) and not all(map(_is_number, dataset.class_names)):
        raise InputError(
            f"An ordinal likelihood needs classes whose order is known, but they are {', '.join(dataset.class_names)}: "
            "write them as numbers in ascending order, such as 1, 2 and 3."
        )
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def implied_task(likelihood: str | Likelihood | None) -> str | None:
    """Return that a likelihood of numbers makes a regression: a few different counts would look like classes."""
    if likelihood is None or isinstance(_read_likelihood(likelihood), ClassLikelihood):
        return None
    return "regression"


def _read_likelihood(likelihood: str | Likelihood) -> Likelihood:
    found: Any = likelihood
    if isinstance(likelihood, str):
        found = grammar.parse(likelihood, "likelihoods") if "(" in likelihood else likelihoods.resolve(likelihood)
    if not isinstance(found, Likelihood):
        raise InputError(
            f"'{likelihood}' is not a likelihood; write one of {', '.join(likelihoods.NAMES)}, or a call such as "
            "student-t(dof=5)."
        )
    return found


def unscaled(dataset: DataSet, likelihood: Likelihood) -> DataSet:
    """Return the data set with targets in original units; counts must be whole numbers."""
    encoder, scale = dataset.encoder, dataset.target_scale
    assert isinstance(encoder, TableTransform)
    assert scale is not None
    parts = {}
    for name, (inputs, targets) in dataset.parts.items():
        values = scale.decode(targets.double())
        if not likelihood.is_count:
            parts[name] = inputs, values.to(targets.dtype)
            continue
        if not bool(((values - values.round()).abs() < 1e-3).all()) or float(values.min()) < -0.5:
            wrong = values[((values - values.round()).abs() >= 1e-3) | (values < -0.5)]
            raise InputError(f"Counts are whole numbers of at least 0, but {encoder.target!r} holds {wrong[0]:g}.")
        parts[name] = inputs, values.round().to(targets.dtype)
    plain = Standardizer(torch.zeros_like(scale.loc), torch.ones_like(scale.scale))
    return replace(dataset, parts=parts, target_scale=plain, encoder=replace(encoder, target_loc=0.0, target_scale=1.0))


def check_network(network: nn.Module, dataset: DataSet, likelihood: Likelihood) -> None:
    """Raise, before any work is done, if data, network and likelihood do not fit together."""
    inputs, targets = dataset.train
    likelihood.check(outputs_of(network, inputs[:2]), targets[:2])


def warn_if_useless(run: TableRun, dataset: DataSet) -> None:
    """Warn if the predictions for held-out rows are worse than the same answer for every row."""
    if isinstance(run.unguarded.likelihood, Quantile):
        return  # its density describes no data, so that of a constant says nothing of it
    targets, held_out = dataset.train[1], dataset.test[1]
    if run.task == "classification":
        shares = torch.bincount(targets, minlength=len(run.encoder.class_names)).double() + 1
        constant = -float((shares / shares.sum()).log()[held_out].mean())
    else:
        scale = float(run.encoder.target_scale)
        spread = torch.distributions.Normal(targets.double().mean(), targets.double().std().clamp_min(1e-12))
        constant = -float(spread.log_prob(held_out.double()).mean()) + torch.tensor(scale).log().item()
    found = run.scores.scores["nll"]
    if not found <= constant:
        warnings.warn(
            f"The predictions for held-out rows are worse (NLL {found:.4g}) than one answer for every row "
            f"({constant:.4g}): the inputs may say nothing about {run.target!r}, the training may have failed, or "
            "weights that were given may belong to other inputs.",
            stacklevel=3,
        )


def with_noise_column(dataset: DataSet, name: str) -> tuple[DataSet, tuple[int, float, float]]:
    """Return the data set whose encoder knows the noise, and the noise's feature, centre and unit.

    Centre and unit are in standard deviations of the target; see `NoiseColumn`.

    Args:
        dataset: The table.
        name: The column: a positive standard deviation in every row, in the unit of the target.
    """
    encoder = dataset.encoder
    if not isinstance(encoder, TableTransform):
        raise InputError("Only the rows of a table have a noise column: leave `noise_column` out.")
    if dataset.task != "regression":
        raise InputError(f"Only numbers have noise, but the target {encoder.target!r} has classes.")
    column = next((each for each in encoder.columns if each.name == name), None)
    if column is None:
        raise InputError(
            f"The noise column {name!r} is not in use; the table's inputs are {', '.join(encoder.column_names)}. A "
            "noise that is the same in all rows is a likelihood: gaussian(noise=...)."
        )
    if not isinstance(column, NumberColumn) or column.boolean:
        raise InputError(f"The noise column {name!r} must hold positive numbers, the standard deviations of targets.")
    if column.indicator:
        raise InputError(f"The noise column {name!r} has missing values: leave those rows out.")
    if len(encoder.columns) == 1:
        raise InputError(f"The table has no inputs beside the noise column {name!r}.")
    place = encoder.spans()[name].start
    least = min(float(inputs[:, place].min()) for inputs, _ in dataset.parts.values() if len(inputs))
    if least * column.scale + column.loc <= 1e-6 * column.scale:
        found = f"{least * column.scale + column.loc:.4g}"
        raise InputError(f"The noise column {name!r} must be positive, but a row holds {found}.")
    marked = tuple(replace(each, noise=True) if each is column else each for each in encoder.columns)
    used = replace(dataset, encoder=replace(encoder, columns=marked))
    return used, (place, column.loc / encoder.target_scale, column.scale / encoder.target_scale)


def noise_likelihood(likelihood: Likelihood) -> Likelihood:
    """Return the likelihood of data with known noise; raise for one that has other noise."""
    is_default = isinstance(likelihood, Gaussian) and isinstance(likelihood.noise, str)
    if not is_default and not isinstance(likelihood, HeteroscedasticGaussian):
        raise InputError(f"A noise column is the noise of a Gaussian likelihood, not of {likelihood!r}: drop one.")
    return HeteroscedasticGaussian()
