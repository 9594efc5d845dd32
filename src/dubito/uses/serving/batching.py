"""Batch concurrent requests: while one batch is predicted, the next one gathers.

A request that comes alone is predicted at once. There is no delay to wait for others, and the batches grow with the
load.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

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
