"""Check that model, data and likelihood fit together before any training starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointError

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import batches, distributed, params
from dubito.core.batches import Batch, Source
from dubito.core.errors import DubitoError, InputError, UnsupportedError, first_line
from dubito.core.randomness import Stream
from dubito.fitting.inference import Problem
from dubito.networks.overwriting import keep_inputs, on_copies
from dubito.networks.twin import light_copy

# The number of examples on which the network is tried.
TRIED = 32


class Template(NamedTuple):
    """The outputs of one example ``[1, ...]`` and the shape of its target, against which later batches are checked."""

    outputs: Tensor
    target_shape: tuple[int, ...]


def check(problem: Problem) -> Template:
    """Check the first batch of training and validation data, and all data that is in memory."""
    if problem.training.needs_validation and problem.validation is None:
        raise InputError("Early stopping and restore_best need validation data: pass `validation=`.")
    params.check_finite(problem.model)
    template = check_source(problem.model, problem.likelihood, problem.source, is_trained_on=True)
    if problem.validation is not None:
        try:
            check_source(problem.model, problem.likelihood, problem.validation)
        except InputError as error:
            raise InputError(f"In the validation data: {error}") from error
    return template


def check_batch(model: nn.Module, likelihood: Likelihood, batch: Batch, template: Template) -> None:
    """Check the values of one batch; the network is called only if the shape of the targets differs from before."""
    _check_finite(batch.inputs)
    if batch.num_rows == 0:
        return
    outputs = template.outputs.expand(batch.num_rows, *template.outputs.shape[1:])
    if tuple(batch.targets.shape[1:]) != template.target_shape:
        outputs = outputs_of(model, batch.inputs)
    likelihood.check(outputs, batch.targets)


def check_source(model: nn.Module, likelihood: Likelihood, source: Source, *, is_trained_on: bool = False) -> Template:
    """Check the first batch of a source, and all of it if it is in memory.

    Args:
        model: The network.
        likelihood: The likelihood.
        source: The data.
        is_trained_on: Whether the network is trained on it; batches of one row are then joined to others if needed.
    """
    first = source.first()
    if first.targets is None:
        raise InputError("The data has inputs but no targets: give (inputs, targets) batches.")
    if not isinstance(first.targets, Tensor):
        raise InputError(f"The targets of a batch must be one tensor, not a {type(first.targets).__name__}.")
    if source.num_batches is None:
        source.num_batches = math.ceil(source.num_data / first.size)
    _check_finite(first.inputs)
    if is_trained_on and _needs_two_rows(model, first.inputs):
        source.join_single_rows()
    rows = batches.num_rows(first.inputs)
    outputs, overwrites = on_copies(partial(outputs_of, model), batches.take(first.inputs, slice(0, TRIED)))
    if overwrites:
        keep_inputs(model)
    if outputs.ndim and len(outputs) == min(TRIED, rows):  # otherwise `likelihood.check` explains the wrong shape
        outputs = outputs[:1].expand(rows, *outputs.shape[1:])
    likelihood.check(outputs, first.targets)
    template = Template(outputs[:1], tuple(first.targets.shape[1:]))
    for raw in source.in_memory or ():
        inputs, targets = batches.split(raw)
        batch = Batch(source.place(inputs), source.place(targets), batches.num_rows(targets))
        check_batch(model, likelihood, batch, template)
    return template


def _needs_two_rows(model: nn.Module, inputs: Any) -> bool:
    """Return whether the network cannot be trained on one row because of its BatchNorm layers."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return False
    try:
        with torch.no_grad(), Stream(0, next(model.parameters()).device).active():
            params.call_on_few(light_copy(model).train(), inputs)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:  # other errors are explained by `outputs_of`
        return "more than 1 value per channel" in str(error)
    return False


def _check_finite(inputs: Any) -> None:
    if not batches.is_finite(inputs):
        raise InputError("The inputs hold NaN or infinite values: clean or impute them first.")


def outputs_of(model: nn.Module, inputs: Any) -> Tensor:
    """Return the outputs of a network in evaluation mode; raise an `InputError` if it cannot process the inputs."""
    if batches.num_rows(inputs) == 0:
        raise InputError("The inputs are empty: give at least one row.")
    _check_finite(inputs)
    was_training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad(), Stream(0, next(model.parameters()).device).active():
            outputs = params.call(model.eval(), inputs)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        shapes = " and ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in batches.leaves(inputs))
        raise InputError(f"The model cannot be called on a batch of inputs {shapes}: {error}") from error
    finally:
        for module, mode in was_training.items():
            module.training = mode
    if outputs.isnan().any():
        raise InputError("The model's outputs are NaN although its inputs and weights are finite: check its layers.")
    return outputs


@contextmanager
def explaining_shapes(*sources: Source | None) -> Iterator[None]:
    """After an error of torch in the block, explain if a later batch of some data has other shapes than the first."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        if not isinstance(error, DubitoError):
            _explain_checkpointing(error)
            for source in sources:
                if source is not None:
                    _explain_shapes(source, error)
        raise


def _explain_checkpointing(error: Exception) -> None:
    """Raise an error in one sentence if the cause is that the network uses `torch.utils.checkpoint`."""
    text = str(error)
    if params.CHECKPOINTED in text:
        raise UnsupportedError(f"This recipe cannot train this network: {params.CHECKPOINTED}.") from error
    if "use_reentrant=True" in text:
        raise UnsupportedError(
            "The network uses gradient checkpointing with use_reentrant=True, which allows no gradients of single "
            "weights: use use_reentrant=False, or switch it off."
        ) from error
    if isinstance(error, CheckpointError):
        raise UnsupportedError(
            "The network uses gradient checkpointing, whose second call of a part differs from the first under this "
            "recipe: switch it off."
        ) from error


def _explain_shapes(source: Source, error: Exception) -> None:
    if distributed.is_active():  # the other processes do not come here
        return
    first: Any = None
    for number, batch in enumerate(source.replay()):
        shapes = [tuple(leaf.shape[1:]) for leaf in batches.leaves(batch.inputs)]
        first = first or shapes
        if shapes != first:
            raise InputError(
                f"The inputs of batch {number} have rows of shape {shapes}, those of batch 0 of {first}, and the "
                f"network cannot take both: {first_line(error)}"
            ) from error
