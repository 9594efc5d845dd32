"""Read the options of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dubito import data
from dubito.beliefs.likelihoods import Categorical
from dubito.cli.arguments import TableOptions
from dubito.cli.delivery import Experiment
from dubito.cli.methods import METHODS
from dubito.cli.output import note_description
from dubito.core import grammar
from dubito.core.errors import InputError
from dubito.data import DataSet, Pair
from dubito.data.table_files import OTHER_SUFFIXES, STANDARD_INPUT, TEXT_SUFFIXES
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training


def demo_data(seed: int, fast: bool = False) -> DataSet:
    """Return the data of `dubito demo`, whose split changes with the seed."""
    return data.load("digits", split=seed, limit=500 if fast else 1200, validation=0.25)


def demo_experiment(seed: int, epochs: int, fast: bool = False) -> Experiment:
    """Return the comparison of `dubito demo`: every method on a few hundred digits, for the same number of epochs."""
    dataset = demo_data(seed, fast)
    return Experiment(
        dataset,
        model="mlp(hidden=[100])" if fast else "mlp(hidden=[300, 100])",
        recipes=read_methods(METHODS),
        likelihood=Categorical(),
        training={"epochs": epochs},
        seeds=(seed,),
        ood={"scrambled digits": scrambled(dataset.test)},
        shifts=data.shifts(dataset, ["rotation", "noise"], (1, 3, 5)),
        names=tuple(METHODS.values()),
    )


def read_methods(texts: Iterable[str]) -> tuple[Recipe, ...]:
    """Return the recipes that the texts describe; raise if a recipe is given twice."""
    recipes: list[Recipe] = []
    for text in texts:
        recipe = grammar.parse(text)
        if not isinstance(recipe, Recipe):
            raise InputError(f"'{text}' is not a method; write one such as \"map()\".")
        if recipe in recipes:
            raise InputError(f"The method {recipe!r} is given twice; drop one.")
        recipes.append(recipe)
    return tuple(recipes)


def read_data(
    name: str, table: TableOptions, *, split: int, gap: bool, limit: int | None, limit_test: int | None
) -> DataSet:
    """Return a data set by name, or one made of a table."""
    if not is_table(name):
        if table.given:
            raise InputError(f"{table.given[0]} is for tables; '{name}' is the name of a data set.")
        return data.load(name, split=split, gap=gap, limit=limit, limit_test=limit_test)
    if gap or limit_test is not None:
        raise InputError(f"{'--gap' if gap else '--limit-test'} is for data sets by name, not for tables; drop it.")
    return read_table(name, table, limit=limit, generator=torch.Generator().manual_seed(split))


def read_table(name: str, table: TableOptions, *, rows: data.Table | None = None, **how: Any) -> DataSet:
    """Return the data set that a table makes, and say what was understood of its columns."""
    rows = data.read_table(name, **table.text()) if rows is None else rows
    if table.target is None:
        columns = ", ".join(rows.names)
        raise InputError(f"Give the column of '{name}' to predict as --target; its columns are: {columns}.")
    dataset = data.load_table(rows, table.target, **table.columns(), **how)
    assert dataset.description is not None
    named = "standard input" if name == STANDARD_INPUT else Path(name).name
    note_description(named, dataset.description)
    return replace(dataset, name=named)


def is_table(name: str) -> bool:
    """Return whether text that stands for data means a file, and not a data set by name."""
    if name in data.names():
        return False
    try:
        exists = Path(name).exists()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        exists = False
    return exists or name == STANDARD_INPUT or name.lower().endswith((*TEXT_SUFFIXES, *OTHER_SUFFIXES, ".gz", ".xls"))


def read_training(text: str | None, **chosen: Any) -> dict[str, Any]:
    """Return the chosen training settings by name; single options take precedence over `text`."""
    settings: dict[str, Any] = {}
    if text is not None:
        training = grammar.parse(text)
        if not isinstance(training, Training):
            raise InputError(f"'{text}' does not describe training; write \"training(epochs=50, lr=0.01)\".")
        settings = training.fields()
    settings |= {name: value for name, value in chosen.items() if value is not None}
    Training(**settings)  # raises before any work is done
    return settings


def foreign(names: Sequence[str], dataset: DataSet, limit_test: int | None) -> dict[str, Pair]:
    """Return the test parts of other data sets, prepared like `dataset`."""
    # One row of training: the statistics are those of `dataset`, so the rest would be prepared in vain.
    options: dict[str, Any] = {"like": dataset, "validation": 0, "limit": 1, "limit_test": limit_test}
    return {name: data.load(name, **options).test for name in names}


def scrambled(pair: Pair) -> Pair:
    """Return images with their pixels in random order, a different one for each image."""
    inputs, targets = pair
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(inputs.shape, generator=generator).flatten(1).argsort(dim=1)
    return inputs.flatten(1).gather(1, order).reshape(inputs.shape), targets
