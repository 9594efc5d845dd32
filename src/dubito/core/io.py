"""Save and load trees of tensors and plain values: safetensors with a JSON header and a checksum, without pickle."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from dubito.core import settings
from dubito.core.atomic import write_atomic
from dubito.core.errors import DubitoError, FileFormatError, InputError
from dubito.core.numeric import all_finite
from dubito.core.settings import bytes_of

FORMAT_VERSION = 1
# The most nested levels of dicts and lists; the deepest file that we write, an ensemble of subspaces, has about ten.
MAX_DEPTH = 100
LONGEST_EMPTY_AXIS = 2**20
# What code raises when it meets content that does not fit together.
CONTENT_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError
)  # fmt: skip


def save(path: str | os.PathLike[str], kind: str, tree: Any) -> None:
    """Save a tree (dicts and lists of tensors, numbers, text, None) as one file of the given kind."""
    stored: dict[str, Tensor] = {}
    skeleton = _strip(tree, stored, "")
    header = json.dumps({"format": FORMAT_VERSION, "kind": kind, "tree": skeleton})
    metadata = {"dubito": header, "sha256": _checksum(header, stored)}
    write_atomic(path, safetensors_bytes(stored, metadata))


def load(path: str | os.PathLike[str], *kinds: str) -> Any:
    """Load what `save` wrote, of one of some kinds; raise a `FileFormatError` if the file is damaged or not ours."""
    target = Path(path)
    if not target.is_file():
        raise FileFormatError(f"There is no file '{target}'.")
    try:
        with safe_open(str(target), framework="pt") as file:
            metadata = file.metadata() or {}
            stored = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise FileFormatError(f"'{target}' is truncated or is not a Dubito file.") from error
    if "dubito" not in metadata:
        raise FileFormatError(f"'{target}' was not written by Dubito.")
    # a tensor without values may claim an axis of any length, and whatever splits it along that axis asks for memory
    longest = max((max(value.shape, default=0) for value in stored.values()), default=0)
    if longest > max(target.stat().st_size, LONGEST_EMPTY_AXIS):
        raise FileFormatError(f"'{target}' holds a tensor with an axis of {longest:,} entries, longer than the file.")
    if metadata.get("sha256") != _checksum(metadata["dubito"], stored):
        raise FileFormatError(f"'{target}' was altered or damaged after it was written: its checksum does not match.")
    with reading(target):
        header = json.loads(metadata["dubito"])
        if header["format"] > FORMAT_VERSION:
            raise FileFormatError(f"'{target}' needs a newer Dubito (format {header['format']}): please upgrade.")
        if header["kind"] not in kinds:
            raise FileFormatError(f"'{target}' holds a {header['kind']}, not a {' or a '.join(kinds)}.")
        tree = _restore(header["tree"], stored)
        if stored:
            raise FileFormatError(f"'{target}' holds a tensor '{min(stored)}' that nothing refers to.")
    return tree


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert any error inside the block into a `FileFormatError` that names the file.

    The checksum only shows that the content is as it was written, not that Dubito wrote it: any entry can be missing or
    have another type, size or depth.
    """
    try:
        with explaining_content(path):
            yield
    except FileFormatError:
        raise
    except DubitoError as error:
        raise FileFormatError(f"'{path}' cannot be read: {error}") from error


@contextmanager
def explaining_content(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Convert an error of another library inside the block into a `FileFormatError`, if there is a path."""
    try:
        yield
    except DubitoError:
        raise
    except CONTENT_ERRORS as error:
        if path is None or isinstance(error, torch.OutOfMemoryError):  # not what the file holds
            raise
        why = next(iter(str(error).strip().splitlines()), "")[:200]
        raise FileFormatError(
            f"'{path}' lacks the content that a file of its kind must have ({type(error).__name__}: {why})."
        ) from error


def copy_into(target: Any, source: Any) -> Any:
    """Copy the tree `source` into `target` and return it; tensors are copied in place, so aliases stay valid.

    A list may differ in length from the saved one (samples are collected one by one); its tensors are then new.
    """
    if isinstance(target, Tensor):
        if not isinstance(source, Tensor) or source.shape != target.shape:
            raise InputError("The saved state does not fit this run: a tensor has a different shape.")
        with torch.no_grad():
            target.copy_(source)
        return target
    if isinstance(target, Mapping):
        if not isinstance(source, Mapping) or target.keys() != source.keys():
            raise InputError("The saved state does not fit this run: it has different entries.")
        return {key: copy_into(value, source[key]) for key, value in target.items()}
    if isinstance(target, list) and isinstance(source, list) and len(target) == len(source):
        return [copy_into(*pair) for pair in zip(target, source, strict=True)]
    kinds = (bool, int | float, str, list | tuple)
    if any(isinstance(target, kind) != isinstance(source, kind) for kind in kinds) and target is not None:
        raise InputError(f"The saved state does not fit this run: it has {source!r} in the place of {target!r}.")
    return source


def clone(tree: Any, device: torch.device | None = None) -> Any:
    """Return a deep copy of a tree of tensors and plain values, on `device` if one is given."""
    if isinstance(tree, Tensor):
        return tree.detach().to(device, copy=True)
    if isinstance(tree, Mapping):
        return {key: clone(value, device) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [clone(value, device) for value in tree]
    return tree


def contiguous(tree: Any) -> Any:
    """Return a tree whose tensors lie in memory as a file has them: in another order, sums round differently."""
    if isinstance(tree, Tensor):
        return tree.contiguous()
    if isinstance(tree, Mapping):
        return {key: contiguous(value) for key, value in tree.items()}
    return [contiguous(value) for value in tree] if isinstance(tree, list | tuple) else tree


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree."""
    if isinstance(tree, Tensor):
        yield tree
    for value in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ():
        yield from tensors(value)


def check_shapes(path: str | os.PathLike[str], saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise an error unless a file has the tensors of a network."""
    for name in {**own, **saved}:
        there, here = (tuple(side[name].shape) if name in side else "missing" for side in (saved, own))
        if there != here:
            raise another_network(path, name, there, here)


def another_network(path: str | os.PathLike[str], name: str, there: Any, here: Any) -> FileFormatError:
    """Return the error for a tensor whose shape differs between a file and a network."""
    return FileFormatError(
        f"'{path}' was saved for another network: '{name}' is {there} in the file and {here} in the model."
    )


def is_finite(tree: Any) -> bool:
    """Return whether every floating tensor of a tree is free of NaN and infinities."""
    return all_finite(tensors(tree))


def digest(tree: Any) -> str:
    """Return a short digest of a tree of tensors and plain values."""
    total = hashlib.sha256()
    _digest_into(total, tree)
    return total.hexdigest()[:16]


def _digest_into(total: Any, tree: Any) -> None:
    if isinstance(tree, Tensor):
        total.update(settings.digest(tree).encode())
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            total.update(str(key).encode())
            _digest_into(total, value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            _digest_into(total, value)
    else:
        total.update(repr(tree).encode())


def _strip(tree: Any, stored: dict[str, Tensor], path: str) -> Any:
    """Replace the tensors of `tree` by markers and put them into `stored`."""
    if isinstance(tree, Tensor):
        stored[path] = tree.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"$tensor": path}
    if isinstance(tree, Mapping):
        wrong = [key for key in tree if not isinstance(key, str)]
        if wrong:
            raise InputError(f"The keys of a saved state must be text, got {wrong[0]!r}.")
        return {"$dict": [[key, _strip(value, stored, f"{path}/{_escape(key)}")] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return [_strip(value, stored, f"{path}/{i}") for i, value in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise InputError(f"A saved state may hold tensors, numbers and text only, got a {type(tree).__name__}.")


def _escape(key: str) -> str:
    """Escape "/" in a key as JSON pointers do, so that two tensors never share a path."""
    return key.replace("~", "~0").replace("/", "~1")


def _restore(skeleton: Any, stored: dict[str, Tensor], depth: int = 0) -> Any:
    """Put the tensors back into their places; each is removed from `stored`, so that none can be used twice."""
    if depth > MAX_DEPTH:
        raise FileFormatError(f"The file is nested more than {MAX_DEPTH} levels deep, which Dubito never writes.")
    if isinstance(skeleton, dict):
        if "$tensor" in skeleton:
            return stored.pop(skeleton["$tensor"])
        return {_text(key): _restore(value, stored, depth + 1) for key, value in skeleton["$dict"]}
    if isinstance(skeleton, list):
        return [_restore(value, stored, depth + 1) for value in skeleton]
    return skeleton


def _text(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key {key!r} is not text")
    return key


def _checksum(header: str, stored: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256(header.encode())
    for name in sorted(stored):
        value = stored[name]
        total.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        total.update(bytes_of(value))
    return total.hexdigest()
