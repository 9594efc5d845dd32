"""Emit a warning only once."""

from __future__ import annotations

import warnings


class WarnOnce:
    """A callable that emits each warning once, even if the warning filters change in between.

    >>> warn = WarnOnce()
    >>> with warnings.catch_warnings(record=True) as given:
    ...     warnings.simplefilter("always")
    ...     warn("This is slow.")
    ...     warn("This is slow.")
    >>> len(given)
    1
    """

    def __init__(self) -> None:
        self._given: set[str] = set()

    def __call__(self, sentence: str, category: type[Warning] = UserWarning) -> None:
        """Warn, unless the same warning was emitted before."""
        if sentence not in self._given:
            warnings.warn(sentence, category, stacklevel=2)
            self._given.add(sentence)

    def forget(self) -> None:
        """Forget all warnings, so that they can be emitted again."""
        self._given.clear()


# For warnings that are emitted once per process.
warn_once = WarnOnce()
