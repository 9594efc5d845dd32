"""Exceptions, each with one sentence that says what is wrong and what to do.

Every error that Dubito raises on purpose is a `DubitoError`, so that a script can catch them all. Each one also
inherits from the built-in exception that fits it, such as `ValueError`.
"""

from __future__ import annotations

from typing import Any

# The most characters of a message.
_LONGEST = 600


class DubitoError(Exception):
    """Base class of all errors that Dubito raises on purpose."""

    def __str__(self) -> str:
        """Return the message on one line; the middle of a very long one, such as a printed tensor, is left out."""
        text = " ".join(super().__str__().split())
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


class InputError(DubitoError, ValueError):
    """Invalid input: wrong shape, NaN, empty data, a label or a setting out of range."""


class UnsupportedError(DubitoError, NotImplementedError):
    """A layer, a posterior family or a combination does not support the request."""


class MissingDataError(DubitoError, FileNotFoundError):
    """A data set, a table or a run that is not on this machine."""


class FileFormatError(DubitoError, OSError):
    """A file is truncated, altered, not written by Dubito, or written for another model."""


class NonFiniteError(DubitoError, ArithmeticError):
    """A loss or statistic became NaN or infinite; `posterior` is the last good one, or None."""

    def __init__(self, message: str, posterior: Any = None) -> None:
        super().__init__(message)
        self.posterior = posterior


class ShardsWarning(UserWarning):
    """Each process was given different data, which is treated as one shard of a common data set."""


class TrustWarning(UserWarning):
    """A result that should not be trusted as it is; the message says why and what to do."""


class NotConvergedWarning(TrustWarning):
    """A training that ended while it still improved, made things worse, or did not happen."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the error's type if it has none.

    >>> first_line(ValueError("one line")), first_line(ValueError())
    ('one line', 'ValueError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
