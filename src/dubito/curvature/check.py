"""Check, once and on the first few examples, that the engine's gradients equal autograd's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dubito.core import batches, params
from dubito.curvature.factor import ExplicitFactor, Factor
from dubito.curvature.factors import CallsFactor
from dubito.networks.layers.rows import IndexRows
from dubito.networks.parameter_uses import nodes_below

if TYPE_CHECKING:
    from dubito.curvature.engine import Tape

# The relative differences that are attributed to rounding.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 3e-2}


def misfits(tape: Tape, names: list[str]) -> list[tuple[list[str], str]]:
    """Return the parameters whose layer rules give wrong gradients, with the reason.

    For a random column of the first and of the last example, the gradient of that example and the sum over all examples
    must both equal autograd's: a layer whose first axis is not the batch fails one of them.
    """
    if not names or not tape.outputs.requires_grad:
        return []
    found: list[tuple[list[str], str]] = []
    good = []
    for call in tape.calls:
        try:
            _ = call.rows
            good.append(call)
        except RuntimeError as error:
            found.append((call.names, f"{error}."))
    bad = {name for which, _ in found for name in which}
    names, tape = [name for name in names if name not in bad], replace(tape, calls=good)
    columns, examples = _single_examples(tape.outputs)
    values = [tape.engine.parameters[name] for name in names]
    try:
        truth = [
            torch.autograd.grad(tape.outputs, values, column, retain_graph=True, allow_unused=True)
            for column in columns
        ]
    except RuntimeError as error:  # reentrant checkpointing forbids autograd.grad
        return [*found, (names, str(error).strip().splitlines()[0])]
    factors, dtype = tape.pull(columns), _coarsest(tape.outputs)
    pairs = zip(names, *truth, strict=True)
    wrong = [name for name, *grads in pairs if not _fits(factors[name], examples, grads, dtype)]
    return [*found, (wrong, "they are not used as the rules of their layers say.")] if wrong else found


def is_independent(tape: Tape) -> bool:
    """Return whether the first example alone gives the same outputs as in its batch."""
    alone = batches.map_leaves(torch.clone, batches.take(tape.inputs, slice(0, 1)))
    with torch.enable_grad():  # as in the batch: some modules use other code without gradients
        outputs = params.call(tape.engine.model, alone)
    return _close(outputs[0], tape.outputs[0], 0.0, _coarsest(tape.outputs))


def _coarsest(outputs: Tensor) -> torch.dtype:
    """Return the coarsest dtype of all results in the graph of some outputs."""
    about = (each for node in nodes_below(outputs) for each in node._input_metadata)
    found = {each.dtype for each in about if each.dtype in _TOLERANCE}
    return max(found | {outputs.dtype}, key=lambda dtype: torch.finfo(dtype).eps)


def _single_examples(outputs: Tensor) -> tuple[Tensor, list[int]]:
    """Return columns ``[V, *outputs]`` that are random for one example each and zero for all others."""
    examples = sorted({0, len(outputs) - 1})
    noise = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    columns = outputs.new_zeros(len(examples), *outputs.shape)
    for v, n in enumerate(examples):
        columns[v, n] = noise.to(outputs)
    return columns, examples


def _fits(factor: Factor, examples: list[int], truth: list[Tensor | None], dtype: torch.dtype) -> bool:
    """Return whether the gradients of single-example columns are correct, for the example and in total."""
    bound = _bound(factor)
    try:
        for v, (n, total) in enumerate(zip(examples, factor.summed(), strict=True)):
            alone = factor.per_sample(slice(n, n + 1), slice(v, v + 1))[0, 0]
            true = torch.zeros_like(total) if truth[v] is None else truth[v].to_dense()  # type: ignore[union-attr]
            if not (_close(alone, true, bound, dtype) and _close(total, true, bound, dtype)):
                return False
    except RuntimeError:  # shapes that do not match
        return False
    return True


def _bound(factor: Factor) -> float:
    """Return a bound on the norm of the sums over rows: if they cancel, rounding errors have this scale."""
    if isinstance(factor, ExplicitFactor):
        return float(factor.gradient.norm())
    assert isinstance(factor, CallsFactor)
    bound = 0.0
    for call in factor.calls:
        ones = call.rows is None or isinstance(call.rows, IndexRows)
        rows = math.sqrt(call.grad[0].numel()) if ones else float(call.rows.a.norm())  # type: ignore[union-attr]
        bound += rows * float(call.grad.norm())
    return bound


def _close(ours: Tensor, truth: Tensor, bound: float, dtype: torch.dtype) -> bool:
    rounding = 100 * torch.finfo(dtype).eps * bound
    return bool((ours - truth).norm() <= _TOLERANCE[dtype] * truth.norm() + rounding)
