"""Answer several requests for predictions at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.core.constraints import OpenProbability, Positive, check
from dubito.core.errors import DubitoError, InputError
from dubito.data import Table, Tally
from dubito.uses.runs.prediction import TablePrediction
from dubito.uses.runs.run import TableRun
from dubito.uses.serving.rows import as_json


@dataclass(frozen=True)
class Answer:
    """What is said about the rows of one request.

    Attributes:
        predictions: The columns of `dubito predict` for each row.
        tally: The cells that the training rows did not prepare for.
    """

    predictions: list[dict[str, Any]]
    tally: Tally

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"predictions": self.predictions, "notes": self.tally.sentences()}


class Service:
    """The predictions of a run, for tables that came in at the same time.

    Args:
        run: The run.
        coverage: The probability with which an interval holds the truth; that of the run if None.
        risk: The largest risk of an answer; that of the run if None.
    """

    def __init__(self, run: TableRun, coverage: float | None = None, risk: float | None = None) -> None:
        check("coverage", OpenProbability | None, coverage)
        check("risk", Positive | None, risk)
        self.run, self.coverage, self.risk = run, coverage, risk
        self.predict(run.parts["held_out"][0][:1])  # what is wrong shows before the first request, which is fast then

    def predict(self, inputs: Tensor) -> TablePrediction:
        """Predict rows that were encoded."""
        return self.run.predict_inputs(inputs, coverage=self.coverage, risk=self.risk)

    def encode(self, table: Table) -> tuple[Tensor, Tally]:
        """Return the inputs of a table; a cell that holds something else than its column is an error."""
        tally = Tally()
        inputs = self.run.encoder.encode(table, tally)
        for name in tally.stray:
            row, value = tally.examples["stray", name]
            kind = next(column.holds for column in self.run.encoder.columns if column.name == name)
            raise InputError(f"The column {name!r} holds {kind}, but row {row} has {value}.")
        return inputs, tally

    def answer(self, tables: Sequence[Table]) -> list[Answer | DubitoError]:
        """Predict all tables in one batch; what is wrong with one of them is said to that one alone."""
        encoded = [self._encoded(table) for table in tables]
        good = [each for each in encoded if not isinstance(each, DubitoError)]
        if not good:
            return [each for each in encoded if isinstance(each, DubitoError)]
        try:
            found = self.predict(torch.cat([inputs for inputs, _ in good]))
        except DubitoError as error:
            if len(tables) == 1:
                return [error]
            return [self.answer([table])[0] for table in tables]
        answers: list[Answer | DubitoError] = []
        start = 0
        for each in encoded:
            if isinstance(each, DubitoError):
                answers.append(each)
                continue
            stop = start + len(each[0])
            answers.append(Answer(as_json(found, start, stop), each[1]))
            start = stop
        return answers

    def _encoded(self, table: Table) -> tuple[Tensor, Tally] | DubitoError:
        try:
            return self.encode(table)
        except DubitoError as error:
            return error
