"""Encode integers with many zeros in few bytes: gaps between non-zeros and values, through LZMA's adaptive range coder.

On networks of 30- to 300-fold sparsity the bytes are within 2 to 6 % of the entropy of positions and values.

A network may be stored as its difference from another one, such as the network before it was trained: equal tensors are
left out, and of those that are rounded in steps the small differences are stored. A digest of the other network's
tensors is in the file, so that it is only read with the same one.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.core.errors import FileFormatError
from dubito.core.settings import bytes_of

# No context bits: neighbouring bytes of gaps and values are independent.
_FILTERS = [{"id": lzma.FILTER_LZMA1, "preset": 6, "dict_size": 2**20, "lc": 0, "lp": 0, "pb": 0}]
_ESCAPE = 255

BASE = ":base"  # no parameter has this name
Tensors = dict[str, Tensor]


def pack(content: bytes) -> bytes:
    """Compress bytes, without any header."""
    return lzma.compress(content, lzma.FORMAT_RAW, filters=_FILTERS)


def unpack(content: bytes, most: int) -> bytes:
    """Undo `pack`; content that would become more than `most` bytes is refused before it does."""
    try:
        found = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_FILTERS).decompress(content, max_length=most + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise FileFormatError("A compressed network is truncated or altered.") from error
    if len(found) > most:
        raise FileFormatError(f"A part of a compressed network is more than the {most} bytes that it should be.")
    return found


def encode(numbers: np.ndarray) -> tuple[bytes, bytes]:
    """Return the bytes of the gaps before each non-zero and those of the non-zeros, of integers in 16 bits.

    >>> gaps, values = encode(np.array([0, 0, 3, 0, -1, 0]))
    >>> list(gaps), decode(gaps, values, 6).tolist()
    ([2, 1], [0, 0, 3, 0, -1, 0])
    """
    flat = numbers.reshape(-1)
    positions = np.flatnonzero(flat)
    gaps = np.diff(positions, prepend=-1) - 1
    # a gap is as many bytes of 255 as fit, then the rest
    counts = gaps // _ESCAPE
    stream = np.full(int(counts.sum()) + len(gaps), _ESCAPE, dtype=np.uint8)
    stream[np.cumsum(counts + 1) - 1] = gaps % _ESCAPE
    values = flat[positions].astype("<i2").view(np.uint8).reshape(-1, 2)
    high = values[:, 1].copy()
    if not ((high == 0) | (high == 255)).all() or (np.abs(flat[positions]) > 127).any():
        return stream.tobytes(), b"\2" + values.T.tobytes()
    return stream.tobytes(), b"\1" + values[:, 0].tobytes()


def decode(gaps: bytes, values: bytes, size: int) -> np.ndarray:
    """Undo `encode`."""
    stream = np.frombuffer(gaps, dtype=np.uint8).astype(np.int64)
    ends = np.flatnonzero(stream != _ESCAPE)
    steps = np.diff(np.concatenate([[0], np.cumsum(stream)[ends]])) + 1
    positions = np.cumsum(steps) - 1
    body = np.frombuffer(values[1:], dtype=np.uint8)
    if values[:1] == b"\2":
        numbers = np.ascontiguousarray(body.reshape(2, -1).T).view("<i2").reshape(-1)
    else:
        numbers = body.view(np.int8)
    if len(numbers) != len(positions) or (len(positions) and positions[-1] >= size):
        raise FileFormatError("A compressed network is altered: its weights do not fit their places.")
    found = np.zeros(size, dtype=np.int32)
    found[positions] = numbers
    return found


def without_base(tensors: Tensors, base: Mapping[str, Tensor], stepped: Collection[str]) -> Tensors:
    """Return what a file must hold: changed tensors, differences of those that have a step, and what was left out.

    Args:
        tensors: The tensors of the network.
        base: Those of the other one.
        stepped: The names of tensors that are rounded in steps.
    """
    alike = [name for name, value in tensors.items() if name in base and base[name].shape == value.shape]
    same = [name for name in alike if torch.equal(tensors[name], base[name])]
    moved = [name for name in alike if name not in same and name in stepped]
    found = {name: value for name, value in tensors.items() if name not in same}
    for name in moved:
        found[name] = tensors[name].double() - base[name].double()
        found[name] = found[name].to(tensors[name].dtype)
    note = {"same": same, "moved": moved, "sha256": _digest(base, [*same, *moved])}
    return {**found, BASE: torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)}


def with_base(path: str | os.PathLike[str], tensors: Tensors, base: Mapping[str, Tensor]) -> Tensors:
    """Undo `without_base`; raise if the file belongs to another network."""
    if BASE not in tensors:
        return tensors
    note: Any = json.loads(bytes(tensors[BASE].tolist()))
    same, moved = note["same"], note["moved"]
    names = [*same, *moved]
    shapes_fit = all(name in base for name in names) and all(tensors[n].shape == base[n].shape for n in moved)
    if not shapes_fit or _digest(base, names) != note["sha256"]:
        raise FileFormatError(
            f"'{path}' holds the difference from another network: load it with the network that it was saved with."
        )
    found = {name: value for name, value in tensors.items() if name != BASE}
    found |= {name: base[name] for name in same}
    return found | {name: (base[name].double() + tensors[name].double()).to(base[name].dtype) for name in moved}


def _digest(tensors: Mapping[str, Tensor], names: Collection[str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype} ".encode())
        digest.update(bytes_of(tensors[name]))
    return digest.hexdigest()
