"""Tables of random bytes: CSV with NULs, quotes, encodings, ragged rows and large fields, gzip, and damaged Parquet."""

from __future__ import annotations

import gzip
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dubito import data
from fuzz.engine import Case, require

CELLS = ["1", "2", "3.5", "-1e3", "", "", "NA", "nan", "inf", "-inf", "1e400", "1e308", "-1e308", "99999999999999999999999", "x", "y", "z",
         "true", "False", "2020-01-02", "2020-01-02T03:04", "0001-01-01", "9999-12-31", "2020-13-45", "12:30", "1,5", '"a,b"',
         '"', '""', '"a\nb"', "'", "\x00", "a\x00b", "\t", " 1 ", "é", "\xff\xfe", "\u00a0", "1_000", "0x10", "1j", "None", "<NA>",
         "#", "\\", "\r", "1 2", "$5", "5%", "1e-320", "0", "00", "+1", '"376,532"', "376.532", "1.234,5", "31.12.2020", "02/03/2020"]  # fmt: skip
NAMES = ["a", "b", "y", "c", "", "a", "Unnamed: 0", "1", "é", '"q"', "a.1", " y", "y", "\x00", "index"]
SIZES = [0, 1, 2, 5, 12, 20, 20, 20, 40, 40]


@cache
def _parquet(nested: bool) -> bytes:
    import pandas as pd

    with tempfile.TemporaryDirectory() as folder:
        frame = pd.DataFrame(
            {"a": [float(i) for i in range(20)], "b": ["x", "y"] * 10, "y": [i % 2 for i in range(20)]}
        )
        if nested:
            frame["l"] = [[i] * (i % 3) for i in range(20)]
            frame["s"] = [{"p": i, "q": "z"} for i in range(20)]
        frame.to_parquet(Path(folder) / "t.parquet")
        return (Path(folder) / "t.parquet").read_bytes()


class Tables:
    """A file, its target column, and sometimes options."""

    def generate(self, rng: random.Random) -> Case:
        case: Case = {"suffix": rng.choice([".csv", ".csv", ".csv", ".tsv", ".csv.gz", ".parquet"]), "target": "y"}
        if case["suffix"] == ".parquet":
            case["damage"] = [[rng.random(), rng.randrange(256)] for _ in range(rng.choice([0, 1, 1, 2, 5]))]
            case["cut"] = rng.choice([1.0, 1.0, 1.0, rng.random()])
            case["nested"] = rng.random() < 0.5
            return case
        usual = "\t" if case["suffix"] == ".tsv" else ","
        case["content"] = self._text(rng, rng.choice([usual, usual, usual, ";", "|", " "]))
        case["encoding"] = rng.choice(["utf-8"] * 12 + ["latin-1", "utf-16", "utf-8-sig"])
        if rng.random() < 0.05:
            case["huge"] = rng.choice([200_000, 2_000_000])
        if rng.random() < 0.08:
            case["damage"] = [[rng.random(), rng.randrange(256)] for _ in range(rng.choice([1, 2, 5]))]
        if rng.random() < 0.1:
            case["target"] = rng.choice(NAMES)
        if rng.random() < 0.3:
            options: dict[str, Any] = {
                "task": rng.choice(["classification", "regression"]), "categorical": [rng.choice(NAMES)],
                "ignore": [rng.choice(NAMES)], "dates": {rng.choice(NAMES): rng.choice(["%Y-%m-%d", "%d.%m.%Y", "x", ""])},
                "validation": rng.choice([0, 0.5, 0.99]), "test": rng.choice([0.01, 0.5, 0.99]), "limit": rng.choice([1, 3]),
                "separator": rng.choice([",", ";", "\t", "", "ab", '"', "\n", "é"]), "decimal": rng.choice([".", ",", ";", ""]),
                "encoding": rng.choice(["utf-8", "latin-1", "utf-16", "ascii", "x", "", "hex", "idna", "\x00"]),
                "keep": [rng.choice(NAMES)], "standardize": rng.choice([True, False]),
            }  # fmt: skip
            case["options"] = {name: options[name] for name in rng.sample(list(options), rng.choice([1, 1, 2]))}
        return case

    def _text(self, rng: random.Random, separator: str) -> str:
        width, rows = rng.choice([1, 2, 3, 3, 3, 3, 3, 6]), rng.choice(SIZES)
        header = ["a", "b", "y"][:width] if rng.random() < 0.7 else [rng.choice(NAMES) for _ in range(width)]
        # Most columns have one kind of cell, some with strays.
        kinds = [rng.sample(CELLS, rng.choice([1, 2, 3, 20])) for _ in header]
        plain = [rng.random() < (0.8 if name == "y" else 0.5) for name in header]
        lines = [header]
        for row in range(rows):
            cells = [str(row * 7 % 5) if one and rng.random() < 0.97 else rng.choice(kind)
                     for one, kind in zip(plain, kinds, strict=True)]  # fmt: skip
            if rng.random() < 0.004:
                cells = cells[:-1] if rng.random() < 0.5 else [*cells, "1"]
            lines.append(cells)
        return rng.choice(["\n", "\n", "\n", "\r\n", "\r"]).join(separator.join(cells) for cells in lines)

    def run(self, case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"t{case['suffix']}"
            path.write_bytes(_bytes_of(case))
            made = data.load_table(path, case["target"], **case.get("options", {}))
            again = data.TableTransform.from_json(made.encoder.to_json())
        require(again == made.encoder, "the transform reads as another one")
        for part, (inputs, targets) in made.parts.items():
            require(inputs.isfinite().all(), f"inputs of {part} are not finite")
            require(len(inputs) == len(targets) > 0, f"{part} has other rows")
            require(inputs.shape[1] == len(made.feature_names), f"inputs of {part} have another width")
            if made.task == "classification":
                require(targets.dtype == torch.int64 and int(targets.min()) >= 0, "a class is no number")
                require(int(targets.max()) < made.num_outputs, "a class is too large")
            else:
                require(targets.isfinite().all(), f"targets of {part} are not finite")


def _bytes_of(case: Case) -> bytes:
    if case["suffix"] == ".parquet":
        content = bytearray(_parquet(case.get("nested", False)))
    else:
        text = case["content"].replace("x", "x" * case.get("huge", 1), 1)
        content = bytearray(text.encode(case["encoding"], errors="replace"))
        if case["suffix"] == ".csv.gz":
            content = bytearray(gzip.compress(bytes(content), mtime=0))
    for place, value in case.get("damage", ()) if content else ():
        content[int(place * len(content))] = value
    return bytes(content[: int(len(content) * case.get("cut", 1.0))])
