"""Store a network as its difference from another one, such as the network before adapters were added or it was trained.

Tensors that are equal to the other network's are left out; of those that are rounded in steps, the differences are
stored, which are small and so take few bytes. The file holds a digest of the other network's tensors, so that it is
only read with the same one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from dubito.core.errors import FileFormatError
from dubito.core.settings import bytes_of

BASE = ":base"  # no parameter has this name
Tensors = dict[str, Tensor]


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
