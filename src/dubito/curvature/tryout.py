"""Try an engine out on a few examples: measure it, and find a correct way to the gradient of every parameter."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.errors import UnsupportedError
from dubito.curvature.check import is_independent, misfits
from dubito.curvature.graph_calls import GraphUse, graph_uses
from dubito.networks.parameter_uses import Uses, uses_between
from dubito.networks.watching import watch

if TYPE_CHECKING:
    from dubito.curvature.engine import Engine, Tape


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
