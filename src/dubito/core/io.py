"""Files: safetensors with versioned JSON beside the tensors; written atomically, checked when read, no pickle."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from dubito.core.errors import FileFormatError, InputError

FORMAT_VERSION = 1


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that a reader sees either the old content or the new one, never a part."""
    target = Path(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise FileFormatError(f"Cannot write '{target}': {error.strerror or error}.") from error
        raise


def save(path: str | os.PathLike[str], kind: str, tree: Any) -> None:
    """Save a tree (dicts and lists of tensors, numbers, text, None) as one file of the given kind."""
    stored: dict[str, Tensor] = {}
    skeleton = _strip(tree, stored, "")
    header = json.dumps({"format": FORMAT_VERSION, "kind": kind, "tree": skeleton})
    metadata = {"dubito": header, "sha256": _checksum(header, stored)}
    write_atomic(path, safetensors_bytes(stored, metadata))


def load(path: str | os.PathLike[str], kind: str) -> Any:
    """Load what `save` wrote; a truncated, altered or foreign file raises one clear sentence."""
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
    if metadata.get("sha256") != _checksum(metadata["dubito"], stored):
        raise FileFormatError(f"'{target}' was altered or damaged after it was written: its checksum does not match.")
    header = json.loads(metadata["dubito"])
    if header["format"] > FORMAT_VERSION:
        raise FileFormatError(f"'{target}' was written by a newer Dubito (format {header['format']}): please upgrade.")
    if header["kind"] != kind:
        raise FileFormatError(f"'{target}' holds a {header['kind']}, not a {kind}.")
    return _restore(header["tree"], stored)


def copy_into(target: Any, source: Any) -> Any:
    """Return `source` in the structure of `target`, tensors copied in place so that aliases of them stay valid.

    A list may have another length than the one saved (samples are collected one by one); its tensors are then new.
    """
    if isinstance(target, Tensor):
        if not isinstance(source, Tensor) or source.shape != target.shape:
            raise InputError("The saved state does not fit this run: a tensor has another shape.")
        with torch.no_grad():
            target.copy_(source)
        return target
    if isinstance(target, Mapping):
        if not isinstance(source, Mapping) or target.keys() != source.keys():
            raise InputError("The saved state does not fit this run: it holds other entries.")
        return {key: copy_into(value, source[key]) for key, value in target.items()}
    if isinstance(target, list) and isinstance(source, list) and len(target) == len(source):
        return [copy_into(*pair) for pair in zip(target, source, strict=True)]
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


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree."""
    if isinstance(tree, Tensor):
        yield tree
    for value in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ():
        yield from tensors(value)


def _strip(tree: Any, stored: dict[str, Tensor], path: str) -> Any:
    """Move the tensors of `tree` into `stored` and leave markers in their place."""
    if isinstance(tree, Tensor):
        stored[path] = tree.detach().cpu().contiguous().clone()
        return {"$tensor": path}
    if isinstance(tree, Mapping):
        wrong = [key for key in tree if not isinstance(key, str)]
        if wrong:
            raise InputError(f"A saved state has text as keys, not {wrong[0]!r}.")
        return {"$dict": [[key, _strip(value, stored, f"{path}/{_escape(key)}")] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return [_strip(value, stored, f"{path}/{i}") for i, value in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise InputError(f"A state holds tensors, numbers and text only, not a {type(tree).__name__}.")


def _escape(key: str) -> str:
    """Write "/" within a key in another way, so that two places never share a name (as JSON pointers do)."""
    return key.replace("~", "~0").replace("/", "~1")


def _restore(skeleton: Any, stored: Mapping[str, Tensor]) -> Any:
    if isinstance(skeleton, dict):
        if "$tensor" in skeleton:
            return stored[skeleton["$tensor"]]
        return {key: _restore(value, stored) for key, value in skeleton["$dict"]}
    if isinstance(skeleton, list):
        return [_restore(value, stored) for value in skeleton]
    return skeleton


def _checksum(header: str, stored: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256(header.encode())
    for name in sorted(stored):
        value = stored[name]
        total.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        if value.numel():
            total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
