"""Find the files of data sets in the folders of `DUBITO_DATA`, then in the user's cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dubito.core.errors import MissingDataError

VARIABLE = "DUBITO_DATA"


def cache_folder() -> Path:
    """Return the cache folder, `$XDG_CACHE_HOME/dubito` or `~/.cache/dubito`; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "dubito"


def data_folders() -> list[Path]:
    """Return the folders of `DUBITO_DATA` (separated like those of `PATH`), in order."""
    return [Path(name).expanduser() for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def find_root(name: str, files: Sequence[str], *, extra: Sequence[Path] = (), obtain: str = "") -> Path:
    """Return the first folder that holds all of `files`.

    Args:
        name: The data set, for the message.
        files: Paths relative to the folder.
        extra: Folders to look into after the others.
        obtain: Where the files come from, for the message.

    Raises:
        MissingDataError: No folder holds them all; the sentence says what was looked for, where, and what to do.
    """
    roots = [*data_folders(), cache_folder(), *extra]
    missing = {root: [file for file in files if not (root / file).is_file()] for root in roots}
    for root, absent in missing.items():
        if not absent:
            return root
    # A folder that holds some of the files is the one the user meant: name what it lacks.
    wanted = min(missing.values(), key=len)
    more = f" and {len(wanted) - 1} more" if len(wanted) > 1 else ""
    unset = "" if data_folders() else f" ({VARIABLE} is not set)"
    places = ", ".join(map(str, roots))
    source = f": {obtain}" if obtain else ""
    raise MissingDataError(
        f"The data set {name!r} needs the file {wanted[0]}{more}, not found in {places}{unset}; "
        f"set {VARIABLE} to a folder that holds it{source}."
    )
