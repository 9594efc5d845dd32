"""The column of a table that holds the known noise of each target."""

from __future__ import annotations

from dataclasses import replace

from dubito.beliefs.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood
from dubito.core.errors import InputError
from dubito.data import DataSet, TableTransform
from dubito.data.columns import NumberColumn


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
