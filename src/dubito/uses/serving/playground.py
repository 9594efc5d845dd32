"""What the page of `dubito play` asks for: the plain network beside the posterior, a sweep, and rows nearby."""

from __future__ import annotations

import copy
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property
from importlib import resources
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dubito
from dubito.beliefs.prediction import Prediction, RegressionPrediction
from dubito.core.errors import DubitoError, InputError
from dubito.data import Tally
from dubito.data.cells import Cells
from dubito.data.columns import OTHER_LEVELS, DateColumn
from dubito.data.dates import ISO_DATE
from dubito.uses.runs.calibration import UNFAMILIAR
from dubito.uses.runs.prediction import TablePrediction, answer_columns
from dubito.uses.runs.run import target_scale
from dubito.uses.serving.controls import Control, controls_of, picture_of
from dubito.uses.serving.limits import ServingLimits
from dubito.uses.serving.rows import as_json, plain_values, table_of
from dubito.uses.serving.service import Service

Rows = list[dict[str, Any]]
# How many values of a column a sweep tries, how many rows nearby are shown, and how many examples the page offers.
STEPS, NEAREST, EXAMPLES = 41, 5, 50


@dataclass(frozen=True)
class Question:
    """A row, and the column that is swept through its range, if any."""

    inputs: Tensor  # the row and then the swept ones, encoded ``[1 + steps, features]``
    notes: list[str]  # what is odd about the row
    swept: Control | None  # the column

    def __len__(self) -> int:
        return len(self.inputs)


class Playground:
    """Answers for the page."""

    def __init__(self, service: Service, limits: ServingLimits) -> None:
        run = service.run
        self.service, self.limits, self.run = service, limits, run
        part = "train" if "train" in run.parts else "held_out"
        self.nearby = {"train": "training", "held_out": "held-out"}[part]
        self.inputs, self.targets = run.parts[part]
        self.rows = run.cells(part)
        self.controls = controls_of(run.encoder, self.rows)
        self.picture = picture_of(self.controls)
        self.swept = {control.name: control for control in self.controls if control.kind == "number"}
        dates = [column for column in run.encoder.columns if isinstance(column, DateColumn)]
        self.formats = {column.name: column.format for column in dates if column.format != ISO_DATE}
        self.neighbours = Neighbours(self.inputs, NEAREST)
        self.network = copy.deepcopy(run.unguarded.model)
        self.network.load_state_dict(run.unguarded.mean(), strict=False)

    def question(self, value: Any) -> Question:
        """Return what a request asks: ``{"row": {...}, "sweep": "column"}``."""
        if not isinstance(value, dict) or not isinstance(value.get("row"), dict):
            raise InputError(
                'The body must be an object with a row: {"row": {"column": value, ...}, "sweep": "column"}.'
            )
        named = value.get("sweep")
        swept = self.swept.get(named) if isinstance(named, str) else None
        rows = {"rows": [self._in_formats(value["row"])]}
        inputs, tally = self.service.encode(table_of(rows, self.run.encoder.column_names, self.limits))
        return Question(inputs if swept is None else self._swept(inputs, swept), self._notes(tally), swept)

    def _notes(self, tally: Tally) -> list[str]:
        """Return what is odd about a row."""
        odd = tally.odd_columns
        if odd and self.picture is not None:  # one sentence for all of its pixels
            return [f"{len(odd)} of the pixels have values that they had in no training picture"]
        return [f"{name}: {tally.remark(name)}" for name in self.run.encoder.column_names if name in odd]

    def _swept(self, inputs: Tensor, swept: Control) -> Tensor:
        """Return the row, and then rows in which a column goes through its range."""
        column = next(each for each in self.run.encoder.columns if each.name == swept.name)
        features = column.encode(Cells.of(swept.name, swept.steps(STEPS)))
        found = inputs.repeat(1 + STEPS, 1)
        found[1:, self.run.encoder.spans()[swept.name]] = torch.from_numpy(features).to(found)
        return found

    def answer(self, questions: Sequence[Question]) -> list[dict[str, Any] | Exception]:
        """Answer several questions in one batch."""
        inputs = torch.cat([question.inputs for question in questions])
        try:
            found = self.service.predict(inputs)
        except DubitoError as error:  # what is wrong with one of them is said to that one alone
            return [error] if len(questions) == 1 else [self.answer([question])[0] for question in questions]
        plain = self.plain(inputs)
        ends = list(accumulate(map(len, questions), initial=0))
        nearest = self.nearest(inputs[ends[:-1]])
        return [
            self._one(question, (found, plain), (start, stop), near)
            for question, start, stop, near in zip(questions, ends, ends[1:], nearest, strict=False)
        ]

    def examples(self) -> list[dict[str, Any]]:
        """Return some rows to start from."""
        rows = [self._cells(place) for place in range(min(EXAMPLES, len(self.inputs)))]
        return [row for row in rows if OTHER_LEVELS not in row.values()] or rows[:1]

    def page(self, nonce: str) -> str:
        """Return the page; its own script and style carry the nonce, and no other may run."""
        import jinja2
        from markupsafe import Markup

        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters["short"] = lambda value: f"{value:.6g}"
        files = resources.files("dubito.uses.serving")
        template = environment.from_string(files.joinpath("playground.html").read_text("utf-8"))
        script = Markup(files.joinpath("playground.js").read_text("utf-8"))  # ours
        return template.render(nonce=nonce, version=dubito.__version__, script=script, data=self._data)

    @cached_property
    def _data(self) -> dict[str, Any]:
        """What the page knows from the start; plain values."""
        run, picture = self.run, self.picture
        rows = run.settings.get("rows", {})
        return {
            "target": run.target, "classes": list(run.encoder.class_names), "coverage": self.coverage,
            "mean": run.encoder.target_loc, "variance": run.encoder.target_scale**2, "unfamiliar": UNFAMILIAR,
            "method": str(run.settings.get("name", "")), "table": str(run.settings.get("table") or ""),
            "training_rows": f"{rows.get('train', run.posterior.num_data):,}", "nearby": self.nearby,
            "controls": [asdict(control) for control in self.controls], "examples": self.examples(),
            "picture": None if picture is None else asdict(picture), "unseen": "(never seen)",
            "longest": self.limits.cell_characters,
        }  # fmt: skip

    def _one(
        self, question: Question, both: tuple[TablePrediction, TablePrediction], rows: tuple[int, int], nearest: Rows
    ) -> dict[str, Any]:
        """Return the answer to one question, whose rows are some of those that both predicted."""
        start, stop = rows
        posterior, plain = (as_json(each, start, start + 1)[0] for each in both)
        found: dict[str, Any] = {
            "posterior": posterior, "plain": plain, "notes": question.notes, "nearest": nearest
        }  # fmt: skip
        if question.swept is not None:
            shown = [f"p_{name}" for name in self.run.encoder.class_names] or ["prediction", "lower", "upper"]
            swept = ({name: plain_values(each[name][start + 1 : stop]) for name in shown} for each in both)
            answers = dict(zip(("posterior", "plain"), swept, strict=True))
            found["sweep"] = {"column": question.swept.name, "values": question.swept.steps(STEPS), **answers}
        return found

    def plain(self, inputs: Tensor) -> TablePrediction:
        """Return what one network says, without a posterior and without the guard: what it would say on its own."""
        inside = self.run.unguarded
        with torch.no_grad():
            outputs = self.network(inputs.to(inside.device, inside.dtype))
        found: Prediction = inside.likelihood.predict_samples(outputs[None])
        scale = target_scale(self.run.encoder)
        if isinstance(found, RegressionPrediction):
            found = found.to("cpu", torch.float64)
            found = found if scale is None else found.rescale(*scale)
        columns = answer_columns(found, self.run.encoder.class_names, None, self.coverage)
        return TablePrediction(columns, found)

    @property
    def coverage(self) -> float:
        """The probability with which an interval holds the truth."""
        return self.run.coverage if self.service.coverage is None else self.service.coverage

    def nearest(self, rows: Tensor) -> list[Rows]:
        """Return for each row those nearest to it, by the Euclidean distance of their inputs to the network."""
        return [
            [{**self._shown(place), "distance": distance} for place, distance in zip(*pair, strict=True)]
            for pair in self.neighbours.of(rows)
        ]

    def _shown(self, place: int) -> dict[str, Any]:
        """Return a known row as the page shows it: its cells, or its picture as one byte per pixel."""
        if self.picture is None:
            return {"cells": self._cells(place), "target": self._target(place)}
        return {"grey": b64encode(self._greys[place]).decode(), "target": self._target(place)}

    @cached_property
    def _greys(self) -> list[bytes]:
        """Each known row as the pixels of its picture, from 0 to 255."""
        picture = self.picture
        assert picture is not None
        empty = [picture.low] * len(self.inputs)
        values = np.array([empty if name is None else self.rows[name] for name in picture.names], dtype=np.float64)
        scaled = 255 * (np.nan_to_num(values, nan=picture.low) - picture.low) / (picture.high - picture.low or 1.0)
        return [pixels.tobytes() for pixels in scaled.T.round().clip(0, 255).astype(np.uint8)]

    def _target(self, place: int) -> str | float:
        encoder, target = self.run.encoder, self.targets[place]
        names = encoder.class_names
        return names[int(target)] if names else float(target) * encoder.target_scale + encoder.target_loc

    def _cells(self, place: int) -> dict[str, Any]:
        return {name: values[place] for name, values in self.rows.items()}

    def _in_formats(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with dates, which the page writes as 2024-12-31, in the formats of their columns."""
        return row | {name: _formatted(row[name], self.formats[name]) for name in self.formats.keys() & row.keys()}


def _formatted(value: Any, date_format: str) -> Any:
    try:
        return date.fromisoformat(value).strftime(date_format)
    except (TypeError, ValueError):
        return value


# By how much |x|² + |y|² - 2x·y may be off in float64, as a share of its first two terms: many times its rounding error
# for any number of features that a table has.
ROUNDING = 1e-10


class Neighbours:
    """The nearest of known rows, by the Euclidean distance, the earlier one first among equals.

    A product of matrices gives all squared distances, but for rounding; the exact distances of the few rows that can be
    among the nearest decide. That takes a sixth of the time of all exact distances for pictures of 784 pixels.

    Args:
        inputs: The known rows ``[N, features]``.
        num: How many rows are looked for.
    """

    def __init__(self, inputs: Tensor, num: int) -> None:
        self.inputs, self.num = inputs.double(), min(num, len(inputs))
        self.squares = self.inputs.square().sum(1)

    def of(self, rows: Tensor) -> list[tuple[list[int], list[float]]]:
        """Return for each row ``[B, features]`` the places of the nearest known rows, and their distances."""
        rows = rows.double()
        sizes = rows.square().sum(1, keepdim=True) + self.squares
        rough = sizes - 2 * rows @ self.inputs.T
        slack = 2 * ROUNDING * sizes.amax(1)
        farthest = rough.kthvalue(self.num, dim=1).values + slack
        found = []
        for row, near in zip(rows, rough <= farthest[:, None], strict=True):
            places = near.nonzero().flatten()
            distances = (self.inputs[places] - row).norm(dim=1)
            order = distances.argsort(stable=True)[: self.num]
            found.append((places[order].tolist(), distances[order].tolist()))
        return found
