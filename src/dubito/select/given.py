"""Check the model and the data that a user gives to a selection rule, and copy the model, as a fit does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dubito.beliefs import likelihoods
from dubito.core import distributed, params
from dubito.core.batches import Source
from dubito.core.randomness import restoring_generators
from dubito.fitting.checks import check_source, explaining_shapes
from dubito.fitting.model_copies import check_model, shared_copy

# The batch size for data that is not batched yet.
BATCH_SIZE = 512


@contextmanager
def given(model: nn.Module, data: Any, likelihood: Any) -> Iterator[tuple[nn.Module, Source]]:
    """Yield a private copy of the model and the data as a `Source` for it, both checked.

    Errors of the network inside the block are explained if the batches have different shapes.
    """
    with restoring_generators(), distributed.together():
        private = shared_copy(model)
        weight = next(private.parameters())
        source = Source(data, batch_size=BATCH_SIZE, must_count=False, device=weight.device, dtype=weight.dtype)
        source.agree()
        known = likelihoods.resolve("categorical" if likelihood is None else likelihood)
        check_source(private, known, source)
        with explaining_shapes(source):
            yield private, source


def for_users(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule's `resolve` that takes data in any form and checks it; a fit gives a `Source`, checked already."""

    @functools.wraps(resolve)
    def checked(
        self: Any, model: nn.Module, data: Any = None, likelihood: Any = None, *args: Any, **options: Any
    ) -> Any:
        if data is None or isinstance(data, Source):
            check_model(model)
            return resolve(self, params.unwrapped(model), data, likelihood, *args, **options)
        with given(model, data, likelihood) as (private, source):
            return resolve(self, private, source, likelihood, *args, **options)

    return checked
