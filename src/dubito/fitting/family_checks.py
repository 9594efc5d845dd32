"""Checks that every posterior family shares; `Posterior` applies them to the methods of its subclasses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from dubito.core import io
from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count, check
from dubito.core.errors import InputError

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
