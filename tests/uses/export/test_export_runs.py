"""A run in one file: rows of a table go in, what `dubito predict` says comes out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dubito.errors import InputError
from export_cases import SUFFIX, describe, run_file

import dubito
from dubito.data.table_module import numbers_of

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
SIZES, TOWNS = RNG.uniform(30, 200, 160).round(1), RNG.choice(["Ulm", "Bonn", "Kiel"], 160)
PRICES = 100 + 2 * SIZES + 50 * (TOWNS == "Ulm") + RNG.normal(size=160) * 5
TABLE = {"size": SIZES.tolist(), "town": TOWNS.tolist(), "price": PRICES.tolist(),
         "cheap": np.where(PRICES < 350, "yes", "no").tolist()}  # fmt: skip
NEW = {"size": [50.0, 120.0, 150.0, 900.0], "town": ["Ulm", "Rom", "Bonn", "Kiel"]}


def test_a_file_predicts_rows(tmp_path: Path) -> None:
    target, risk = ("cheap", 0.2) if SUFFIX == ".onnx" else ("price", 20.0)
    run = dubito.runs.fit(
        TABLE, target, recipe=dubito.Laplace(weights=dubito.select.last_layer()), network="mlp(hidden=[6])", risk=risk,
        training={"epochs": 40, "lr": 0.03}, ignore=["cheap" if target == "price" else "price"], progress=False,
    )  # fmt: skip
    path = tmp_path / f"run{SUFFIX}"
    made = dubito.runs.export(run, path, metadata={"owner": "Ada"})
    found, expected = run_file(path, numbers_of(run.encoder.columns, NEW)), run.predict(NEW)
    assert tuple(found) == made.outputs
    assert describe(path)["owner"] == "Ada"
    assert [column["name"] for column in describe(path)["columns"]] == ["size", "town"]
    answered = found["answer"].flatten() & ~found["unfamiliar"].flatten()
    assert [word == "answer" for word in expected["decision"]] == answered.tolist()
    assert not answered[1]  # no training row had this town
    if target == "cheap":
        assert describe(path)["classes"] == ["no", "yes"]
        np.testing.assert_allclose(found["probs"][:, 1], expected["p_yes"], rtol=1e-4, atol=1e-6)
    else:
        for name in ("lower", "upper", "stddev"):
            np.testing.assert_allclose(found[name].flatten(), expected[name], rtol=1e-4)
    np.testing.assert_allclose(found["epistemic"].flatten(), expected["epistemic"], rtol=1e-2, atol=1e-5)


def test_what_a_run_knows_is_not_given_again(tmp_path: Path) -> None:
    run = dubito.runs.fit(
        TABLE, "cheap", recipe=dubito.MAP(), network="mlp(hidden=[3])", training={"epochs": 40, "lr": 0.03},
        ignore=["price"], progress=False,
    )  # fmt: skip
    path = tmp_path / f"run{SUFFIX}"
    for name in ("example", "decisions", "preprocess", "level", "target_scale"):
        with pytest.raises(InputError, match=f"`{name}` comes from the run"):
            dubito.runs.export(run, path, **{name: None})
    for metadata in ({"classes": ["a", "b"]}, {"form": "mine"}, {"owner": object()}):
        with pytest.raises(InputError, match="`metadata` must"):
            dubito.runs.export(run, path, metadata=metadata)
    assert not path.exists()
