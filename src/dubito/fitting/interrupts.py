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

    Ctrl-C waits until the end of a step (`held`), then the previous handler acts, which by default raises
    `KeyboardInterrupt`. The handler is set once per run, because setting one takes as long as a small layer.

    SIGTERM, by which schedulers and torchrun stop a process, raises `Terminated`, so that a checkpoint can be written.
    `deliver` then passes it on to the previous handler, which by default ends the process. With several processes it
    only sets `is_terminated`, and the processes agree to stop between two steps.

    Args:
        catch_sigterm: Whether to handle SIGTERM, because there is a checkpoint to write.
    """

    def __init__(self, catch_sigterm: bool) -> None:
        self.is_terminated = False
        self._process = os.getpid()
        self._is_interrupted = self._busy = False
        self._handlers: dict[signal.Signals, Any] = {signal.SIGINT: self._interrupted}
        if catch_sigterm:
            self._handlers[signal.SIGTERM] = self._caught
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in self._handlers}
            # None is a handler that Python cannot restore
            self._before = {number: handler for number, handler in found.items() if handler is not None}

    def __enter__(self) -> Interrupts:
        for number in self._before:
            signal.signal(number, self._handlers[number])
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handlers[number]:  # else the user's code has set another one
                signal.signal(number, handler)

    def deliver(self) -> None:
        """Pass SIGTERM on to the previous handler; return only if that handler does not end the process."""
        self._pass_on(signal.SIGTERM)
        self.is_terminated = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay signals until the end of the block, because a checkpoint in the middle of a step is not exact."""
        self._busy = True
        try:
            yield
        except BaseException:  # which ends the run
            self._busy = self._is_interrupted = False
            raise
        self._busy = False
        if self._is_interrupted:
            self._is_interrupted = False
            self._pass_on(signal.SIGINT)
        self._raise_if_terminated()

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._busy and os.getpid() == self._process:
            self._is_interrupted = True
        elif callable(before := self._before[signal.SIGINT]):
            before(number, frame)
        else:
            self._pass_on(signal.SIGINT)

    def _pass_on(self, number: signal.Signals) -> None:
        """Let the previous handler act on a signal."""
        signal.signal(number, self._before[number])
        try:
            signal.raise_signal(number)
        finally:
            signal.signal(number, self._handlers[number])

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child process that inherited this handler, such as a DataLoader worker
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self.is_terminated = True
        self._raise_if_terminated()

    def _raise_if_terminated(self) -> None:
        if self.is_terminated and not self._busy and not distributed.is_active():
            raise Terminated
