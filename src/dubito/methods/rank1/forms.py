"""The predictive as a function that can be recorded as a graph: one network on several copies of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dubito.beliefs.prediction import Prediction
from dubito.core import batches
from dubito.core.errors import UnsupportedError
from dubito.fitting.traceable import Traceable

if TYPE_CHECKING:
    from dubito.methods.rank1.posterior import Rank1Posterior


def forms(posterior: Rank1Posterior, example: Any, num_samples: int, generator: torch.Generator) -> Iterator[Traceable]:
    """Yield members whose weights are made of the shared ones, then one network for all of them.

    A file holds the shared weights once. A network of dense layers takes copies of the inputs on a new axis, which
    differ only in their factors: each layer is one product for all members. In other networks factors would be passes
    over large activations, so each member has weights of its own, which are made when the file is loaded. Where the
    format cannot do that, the copies are made at the first layer with factors if the network allows it.

    Args:
        posterior: A working copy.
        example: A batch of inputs.
        num_samples: As for `predictor`.
        generator: As for `predictor`.
    """
    members, factors = posterior.draw_members(num_samples, generator)
    components, few = members.tolist(), batches.take(example, slice(0, 4))
    biases, count = posterior.mixture.bias[members], len(members)
    separate = posterior.networks(members, factors)

    def widened(copy_at: str, inputs: Any) -> Tensor:
        rows = batches.num_rows(inputs)
        if copy_at == "inputs":
            inputs = batches.map_leaves(lambda leaf: leaf.repeat(count, *[1] * (leaf.ndim - 1)), inputs)
        blocks, narrow = [(k, rows) for k in components], None if copy_at == "inputs" else rows
        stacked = copy_at == "a new axis"
        outputs = posterior._module.run_with(inputs, blocks, factors, biases, narrow=narrow, stacked=stacked)
        return outputs if stacked else outputs.unflatten(0, (count, rows))

    def one_by_one(inputs: Any) -> Tensor:
        return torch.stack(list(separate(inputs)))

    expected = one_by_one(few)
    ways = [partial(widened, copy_at) for copy_at in ("a new axis", "the first layer", "inputs")]
    found = next((way for way in ways if _agrees(way, few, expected)), one_by_one)
    if posterior.mixture.mergeable and found is not ways[0]:
        yield _from_shared(posterior, list(zip(components, factors, strict=True)))
    form = f"{count} weight samples" if found is one_by_one else f"one network on {count} copies of the inputs"
    yield Traceable(lambda inputs: posterior.likelihood.predict_samples(found(inputs)), form)


def _from_shared(posterior: Rank1Posterior, members: list[tuple[int, Tensor]]) -> Traceable:
    """Return the form with a network for each member, whose weights are products of the shared ones with factors."""

    def predict(inputs: Any) -> Prediction:
        return posterior.likelihood.predict_samples(torch.stack(list(posterior.outputs_of(members, inputs))))

    return Traceable(predict, f"{len(members)} networks with shared weights", makes_weights=True)


def _agrees(compute: Callable[[Any], Tensor], inputs: Any, expected: Tensor) -> bool:
    """Return whether a way to compute the outputs works and gives the expected ones."""
    try:
        found = compute(inputs)
    except (UnsupportedError, RuntimeError):
        return False
    tolerance = 1e-2 if expected.dtype in (torch.float16, torch.bfloat16) else 1e-4
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
