"""Predict one batch: check inputs and options, split large batches, explain errors, draw random numbers apart."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from dubito.beliefs.prediction import ClassPrediction, Prediction
from dubito.core import batches, io, limits, params
from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count, check
from dubito.core.errors import DubitoError, InputError, NonFiniteError, first_line
from dubito.core.limits import numbers, slices
from dubito.core.private_draws import PrivateDraws
from dubito.core.settings import digest

Predictor = Callable[[Any], Prediction]
Shapes = tuple[tuple[int, ...], ...]


class ChecksPredictions:
    """The part of a `Posterior` that predicts one batch."""

    model: nn.Module
    origin: Any
    device: Any
    predictor: Any
    _file: str | None
    _network_draws: bool | None = None  # whether the network draws random numbers; None before it was called
    _uses_libraries: bool = False  # whether it draws them from numpy or `random`
    _output_sizes: Mapping[Shapes, int] = MappingProxyType({})  # the number of outputs, by the shapes of an input

    def _checked(self, inputs: Any) -> Any:
        check_finite_inputs(inputs)
        return inputs

    def _checked_predictor(
        self, count: int, generator: torch.Generator, options: dict[str, Any], top_k: int | None = None
    ) -> Predictor:
        """Return the predictor of one call, with input checks and its own random numbers; for a working copy."""
        origin = self.origin
        state = generator.get_state()
        draws = PrivateDraws(lambda: int(digest(state), 16) >> 1, self.device, others=(generator,))
        predict_batch = draws.run(lambda: self.predictor(count, generator, **options))

        def predict(inputs: Any) -> Prediction:
            if origin._network_draws is None:
                origin._network_draws, origin._uses_libraries = self._try_network(inputs)
            draws.network_draws = draws.network_draws or origin._network_draws
            draws.uses_libraries = origin._uses_libraries
            parts = []
            for part in self._small_batches(inputs, count):
                found = draws.run(partial(self._predict_batch, predict_batch, part))
                parts.append(found if top_k is None else _top(found, top_k))
            origin._network_draws = draws.network_draws
            return parts[0] if len(parts) == 1 else type(parts[0]).cat(parts)

        return predict

    def _small_batches(self, inputs: Any, count: int) -> Iterator[Any]:
        """Split a batch whose outputs, for all samples, would take too much memory."""
        rows, shapes = batches.num_rows(inputs), _row_shapes(inputs)
        if rows > 1 and shapes not in self.origin._output_sizes:
            self._try_network(inputs)
        step = numbers(limits.current().outputs) // (count * self.origin._output_sizes.get(shapes, 1))
        if step >= rows or rows < 2:
            yield inputs
        else:
            yield from (batches.take(inputs, some) for some in slices(rows, step))

    def _try_network(self, inputs: Any) -> tuple[bool, bool]:
        """Call the network on the first of these inputs, and note the number of its outputs.

        Returns:
            Whether it draws random numbers: of torch, of libraries.
        """
        watched = PrivateDraws(lambda: 0, self.device, network_draws=True, uses_libraries=True)
        example = batches.take(inputs, slice(1))
        try:
            outputs = watched.run(lambda: params.call(self.model, batches.map_leaves(torch.clone, example)))
        except (*io.CONTENT_ERRORS, DubitoError):
            return True, False  # the error is explained when the inputs are predicted
        sizes = self.origin._output_sizes
        self.origin._output_sizes = {**sizes, _row_shapes(inputs): max(1, outputs.numel())}
        return watched.network_draws, watched.uses_libraries

    def _predict_batch(self, predict_batch: Predictor, inputs: Any) -> Prediction:
        """Predict one batch; raise an `InputError` if the network cannot process the inputs."""
        try:
            return _finite(predict_batch(self._checked(inputs)))
        except DubitoError:
            params.check_finite(self.model)
            raise
        except io.CONTENT_ERRORS:
            check_call(self.model, inputs)
            with io.explaining_content(self._file):
                raise  # the network can process them, so the error has another cause


def check_finite_inputs(inputs: Any) -> None:
    """Raise an error if inputs hold NaN or infinite values."""
    if not batches.is_finite(inputs):
        raise InputError("The inputs hold NaN or infinite values: clean or impute them first.")


def check_call(model: nn.Module, inputs: Any) -> None:
    """Raise an error unless the network can be called on the first of these inputs."""
    try:
        params.call_on_few(model, inputs)
    except io.CONTENT_ERRORS as error:
        shapes = " and ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in batches.leaves(inputs))
        raise InputError(f"The network cannot be called on inputs of shape {shapes}: {first_line(error)}") from error


def _row_shapes(inputs: Any) -> Shapes:
    return tuple(tuple(leaf.shape[1:]) for leaf in batches.leaves(inputs))


def _top(prediction: Prediction, count: int) -> Prediction:
    """Return the most probable classes; raise an error if the prediction is not of classes."""
    if not isinstance(prediction, ClassPrediction):
        raise InputError("top_k keeps the most probable classes, but this prediction is of numbers: leave it out.")
    return prediction.top(count)


def _finite(prediction: Prediction) -> Prediction:
    """Return the prediction if it is finite; raise an error otherwise."""
    parts = (getattr(prediction, name, None) for name in ("mean", "aleatoric", "epistemic"))
    if not batches.is_finite([part for part in parts if part is not None]):
        raise NonFiniteError(
            "The prediction is NaN or infinite although the inputs are finite: check the network for extreme weights, "
            "scale the inputs, or use float64."
        )
    return prediction


# Methods whose errors are explained for a posterior that was loaded from a file.
EXPLAINED = {
    "sample", "marginals", "prior", "predictor", "predictors", "log_evidence", "precision_diagonal", "conditional_mean",
    "history", "mean", "state", "__repr__",
}  # fmt: skip

# Methods that compute on the device of the network.
COMPUTING = EXPLAINED | {
    "diagnose", "functional", "functional_samples", "functions", "log_prob", "predict", "update", "with_likelihood",
}  # fmt: skip


def with_a_count(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Return a family's `sample` with a check that `num_samples` is at least 1."""
    sample = checked_arguments(sample)

    @functools.wraps(sample)
    def checked(self: Any, num_samples: int, *args: Any, **options: Any) -> Any:
        check("num_samples", Count, num_samples)
        return sample(self, num_samples, *args, **options)

    return checked


def with_known_options(predictor: Callable[..., Any]) -> Callable[..., Any]:
    """Return a family's `predictor` with a check of its options: names and values of its keyword-only arguments."""
    parameters = inspect.signature(predictor).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    with_checks = checked_arguments(predictor)

    @functools.wraps(predictor)
    def checked(self: Any, num_samples: int, generator: Any, **options: Any) -> Any:
        if not options:
            return predictor(self, num_samples, generator)
        unknown = next((name for name in options if name not in known), None)
        if unknown is not None and not self.passes_options:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise InputError(f"A {self.family} posterior has no predict option '{unknown}': {has}.")
        return with_checks(self, num_samples, generator, **options)

    return checked


def explained(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that names the file of a loaded posterior in errors that its content causes."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with io.explaining_content(self._file):
            return method(self, *args, **options)

    return call
