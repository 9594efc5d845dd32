"""Write a plain network, without a posterior, to a file."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import params
from dubito.core.atomic import check_writable, write_atomic
from dubito.core.errors import FileFormatError
from dubito.networks.twin import copied
from dubito.uses.export import check
from dubito.uses.export.exporting import Exported
from dubito.uses.export.formats import find_format
from dubito.uses.export.graph import record
from dubito.uses.export.inputs import Inputs, as_inputs
from dubito.uses.export.outputs import Output

# The largest difference that rounding explains in float32, where nothing but the network is computed.
TOLERANCE = 1e-5


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


class _Network(nn.Module):
    """A network that takes its tensors one after the other."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *tensors: Tensor) -> Tensor:
        return params.call(self.model, self.inputs.rebuilt(tensors))
