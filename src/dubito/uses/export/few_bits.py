"""Write a plain network, without a posterior, to a file; in an ONNX file its weights may have 8 or 4 bits."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import params
from dubito.core.atomic import check_writable, write_atomic
from dubito.core.errors import FileFormatError, InputError
from dubito.networks.twin import copied
from dubito.uses.export import check
from dubito.uses.export.exporting import Exported
from dubito.uses.export.formats import find_format
from dubito.uses.export.graph import record
from dubito.uses.export.inputs import Inputs, as_inputs
from dubito.uses.export.outputs import Output

# The largest difference that weights in few bits may cause, relative to the largest output.
FEW_BITS_TOLERANCE = 0.1
# The first version of the standard with integers of 4 bits.
OPSET, IR_VERSION = 21, 10
# The largest difference that rounding explains in float32, where nothing but the network is computed.
TOLERANCE = 1e-5


def export_int8(model: nn.Module, path: str | os.PathLike[str], example: Any) -> Exported:
    """Write a network to an ``.onnx`` file whose weights have 8 bits, run the file, and compare.

    Activations are rounded to 8 bits in every call, by their range there (dynamic quantization).
    """
    return _written(model, model, path, example, _int8, "weights and activations are rounded to 8 bits")


def export_few_bits(
    model: nn.Module,
    rounded: nn.Module,
    bits: Mapping[str, int],
    steps: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    example: Any,
) -> Exported:
    """Write a network to an ``.onnx`` file whose weight matrices are integers of 4 or 8 bits, run it, and compare.

    They become floating-point numbers when the file runs (`DequantizeLinear` of the standard), so activations are not
    rounded.

    Args:
        model: The network before rounding, with which the file is compared.
        rounded: The network with rounded weights.
        bits: The bits of each of these, 4 or 8, by parameter.
        steps: Their scales: one number, or one for each channel in a shape that broadcasts.
        path: The file.
        example: A batch of inputs.
    """
    weights = {name: rounded.get_parameter(name).detach() for name in bits}

    def convert(plain: Path, small: Path) -> None:
        import onnx

        graph = onnx.version_converter.convert_version(onnx.load(plain), OPSET)
        graph.ir_version = IR_VERSION
        for name, weight in weights.items():
            _store(graph.graph, weight.cpu(), steps[name].cpu(), bits[name])
        onnx.checker.check_model(graph)
        onnx.save(graph, small)

    counts = " or ".join(str(count) for count in sorted({*bits.values()}))
    return _written(model, rounded, path, example, convert, f"weight matrices are rounded to {counts} bits")


def _written(
    model: nn.Module,
    exported: nn.Module,
    path: str | os.PathLike[str],
    example: Any,
    convert: Callable[[Path, Path], None],
    rounding: str,
) -> Exported:
    """Write a network as a plain file, convert that, compare the outputs and move the result to its place."""
    target, file_format = find_format(path)
    if target.suffix != ".onnx":
        raise InputError(f"Weights in few bits are written to .onnx files only, got '{path}'.")
    check_writable(target)
    with tempfile.TemporaryDirectory() as folder:
        plain, small = Path(folder) / "plain.onnx", Path(folder) / "small.onnx"
        made = export_network(exported, plain, example, keep_filters=True)  # says what is missing
        convert(plain, small)
        content = small.read_bytes()
    private = copied(model).eval()
    like = next(private.parameters())
    inputs = as_inputs(example, private, like.device, like.dtype)
    with torch.no_grad():
        expected = params.call(private, inputs.rebuilt(inputs.copies()))
        found = file_format.load(content)(inputs.tensors)
    errors = check.differences([Output("output", lambda _: expected)], found, [expected], FEW_BITS_TOLERANCE)
    if not errors["output"] <= FEW_BITS_TOLERANCE:
        raise FileFormatError(
            f"With weights in few bits the outputs differ by {errors['output']:.2g} from the network's, so it was not "
            "written: use more bits, or the plain file."
        )
    write_atomic(target, content)
    return Exported(target, len(content), made.inputs, ("output",), "one network", (rounding,), errors)


def _int8(plain: Path, small: Path) -> None:
    """Convert a file by onnxruntime's dynamic quantization."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for a pass over the graph that is not needed
        from onnxruntime.quantization import QuantType, quantize_dynamic

        logger, level = logging.getLogger(), logging.getLogger().level
        logger.setLevel(logging.ERROR)  # the same as a message of the root logger
        try:
            quantize_dynamic(plain, small, per_channel=True, weight_type=QuantType.QInt8)
        finally:
            logger.setLevel(level)


def _store(graph: Any, weight: Tensor, step: Tensor, bits: int) -> None:
    """Replace the constant of a graph that is this weight, or its transpose, by integers and their scales."""
    from onnx import TensorProto, helper, numpy_helper

    axes = [axis for axis, size in enumerate(step.shape) if size > 1]
    whole = torch.round(weight / step).to(torch.int8)
    ways = [(weight, whole, axes[0] if axes else None)]
    if weight.ndim == 2:
        ways.append((weight.T, whole.T, 1 - axes[0] if axes else None))
    for place, constant in enumerate(graph.initializer):
        if constant.data_type != TensorProto.FLOAT or sorted(constant.dims) != sorted(weight.shape):
            continue
        values = torch.from_numpy(numpy_helper.to_array(constant).copy())
        for known, numbers, axis in ways:
            if values.shape != known.shape or not torch.equal(values, known):
                continue
            name, kind = constant.name, TensorProto.INT4 if bits <= 4 else TensorProto.INT8
            content = _packed(numbers) if bits <= 4 else numbers.contiguous().numpy().tobytes()
            stored = helper.make_tensor(f"{name}:steps", kind, list(numbers.shape), content, raw=True)
            scale = (step.reshape(()) if axis is None else step.flatten()).numpy()
            graph.initializer[place].CopyFrom(stored)
            graph.initializer.append(numpy_helper.from_array(scale, f"{name}:scale"))
            attributes = {} if axis is None else {"axis": axis}
            node = helper.make_node("DequantizeLinear", [stored.name, f"{name}:scale"], [name], **attributes)
            graph.node.insert(0, node)
            return


def _packed(numbers: Tensor) -> bytes:
    """Return integers of 4 bits, two in a byte, the first in its lower half."""
    flat = nn.functional.pad(numbers.flatten(), (0, numbers.numel() % 2)).numpy().view("uint8") & 15
    packed: bytes = (flat[::2] | flat[1::2] << 4).tobytes()
    return packed


def export_network(
    model: nn.Module, path: str | os.PathLike[str], example: Any, *, keep_filters: bool = False
) -> Exported:
    """Write a network in the format that the ending of `path` names, run the file, and compare.

    The batch size stays free. A network in half precision is written in float32. With `keep_filters` convolutions have
    the network's own weights; by default BatchNorm is part of them, and channels come in blocks.
    """
    target, file_format = find_format(path)
    check_writable(target)
    private = copied(model).eval()
    like = next(private.parameters(), torch.empty(0))
    inputs = as_inputs(example, private, like.device, like.dtype)
    half = like.dtype in (torch.float16, torch.bfloat16)
    with torch.no_grad():
        expected = params.call(private, inputs.rebuilt(inputs.copies()))
        wide_type = torch.float32 if half else None
        recorded = record(_Network(private, inputs), inputs.traced_rows(), wide_type, keep_filters=keep_filters)
        converted = file_format.convert(recorded, inputs.names, ["output"])
        content = file_format.content(converted, {})
        wide = tuple(t.float() if half and t.is_floating_point() else t for t in inputs.tensors)
        found = file_format.load(content)(wide)
    tolerance = check.usual_tolerance(like.dtype, exact=True) if half else TOLERANCE
    errors = check.differences([Output("output", lambda _: expected)], found, [expected], tolerance)
    if not errors["output"] <= tolerance:
        raise FileFormatError(
            f"The outputs of the file differ by {errors['output']:.2g} from the network's, so it was not written."
        )
    write_atomic(target, content)
    return Exported(target, len(content), inputs.names, ("output",), "one network", (), errors)


class _Network(nn.Module):
    """A network that takes its tensors one after the other."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *tensors: Tensor) -> Tensor:
        return params.call(self.model, self.inputs.rebuilt(tensors))
