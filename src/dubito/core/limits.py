"""Limits on working memory, in bytes.

Work is split into parts that stay below these limits. Numbers in the model's precision count as four bytes each
(`numbers`), so that work is split in the same way in every precision; in float64 it takes twice the limit.

>>> with using(chunk=2**10):
...     numbers(current().chunk)
256
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Bytes that each kind of intermediate result may take."""

    gradients: int = 96 * MIB  # gradients of one vector-Jacobian product; batches and columns are split to stay below
    cached_gradients: int = 8 * MIB  # the same, where they should fit the processor's cache; larger parts are no faster
    activation: int = 12 * MIB  # the largest activation of one forward pass of the curvature engine
    activations: int = 128 * MIB  # all activations of a forward pass that is differentiated
    cached_products: int = 4 * MIB  # explicit gradients of convolutions, which should fit the processor's cache
    kept_gradients: int = 256 * MIB  # explicit per-example gradients that are used twice; further ones are formed again
    chunk: int = 16 * MIB  # per-example gradients, output Hessians, sampled logits and other short-lived arrays
    full_matrix: int = 8 * 20_000**2  # a float64 matrix over pairs of weights; a structure with a larger one is refused
    subset_rows: int = 1152 * MIB  # mixtures of rows of the Jacobian, which precondition exact posterior samples
    kept_rows: int = 512 * MIB  # rows of Jacobians that the greedy selection keeps; others are computed again each time
    drawn_weights: int = 64 * MIB  # float64 weight samples that are drawn or averaged at a time
    kept_weights: int = 256 * MIB  # weight samples that a prediction keeps for the next batch; others are drawn again
    cached_features: int = 1024 * MIB  # features of frozen layers that a sampler keeps in place of its inputs
    kept_samples: int = 64 * MIB  # samples of a prediction on a Dataset or a loader; of more, a summary is kept
    kept_logits: int = 4 * 4096  # sampled logits of one example that a linearized prediction keeps
    covariance_factor: int = 64 * MIB  # the factor of a correlated variational covariance; a larger one is refused
    float64_factor: int = 8 * 2048**2  # a Kronecker factor in float64; a larger one is summed in the model's precision
    exact_block: int = 8 * 256**2  # the exact block of a parameter or a network, in float64; EKFAC approximates others
    kronecker_factor: int = 8 * 8192**2  # a Kronecker factor; a larger one (of a vocabulary) becomes a diagonal
    outputs: int = 64 * MIB  # the outputs of one forward pass of a prediction, of all samples; larger batches are split
    exact_report: int = 8 * 3000**2  # a float64 matrix over all weights, with which a report is exact
    context_jacobian: int = 2048 * MIB  # the Jacobian at the context points of a prior over functions; else refused
    probed_activation: int = 64 * MIB  # the largest activation of a call that follows changed channels
    fitted_outputs: int = 128 * MIB  # outputs of layers of a large network to which smaller ones are fitted at a time
    exponentials: int = 4 * 2**15  # numbers that are exponentiated at a time, which should fit the processor's cache
    compared_inputs: int = 4 * 5_000_000  # the inputs whose neighbours are searched
    file_part: int = 4 * MIB  # the part of a file that is read or unpacked at a time
    unpacked: int = 100 * MIB  # the content of a compressed file, however small the file is
    summed: int = 128 * MIB  # float64 numbers that processes sum in one message
    kept_examples: int = 64 * MIB  # examples of a loader that are kept to judge a fit by
    message: int = 16 * MIB  # any other message between processes


_current: ContextVar[Limits] = ContextVar("limits", default=Limits())  # noqa: B039 - frozen


def current() -> Limits:
    """Return the limits that are in effect."""
    return _current.get()


@contextmanager
def using(**changes: int) -> Iterator[Limits]:
    """Change some limits for a block of code, in this thread only."""
    token = _current.set(replace(current(), **changes))
    try:
        yield current()
    finally:
        _current.reset(token)


def numbers(size: int) -> int:
    """Return how many numbers of four bytes fit into `size` bytes."""
    return size // 4


def slices(size: int, step: int) -> list[slice]:
    """Divide ``range(size)`` into slices of length `step`, at least 1.

    >>> slices(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, step)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
