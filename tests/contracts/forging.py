"""Forge files: take a file that is well made, change what it holds, and give it a checksum that fits.

    python tests/contracts/forging.py 5000

loads so many forgeries of every file in ``fixtures/v1``. Each ends in a posterior or in one `FileFormatError` with one
sentence, and none asks for much memory; `test_forged_files.py` tries a few of each.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from first_version_files import FILES, network_of
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

import dubito
from dubito import compression
from dubito.core import io
from dubito.uses.compression import coding, storage

JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**62, 10**30, -(10**30), 0.5, 1e308, float("inf"), float("nan"), "", "x",
    "MAP", "Laplace", "Ensemble", "kron", "../x", [], [[]], [1, 2], [10**9, 10**9], {}, {"$dict": []}, {"$tensor": "x"},
    {"$dict": [["a", 1]]}, {"$setting": "MAP"}, {"$setting": "priors.Normal"}, {"$type": "os:PathLike"},
    {"$tuple": [1]}, {"$float": "x"}, {"$setting": "Ensemble", "members": 10**12},
)  # fmt: skip
LIMIT = 2 * 2**30  # bytes of memory that a forged file may make us ask for at most


def places(tree: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a JSON value."""
    found = [] if found is None else found
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        found.append((tree, key))
        places(tree[key], found)
    return found


def clone(value: Any) -> Any:
    """Return a copy; of text where it is too deep."""
    return json.loads(json.dumps(value))


def mutate(tree: Any, rng: random.Random) -> None:
    """Change a JSON value in one place; text that is JSON itself is changed inside."""
    spots = places(tree)
    if not spots:
        return
    holder, key = rng.choice(spots)
    value = holder[key]
    if isinstance(value, str) and value[:1] in "{[" and rng.random() < 0.9:
        try:
            inside = [json.loads(value)]
        except ValueError:
            return
        mutate(inside, rng)
        holder[key] = json.dumps(inside[0]) if inside else ""
        return
    action = rng.randrange(8)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, list):
        holder.insert(key, clone(value))
    elif action == 2:
        other, where = rng.choice(spots)
        holder[key] = clone(other[where])
    elif action == 3:
        deep: Any = value
        for _ in range(rng.choice((3, 40, 110))):
            deep = [deep] if rng.random() < 0.5 else {"$dict": [["a", deep]]}
        holder[key] = deep
    elif action == 4 and isinstance(holder, dict):
        holder[rng.choice(("a", "weights", "recipe", "$dict", "$tensor"))] = holder.pop(key)
    elif isinstance(value, int | float) and not isinstance(value, bool) and action < 7:
        holder[key] = rng.choice((value + 1, -value, value * 10**6, 10**12, float(value), str(value)))
    else:
        holder[key] = clone(rng.choice(JUNK))


def mutate_tensor(stored: dict[str, Tensor], rng: random.Random) -> None:
    """Change one tensor's values, type or shape."""
    name = rng.choice(sorted(stored))
    value = stored[name]
    changes: tuple[Callable[[], Tensor], ...] = (
        lambda: value.flatten(), lambda: value.reshape(-1)[:-1], lambda: value.double(), lambda: value.long(),
        lambda: value[None], lambda: value.t() if value.ndim == 2 else value.flip(0) if value.ndim else value,
        lambda: torch.empty(0, 2**40), lambda: torch.tensor(1.0), lambda: torch.zeros(3, 3), lambda: value > 0,
        lambda: value * float("nan"), lambda: value.double() - 1e9, lambda: stored[rng.choice(sorted(stored))],
    )  # fmt: skip
    stored[name] = rng.choice(changes)().contiguous().clone()


def forge(content: Path, rng: random.Random) -> bytes:
    """Return the bytes of a forged safetensors file."""
    with safe_open(str(content), framework="pt") as file:
        header = json.loads(file.metadata()["dubito"])
        stored = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if rng.random() < 0.25 and stored:
            mutate_tensor(stored, rng)
        else:
            mutate(header if rng.random() < 0.1 else header.get("tree"), rng)
    text = json.dumps(header)
    return safetensors_bytes(stored, {"dubito": text, "sha256": io._checksum(text, stored)})


def forge_coded(content: bytes, rng: random.Random) -> bytes:
    """Return the bytes of a forged entropy-coded file."""
    start = len(storage.MAGIC) + 4
    sizes = struct.unpack("<4I", content[start : start + 16])
    ends = [start + 16 + sum(sizes[:i]) for i in range(5)]
    parts = [coding.unpack(content[a:b], 10**8) for a, b in pairwise(ends)]
    header = json.loads(parts[0])
    which = rng.randrange(5)
    if which < 3:
        mutate(header, rng)
    elif which == 3:
        part = rng.randrange(1, 4)
        parts[part] = rng.choice((bytes(10**7), parts[part][:-1], parts[part] + b"\xff", b"", parts[part][::-1]))
    parts[0] = json.dumps(header).encode() + (b" " * 10**7 if which == 4 else b"")
    packed = [coding.pack(part) for part in parts]
    if rng.random() < 0.1:
        packed[1] = rng.randbytes(30)
    body = struct.pack("<4I", *map(len, packed)) + b"".join(packed)
    return storage.MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def read(path: Path, name: str, task: str, network: nn.Module | None = None) -> Any:
    """Load one file as a user does."""
    if name == "compressed":
        return compression.load(path, network or network_of(name, "classification"))
    return dubito.load(path, network or network_of(name, task))


def verdict(path: Path, name: str, task: str) -> str:
    """Load a forged file and say what became of it: ``"loaded"``, ``"refused"``, or what is wrong with us."""
    try:
        read(path, name, task)
    except dubito.errors.FileFormatError as error:
        cause = error.__cause__
        if isinstance(cause, MemoryError) or "allocate" in str(cause):
            return f"asks for memory: {error}"
        return "refused" if "\n" not in str(error) else f"more than one line: {error}"
    except Exception as error:  # noqa: BLE001 - which ones there are is what we want to know
        return f"raw {type(error).__name__}: {error}"
    return "loaded"


def try_out(file: Path, number: int, seed: int, folder: Path) -> Counter[str]:
    """Load so many forgeries of one file, with a limit on the memory of this process."""
    rng, found = random.Random(f"{file.name} {seed}"), Counter[str]()
    name, _, task = file.stem.rpartition("-")
    with limited_memory():
        for _ in range(number):
            coded = file.stem.endswith("coded")
            (folder / "forged").write_bytes(forge_coded(file.read_bytes(), rng) if coded else forge(file, rng))
            found[verdict(folder / "forged", name, task)] += 1
    return found


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process ask for at most `LIMIT` bytes more than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> None:
    """Try so many forgeries of each file as the first argument says, and print what became of them."""
    total = Counter[str]()
    with TemporaryDirectory() as folder:
        for file in sorted(FILES.iterdir()):
            found = try_out(file, int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, Path(folder))
            print(file.name, dict(found.most_common(5)), flush=True)
            total += found
    print(dict(total.most_common(40)))


if __name__ == "__main__":
    main()
