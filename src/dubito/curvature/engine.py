r"""The engine: one forward pass, one batched vector-Jacobian product, all gradients in factored form.

For a batch the model runs once. A vector-Jacobian product with `V` columns goes from the outputs to the *outputs of the
selected layers* only; with the layers' inputs as rows `a [B, T, I]` and these gradients as rows `G [V, B, T, O]` the
gradient of column `v` and example `n` is :math:`\sum_t G_{vnt} a_{nt}^\top`, and stays in that form (`Factor`) until
something contracts it. No `B × V × D` Jacobian is built.

A forward hook records the gradient edges of the layers' outputs, which stay valid after in-place activations.
Parameters without a layer rule are followed through autograd's graph (`curvature/graph_calls`). What is not understood
there is differentiated example by example: the module that holds it alone where that is possible, else the whole
network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dubito.core import batches, limits, params
from dubito.core.errors import InputError, UnsupportedError, first_line
from dubito.core.limits import slices
from dubito.core.once import warn_once
from dubito.core.randomness import drawing_aside
from dubito.curvature import backward, per_example, tryout
from dubito.curvature.call_gradients import CallGradient, LayerCall, ModuleCall
from dubito.curvature.factor import ExplicitFactor, Factor
from dubito.curvature.factors import make_factor
from dubito.curvature.graph_calls import GraphCall, GraphUse
from dubito.curvature.per_example import SubspaceGradients
from dubito.curvature.products import Workspace
from dubito.curvature.roles import Roles, find_roles, without
from dubito.networks.layers import LayerRule, class_rule, require_rule
from dubito.networks.parameter_uses import Node, nodes_below
from dubito.networks.subspace import SubspaceNetwork
from dubito.networks.twin import twin
from dubito.networks.watching import watch_always

# The examples of one part of a batch: at least FEW, unless memory allows only fewer, and at most MANY, because the
# forward pass has caches of its own.
FEW, MANY = 64, 512
# The number of examples on which the engine is verified.
TRIED = 4

CAST = "ToCopyBackward0"

Call = LayerCall | GraphCall | ModuleCall


class FallbackWarning(UserWarning):
    """A slower general method is used."""


@dataclass
class Tape:
    """The record of one forward pass: its outputs, and what was done with the selected parameters."""

    engine: Engine
    inputs: Any
    outputs: Tensor
    calls: list[Call] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)  # of autograd's graph, where parameters are followed through it
    doubled: Tensor | None = None  # the outputs for one example given twice, of which `outputs` is the first

    @property
    def graph(self) -> tuple[str, ...]:
        """The operations of the graph."""
        return tuple(node.name() for node in self.nodes)

    @property
    def top(self) -> tuple[Node, int]:
        """The node and the number of the result that gave the outputs, before they were cast from half precision."""
        edge = get_gradient_edge(self.outputs)
        below = edge.node.next_functions[0] if edge.node.name() == CAST else (None, 0)
        return (edge.node, edge.output_nr) if below[0] is None else below

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
            explicit = engine.explicit_gradients(self.inputs, columns)
            for call, grad in zip(self.calls, self._gradients(columns, workspace), strict=True):
                if grad is None:
                    continue
                grad = grad.to(columns.dtype)
                if isinstance(call, ModuleCall):
                    for name, value in engine.pull_alone(call, grad).items():
                        own = value[:, : len(self.outputs)]
                        explicit[name] = explicit[name] + own if name in explicit else own
                else:
                    for name, gradient in call.gradients(grad):
                        found[name].append(gradient if self.doubled is None else gradient.take(slice(0, 1)))
        return self._factors(columns, found, explicit)

    def _factors(
        self, columns: Tensor, found: dict[str, list[CallGradient]], explicit: dict[str, Tensor]
    ) -> dict[str, Factor]:
        factors: dict[str, Factor] = {}
        for name, calls in found.items():
            shape = self.engine.shapes[name] or (1,)  # at least one axis
            about = shape, len(columns), self.outputs.shape[0], columns
            if name in explicit:
                factors[name] = ExplicitFactor(*about, explicit[name].reshape(*explicit[name].shape[:2], *shape))
            else:
                factors[name] = make_factor(*about, calls)
        return factors

    def _gradients(self, columns: Tensor, workspace: Workspace | None) -> list[Tensor | None]:
        """Return the gradients at the output of each call, ``[V, *output]``; None if they do not depend on it."""
        top = self.top
        edges = [call.edge for call in self.calls if call.edge[:2] != top]
        below = iter(self._pull(edges, columns.contiguous(), workspace) if edges else [])
        # the columns themselves for the output layer: expanded columns stay expanded, without a copy
        return [columns if call.edge[:2] == top else next(below) for call in self.calls]

    def _pull(self, edges: list[GradientEdge], columns: Tensor, workspace: Workspace | None) -> list[Tensor | None]:
        found = backward.pull(self.outputs, edges, columns, workspace) if self.engine.walks else None
        return self.engine.vector_jacobian(self.outputs, edges, columns) if found is None else found


class Engine:
    """The engine for gradients of a network's outputs with respect to some of its parameters.

    Args:
        model: The network; the engine works on its own copy, so no hook or flag is left on this one.
        names: The parameters, by their canonical names.
        known: The trial of another engine for the same network and parameters, which then are not tried out again.

    Attributes:
        roles: What each layer with a rule does with which parameter: ``{layer: {"weight": name, "bias": name}}``.
        unruled: Why other parameters have no rule; they are followed through autograd's graph, or fall back.
        graphs: How they are used, by the operations of the graph.
        alone: Which parameters of which module are differentiated example by example, in that module alone.
        fallback: The parameters that are differentiated example by example, in their module or the whole network.
        doubles: Whether one example alone is given to the network twice, because it treats that in another way.
        num_outputs: The number of outputs per example; 0 until the first batch was seen.
    """

    @torch.inference_mode(False)
    def __init__(self, model: nn.Module, names: list[str], known: tryout.Trial | None = None) -> None:
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
        self.unruled: dict[str, str] = {}
        self.alone: dict[nn.Module, dict[str, str]] = {}
        self.fallback: list[str] = []
        self.graphs: dict[tuple[str, ...], list[GraphUse]] = {}
        self._rules: dict[nn.Module, LayerRule[Any]] = {}
        self.num_outputs = 0
        self.doubles = False
        self._tried = 0  # the number of examples on which the engine was tried out
        self._overwrites: bool | None = None  # whether the model overwrites its inputs; None if unknown
        self._copy_inputs = False  # whether it overwrites inputs of its layers
        self._per_example_by_vmap = True
        self._calls: list[Call] | None = None  # a list while a forward pass is recorded
        self._rows = 0  # the number of examples in that pass
        self._size_of_one = 1  # numbers per example and column in one product
        self._largest = 1  # numbers per example in the largest activation
        self._find_roles()
        self.along: SubspaceGradients | None = None
        if isinstance(self.model, SubspaceNetwork):
            self.along, self.fallback = SubspaceGradients(self.model, Engine), list(names)
        for layer in self.roles:
            watch_always(layer, self._record)
        if known is not None:
            vars(self).update(vars(known))

    @property
    def trial(self) -> tryout.Trial | None:
        """What was found out, for other engines; None before several examples were seen, or without rules for all."""
        return None if self._tried < 2 or self.unruled or self.along is not None else tryout.trial_of(self)

    def _find_roles(self) -> None:
        """Decide for each parameter whether every module that holds it has a rule for it."""
        for module in self.model.modules():
            if (rule := class_rule(module)) is not None and rule.mixes_examples(module):
                raise UnsupportedError(
                    f"A {type(module).__name__} without running statistics mixes the examples of a batch, so they have "
                    "no gradients of their own: build it with track_running_stats=True."
                )
        self.roles, self.unruled = find_roles(self.model, self.names)

    def lose(self, names: list[str], why: str) -> None:
        """Take parameters away from their rules."""
        self.unruled |= {name: why for name in names if name not in self.unruled}
        self.roles = without(self.roles, set(names))

    def fall_back(self, names: list[str], alone: dict[nn.Module, dict[str, str]]) -> None:
        """Differentiate parameters example by example from now on, and say so in one sentence for each reason."""
        self.alone |= alone
        for module in alone:
            watch_always(module, self._record_alone)
        new = [name for name in names if name not in self.fallback]
        self.fallback += new
        for why in dict.fromkeys(self.unruled[name] for name in new):
            which = [name for name in new if self.unruled[name] == why]
            more = f" and {len(which) - 3} more" if len(which) > 3 else ""
            shown = ", ".join(which[:3]) + more
            warn_once(f"Gradients of {shown} are computed example by example, which is slower: {why}", FallbackWarning)

    def _record(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        roles = self.roles.get(layer)
        if self._calls is None or not roles or not output.requires_grad:
            return
        if len(args) + len(kwargs) != 1 or output.shape[0] != self._rows:
            kind = type(layer).__name__
            self.lose(list(roles.values()), f"a {kind} is not called on one tensor with one row per example.")
            return
        inputs = args[0] if args else kwargs["input"]
        kept = inputs.detach().clone() if self._copy_inputs else inputs.detach()
        if (rule := self._rules.get(layer)) is None:
            rule = self._rules[layer] = require_rule(layer)
        edge = get_gradient_edge(output)
        self._calls.append(LayerCall(layer, rule, roles, kept, kept._version, edge, output.numel()))

    def _record_alone(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        result = output[0] if isinstance(output, tuple) else output
        if self._calls is None or module not in self.alone or not result.requires_grad:
            return
        keep = torch.clone if self._copy_inputs else torch.Tensor.detach
        args, kwargs = batches.map_leaves(lambda leaf: keep(leaf.detach()), (args, kwargs))
        versions = [leaf._version for leaf in batches.leaves((args, kwargs))]
        edge = get_gradient_edge(result)
        self._calls.append(ModuleCall(module, self.alone[module], args, kwargs, versions, edge, result.numel()))

    @torch.inference_mode(False)
    def run(self, inputs: Any) -> Tape:
        """Run the model on one batch and record what the products need."""
        self.try_out(inputs)
        tape = self.forward(inputs)
        while tape.nodes and tape.graph not in self.graphs:  # these inputs take another path through the network
            tryout.study(self, tape)
            tape = self.forward(inputs)
        return tape

    def forward(self, inputs: Any) -> Tape:
        """Run the model and record it, as far as it is understood."""
        doubles = self.doubles and batches.num_rows(inputs) == 1
        given = batches.map_leaves(self._own, batches.take(inputs, [0, 0]) if doubles else inputs)
        before = [leaf._version for leaf in batches.leaves(given)]
        calls: list[Call] = []
        self._calls, self._rows = calls, batches.num_rows(given)
        try:
            with torch.enable_grad():
                outputs = params.call(self.model, given)
        finally:
            self._calls = None
        if outputs.ndim == 0 or outputs.shape[0] != self._rows:
            raise InputError(
                f"The network returned outputs of shape {tuple(outputs.shape)} for {self._rows} examples: the first "
                "axis must be the batch."
            )
        self._overwrites = self._overwrites or before != [leaf._version for leaf in batches.leaves(given)]
        if any(call.is_stale for call in calls):
            self._copy_inputs = True  # a later layer overwrote an input in place: run again with copies
            return self.forward(inputs)
        counted = [call for call in calls if self._still_counts(call)]
        first = outputs[:1] if doubles else outputs
        return self._with_graph(Tape(self, inputs, first, counted, doubled=outputs if doubles else None), outputs)

    def _still_counts(self, call: Call) -> bool:
        """Return whether the rules of a call still hold: a later call may have shown that they do not."""
        if isinstance(call, LayerCall):
            call.roles = self.roles[call.layer]
            return bool(call.roles)
        return True

    @property
    def followed(self) -> list[str]:
        """The parameters that are followed through autograd's graph."""
        return [name for name in self.names if name in self.unruled and name not in self.fallback]

    def _with_graph(self, tape: Tape, outputs: Tensor) -> Tape:
        """Add the uses of parameters without a rule, if the graph is one that is known."""
        if self.followed and outputs.requires_grad:
            tape.nodes = nodes_below(outputs)
            uses = [use for use in self.graphs.get(tape.graph, ()) if use.name not in self.fallback]
            tape.calls += [use.call(tape.nodes, self._rows) for use in uses]
        return tape

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
                reason = first_line(error)
                warn_once(
                    f"The columns of a vector-Jacobian product are computed one by one, which is slower: {reason}",
                    FallbackWarning,
                )
        one_by_one = [_grad(outputs, inputs, column) for column in columns]
        return [None if each[0] is None else torch.stack(each) for each in zip(*one_by_one, strict=True)]

    def chunks(self, inputs: Any, num_columns: int, extra: int = 0) -> Iterator[tuple[slice, Tape]]:
        """Run the model on the parts of a batch; see `parts`."""
        for rows in self.parts(inputs, num_columns, extra):
            yield rows, self.run(batches.take(inputs, rows))

    def parts(self, inputs: Any, num_columns: int, extra: int = 0) -> list[slice]:
        """Return parts of a batch that are small enough for `num_columns` columns (or all outputs) at a time.

        `extra` is the number of further entries per example and column that the caller will build.
        """
        size = batches.num_rows(inputs)
        if not size:
            return []
        self.try_out(inputs)
        columns = min(num_columns, self.num_outputs)
        width = next(self.model.parameters()).element_size()
        bytes_of_one = max((2 * self._size_of_one + extra) * columns * width, 1)
        limit = limits.current()
        passing = max(FEW, limit.activation // (self._largest * width))
        most = max(1, min(MANY, passing, limit.gradients // bytes_of_one))
        cached = max(FEW, limit.cached_gradients // bytes_of_one)
        parts = max(-(-size // most), round(size / cached))  # of nearly equal size
        return slices(size, -(-size // parts))

    def columns_at_once(self, most: int) -> int:
        """Return how many columns, up to `most`, one vector-Jacobian product of one example may have."""
        width = next(self.model.parameters()).element_size()
        return max(1, min(most, limits.current().gradients // (2 * self._size_of_one * width)))

    @torch.inference_mode(False)
    def try_out(self, inputs: Any) -> None:
        """Measure and verify the engine on the first few examples; one alone does not show the batch axis."""
        rows = batches.num_rows(inputs)
        if self._tried > 1 or self._tried == min(rows, 2):
            return
        # one example alone is doubled: what it shares with others would look like its own
        few = [n % rows for n in range(max(2, min(rows, TRIED)))]
        with drawing_aside():
            sizes = tryout.measure(self, batches.take(inputs, few))
        self._size_of_one, self._largest, self.num_outputs = sizes
        if self.along is not None:
            self.along.engine.try_out(inputs)
            self._size_of_one += self.along.engine._size_of_one
        self._tried = min(rows, TRIED)

    def explicit_gradients(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        """Return ``[V, B, *shape]`` gradients of the parameters for which the whole network is differentiated."""
        alone = {name for names in self.alone.values() for name in names}
        names = [name for name in self.fallback if name not in alone]
        if not names:
            return {}
        if self.along is not None:
            return self.along.pull(inputs, columns)
        found = self._per_example(lambda pull: pull(self.model, names, inputs, columns))
        return {name: value.to(columns.dtype) for name, value in found.items()}

    def pull_alone(self, call: ModuleCall, grad: Tensor) -> dict[str, Tensor]:
        """Return ``[V, B, *shape]`` gradients of the parameters of a module that is differentiated alone."""
        return self._per_example(lambda pull: call.explicit(grad, pull))

    def _per_example(self, function: Callable[[per_example.Pull], dict[str, Tensor]]) -> dict[str, Tensor]:
        if self._per_example_by_vmap:
            try:
                return function(per_example.by_vmap)
            except (RuntimeError, TypeError, ValueError):
                self._per_example_by_vmap = False
        return function(per_example.by_loop)


def _grad(outputs: Tensor, inputs: list[Any], columns: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(outputs, inputs, columns, retain_graph=True, allow_unused=True, **options)
