"""Free text in tables: its features, and runs that keep the sentences."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from run_cases import GOOD, reviews

import dubito
from dubito.core.errors import UnsupportedError
from dubito.data import TableTransform, Tally, describe_table
from dubito.data.cells import Cells
from dubito.data.text_column import TextColumn
from dubito.uses.runs.run import TableRun


def aligned(run: TableRun) -> None:
    """Check that the kept sentences are those of the kept inputs."""
    for part in ("train", "held_out"):
        inputs, targets = run.parts[part]
        cells = run.cells(part)
        assert len(cells["text"]) == len(targets)
        np.testing.assert_array_equal(run.encoder.encode(cells), inputs)
        signs = ["good" if any(word in text for word in GOOD) else "bad" for text in cells["text"]]
        assert [run.encoder.class_names[target] for target in targets] == signs


def test_features_of_a_text() -> None:
    texts = ["a good film", "a bad film", "A film!", "the film 2"] * 2
    column = TextColumn.fit(Cells.of("text", texts))
    assert column is not None
    assert column.words == ("film", "a")  # the others are in two texts only
    weights = {"film": 1.0, "a": 1 + math.log(8 / 6)}
    size = math.sqrt((3 * 2 + 1) / 4)
    assert column.size == pytest.approx(size)
    norm = math.hypot(*weights.values())
    tally = Tally()
    found = column.encode(Cells.of("text", ["a a film", "film", "xyz", None]), tally)
    np.testing.assert_allclose(found, size * np.array([[1 / norm, weights["a"] / norm], [1, 0], [0, 0], [0, 0]]))
    assert tally.unread == {"text": 1}
    assert "no word" in tally.sentences()[0]
    assert TextColumn.fit(Cells.of("text", ["one", "two", "three"])) is None


@pytest.mark.slow
def test_a_run_on_sentences(tmp_path: Path) -> None:
    table = reviews(120)
    described = describe_table({**table, "id": [f"r{place}" for place in range(120)]}, "label")
    assert [described[name].kind for name in ("text", "id")] == ["text", "category"]
    assert "free text" in described["text"].remark
    run = dubito.runs.fit(
        table, "label", recipe=dubito.Laplace(), network="mlp(hidden=[8])", training={"epochs": 30, "lr": 0.03},
        progress=False,
    )  # fmt: skip
    assert run.scores.scores["accuracy"] > 0.9
    aligned(run)
    run.save(tmp_path / "run")
    loaded = dubito.runs.load(tmp_path / "run")
    assert TableTransform.from_json(run.encoder.to_json()) == run.encoder
    assert loaded.cells("train", [3]) == run.cells("train", [3])
    for example in loaded.scores.curves.examples:  # for the report
        assert example.cells["text"] == run.texts["held_out"]["text"][example.index]
    found = loaded.predict({"text": ["a superb film", "what a dull story", "xyzzy"]})
    assert found["prediction"][:2].tolist() == ["good", "bad"]
    assert found["confidence"][2] < found["confidence"][:2].min()
    updated = dubito.runs.update(loaded, reviews(30, seed=1), progress=False)
    assert len(updated.parts["held_out"][1]) == len(run.parts["held_out"][1]) + 6
    aligned(updated)
    with pytest.raises(UnsupportedError, match="holds free text"):
        dubito.runs.export(run, tmp_path / "run.pt2")
