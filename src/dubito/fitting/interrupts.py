"""Signals that stop a run: a step is never cut in two, and SIGTERM leaves time for a checkpoint."""

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
    """Raised by SIGTERM at a place where a checkpoint can be written."""


class Interrupts:
    """What a run does about signals, from `__enter__` to `__exit__`; only in the main thread, as Python demands.

    SIGTERM, by which schedulers and torchrun stop a process, becomes `Terminated`, so that a checkpoint can be written;
    `deliver` then hands it on to the handler that was there before, by default the end of the process. Where there are
    several processes it is only written down (`is_terminated`): they agree to stop between two steps.

    Args:
        catch_sigterm: Whether there is a checkpoint to be written.
    """

    def __init__(self, catch_sigterm: bool) -> None:
        self.is_terminated = False
        self._main = threading.current_thread() is threading.main_thread()
        self._process = os.getpid()
        self._before: Any = signal.getsignal(signal.SIGTERM) if self._main and catch_sigterm else None
        self._busy = False

    def __enter__(self) -> Interrupts:
        if self._before is not None:  # None: nobody asked, or a handler that Python could not put back
            signal.signal(signal.SIGTERM, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def deliver(self) -> None:
        """Hand SIGTERM on to the handler that was there before; returns only if that one lets the process live."""
        self.__exit__()
        signal.raise_signal(signal.SIGTERM)
        self.is_terminated = False
        self.__enter__()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back until the block is done: a checkpoint in the middle of a step would not be exact."""
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
        if os.getpid() != self._process:  # a child that inherited this handler, such as a worker of a DataLoader
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self.is_terminated = True
        self._raise_if_terminated()

    def _raise_if_terminated(self) -> None:
        if self.is_terminated and not self._busy and not distributed.is_active():
            raise Terminated
