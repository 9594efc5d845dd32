"""Make stand-ins for the CUDA libraries that a build of torch links to, so that its CPU part runs without them.

    python cuda_stubs.py SITE_PACKAGES/torch/lib FOLDER

Each stand-in defines the symbols that are looked up in it, as functions that return 100, CUDA's "no device". Then torch
is imported with ``LD_LIBRARY_PATH=FOLDER``. It needs readelf, as and gcc; `make test-torch` calls it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# From the name of a library to the beginnings of its symbols that have no version.
UNVERSIONED = {"libnccl": "nccl", "libcusparseLt": "cusparseLt", "libnvshmem_host": "nvshmem", "libcufile": "cuFile"}


def read(option: str, library: Path) -> list[str]:
    return subprocess.run(["readelf", option, "-W", library], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )


def needed(library: Path) -> set[str]:
    return {found[1] for line in read("-d", library) if (found := re.search(r"\(NEEDED\).*\[(.*)\]", line))}


def versions(library: Path) -> dict[str, str]:
    """Return the library that each version of a symbol belongs to."""
    found, owner = {}, ""
    for line in read("-V", library):
        if file := re.search(r"File: (\S+)", line):
            owner = file[1]
        elif (name := re.search(r"Name: (\S+)", line)) and owner:
            found[name[1]] = owner
    return found


def undefined(library: Path) -> list[tuple[str, str]]:
    """Return the symbols that a library looks up elsewhere, with their versions."""
    columns = (line.split() for line in read("--dyn-syms", library))
    names = [column[7] for column in columns if len(column) > 7 and column[6] == "UND"]
    return [(name.partition("@")[0], name.rpartition("@")[2] if "@" in name else "") for name in names]


def build(name: str, symbols: dict[str, set[str]], folder: Path) -> None:
    """Compile one library from its symbols by version."""
    every = sorted(set().union(*symbols.values())) if symbols else []
    code = [f".globl {symbol}\n.type {symbol},@function\n{symbol}: mov $100,%eax\nret\n" for symbol in every]
    source, compiled, script = (folder / f"{name}{suffix}" for suffix in (".s", ".o", ".map"))
    source.write_text(".text\n" + "".join(code))
    script.write_text("".join(f"{v} {{ global: {'; '.join(sorted(s))}; }};\n" for v, s in symbols.items() if v))
    subprocess.run(["as", "-o", compiled, source], check=True)
    versioned = [f"-Wl,--version-script={script}"] if any(symbols) else []
    subprocess.run(
        ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", *versioned, "-o", folder / name, compiled], check=True
    )


def main(libraries: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    own = {file.name for file in libraries.iterdir()}
    found: dict[str, dict[str, set[str]]] = {}
    for library in libraries.glob("*.so*"):
        missing = {name for name in needed(library) - own if re.match(r"lib(cu|nccl|nv)", name)}
        for name in missing:
            found.setdefault(name, {})
        owners = versions(library) if missing else {}
        for symbol, version in undefined(library) if missing else ():
            for name in missing:
                loose = UNVERSIONED.get(name.partition(".")[0])
                if owners.get(version) == name or (not version and loose and symbol.startswith(loose)):
                    found[name].setdefault(version, set()).add(symbol)
    for name, symbols in found.items():
        build(name, symbols, folder)
    print(f"made {len(found)} stand-ins: {', '.join(sorted(found))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
