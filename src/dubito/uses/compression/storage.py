"""Save networks in three formats that all load into a plain module: dense, CSR and entropy-coded."""

from __future__ import annotations

import json
import math
import os
import struct
import warnings
import zlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dubito.core import io
from dubito.core.arguments import checked_arguments
from dubito.core.atomic import write_atomic
from dubito.core.constraints import Natural, Range, accepts
from dubito.core.errors import FileFormatError
from dubito.core.settings import bytes_of
from dubito.fitting.working_copies import check_model
from dubito.networks.layers import rule_for
from dubito.networks.swapping import put
from dubito.networks.twin import copied
from dubito.uses.compression import coding
from dubito.uses.compression.coding import BASE, with_base, without_base
from dubito.uses.compression.quantize import rounded

Format = Literal["dense", "csr", "coded"]
Counts = Mapping[str, Mapping[str, int]]
COUNTS, INTEGERS = ":counts", ":integers"  # no parameter has these names
KIND = "compressed network"
MAGIC = b"DUBITOC1"
# Bytes that the header of a coded file may have beyond a hundred times its packed size.
HEADER = 2**20
# Bytes in the header of a file that three tensors and a shape take beyond those of one tensor.
ROWS_HEADER = 300
# Values that a tensor may have at most to be stored by a codebook.
SHARED = 64


@checked_arguments
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    format: Format = "coded",
    steps: Mapping[str, float] | None = None,
    counts: Counts | None = None,
    base: nn.Module | None = None,
) -> int:
    """Write a network and return the size of the file in bytes.

    Args:
        path: The file.
        model: The network; of tied weights one copy is written.
        format: ``"dense"``: every number in full; ``"csr"``: weight matrices as compressed sparse rows, where that is
            smaller; ``"coded"``: weights in steps, gaps and values entropy-coded.
        steps: For ``"coded"``, the step of each parameter. A tensor with few different values, such as shared weights,
            is written exactly, as their numbers and a codebook; so are parameters without a step, and buffers, in full.
        counts: Integers of its modules that changed with its layers, such as numbers of heads; see `Plan.counts`.
            `load` raises an error if a network lacks one of them. Those of modules around layers are always written.
        base: Another network, of which only the difference is written: for adapters on frozen weights, these alone.
            `load` then needs a network with the same weights.
    """
    check_model(model)
    tensors = _tensors(model)
    if base is not None:
        tensors = without_base(tensors, _tensors(base), (steps or {}) if format == "coded" else ())
    for key, integers in ((COUNTS, counts), (INTEGERS, _integers(model))):
        if integers:
            tensors[key] = torch.tensor(list(json.dumps(integers).encode()), dtype=torch.uint8)
    if format == "coded":
        write_atomic(path, _coded(tensors, steps or {}))
    elif format == "csr":
        io.save(path, KIND, {name: _rows(value) for name, value in tensors.items()})
    else:
        io.save(path, KIND, tensors)
    return Path(path).stat().st_size


@checked_arguments
def load(path: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """Return the network that `save` wrote, as a plain module of the architecture of `model`.

    Layers get the sizes that they have in the file, so `model` may be the network before it was compressed. It is not
    changed. Of a file that was saved with `base=`, it must have the weights of that network.
    """
    check_model(model)
    with io.reading(path):
        tensors = with_base(path, _read(Path(path), _Sizes(path, model)), _tensors(model))
        found = copied(model)
        says_counts = INTEGERS in tensors or COUNTS in tensors
        for key in (INTEGERS, COUNTS):
            if key in tensors:
                _set_counts(path, found, json.loads(bytes(tensors.pop(key).tolist())), strict=key == COUNTS)
        for name, module in list(found.named_modules()):
            if (layer := _resized(name, module, tensors)) is not module:
                found = put(found, name, layer)
        own = {**dict(found.named_parameters()), **dict(found.named_buffers())}
        io.check_shapes(path, tensors, own)
        for name, value in own.items():
            value.data.copy_(tensors[name])
    if not says_counts:
        _question_counts(path, model, found)
    return found.eval()


def _integers(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the positive integers of the modules around layers, which their code may read: a number of heads, say."""
    around = {
        name: module
        for name, module in model.named_modules()
        if rule_for(module) is None and any(rule_for(child) is not None for child in module.children())
    }
    found = {n: {a: v for a, v in vars(m).items() if type(v) is int and v > 0} for n, m in around.items()}
    return {name: own for name, own in found.items() if own}


def _set_counts(path: str | os.PathLike[str], model: nn.Module, counts: Any, *, strict: bool) -> None:
    """Set integers of a network's modules, which may only become smaller; if `strict`, each must be there."""
    modules = dict(model.named_modules())
    for name, own in counts.items():
        for attribute, value in own.items():
            before = vars(modules[name]).get(attribute) if name in modules else None
            if type(before) is int and accepts(Annotated[int, Range(1, before)], value):
                setattr(modules[name], attribute, value)
            elif strict:
                raise FileFormatError(f"'{path}' was saved for another network: '{name}' has no such '{attribute}'.")


def _question_counts(path: str | os.PathLike[str], model: nn.Module, found: nn.Module) -> None:
    """Warn if an old file, which says no numbers of heads, has narrower layers in a module that may read one."""
    for name, own in _integers(model).items():
        for part, layer in model.get_submodule(name).named_children():
            rule, after = rule_for(layer), found.get_submodule(f"{name}.{part}" if name else part)
            if rule is None or rule.weight_axis(layer, "output") is None:
                continue
            width = rule.num_outputs(layer)
            heads = [f"'{key}'" for key, value in own.items() if 1 < value < width and width % value == 0]
            if heads and rule.num_outputs(after) < width:
                warnings.warn(
                    f"'{path}' was written by an old version, which did not store {', '.join(heads)} of '{name}', and "
                    f"'{part}' is narrower in it: if heads were removed, this is another network. Compress the large "
                    "one again.",
                    stacklevel=4,
                )
                return


class _Sizes:
    """Check that no tensor of a file is larger than the tensor of the network.

    A few bytes can encode any number of zeros, so sizes are checked before memory is allocated.
    """

    def __init__(self, path: str | os.PathLike[str], model: nn.Module) -> None:
        self.path = path
        self.own = {name: tuple(value.shape) for name, value in _tensors(model).items()}

    def checked(self, name: Any, shape: Any) -> list[int]:
        """Return the shape of a tensor of the file; raise if the network's own is smaller."""
        if not accepts(str, name) or not isinstance(shape, list) or not accepts(tuple[Natural, ...], tuple(shape)):
            raise FileFormatError(f"'{self.path}' names a tensor {name!r} of shape {shape!r}, which is invalid.")
        if name in (COUNTS, INTEGERS, BASE) and len(shape) == 1 and shape[0] <= HEADER:
            return shape
        # a bias that only the file has holds the constants of removed units: one number per output
        here = self.own.get(name, self.own.get(f"{name.removesuffix('bias')}weight") if name.endswith("bias") else None)
        if here is None or math.prod(shape) > math.prod(here):
            raise io.another_network(self.path, name, tuple(shape), self.own.get(name, "missing"))
        return shape


def _read(path: Path, sizes: _Sizes) -> dict[str, Tensor]:
    """Return the tensors of a file by name."""
    if path.is_file():
        with path.open("rb") as stream:
            coded = stream.read(len(MAGIC)) == MAGIC
        if coded:
            return _decoded(path, sizes)
    tree = io.load(path, KIND)
    return {
        name: value if isinstance(value, Tensor) else _from_rows(name, value, sizes) for name, value in tree.items()
    }


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value.detach().cpu() for name, value in state.items()}


# ---------------------------------------------------------------------- compressed sparse rows


def _rows(value: Tensor) -> Tensor | dict[str, Any]:
    """Return a weight matrix as sparse rows with the smallest integers that fit, or itself if that is smaller."""
    if value.ndim < 2 or not value.is_floating_point():
        return value
    matrix = value.flatten(1)
    mask = matrix != 0
    columns = mask.nonzero()[:, 1].numpy()
    starts = np.concatenate([[0], np.cumsum(mask.sum(1).numpy())])
    parts = {
        "values": matrix[mask],
        "columns": _smallest(columns, matrix.shape[1]),
        "starts": _smallest(starts, len(columns)),
    }
    size = ROWS_HEADER + sum(part.numel() * part.element_size() for part in parts.values())
    return {**parts, "shape": list(value.shape)} if size < value.numel() * value.element_size() else value


def _smallest(numbers: np.ndarray, largest: int) -> Tensor:
    kind = np.uint8 if largest < 2**8 else np.int16 if largest < 2**15 else np.int32
    return torch.from_numpy(numbers.astype(kind))


def _from_rows(name: str, tree: Mapping[str, Any], sizes: _Sizes) -> Tensor:
    shape = sizes.checked(name, tree["shape"])
    starts, columns = tree["starts"].long(), tree["columns"].long()
    counts = starts.diff()
    if len(counts) != shape[0] or bool((counts < 0).any()) or int(counts.sum()) != len(columns):
        raise FileFormatError(f"'{sizes.path}' is altered: the rows of '{name}' do not fit its values.")
    rows = torch.repeat_interleave(torch.arange(shape[0]), counts)
    found = torch.zeros(shape[0], int(np.prod(shape[1:])), dtype=tree["values"].dtype)
    found[rows, columns] = tree["values"]
    return found.reshape(shape)


# ---------------------------------------------------------------------- entropy-coded


def _coded(tensors: Mapping[str, Tensor], steps: Mapping[str, float]) -> bytes:
    """Return the bytes of a file: magic, checksum, header, all gaps, all values, all plain numbers, each packed."""
    header: list[list[Any]] = []
    gaps, values, plain = [], [], []
    for name, value in tensors.items():
        book = _codebook(value)
        if book is not None or (name in steps and value.is_floating_point()):
            scale = steps[name] if book is None else book.tolist()
            integers = rounded(value, steps[name]) if book is None else _numbers(value, book)
            gap, number = coding.encode(integers.numpy())
            header.append([name, list(value.shape), str(value.dtype)[6:], scale, len(gap), len(number)])
            gaps.append(gap)
            values.append(number)
        else:
            content = bytes(bytes_of(value))
            header.append([name, list(value.shape), str(value.dtype)[6:], len(content)])
            plain.append(content)
    streams = (json.dumps(header, separators=(",", ":")).encode(), *(b"".join(s) for s in (gaps, values, plain)))
    packed = [coding.pack(stream) for stream in streams]
    body = struct.pack("<4I", *map(len, packed)) + b"".join(packed)
    return MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def _codebook(value: Tensor) -> Tensor | None:
    """Return the distinct non-zero values of a large tensor if it has few of them; else None."""
    if not value.is_floating_point() or value.numel() < SHARED * 8:
        return None
    different = value.unique()
    different = different[different != 0]
    return different.double() if 0 < len(different) <= SHARED else None


def _numbers(value: Tensor, book: Tensor) -> Tensor:
    """Return the position of each value in the codebook, counted from 1; 0 for zero."""
    numbers = torch.searchsorted(book, value.double().contiguous()) + 1
    return numbers.masked_fill_(value == 0, 0).int()


def _decoded(path: Path, limits: _Sizes) -> dict[str, Tensor]:
    content = path.read_bytes()[len(MAGIC) :]
    if len(content) < 20 or zlib.crc32(content[4:]) != struct.unpack("<I", content[:4])[0]:
        raise FileFormatError(f"'{path}' was truncated or altered after it was written: its checksum does not match.")
    sizes = struct.unpack("<4I", content[4:20])
    if sum(sizes) != len(content) - 20:
        raise FileFormatError(f"'{path}' is altered: its parts are not as long as its header says.")
    packed, *streams = (content[a:b] for a, b in pairwise(np.cumsum((20, *sizes)).tolist()))
    entries = [_entry(path, entry, limits) for entry in json.loads(coding.unpack(packed, HEADER + 100 * len(packed)))]
    if len({entry.name for entry in entries}) < len(entries):
        raise FileFormatError(f"'{path}' is altered: it names a tensor twice.")
    lengths = [sum(entry.lengths[i] for entry in entries) for i in range(3)]
    readers = [_ByteReader(coding.unpack(stream, length)) for stream, length in zip(streams, lengths, strict=True)]
    return {entry.name: entry.tensor(*(reader.take(n) for reader, n in zip(readers, entry.lengths, strict=True)))
            for entry in entries}  # fmt: skip


class _Entry(NamedTuple):
    """One tensor of a coded file: how many bytes it has of the gaps, the values and the plain numbers."""

    name: str
    shape: list[int]
    dtype: torch.dtype
    scale: float | list[float] | None
    lengths: tuple[int, int, int]

    def tensor(self, gaps: bytes, values: bytes, plain: bytes) -> Tensor:
        """Decode the tensor."""
        if self.scale is None:
            raw = torch.frombuffer(bytearray(plain), dtype=self.dtype) if plain else torch.empty(0, dtype=self.dtype)
            return raw.reshape(self.shape)
        numbers = torch.from_numpy(coding.decode(gaps, values, math.prod(self.shape)))
        if isinstance(self.scale, list):
            return (
                torch.tensor([0.0, *self.scale], dtype=torch.float64)[numbers.long()].to(self.dtype).reshape(self.shape)
            )
        return (numbers.double() * self.scale).to(self.dtype).reshape(self.shape)


def _entry(path: Path, raw: Any, limits: _Sizes) -> _Entry:
    """Read what the header says of one tensor; every length in it is bounded by the size of the tensor."""
    name, shape, kind, *rest = raw
    shape, dtype = limits.checked(name, shape), getattr(torch, kind)
    if not isinstance(dtype, torch.dtype):
        raise FileFormatError(f"'{path}' is altered: there is no type {kind!r} of numbers.")
    scale, *lengths = (None, 0, 0, *rest) if len(rest) == 1 else (*rest, 0)
    size = math.prod(shape)
    most = (0, 0, size * dtype.itemsize) if scale is None else (size, 2 * size + 1, 0)
    if not all(accepts(Annotated[int, Range(0, limit)], each) for each, limit in zip(lengths, most, strict=True)):
        raise FileFormatError(f"'{path}' is altered: '{name}' has more bytes than a tensor of its size.")
    return _Entry(name, shape, dtype, scale, (lengths[0], lengths[1], lengths[2]))


class _ByteReader:
    """Reads bytes piece by piece."""

    def __init__(self, content: bytes) -> None:
        self.content, self.start = content, 0

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        self.start += size
        return self.content[self.start - size : self.start]


# ---------------------------------------------------------------------- sizes


def _resized(name: str, module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the layer with the sizes of its tensors in the file, and a bias where only the file has one."""
    own = {key: tensors.get(f"{name}.{key}" if name else key) for key in ("weight", "bias", "running_mean")}
    rule = rule_for(module)
    given = own["weight"] if own["weight"] is not None else own["running_mean"]
    if rule is None or given is None:  # a layer without tensors, or one whose weight is tied to another
        return module
    outputs, inputs = rule.weight_axis(module, "output"), rule.weight_axis(module, "input")
    smaller: Any = module
    if outputs is not None and rule.num_outputs(module) > given.shape[outputs]:
        smaller = rule.keep_outputs(smaller, torch.arange(given.shape[outputs], device=given.device))
    if inputs is not None and rule.num_inputs(module) > given.shape[inputs]:
        smaller = rule.keep_inputs(smaller, torch.arange(given.shape[inputs], device=given.device))
    if own["bias"] is not None and getattr(smaller, "bias", None) is None:
        smaller = copied(smaller) if smaller is module else smaller
        smaller.bias = nn.Parameter(own["bias"].clone())
    return smaller
