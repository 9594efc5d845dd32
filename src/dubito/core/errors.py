"""What goes wrong, in one clear sentence each: what was wrong, and what to do.

Every error that Dubito raises on purpose is a `DubitoError`, so a script or the command line can catch them all; each
is also the built-in error a Python programmer would expect.
"""

from __future__ import annotations

from typing import Any

# Characters of a message.
_LONGEST = 600


class DubitoError(Exception):
    """The base of all errors raised on purpose."""

    def __str__(self) -> str:
        """The message on one line; the middle of a long one, such as a printed tensor, is left out."""
        text = " ".join(super().__str__().split())
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


class InputError(DubitoError, ValueError):
    """Bad input: wrong shape, NaN, empty data, a label out of range, a setting out of range."""


class UnsupportedError(DubitoError, NotImplementedError):
    """A layer, family or combination that cannot give what was asked of it."""


class MissingDataError(DubitoError, FileNotFoundError):
    """A data set that is not on this machine."""


class FileFormatError(DubitoError, OSError):
    """A file that is truncated, altered, foreign, or written for another model."""


class NonFiniteError(DubitoError, ArithmeticError):
    """A loss or statistic became NaN or infinite; `posterior` is the last good one, where there is one."""

    def __init__(self, message: str, posterior: Any = None) -> None:
        super().__init__(message)
        self.posterior = posterior


class ShardsWarning(UserWarning):
    """Each process was given different data, which is treated as its shard of one data set."""
