"""Answer several requests for predictions at once: while one batch is predicted, the next one gathers.

A request that comes alone is predicted at once. There is no delay to wait for others, and the batches grow with the
load.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
    """What is said about the rows of one request."""

    predictions: list[dict[str, Any]]  # the columns of `dubito predict` for each row
    tally: Tally  # the cells that the training rows did not prepare for

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


Q = TypeVar("Q")
A = TypeVar("A")


class FullError(Exception):
    """Too many rows are waiting."""


class Batcher(Generic[Q, A]):
    """Answer questions in batches, one batch at a time, in a thread beside the event loop.

    Args:
        answer: Answers a batch: one answer per question, in order. An answer that is an exception is raised.
        together: The largest size of a batch of several questions.
        waiting: The largest size of all questions that wait.
        on_batch: Called with the size of each batch.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Q]], Sequence[A | Exception]],
        *,
        together: int,
        waiting: int,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._answer, self._together, self._most, self._on_batch = answer, together, waiting, on_batch
        self._queue: deque[tuple[Q, int, asyncio.Future[A]]] = deque()
        self._size = 0
        self._worker: asyncio.Task[None] | None = None

    async def ask(self, question: Q, size: int) -> A:
        """Return the answer to a question of a size; raise `FullError` if too much is waiting."""
        if self._size + size > self._most:
            raise FullError
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._queue.append((question, size, future))
        self._size += size
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def close(self) -> None:
        """Finish what was asked."""
        if self._worker is not None:
            await self._worker

    async def _work(self) -> None:
        while batch := self._next_batch():
            try:
                answers = await asyncio.to_thread(self._answer, [question for question, _, _ in batch])
            except Exception as error:  # noqa: BLE001 - whatever it is, each of those who wait is told
                answers = [error] * len(batch)
            for (_, _, future), answer in zip(batch, answers, strict=True):
                if future.done():  # nobody waits any more
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _next_batch(self) -> list[tuple[Q, int, asyncio.Future[A]]]:
        batch: list[tuple[Q, int, asyncio.Future[A]]] = []
        total = 0
        while self._queue and (not batch or total + self._queue[0][1] <= self._together):
            item = self._queue.popleft()
            self._size -= item[1]
            if not item[2].done():
                batch.append(item)
                total += item[1]
        if batch:
            self._on_batch(total)
        return batch
