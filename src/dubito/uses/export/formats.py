"""File formats: ONNX, which onnxruntime and others run without torch, and programs of `torch.export`."""

from __future__ import annotations

import io as streams
import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram

from dubito.core.errors import InputError, UnsupportedError
from dubito.core.tracing import recording

OPSET = 18
# From the inputs of a file to its outputs.
Runner = Callable[[tuple[Tensor, ...]], list[Tensor]]
# The key under which a file holds what it is, as JSON.
METADATA = "dubito"
# What every file says of itself.
DESCRIBED = ("version", "family", "recipe", "inputs", "outputs", "form", "approximations", "decisions", "errors")
# Inputs and outputs have names with this prefix until the graph is complete: "mean" is also the name of an operation.
_PLACE = "dubito:"


class Format(ABC):
    """One file format.

    Attributes:
        computes_constants_once: Whether its runtime computes what depends on constants alone when it loads a file.
    """

    computes_constants_once: ClassVar[bool] = False

    def check_installed(self) -> None:  # noqa: B027 - most formats need nothing
        """Raise an error if a package that the format needs is missing."""

    @abstractmethod
    def convert(self, program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
        """Return the program as an object of this format, with names for its inputs and outputs."""

    @abstractmethod
    def content(self, converted: Any, metadata: Mapping[str, Any]) -> bytes:
        """Return the content of the file, given what `convert` returned and what the file says of itself."""

    @abstractmethod
    def load(self, content: bytes) -> Runner:
        """Return the function that a file computes."""


class Onnx(Format):
    """ONNX with the operators of the standard."""

    computes_constants_once = True

    def check_installed(self) -> None:
        """Raise an error unless the extra "onnx" is installed."""
        try:
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401 - torch.onnx needs it
        except ImportError as error:
            raise UnsupportedError(
                "ONNX files need onnx, onnxscript and onnxruntime: pip install 'dubito[onnx]'."
            ) from error

    def convert(self, program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
        """Return the graph as a `ModelProto`."""
        import onnx

        with recording():
            with _explained("ONNX cannot express this network"):
                found = torch.onnx.export(
                    program,
                    input_names=[f"{_PLACE}{name}" for name in inputs],
                    output_names=[f"{_PLACE}{name}" for name in outputs],
                    opset_version=OPSET,
                    dynamo=True,
                    verbose=False,
                    external_data=False,
                )
            assert found is not None
            model = found.model_proto
        foreign = {node.domain for node in model.graph.node} - {"", "ai.onnx"}
        if foreign or model.functions:
            raise UnsupportedError(f"This network needs operators beyond the ONNX standard: {', '.join(foreign)}.")
        for node in model.graph.node:  # which hold the lines of code that they come from
            node.ClearField("metadata_props")
        _order_gelu(model.graph)
        del model.graph.value_info[:]  # shapes that runtimes infer again: a third of the file of a small network
        _name_ends(model, {f"{_PLACE}{name}": name for name in (*inputs, *outputs)})
        if model.ByteSize() >= 2**31 - 2**20:
            raise UnsupportedError("One ONNX file holds at most 2 GB: use fewer samples, or a .pt2 file.")
        onnx.checker.check_model(model)
        return model

    def content(self, converted: Any, metadata: Mapping[str, Any]) -> bytes:
        """Return the graph in the protocol-buffer form."""
        converted.producer_name = METADATA
        del converted.metadata_props[:]
        entry = converted.metadata_props.add()
        entry.key, entry.value = METADATA, json.dumps(metadata)
        content: bytes = converted.SerializeToString()
        return content

    def load(self, content: bytes) -> Runner:
        """Return the graph in onnxruntime, on the CPU."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        with _explained("onnxruntime cannot run this network"):
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]

        def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
            arrays = {name: one.detach().cpu().numpy() for name, one in zip(names, inputs, strict=True)}
            with _explained("onnxruntime cannot run this network"):
                return [torch.from_numpy(found) for found in session.run(None, arrays)]

        return run


class TorchProgram(Format):
    """A program of `torch.export`, which torch loads without the code of the network."""

    def convert(self, program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
        """Return the program as it is; its outputs are a tuple, which has no names."""
        return program

    def content(self, converted: Any, metadata: Mapping[str, Any]) -> bytes:
        """Return the archive."""
        stream = streams.BytesIO()
        with recording():
            torch.export.save(converted, stream, extra_files={f"{METADATA}.json": json.dumps(metadata)})
        return stream.getvalue()

    def load(self, content: bytes) -> Runner:
        """Return the program as a module."""
        with recording():
            module = torch.export.load(streams.BytesIO(content)).module()

        def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
            with torch.no_grad(), _explained("torch cannot run this program"):
                found = module(*inputs)
            return [found] if isinstance(found, Tensor) else list(found)

        return run


FORMATS: dict[str, Format] = {".onnx": Onnx(), ".pt2": TorchProgram()}


def find_format(path: str | os.PathLike[str]) -> tuple[Path, Format]:
    """Return the path and its format; raise an error before any work if the file cannot be written."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"`path` must be the name of a file, got {path!r}.")
    found = Path(path)
    if found.suffix not in FORMATS:
        raise InputError(f"'{found.name}' must end in .onnx or .pt2, which decides the format.")
    if not found.parent.is_dir():
        raise InputError(f"The folder of '{found}' does not exist: create it first.")
    FORMATS[found.suffix].check_installed()
    return found, FORMATS[found.suffix]


def check_metadata(metadata: Any) -> None:
    """Raise an error unless entries for the file's description of itself can be written as JSON."""
    try:
        json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"`metadata` must be a dict of what JSON can hold, such as {{'classes': ['cat', 'dog']}}: {error}."
        ) from error
    taken = [name for name in DESCRIBED if name in dict(metadata or {})]
    if taken:
        raise InputError(f"`metadata` must not hold '{taken[0]}', which a file says of itself: choose another name.")


def _name_ends(model: Any, names: Mapping[str, str]) -> None:
    """Give the inputs and outputs of a graph their names, and other values that have one of these a new one."""
    graph = model.graph
    taken = set(names.values())

    def new(name: str) -> str:
        return names.get(name, f"{name}:inner" if name in taken else name)

    for node in graph.node:
        node.input[:] = [new(name) for name in node.input]
        node.output[:] = [new(name) for name in node.output]
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = new(value.name)


def _order_gelu(graph: Any) -> None:
    """Compute ``x (k (1 + erf y))`` as ``(x k) (1 + erf y)``, which runtimes recognize as one operation, GELU."""
    made = {name: node for node in graph.node for name in node.output}
    used = Counter(name for node in graph.node for name in node.input)

    def is_one(name: str, kind: str) -> bool:
        return name in made and made[name].op_type == kind and used[name] == 1

    for last in [node for node in graph.node if node.op_type == "Mul"]:
        for x, scaled in (tuple(last.input), tuple(last.input)[::-1]):
            if not is_one(scaled, "Mul"):
                continue
            for k, shifted in (tuple(made[scaled].input), tuple(made[scaled].input)[::-1]):
                if is_one(shifted, "Add") and any(is_one(name, "Erf") for name in made[shifted].input):
                    made[scaled].input[:] = [x, k]
                    last.input[:] = [scaled, shifted]


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn the errors of another library into one sentence."""
    try:
        yield
    except Exception as error:
        missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", str(error))
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = lines[-1].rstrip(".") if lines else type(error).__name__
        if missing is not None:
            gradient = " or export weight samples with method='weights'" if missing[1].endswith("_backward") else ""
            why = f"it has no operation like {missing[1]}, so write a .pt2 file{gradient}"
        raise UnsupportedError(f"{what}: {why}.") from error
