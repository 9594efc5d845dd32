"""Files of posteriors, compressed networks and checkpoints: forged with a fitting checksum, damaged, cut or extended."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from dubito.errors import DubitoError

from fuzz.checkpoints import RECIPES, checkpoint_of, fit
from fuzz.engine import Case, require

sys.path.insert(0, str(Path(__file__).parent.parent / "contracts"))
from first_version_files import FILES
from forging import forge, forge_coded, limited_memory, read


@cache
def _names() -> list[str]:
    return sorted(file.name for file in FILES.iterdir())


class Files:
    """One damaged file, loaded and used as a user does; or a damaged checkpoint, from which a run continues."""

    def generate(self, rng: random.Random) -> Case:
        place = ["checkpoint", rng.choice(RECIPES)] if rng.random() < 0.15 else ["file", rng.choice(_names())]
        case: Case = dict([place])
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
        file = FILES / case["file"] if "file" in case else checkpoint_of(case["checkpoint"])
        content = _damaged(file, case)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / file.name
            path.write_bytes(content)
            try:
                with limited_memory():
                    self._use(path, case)
            except Exception as error:
                cause = error.__cause__
                require(
                    not isinstance(cause, MemoryError) and "allocate" not in str(cause), f"asks for memory: {error}"
                )
                raise
        require("seed" in case or content == file.read_bytes(), "a damaged file was loaded")  # two flips may cancel out

    def _use(self, path: Path, case: Case) -> None:
        if "checkpoint" in case:
            for beside in checkpoint_of(case["checkpoint"]).parent.glob("run.*"):
                shutil.copy(beside, path.parent)
            fit(case["checkpoint"], path)
            return
        name, _, task = path.stem.rpartition("-")
        found = read(path, name, task)
        if name == "compressed":
            return
        inputs = torch.linspace(-1, 1, 12).reshape(3, 4)
        for use in (lambda: found.predict(inputs, num_samples=2), lambda: found.sample(2), found.marginals, found.prior,
                    found.log_evidence, found.digest, lambda: repr(found), lambda: found.save(path)):  # fmt: skip
            with contextlib.suppress(DubitoError):
                use()


def _damaged(file: Path, case: Case) -> bytes:
    content = bytearray(file.read_bytes())
    if "seed" in case:
        rng = random.Random(case["seed"])
        return forge_coded(bytes(content), rng) if file.stem.endswith("coded") else forge(file, rng)
    for place, bit in case.get("flips", ()):
        content[int(place * len(content))] ^= 1 << bit
    content = content[: int(len(content) * case.get("cut", 1.0))]
    return bytes(content) + bytes(case.get("more", 0))
