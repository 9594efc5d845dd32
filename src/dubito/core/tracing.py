"""Record a function as a graph, for an exported file.

While torch records, tensors have no values and the batch has no fixed size. So code that looks at values (a check for
NaN, an early exit) or cuts a batch into parts asks `is_tracing` first and computes everything in one piece instead.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from dubito.core import nests
from dubito.core.errors import DubitoError, UnsupportedError, first_line
from dubito.core.locks import ProcessLock

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# A prime, so that no product of other axes is equal to it.
RECORDED_ROWS = 37
_active: ContextVar[bool] = ContextVar("tracing", default=False)
_TALKATIVE = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")  # loggers
_lock = ProcessLock()  # torch records one function at a time: parts of its state are global


def rows_to_record(example: Any) -> Any:
    """Return the rows of an example, repeated or cut to a number that no usual axis of a network has.

    An axis as long as the batch could be taken for it.
    """
    count = nests.num_rows(example)
    return nests.take(example, [row % count for row in range(RECORDED_ROWS)])


def is_tracing() -> bool:
    """Return whether this thread records a graph.

    >>> with recording():
    ...     is_tracing()
    True
    """
    return _active.get()


@contextmanager
def recording() -> Iterator[None]:
    """Record in this block: `is_tracing` is true, other threads wait, and torch's notes about itself are hidden."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    with _lock, warnings.catch_warnings():
        levels, token = [logger.level for logger in loggers], _active.set(True)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            _active.reset(token)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def export_any_batch(module: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    """Call `torch.export` on a module that takes tensors by position; their first axis, the batch, stays free.

    Args:
        module: The module; one that is not a graph takes ``*inputs``.
        inputs: At least two rows of each input.
    """
    shapes: Any = tuple({0: torch.export.Dim.AUTO} for _ in inputs)
    shapes = shapes if isinstance(module, fx.GraphModule) else (shapes,)
    try:
        found = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    except DubitoError:
        raise
    except Exception as error:
        raise UnsupportedError(_why(error)) from error
    names = found.graph_signature.user_inputs
    given = [node for node in found.graph.nodes if node.op == "placeholder" and node.name in names]
    if any(str(node.meta["val"].shape[0]).isdigit() for node in given):  # a symbol may have a known value too
        raise UnsupportedError(
            "This network cannot be exported: it treats the number of rows as a constant, so write it for any batch."
        )
    return found


def without_changes(program: ExportedProgram) -> ExportedProgram:
    """Return a program that computes the same without operations that change their arguments."""
    try:
        return program.run_decompositions({})
    except Exception as error:
        raise UnsupportedError(_why(error)) from error


def returned(program: ExportedProgram, output: fx.Node) -> list[fx.Node]:
    """Return what a program returns, without the new values of inputs and buffers that it changes.

    Args:
        program: The program.
        output: The node that ends its graph.
    """
    nodes: Any = output.args[0]
    specs = program.graph_signature.output_specs
    return [node for node, spec in zip(nodes, specs, strict=True) if spec.kind.name == "USER_OUTPUT"]


def _why(error: Exception) -> str:
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        return "This network cannot be exported: what it computes depends on values of its inputs (an `if`, a loop)."
    if "mutated in the forward" in str(error):
        return (
            "This network cannot be exported: it changes a buffer in `forward`, which a file cannot: leave that out in "
            "evaluation mode (if self.training)."
        )
    return f"This network cannot be traced for export: {first_line(error).rstrip('.')}."


def record_with_gradients(function: Callable[..., Any], example: tuple[Tensor, ...]) -> fx.GraphModule:
    """Record a function that differentiates inside as a graph of plain operations; the first axis stays free.

    `torch.export` cannot record calls of autograd; it can record the graph that this returns.

    Args:
        function: Takes tensors and returns a tensor or a tuple of tensors.
        example: Its arguments, with at least two rows.
    """
    from torch._dispatch.python import enable_python_dispatcher

    found = _record(function, example, nullcontext())
    if _takes_any_batch(found, example):
        return found
    return _record(function, example, enable_python_dispatcher())  # torch 2.6 fixes the batch of products otherwise


def _takes_any_batch(graph: fx.GraphModule, example: tuple[Tensor, ...]) -> bool:
    try:
        with torch.no_grad():
            graph(*(value[:-1] for value in example))
    except RuntimeError:
        return False
    return True


def _record(
    function: Callable[..., Any], example: tuple[Tensor, ...], around: AbstractContextManager[Any]
) -> fx.GraphModule:
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    with recording():
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        fake = []
        for number, value in enumerate(example):
            sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (value.ndim - 1)]
            context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
            fake.append(mode.from_tensor(value, source=ConstantSource(f"input_{number}"), symbolic_context=context))
        table = {torch.ops.aten.avg_pool2d_backward.default: _pull_through_mean}
        with mode, around:
            return make_fx(function, table, tracing_mode="real", _allow_non_fake_inputs=True)(*fake)


def _pull_through_mean(
    grad: Tensor,
    inputs: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    """Return the gradient of `avg_pool2d` as a transposed convolution, which file formats know."""
    if ceil_mode or inputs.ndim != 4 or (any(padding) and not count_include_pad):
        return NotImplemented
    kernel, padding = ([*each] * 2 if len(each) == 1 else [*each] for each in (kernel, padding))
    stride = kernel if not stride else [*stride] * 2 if len(stride) == 1 else [*stride]
    channels, share = inputs.shape[1], 1 / (divisor or kernel[0] * kernel[1])
    weight = torch.full((channels, 1, *kernel), share, dtype=grad.dtype, device=grad.device)
    reached = [(grad.shape[k + 2] - 1) * stride[k] - 2 * padding[k] + kernel[k] for k in range(2)]
    missing = [inputs.shape[k + 2] - reached[k] for k in range(2)]  # rows at the end that no mean has
    return torch.nn.functional.conv_transpose2d(grad, weight, None, stride, padding, missing, channels)
