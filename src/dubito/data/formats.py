"""Find the files of data sets, read their formats, idx (the format of MNIST) and npz, and verify checksums."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dubito.core import limits
from dubito.core.atomic import write_atomic
from dubito.core.errors import FileFormatError, MissingDataError

Array = NDArray[Any]
# How many times its own size a packed file may have when it is unpacked; text that repeats itself reaches about 50.
MAX_RATIO = 100.0


def most_unpacked(path: Path, max_ratio: float = MAX_RATIO) -> float:
    """Return how many bytes a packed file may have when it is unpacked."""
    return max(max_ratio * path.stat().st_size, limits.current().unpacked)


def check_unpacked(path: Path, size: int, most: float, max_ratio: float = MAX_RATIO) -> None:
    """Raise an error if a file has more than `most` bytes when it is unpacked."""
    if size > most:
        raise FileFormatError(
            f"The file {path} unpacks to more than {max_ratio:g} times its size, as files do that are made to fill the "
            "memory: if you trust it, unpack it yourself, or raise data.read_table(..., max_ratio=)."
        )


class Unpacked(io.RawIOBase):
    """The unpacked bytes of a gzip file, at most `max_ratio` times its size or `Limits.unpacked`."""

    def __init__(self, path: Path, max_ratio: float = MAX_RATIO) -> None:
        self._path, self._max_ratio, self._count = path, max_ratio, 0
        self._packed = path.open("rb")
        self._most = most_unpacked(path, max_ratio)
        self._stream = gzip.GzipFile(fileobj=self._packed)

    def readable(self) -> bool:
        """Return True: it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read unpacked bytes into a buffer and return their number."""
        try:
            part = self._stream.read(min(len(buffer), limits.current().file_part))
        except (OSError, EOFError, zlib.error) as error:
            raise FileFormatError(
                f"The file {self._path} is not a complete gzip file ({error}): fetch it again."
            ) from error
        self._count += len(part)
        check_unpacked(self._path, self._count, self._most, self._max_ratio)
        buffer[: len(part)] = part
        return len(part)

    def tell(self) -> int:
        """Return how many packed bytes were read."""
        return self._packed.tell()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._packed.close()
        super().close()


def read_gzip(path: Path, max_ratio: float = MAX_RATIO) -> bytes:
    """Return the unpacked bytes of a gzip file; see `Unpacked`."""
    try:
        with Unpacked(path, max_ratio) as stream:
            return stream.read()
    except FileFormatError:
        raise
    except OSError as error:
        raise FileFormatError(f"The file {path} is not a complete gzip file ({error}): fetch it again.") from error


def read_idx(path: Path) -> Array:
    """Read a gzipped idx file: two zeros, type 8 (bytes), the number of axes, their big-endian sizes, the values."""
    content = read_gzip(path)
    num_axes = content[3] if len(content) >= 4 else 0
    if content[:3] != b"\x00\x00\x08" or len(content) < 4 + 4 * num_axes:
        raise FileFormatError(f"The file {path} is not an idx file of unsigned bytes: fetch it again.")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", count=num_axes, offset=4))
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes)
    if values.size != np.prod(shape):
        raise FileFormatError(
            f"The file {path} declares values of shape {shape} but holds {values.size}: fetch it again."
        )
    return values.reshape(shape)


def read_npz(path: Path, *keys: str) -> list[Array]:
    """Read the arrays `keys` of an npz file, without pickle.

    LZMA members take seconds to unpack, so they are kept unpacked in the user's cache where that can be written.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = [archive.getinfo(f"{key}.npy").file_size for key in keys]  # no more than that is unpacked
            check_unpacked(path, sum(sizes), most_unpacked(path))
            return [_read_member(archive, f"{key}.npy") for key in keys]
    except KeyError as error:
        raise FileFormatError(f"The file {path} lacks an array ({error.args[0]}): fetch it again.") from error
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise FileFormatError(f"The file {path} is not a complete npz file ({error}): fetch it again.") from error


def _read_member(archive: zipfile.ZipFile, member: str) -> Array:
    info = archive.getinfo(member)
    if info.compress_type == zipfile.ZIP_LZMA:
        content = _unpack_cached(archive, info)
    else:
        content = archive.read(info)
    return _array(content)


def _array(content: bytes) -> Array:
    """Return the array of a `.npy` file; numpy's own reader asks for the memory of any shape before it looks."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(stream)
    if dtype.hasobject:
        raise ValueError("it holds objects")
    values = np.frombuffer(content, dtype, offset=stream.tell()).copy() if dtype.itemsize else np.empty(0, dtype)
    if values.size != math.prod(shape):
        raise ValueError(f"it declares the shape {shape} but holds {values.size} values")
    return values.reshape(shape, order="F" if is_fortran else "C")


def _unpack_cached(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Unpack into the cache; the archive's checksum names the cached file and verifies its content."""
    cached = cache_folder() / "unpacked" / f"{info.CRC:08x}-{info.file_size}.npy"
    with contextlib.suppress(OSError):  # no such file, or not readable: the archive has it all
        content = cached.read_bytes()
        if len(content) == info.file_size and zlib.crc32(content) == info.CRC:
            return content
    content = archive.read(info)
    with contextlib.suppress(OSError):  # a read-only or full disk costs time at the next call, not the data
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cached, content)
    return content


def wrong_checksums(root: Path, files: tuple[str, ...]) -> list[str]:
    """Return those of `files` whose SHA-256 differs from `root/SHA256SUMS`; files it does not list pass."""
    sums = root / "SHA256SUMS"
    if not sums.is_file():
        return []
    lines = (line.split(maxsplit=1) for line in sums.read_text(encoding="utf-8").splitlines() if line.strip())
    listed = {file.lstrip("*"): digest for digest, file in lines}
    return [file for file in files if file in listed and _digest(root / file) != listed[file]]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
