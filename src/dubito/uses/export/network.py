"""Write a plain network, without a posterior, to a file."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
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

# The largest difference that rounding explains in float32, where nothing but the network is computed.
TOLERANCE = 1e-5
# The largest difference that rounding to 8 bits may cause, relative to the largest output.
INT8_TOLERANCE = 0.1


def export_network(model: nn.Module, path: str | os.PathLike[str], example: Any) -> Exported:
    """Write a network in the format that the ending of `path` names, run the file, and compare.

    The batch size stays free. A network in half precision is written in float32.
    """
    target, file_format = find_format(path)
    check_writable(target)
    private = copied(model).eval()
    like = next(private.parameters(), torch.empty(0))
    inputs = as_inputs(example, private, like.device, like.dtype)
    half = like.dtype in (torch.float16, torch.bfloat16)
    with torch.no_grad():
        expected = params.call(private, inputs.rebuilt(inputs.tensors))
        recorded = record(_Network(private, inputs), inputs.traced_rows(), torch.float32 if half else None)
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


def export_int8(model: nn.Module, path: str | os.PathLike[str], example: Any) -> Exported:
    """Write a network to an ``.onnx`` file whose weights have 8 bits, run the file, and compare.

    Activations are rounded to 8 bits in every call, by their range there (dynamic quantization).
    """
    target, file_format = find_format(path)
    if target.suffix != ".onnx":
        raise InputError(f"Weights in 8 bits are written to .onnx files only, got '{path}'.")
    check_writable(target)
    with tempfile.TemporaryDirectory() as folder:
        plain, small = Path(folder) / "plain.onnx", Path(folder) / "small.onnx"
        made = export_network(model, plain, example)  # says what is missing
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it asks for a pass over the graph that is not needed
            import onnx
            from onnxruntime.quantization import QuantType, quantize_dynamic

            graph = onnx.load(plain)
            del graph.graph.value_info[:]  # shapes before weights were transposed, at which it would stumble
            onnx.save(graph, plain)
            logger, level = logging.getLogger(), logging.getLogger().level
            logger.setLevel(logging.ERROR)  # the same as a message of the root logger
            try:
                quantize_dynamic(plain, small, per_channel=True, weight_type=QuantType.QInt8)
            finally:
                logger.setLevel(level)
        content = small.read_bytes()
    private = copied(model).eval()
    like = next(private.parameters())
    inputs = as_inputs(example, private, like.device, like.dtype)
    with torch.no_grad():
        expected = params.call(private, inputs.rebuilt(inputs.tensors))
        found = file_format.load(content)(inputs.tensors)
    errors = check.differences([Output("output", lambda _: expected)], found, [expected], INT8_TOLERANCE)
    if not errors["output"] <= INT8_TOLERANCE:
        raise FileFormatError(
            f"With weights in 8 bits the outputs differ by {errors['output']:.2g} from the network's, so it was not "
            "written: use the plain file."
        )
    write_atomic(target, content)
    rounded = ("weights and activations are rounded to 8 bits",)
    return Exported(target, len(content), made.inputs, ("output",), "one network", rounded, errors)


class _Network(nn.Module):
    """A network that takes its tensors one after the other."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *tensors: Tensor) -> Tensor:
        return params.call(self.model, self.inputs.rebuilt(tensors))
