"""Handle the signals that stop a run: no step is interrupted, and SIGTERM leaves time to write a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dubito.core import distributed


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; raised where a checkpoint can be written."""


class Interrupts:
    """A context that handles signals during a run; it acts only in the main thread, as Python requires.

    SIGTERM, by which schedulers and torchrun stop a process, raises `Terminated`, so that a checkpoint can be written.
    `deliver` then passes it on to the previous handler, which by default ends the process. With several processes it
    only sets `is_terminated`, and the processes agree to stop between two steps.

    Args:
        catch_sigterm: Whether to handle SIGTERM, because there is a checkpoint to write.
    """

    def __init__(self, catch_sigterm: bool) -> None:
        self.is_terminated = False
        self._main = threading.current_thread() is threading.main_thread()
        self._process = os.getpid()
        self._before: Any = signal.getsignal(signal.SIGTERM) if self._main and catch_sigterm else None
        self._busy = False

    def __enter__(self) -> Interrupts:
        if self._before is not None:  # None: not requested, or a handler that Python cannot restore
            signal.signal(signal.SIGTERM, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def deliver(self) -> None:
        """Pass SIGTERM on to the previous handler; return only if that handler does not end the process."""
        self.__exit__()
        signal.raise_signal(signal.SIGTERM)
        self.is_terminated = False
        self.__enter__()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay signals until the end of the block, because a checkpoint in the middle of a step is not exact."""
        before = signal.getsignal(signal.SIGINT) if self._main else None
        if before is None:
            yield
            return
        caught: list[int] = []
        signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)
        self._raise_if_terminated()

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child process that inherited this handler, such as a DataLoader worker
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self.is_terminated = True
        self._raise_if_terminated()

    def _raise_if_terminated(self) -> None:
        if self.is_terminated and not self._busy and not distributed.is_active():
            raise Terminated
