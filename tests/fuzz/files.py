"""Files of posteriors, compressed networks, checkpoints and runs: forged with a fitting checksum, damaged or cut."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from dubito.errors import DubitoError
from torch import nn

import dubito
from fuzz.checkpoints import RECIPES, checkpoint_of, fit, saved_by
from fuzz.command_line import run_files
from fuzz.engine import Case, require

sys.path.insert(0, str(Path(__file__).parent.parent / "contracts"))
from first_version_files import FILES, network_of
from forging import forge, forge_coded, limited_memory, mutate, read

# Kinds of files that the first version did not write, as recipes; the last has a decision rule in its file.
NEW = ["Laplace(structure=ekfac)", "Laplace(structure=full)", "Laplace(structure=low-rank, rank=2)",
       "Laplace(structure=diag, weights=select.last_layer())", "MAP(train=false)"]  # fmt: skip
PLACES = {"file": 0.74, "new": 0.1, "checkpoint": 0.06, "run": 0.1}
# The writing of a page takes long, and nothing reads it.
NOT_READ = ("report.html",)


@cache
def _names(place: str) -> list[str]:
    if place == "file":
        return sorted(file.name for file in FILES.iterdir())
    return {"new": NEW, "checkpoint": RECIPES}.get(place) or sorted(set(run_files()) - set(NOT_READ))


class Files:
    """One damaged file, loaded and used as a user does; or a damaged checkpoint, from which a run continues."""

    def generate(self, rng: random.Random) -> Case:
        place = rng.choices(list(PLACES), list(PLACES.values()))[0]
        case: Case = {place: rng.choice(_names(place))}
        kind = rng.choice(["forged", "forged", "forged", "flips", "cut", "extended"])
        if kind == "forged":
            case["seed"] = rng.randrange(2**31)
        elif kind == "flips":
            early = rng.random() < 0.5  # where the header is
            case["flips"] = [
                [rng.random() * (0.05 if early else 1), rng.randrange(8)] for _ in range(rng.choice([1, 1, 2, 9]))
            ]
        elif kind == "cut":
            case["cut"] = rng.choice([0.0, rng.random() * 0.05, rng.random(), 0.9999])
        else:
            case["more"] = rng.choice([1, 7, 1000])
        return case

    def run(self, case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = _copied(case, Path(folder))
            before, content = file.read_bytes(), _damaged(file, case)
            file.write_bytes(content)
            try:
                with limited_memory():
                    self._use(file, case)
            except Exception as error:
                cause = error.__cause__
                require(
                    not isinstance(cause, MemoryError) and "allocate" not in str(cause), f"asks for memory: {error}"
                )
                raise
        has_checksum = "seed" not in case and file.suffix != ".json"
        require(not has_checksum or content == before, "a damaged file was loaded")  # two flips may cancel out

    def _use(self, path: Path, case: Case) -> None:
        if "checkpoint" in case:
            fit(case["checkpoint"], path)
        elif "run" in case:
            run = dubito.runs.load(path.parents[case["run"].count("/")])
            with contextlib.suppress(DubitoError):
                run.predict([{"a": 1, "b": 0.5}, {"a": None, "b": 2}])
            _use_posterior(run.posterior, run.parts["held_out"][0], path)
        elif "new" in case:
            found = dubito.load(path, _network("new", "classification"))
            if not isinstance(found, dubito.Posterior):
                with contextlib.suppress(DubitoError):
                    found.predict(torch.linspace(-1, 1, 12).reshape(3, 4))
                found = found.posterior
            _use_posterior(found, torch.linspace(-1, 1, 12).reshape(3, 4), path)
        else:
            name, _, task = path.stem.rpartition("-")
            found = read(path, name, task, _network(name, task))
            if name != "compressed":
                _use_posterior(found, torch.linspace(-1, 1, 12).reshape(3, 4), path)


@cache
def _network(name: str, task: str) -> nn.Module:
    """Return the network of a file; `load` does not change it."""
    return network_of(name, "classification" if name == "compressed" else task)


def _use_posterior(found: Any, inputs: Any, path: Path) -> None:
    for use in (lambda: found.predict(inputs, num_samples=2), lambda: found.sample(2), found.marginals, found.prior,
                found.log_evidence, found.digest, lambda: repr(found), lambda: found.save(path)):  # fmt: skip
        with contextlib.suppress(DubitoError):
            use()


def _copied(case: Case, folder: Path) -> Path:
    """Copy the file of a case, and those beside it, into a folder."""
    if "run" in case:
        for name, content in run_files().items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        return folder / case["run"]
    if "checkpoint" in case:
        file = checkpoint_of(case["checkpoint"])
        for beside in file.parent.glob("run*"):
            shutil.copy(beside, folder)
        return folder / file.name
    file = FILES / case["file"] if "file" in case else saved_by(case["new"], _network("new", "classification"))
    shutil.copy(file, folder)
    return folder / file.name


def _damaged(file: Path, case: Case) -> bytes:
    content = bytearray(file.read_bytes())
    if "seed" in case:
        rng = random.Random(case["seed"])
        if file.suffix == ".json":
            tree = [json.loads(bytes(content))]
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                mutate(tree, rng)
            return json.dumps(tree[0] if tree else None).encode()
        return forge_coded(bytes(content), rng) if file.stem.endswith("coded") else forge(file, rng)
    for place, bit in case.get("flips", ()):
        content[int(place * len(content))] ^= 1 << bit
    content = content[: int(len(content) * case.get("cut", 1.0))]
    return bytes(content) + bytes(case.get("more", 0))
