"""Limits hold in a block of code and in one thread."""

from __future__ import annotations

import threading

import pytest

from dubito.core import limits


def test_limits_hold_inside_the_block_only() -> None:
    before = limits.current()
    with pytest.raises(KeyError), limits.using(chunk=8) as inside:  # noqa: PT012
        assert limits.current() is inside
        assert (inside.chunk, inside.gradients) == (8, before.gradients)
        with limits.using(gradients=1):
            assert (limits.current().chunk, limits.current().gradients) == (8, 1)
        raise KeyError
    assert limits.current() is before


def test_other_threads_keep_their_limits() -> None:
    seen: list[int] = []
    with limits.using(chunk=8):
        other = threading.Thread(target=lambda: seen.append(limits.current().chunk))
        other.start()
        other.join()
    assert seen == [limits.Limits().chunk]


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(TypeError, match="memory"), limits.using(memory=1):
        pass
