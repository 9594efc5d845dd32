"""Small tables and the runs on them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import dubito
from dubito import runs
from dubito.uses.runs.run import TableRun

TRAINING = {"epochs": 30, "lr": 0.02}
TOWNS = {"Ulm": 100.0, "Bern": 400.0, "Graz": 200.0, "Wien": 300.0}


def houses(num: int = 160, seed: int = 0) -> dict[str, list[Any]]:
    """Prices that depend on size and town; a house is cheap if it costs less than 400."""
    rng = np.random.default_rng(seed)
    town = [list(TOWNS)[i % 4] for i in range(num)]
    size = rng.uniform(30, 200, num).round(1).tolist()
    price = [round(TOWNS[t] + s + e, 1) for t, s, e in zip(town, size, rng.normal(0, 20, num), strict=True)]
    return {"size": size, "town": town, "price": price, "cheap": ["yes" if p < 350 else "no" for p in price]}


def write(path: Path, table: dict[str, list[Any]], separator: str = ",", decimal: str = ".") -> Path:
    rows = [
        separator.join(str(cell).replace(".", decimal) for cell in row) for row in zip(*table.values(), strict=True)
    ]
    path.write_text("\n".join([separator.join(table), *rows]) + "\n")
    return path


@cache
def run_of(target: str = "price", method: str = "laplace()") -> TableRun:
    other = "cheap" if target == "price" else "price"
    return runs.fit(
        houses(), target, recipe=dubito.parse(method), network="mlp(hidden=[8], activation=tanh)", training=TRAINING,
        ignore=[other], progress=False,
    )  # fmt: skip


GOOD, BAD = ("great", "lovely", "superb"), ("awful", "dull", "poor")
OTHERS = ("the", "film", "was", "a", "story", "about", "people", "with", "music", "and", "some", "actors", "city")


def reviews(num: int, seed: int = 0) -> dict[str, list[str]]:
    rng = random.Random(seed)
    labels = [rng.choice(["good", "bad"]) for _ in range(num)]
    texts = [" ".join(rng.sample([*rng.choices(OTHERS, k=7), rng.choice(GOOD if label == "good" else BAD)], 8))
             for label in labels]  # fmt: skip
    return {"text": texts, "label": labels}
