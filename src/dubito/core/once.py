"""Warnings that are given once."""

from __future__ import annotations

import warnings


class WarnOnce:
    """Gives each warning once; Python itself forgets what it has shown when the filters of warnings change.

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
        """Warn, unless the same sentence was given before."""
        if sentence not in self._given:
            warnings.warn(sentence, category, stacklevel=2)
            self._given.add(sentence)

    def forget(self) -> None:
        """Forget what was given, so that it is given again."""
        self._given.clear()


# For warnings that are given once per process.
warn_once = WarnOnce()
