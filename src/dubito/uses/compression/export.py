"""Export networks to ONNX, checked with onnxruntime, and to `torch.export`."""

from __future__ import annotations

import contextlib
import io as streams
import logging
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dubito.core import batches, params
from dubito.core.errors import FileFormatError, InputError, UnsupportedError
from dubito.networks.twin import copied
from dubito.uses.compression.verify import TOLERANCE


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: The file.
        num_bytes: Its size.
        difference: The largest difference between the outputs of the file and of the network, relative to the largest
            output if that is above 1.
    """

    path: Path
    num_bytes: int
    difference: float


def export(model: nn.Module, path: Path, example: Any) -> Exported:
    """Write `model` in the format that the ending of `path` names, run the file, and compare.

    The batch size stays free. A difference above 1e-5 is an error.
    """
    writers = {".onnx": _onnx, ".pt2": _torch_export}
    if path.suffix not in writers:
        raise InputError(f"'{path.name}' must end in .onnx or .pt2, which decides the format.")
    if not path.parent.is_dir():
        raise InputError(f"The folder of '{path}' does not exist: create it first.")
    private = copied(model).eval()
    inputs = example if isinstance(example, tuple) else (example,)
    if not all(isinstance(one, torch.Tensor) for one in inputs):
        raise InputError("Only networks that take tensors can be exported: wrap this one in such a module.")
    with torch.no_grad():
        expected = params.call(private, inputs)
        found = writers[path.suffix](private, path, inputs)
    difference = float((expected - found).abs().max() / expected.abs().max().clamp_min(1.0))
    if not difference <= TOLERANCE:
        raise FileFormatError(f"'{path}' was written, but its outputs differ by {difference:.2g} from the network's.")
    return Exported(path, path.stat().st_size, difference)


def check_installed(path: Path) -> None:
    """Raise, before any work is done, if the file cannot be written: a wrong ending, or a package that is missing."""
    if path.suffix not in (".onnx", ".pt2"):
        raise InputError(f"'{path.name}' must end in .onnx or .pt2, which decides the format.")
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if path.suffix == ".onnx" and missing:
        raise UnsupportedError(f"ONNX files need {', '.join(missing)}: pip install 'dubito[onnx]'.")


def _torch_export(model: nn.Module, path: Path, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    program = _traced(lambda: torch.export.export(model, inputs, dynamic_shapes=_free_batch(inputs)))
    torch.export.save(program, path)
    return torch.export.load(path).module()(*inputs)


def _onnx(model: nn.Module, path: Path, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch.onnx needs it
    except ImportError as error:
        raise UnsupportedError(
            "ONNX files need onnx, onnxscript and onnxruntime: pip install 'dubito[onnx]'."
        ) from error

    def write() -> Any:
        with contextlib.redirect_stdout(streams.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                model, inputs, dynamo=True, dynamic_shapes=_free_batch(inputs), verbose=False, external_data=False
            )

    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        _traced(write).save(str(path), external_data=False)
    finally:
        logger.setLevel(level)
    onnx.checker.check_model(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    outputs = session.run(None, {name: one.cpu().numpy() for name, one in zip(names, inputs, strict=True)})
    return torch.from_numpy(outputs[0]).to(inputs[0].device)


def _free_batch(inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    size = torch.export.Dim("batch")
    return tuple({0: size} for _ in inputs) if batches.num_rows(inputs) > 1 else tuple(None for _ in inputs)


def _traced(work: Any) -> Any:
    try:
        return work()
    except Exception as error:
        sentence = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedError(f"This network cannot be traced for export: {sentence}") from error
