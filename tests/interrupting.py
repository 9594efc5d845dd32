"""Do something in the middle of an update of the fit loop, such as pressing Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from dubito.fitting import loop
from dubito.fitting.inference import Inference


def before_updates(action: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `action` with its number, from 1, at the begin of each update; they are counted over all fits."""
    build, count = loop.build, 0

    def watched(*args: Any) -> Inference:
        plain = build(*args)

        def update(*args: Any) -> Any:
            nonlocal count
            count += 1
            action(count)
            return plain.update(*args)

        return plain._replace(update=update)

    monkeypatch.setattr(loop, "build", watched)


def at_update(step: int, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `action` inside of one update, counted over all fits."""
    before_updates(lambda number: action() if number == step else None, monkeypatch)


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C in the middle of one update, counted over all fits."""
    at_update(step, lambda: os.kill(os.getpid(), signal.SIGINT), monkeypatch)
