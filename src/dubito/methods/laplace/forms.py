"""The linearized predictive as a function that can be recorded as a graph, for exported files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.likelihoods.kinds import DistributionLikelihood
from dubito.core import batches, params
from dubito.core.errors import UnsupportedError
from dubito.core.precision import widened
from dubito.core.tracing import record_with_gradients, rows_to_record
from dubito.curvature import links, output_columns
from dubito.curvature import matrices as linalg
from dubito.curvature.call_gradients import LayerCall
from dubito.curvature.engine import Tape
from dubito.curvature.functional import FunctionalTerms
from dubito.curvature.last_layer import LastLayer
from dubito.curvature.output_columns import is_one_linear
from dubito.curvature.structures import jacobian
from dubito.fitting.traceable import Traceable
from dubito.networks.subspace import SubspaceNetwork
from dubito.networks.watching import first_argument, watch

if TYPE_CHECKING:
    from dubito.methods.laplace.posterior import LaplacePosterior

# The relative error that variances of a wide last layer may have, where it makes the file faster.
TOLERANCE = 1e-3
# From inputs to outputs in the model's layout and their variances in canonical layout.
Moments = Callable[[Any], tuple[Tensor, Tensor]]


def draws_outputs(likelihood: Likelihood, link: links.Link) -> bool:
    """Return whether the outputs of numbers that are not Gaussian given them are drawn together."""
    return link.reads_covariance and isinstance(likelihood, DistributionLikelihood)


def linearized_forms(
    posterior: LaplacePosterior, example: Any, noise: links.Noise, link: links.Link, centred: bool
) -> Iterator[Traceable]:
    """Yield the form of a working copy's linearized prediction; both kinds give what `predict` gives."""
    is_joint = draws_outputs(posterior.likelihood, link)
    if is_joint or (links.is_classification(posterior.likelihood) and link.reads_covariance):
        raise UnsupportedError(
            "Only link='probit' can be exported: the others need the eigenvectors of a matrix for each input, which "
            "file formats cannot compute."
        )
    centred = centred and links.has_null_direction(posterior.likelihood)
    tape = posterior.engine.run(rows_to_record(example))
    if unruled := [name for name in posterior.engine.names if name in posterior.engine.unruled]:
        is_subspace = isinstance(posterior.engine.model, SubspaceNetwork)
        what = "a subspace of the weights" if is_subspace else f"'{unruled[0]}', which belongs to no layer with a rule,"
        raise UnsupportedError(
            f"The gradient of {what} has no form that a file could follow: export weight samples with method='weights'."
        )

    def traceable(moments: Moments, *about: Any) -> Traceable:
        likelihood = posterior.likelihood
        return Traceable(lambda inputs: links.predict(likelihood, *moments(inputs), noise, link, centred), *about)

    if not is_one_linear(tape):
        yield traceable(_jacobian(posterior, tape, centred), "linearized, by the Jacobian of the random layers")
        return
    name, note = "closed form of the last layer", f"variances may be up to {TOLERANCE:.1%} too large"
    moments, is_joined = _last_layer(posterior, tape, centred, TOLERANCE)
    if is_joined:
        yield traceable(moments, name, (note,))
    yield traceable(_last_layer(posterior, tape, centred)[0], name)


def _columns(posterior: LaplacePosterior, tape: Tape, centred: bool) -> Tensor:
    """Return all output columns ``[V, *outputs]``."""
    count = tape.outputs[0].numel()
    return next(output_columns.identity(posterior.likelihood, tape.outputs, count, centred=centred))


def _last_layer(
    posterior: LaplacePosterior, tape: Tape, centred: bool, tolerance: float | None = None
) -> tuple[Moments, bool]:
    """Return the moments, and whether their variances have an error of up to `tolerance`."""
    call, model = tape.calls[0], posterior.engine.model
    assert isinstance(call, LayerCall)
    layer = call.layer
    bias = posterior.engine.roles[layer].get("bias")
    weight: Any = layer.weight
    columns = _columns(posterior, tape, centred)[:, 0]
    variance = LastLayer(posterior.covariance, posterior.selection, bias, tuple(weight.shape), columns, tolerance)

    def moments(inputs: Any) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []

        def keep(name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(first_argument(args, kwargs))

        with watch({"": layer}, before=keep):
            outputs = params.call(model, inputs)
        return outputs, variance(widened(seen[0]))

    return moments, variance.is_joined


def _jacobian(posterior: LaplacePosterior, tape: Tape, centred: bool) -> Moments:
    engine = posterior.engine
    engine.batched = False  # the batching of autograd fixes the number of examples
    leaves = tuple(batches.leaves(tape.inputs))

    def compute(*given: Tensor) -> tuple[Tensor, Tensor]:
        parts = iter(given)
        run = engine.forward(batches.map_leaves(lambda _: next(parts), tape.inputs))
        layout = posterior.likelihood.canonical(run.outputs).shape
        variance = _variance(posterior, run, _columns(posterior, run, centred))
        return run.outputs.detach(), variance.mT.contiguous().reshape(layout)

    recorded = record_with_gradients(compute, leaves)

    def moments(inputs: Any) -> tuple[Tensor, Tensor]:
        outputs, variance = recorded(*batches.leaves(inputs))
        return outputs, variance

    return moments


@torch.no_grad()
def _variance(posterior: LaplacePosterior, tape: Tape, columns: Tensor) -> Tensor:
    """Return the variance of each column and example, ``[V, B]``."""
    factors, covariance = tape.pull(columns), posterior.covariance
    if isinstance(covariance, linalg.DenseCovariance):
        rows = jacobian(factors, posterior.selection)
        return (rows @ covariance.root.to(rows.dtype)).square().sum(-1)
    return FunctionalTerms(posterior.matrix, posterior.selection, factors).variance(covariance)
