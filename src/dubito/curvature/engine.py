r"""The engine: one forward pass, one batched vector-Jacobian product, all gradients in factored form.

For a batch the model runs once. A vector-Jacobian product with `V` columns goes from the outputs to the *outputs of the
selected layers* only; with the layers' inputs as rows `a [B, T, I]` and these gradients as rows `G [V, B, T, O]` the
gradient of column `v` and example `n` is :math:`\sum_t G_{vnt} a_{nt}^\top`, and stays in that form (`Factor`) until
something contracts it. No `B × V × D` Jacobian is built.

A forward hook records the gradient edges of the layers' outputs, which stay valid after in-place activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dubito.core import batches, limits, params
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.once import warn_once
from dubito.core.randomness import drawing_aside
from dubito.curvature import backward, per_example
from dubito.curvature.call_gradients import CallGradient
from dubito.curvature.check import is_independent, misfits
from dubito.curvature.factors import ExplicitFactor, Factor, make_factor
from dubito.curvature.roles import Roles, find_roles, without
from dubito.curvature.workspace import Workspace
from dubito.networks.layers import class_rule, rule_for
from dubito.networks.layers.base import LayerRule
from dubito.networks.layers.rows import Rows
from dubito.networks.twin import twin
from dubito.networks.watching import watch

# The examples of one part of a batch: at least FEW, unless memory allows only fewer, and at most MANY, because the
# forward pass has caches of its own.
FEW, MANY = 64, 512
# The number of examples on which the engine is verified.
TRIED = 4


class FallbackWarning(UserWarning):
    """A slower general method is used."""


@dataclass
class _Call:
    """One call of a layer: its input, and the gradient edge of its output."""

    layer: nn.Module
    rule: LayerRule[Any]
    inputs: Tensor
    version: int
    edge: GradientEdge
    output_size: int
    _rows: Rows | None = None

    @property
    def rows(self) -> Rows:
        if self._rows is None:
            self._rows = self.rule.inputs_as_rows(self.layer, self.inputs)
        return self._rows


@dataclass
class Tape:
    """The record of one forward pass: its outputs and the calls of the selected layers."""

    engine: Engine
    inputs: Any
    outputs: Tensor
    calls: list[_Call] = field(default_factory=list)

    def lend(self) -> AbstractContextManager[Workspace]:
        """Lend the engine's memory for what is pulled inside a ``with`` block."""
        return self.engine.workspace.lend()

    @torch.inference_mode(False)
    def pull(self, columns: Tensor, workspace: Workspace | None = None) -> dict[str, Factor]:
        """Pull the output columns ``[V, *outputs]`` back to every selected parameter, in factored form.

        Args:
            columns: The columns.
            workspace: Memory lent by `lend`, which is valid until its block ends; by default new memory is allocated.
        """
        engine = self.engine
        found: dict[str, list[CallGradient]] = {name: [] for name in engine.names}
        explicit: dict[str, Tensor] = {}
        if self.outputs.requires_grad:  # else no selected parameter is used
            for call, grad in zip(self.calls, self._gradients(columns, workspace), strict=True):
                if grad is None:
                    continue
                for role, name in engine.roles[call.layer].items():
                    rows = call.rows if role == "weight" else None
                    found[name].append(CallGradient(call.rule, call.layer, rows, grad))
            explicit = engine.explicit_gradients(self.inputs, columns)
        factors: dict[str, Factor] = {}
        for name, calls in found.items():
            shape = engine.shapes[name] or (1,)  # at least one axis
            about = shape, len(columns), len(self.outputs), columns
            if name in explicit:
                factors[name] = ExplicitFactor(*about, explicit[name].reshape(*explicit[name].shape[:2], *shape))
            else:
                factors[name] = make_factor(*about, calls)
        return factors

    def _gradients(self, columns: Tensor, workspace: Workspace | None) -> list[Tensor | None]:
        """Return the gradients at the output of each call, ``[V, *output]``; None if they do not depend on it."""
        top = get_gradient_edge(self.outputs)
        edges = [call.edge for call in self.calls if call.edge != top]
        below = iter(self._pull(edges, columns.contiguous(), workspace) if edges else [])
        # the columns themselves for the output layer: expanded columns stay expanded, without a copy
        return [columns if call.edge == top else next(below) for call in self.calls]

    def _pull(self, edges: list[GradientEdge], columns: Tensor, workspace: Workspace | None) -> list[Tensor | None]:
        found = backward.pull(self.outputs, edges, columns, workspace) if self.engine.walks else None
        return self.engine.vector_jacobian(self.outputs, edges, columns) if found is None else found


class Engine:
    """The engine for gradients of a network's outputs with respect to some of its parameters.

    Args:
        model: The network; the engine works on its own copy, so no hook or flag is left on this one.
        names: The parameters, by their canonical names.

    Attributes:
        roles: What each layer with a rule does with which parameter: ``{layer: {"weight": name, "bias": name}}``.
        fallback: The parameters that are differentiated example by example, because no rule fits their use.
        num_outputs: The number of outputs per example; 0 until the first batch was seen.
    """

    @torch.inference_mode(False)
    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.model = twin(model).eval()
        parameters = dict(self.model.named_parameters())
        self.names = list(names)
        self.shapes = {name: tuple(parameters[name].shape) for name in names}
        for name, value in parameters.items():
            value.requires_grad_(name in self.shapes)
        self.parameters = {name: parameters[name] for name in names}
        self.workspace = Workspace()  # memory for gradients, reused for each part of a batch
        self.walks = self.batched = True  # the two fast products; off after a failure
        self.roles: Roles = {}
        self.fallback: list[str] = []
        self.num_outputs = 0
        self._tried = 0  # the number of examples on which the engine was tried out
        self._overwrites: bool | None = None  # whether the model overwrites its inputs; None if unknown
        self._copy_inputs = False  # whether it overwrites inputs of its layers
        self._per_example_by_vmap = True
        self._calls: list[_Call] | None = None  # a list while a forward pass is recorded
        self._rows = 0  # the number of examples in that pass
        self._size_of_one = 1  # numbers per example and column in one product
        self._largest = 1  # numbers per example in the largest activation
        self._find_roles()
        for layer in self.roles:
            # before the user's hooks, which may replace the layer's output
            layer.register_forward_hook(self._record, with_kwargs=True, prepend=True)

    def _find_roles(self) -> None:
        """Decide for each parameter whether every module that holds it has a rule for it."""
        for module in self.model.modules():
            if (rule := class_rule(module)) is not None and rule.mixes_examples(module):
                raise UnsupportedError(
                    f"A {type(module).__name__} without running statistics mixes the examples of a batch, so they have "
                    "no gradients of their own: build it with track_running_stats=True."
                )
        self.roles, reasons = find_roles(self.model, self.names)
        for why, which in reasons.items():
            self._fall_back(which, why)

    def _fall_back(self, names: list[str], why: str) -> None:
        """Differentiate parameters example by example from now on, and warn once."""
        new = [name for name in dict.fromkeys(names) if name not in self.fallback]
        if not new:
            return
        self.fallback += new
        self.roles = without(self.roles, set(new))
        more = f" and {len(new) - 3} more" if len(new) > 3 else ""
        which = ", ".join(new[:3]) + more
        warn_once(f"Gradients of {which} are computed example by example, which is slower: {why}", FallbackWarning)

    def _record(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        roles = self.roles.get(layer)
        if self._calls is None or not roles or not output.requires_grad:
            return
        if len(args) + len(kwargs) != 1 or len(output) != self._rows:
            kind = type(layer).__name__
            self._fall_back(list(roles.values()), f"a {kind} is not called on one tensor with one row per example.")
            return
        inputs = args[0] if args else kwargs["input"]
        kept = inputs.detach().clone() if self._copy_inputs else inputs.detach()
        rule = rule_for(layer)
        assert rule is not None
        self._calls.append(_Call(layer, rule, kept, kept._version, get_gradient_edge(output), output.numel()))

    @torch.inference_mode(False)
    def run(self, inputs: Any) -> Tape:
        """Run the model on one batch and record what the products need."""
        self._try_out(inputs)
        return self._forward(inputs)

    def _forward(self, inputs: Any) -> Tape:
        given = batches.map_leaves(self._own, inputs)
        before = [leaf._version for leaf in batches.leaves(given)]
        calls: list[_Call] = []
        self._calls, self._rows = calls, batches.num_rows(inputs)
        try:
            with torch.enable_grad():
                outputs = params.call(self.model, given)
        finally:
            self._calls = None
        if outputs.ndim == 0 or len(outputs) != self._rows:
            raise InputError(
                f"The network returned outputs of shape {tuple(outputs.shape)} for {self._rows} examples: the first "
                "axis must be the batch."
            )
        self._overwrites = self._overwrites or before != [leaf._version for leaf in batches.leaves(given)]
        if any(call.inputs._version != call.version for call in calls):
            self._copy_inputs = True  # a later layer overwrote an input in place: run again with copies
            return self._forward(inputs)
        return Tape(self, inputs, outputs, calls)

    def _own(self, tensor: Tensor) -> Tensor:
        """Return a tensor that the model may overwrite and autograd may save."""
        return tensor.clone() if self._overwrites is not False or tensor.is_inference() else tensor

    def vector_jacobian(self, outputs: Tensor, inputs: list[Any], columns: Tensor) -> list[Tensor | None]:
        """Pull `columns` ``[V, *outputs]`` back to tensors or edges, all columns at once where the model allows it."""
        if self.batched:
            try:
                return list(_grad(outputs, inputs, columns, is_grads_batched=True))
            except RuntimeError as error:
                self.batched = False
                reason = _first_line(error)
                warn_once(
                    f"The columns of a vector-Jacobian product are computed one by one, which is slower: {reason}",
                    FallbackWarning,
                )
        one_by_one = [_grad(outputs, inputs, column) for column in columns]
        return [None if each[0] is None else torch.stack(each) for each in zip(*one_by_one, strict=True)]

    def chunks(self, inputs: Any, num_columns: int, extra: int = 0) -> Iterator[tuple[slice, Tape]]:
        """Run the model on parts of a batch that are small enough for `num_columns` columns (or all outputs) at a time.

        `extra` is the number of further entries per example and column that the caller will build.
        """
        size = batches.num_rows(inputs)
        if not size:
            return
        self._try_out(inputs)
        columns = min(num_columns, self.num_outputs)
        width = next(self.model.parameters()).element_size()
        bytes_of_one = max((2 * self._size_of_one + extra) * columns * width, 1)
        limit = limits.current()
        passing = max(FEW, limit.activation // (self._largest * width))
        most = max(1, min(MANY, passing, limit.gradients // bytes_of_one))
        cached = max(FEW, limit.cached_gradients // bytes_of_one)
        parts = max(-(-size // most), round(size / cached))  # of nearly equal size
        step = -(-size // parts)
        for start in range(0, size, step):
            rows = slice(start, min(start + step, size))
            yield rows, self.run(batches.take(inputs, rows))

    @torch.inference_mode(False)
    def _try_out(self, inputs: Any) -> None:
        """Measure and verify the engine on the first few examples; a single one does not show the batch axis."""
        if self._tried > 1 or self._tried == min(batches.num_rows(inputs), 2):
            return
        with drawing_aside():
            self._measure(inputs)

    def _measure(self, inputs: Any) -> None:
        sizes = [1]

        def note(name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                sizes.append(output.numel())

        with watch(dict(self.model.named_modules()), after=note):
            tape = self._forward(batches.take(inputs, slice(0, TRIED)))
        size = len(tape.outputs)
        self._largest = max(1, max(sizes) // size)
        ruled = [name for name in self.names if name not in self.fallback]
        wrong = misfits(tape, ruled)
        if wrong and self.walks:  # for example, if a hook changes gradients
            self.walks = False
            wrong = misfits(tape, ruled)
        for names, why in wrong:
            self._fall_back(names, why)
        if self.fallback and not is_independent(tape):
            raise UnsupportedError(
                "The network's outputs for one example depend on the other examples of the batch, so gradients per "
                "example do not exist: make the network treat examples independently."
            )
        explicit = sum(self.parameters[name].numel() for name in self.fallback)
        total = sum(call.output_size for call in tape.calls) + tape.outputs.numel()
        self._size_of_one = max(1, total // size) + explicit
        self.num_outputs = tape.outputs[0].numel()
        self._tried = size

    def explicit_gradients(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        """Return ``[V, B, *shape]`` gradients of the parameters that have no rule, example by example."""
        if not self.fallback:
            return {}
        if self._per_example_by_vmap:
            try:
                return per_example.by_vmap(self.model, self.fallback, inputs, columns)
            except (RuntimeError, TypeError, ValueError):
                self._per_example_by_vmap = False
        return per_example.by_loop(self.model, self.fallback, inputs, columns)


def _grad(outputs: Tensor, inputs: list[Any], columns: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(outputs, inputs, columns, retain_graph=True, allow_unused=True, **options)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
