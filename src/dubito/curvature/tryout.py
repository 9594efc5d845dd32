"""Try an engine out on a few examples: measure it, and find a correct way to the gradient of every parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.errors import UnsupportedError, first_line
from dubito.curvature.factor import ExplicitFactor, Factor
from dubito.curvature.factors import CallsFactor
from dubito.curvature.graph_calls import GraphUse, graph_uses
from dubito.networks.layers.rows import IndexRows
from dubito.networks.parameter_uses import Uses, nodes_below, uses_between
from dubito.networks.watching import watch

if TYPE_CHECKING:
    from dubito.curvature.engine import Engine, Tape

# The relative differences that are attributed to rounding.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Trial:
    """The attributes of an engine that were found out on a few examples, for a network whose layers all have rules."""

    num_outputs: int
    walks: bool
    batched: bool
    _tried: int
    _size_of_one: int
    _largest: int
    _overwrites: bool | None
    _copy_inputs: bool


def trial_of(engine: Engine) -> Trial:
    """Return what an engine has found out."""
    return Trial(**{each.name: getattr(engine, each.name) for each in fields(Trial)})


def measure(engine: Engine, inputs: Any) -> tuple[int, int, int]:
    """Verify the engine on a few examples.

    Returns:
        The numbers per example and column of one product, those per example in the largest activation, and the number
        of outputs per example.
    """
    sizes = [1]

    def note(name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel())

    with watch(dict(engine.model.named_modules()), after=note):
        tape = engine.forward(inputs)
    ruled = [name for name in engine.names if name not in engine.unruled]
    wrong = misfits(tape, ruled)
    if wrong and engine.walks:  # for example, if a hook changes gradients
        engine.walks = False
        wrong = misfits(tape, ruled)
    for names, why in wrong:
        engine.lose(names, why)
    if engine.followed:
        tape = engine.forward(inputs)
        if tape.graph not in engine.graphs:
            study(engine, tape)
        tape = engine.forward(inputs)
    if engine.fallback and not is_independent(tape):
        raise UnsupportedError(
            "The network's outputs for one example depend on the other examples of the batch, so gradients per "
            "example do not exist: make the network treat examples independently."
        )
    size = len(tape.outputs)
    explicit = sum(engine.parameters[name].numel() for name in engine.fallback)
    total = sum(call.output_size for call in tape.calls) + tape.outputs.numel()
    return max(1, total // size) + explicit, max(1, max(sizes) // size), tape.outputs[0].numel()


def study(engine: Engine, tape: Tape) -> None:
    """Find how the parameters without a rule are used in the graph of a tape; those that cannot be followed fall back.

    The graph of the same batch with its first example once more shows which axes have the batch.
    """
    rest = engine.followed
    outputs = tape.outputs if tape.doubled is None else tape.doubled
    longer = [n % len(tape.outputs) for n in range(len(outputs) + 1)]
    again = batches.map_leaves(lambda leaf: leaf[longer].clone(), tape.inputs)
    with torch.enable_grad():
        more = params.call(engine.model, again)
    uses = uses_between(outputs, more, {name: engine.parameters[name] for name in rest})
    if uses is None and len(outputs) == 1 and not engine.doubles:
        engine.doubles = True  # two examples may take the same path as three
        return
    found = {} if uses is None else _understood(engine, tape, uses)
    engine.graphs[tape.graph] = [use for each in found.values() for use in each]
    if missing := [name for name in rest if name not in found]:
        _fall_back(engine, tape, missing)


def _understood(engine: Engine, tape: Tape, uses: Uses) -> dict[str, list[GraphUse]]:
    """Return the uses of the parameters whose gradients at their uses are correct."""
    found: dict[str, list[GraphUse]] = {}
    for name in uses.found:
        known = graph_uses(uses, name, engine.parameters[name])
        if known is not None:
            found[name] = known
    if wrong := _wrong(tape, found):  # positions that share an axis with the batch may lie inside or outside of it
        found |= {name: [replace(use, inner=not use.inner, orders={}) for use in found[name]] for name in wrong}
        wrong = _wrong(tape, found)
    return {name: each for name, each in found.items() if name not in wrong}


def _wrong(tape: Tape, found: dict[str, list[GraphUse]]) -> set[str]:
    wrong: set[str] = set()
    calls = []
    for name, uses in found.items():
        try:
            size = len(tape.outputs if tape.doubled is None else tape.doubled)
            own = [use.call(tape.nodes, size) for use in uses]
            _ = [call.rows for call in own], [call.order for call in own]
            calls += own
        except (RuntimeError, LookupError):
            wrong.add(name)
    tried = replace(tape, calls=[*tape.calls, *calls])
    for names, _ in misfits(tried, [name for name in found if name not in wrong]):
        wrong |= set(names)
    return wrong


def _fall_back(engine: Engine, tape: Tape, names: list[str]) -> None:
    """Let parameters be differentiated example by example, in a module alone where that gives the same."""
    alone = _modules(engine, tape, names)
    if alone:
        inside = [name for own in alone.values() for name in own]
        engine.fall_back([], alone)
        tried = engine.forward(tape.inputs)
        try:
            wrong = {name for group, _ in misfits(tried, inside) for name in group}
        except (RuntimeError, TypeError, ValueError, LookupError):  # the module cannot be called by itself
            wrong = set(inside)
        for module, own in alone.items():
            engine.alone[module] = {name: local for name, local in own.items() if name not in wrong}
        engine.alone = {module: own for module, own in engine.alone.items() if own}
    engine.fall_back(names, {})


def _modules(engine: Engine, tape: Tape, names: list[str]) -> dict[nn.Module, dict[str, str]]:
    """Return the smallest modules that hold these parameters and take and give one row per example."""
    rows, fits = len(tape.outputs), dict[str, bool]()

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        result = output[0] if isinstance(output, tuple) and output else output
        given = [leaf for leaf in (*batches.leaves((args, kwargs)), result) if isinstance(leaf, Tensor)]
        good = len(given) > 1 and isinstance(result, Tensor) and all(leaf.ndim and len(leaf) == rows for leaf in given)
        fits[name] = fits.get(name, True) and good

    modules = dict(engine.model.named_modules())
    with watch(modules, after=note), torch.enable_grad():
        params.call(engine.model, batches.map_leaves(torch.clone, tape.inputs))
    everything = list(engine.model.named_parameters(remove_duplicate=False))
    found: dict[nn.Module, dict[str, str]] = {}
    for name in names:
        value = engine.parameters[name]
        owners = [other.rpartition(".")[0] for other, same in everything if same is value]
        around = [
            path for path, fit in fits.items()
            if fit and path and all(f"{owner}.".startswith(f"{path}.") for owner in owners)
        ]  # fmt: skip
        if around:
            module = modules[max(around, key=len)]
            local = next(own for own, same in module.named_parameters(remove_duplicate=False) if same is value)
            found.setdefault(module, {})[name] = local
    return found


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
        return [*found, (names, first_line(error))]
    factors, dtype = tape.pull(columns), _coarsest(tape.outputs)
    pairs = zip(names, *truth, strict=True)
    wrong = [name for name, *grads in pairs if not _fits(factors[name], examples, grads, dtype)]
    return [*found, (wrong, "they are not used as the rules of their layers say.")] if wrong else found


def is_independent(tape: Tape) -> bool:
    """Return whether the first example alone gives the same outputs as in its batch."""
    with torch.enable_grad():  # as in the batch: some modules use other code without gradients
        outputs = params.call_on_few(tape.engine.model, tape.inputs)
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
