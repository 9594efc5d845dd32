"""Pictures as tables: one column ``pixel_row_column`` per pixel, in grey from 0 to 1, so that runs work on them too.

A folder of picture files with one folder per class, or an ``.npz`` file of `images` and `labels`, is read as a table.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dubito.core.errors import FileFormatError, InputError
from dubito.data.cells import Cells
from dubito.data.formats import read_npz
from dubito.data.table import Table

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
FILE, LABEL = "file", "label"
# Pictures with a longer side are made smaller, to squares of this side.
LARGEST_SIDE, SMALL_SIDE = 32, 28
_PIXEL = re.compile(r"pixel_\d+_\d+")
_LUMA = np.array([0.299, 0.587, 0.114])  # the grey of red, green and blue (ITU-R BT.601)


class Pictures:
    """Pictures that are read like the rows of a table, in pieces; see `TableFile`.

    Args:
        name: What messages call them.
        own: The columns beside the pixels: files, labels. They are written with predictions, the pixels are not.
        shape: The height and the width of each picture.
        pieces: Yields the grey pictures ``[n, H, W]`` of the first n rows, then of the next.
    """

    def __init__(
        self, name: str, own: dict[str, Sequence[Any]], shape: tuple[int, int], pieces: Iterator[NDArray[Any]]
    ) -> None:
        self.name, self.dialect, self.num_short = name, None, 0
        self.header = list(own)
        self.names = (*own, *pixel_names(*shape))
        self._own, self._pieces = own, pieces

    def chunks(self, num_rows: int) -> Iterator[Table]:
        """Yield tables of some rows."""
        first = 0
        for piece in self._pieces:
            rows = range(first + 1, first + len(piece) + 1)
            own = {
                name: Cells.of(name, list(each[first : first + len(piece)]), rows) for name, each in self._own.items()
            }
            flat = piece.reshape(len(piece), -1).T.astype(np.float64)
            pixels = zip(self.names[len(own) :], flat, strict=True)
            yield Table(own | {name: Cells.of(name, values, rows) for name, values in pixels})
            first += len(piece)


def pixel_names(height: int, width: int) -> list[str]:
    """Return the columns of the pixels, row by row."""
    return [f"pixel_{row}_{column}" for row in range(height) for column in range(width)]


def is_of_pictures(table: Table) -> bool:
    """Return whether a table was made of pictures; one of a text file has values of another range."""
    return table.dialect is None and sum(_PIXEL.fullmatch(name) is not None for name in table.names) >= 16


def files_in(folder: Path) -> list[Path]:
    """Return the picture files of a folder and of the folders in it, sorted; empty if there are none."""
    found = [*folder.glob("*"), *folder.glob("*/*")]
    return sorted(path for path in found if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))


def open_folder(folder: Path, files: Sequence[Path], piece: int = 256) -> Pictures:
    """Return the pictures of a folder; the folder that a file is in is its label."""
    names = [str(file.relative_to(folder)) for file in files]
    labelled = [file.parent != folder for file in files]
    if any(labelled) != all(labelled):
        loose = files[labelled.index(False)]
        raise InputError(f"{loose} is in no folder of a class, but other pictures are: move it into one, or all out.")
    own: dict[str, Sequence[Any]] = {FILE: names}
    if all(labelled):
        own[LABEL] = [file.parent.name for file in files]
    first = _grey(files[0])

    def pieces() -> Iterator[NDArray[Any]]:
        for start in range(0, len(files), piece):
            found = [_grey(file) for file in files[start : start + piece]]
            for file, picture in zip(files[start:], found, strict=False):
                if picture.shape != first.shape:
                    raise InputError(
                        f"{file} has {picture.shape[1]} × {picture.shape[0]} pixels, but {files[0]} has "
                        f"{first.shape[1]} × {first.shape[0]}: make them equal."
                    )
            yield np.stack(found)

    return Pictures(f"The folder {folder}", own, first.shape, pieces())


def open_archive(path: Path) -> Pictures:
    """Return the pictures of an ``.npz`` file: `images` ``[N, H, W]`` or ``[N, C, H, W]``, and `labels` ``[N]``."""
    try:
        with zipfile.ZipFile(path) as archive:
            labelled = "labels.npy" in archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise FileFormatError(f"The file {path} is not a complete npz file ({error}).") from error
    images, *rest = read_npz(path, "images", *(["labels"] if labelled else []))
    return of_arrays(f"The file {path}", images, rest[0] if rest else None)


def of_arrays(
    name: str, images: NDArray[Any], labels: NDArray[Any] | None = None, unit: float | None = None
) -> Pictures:
    """Return pictures in memory; bytes are divided by 255, other numbers by `unit`."""
    if images.ndim not in (3, 4) or not len(images) or images.dtype.kind not in "uif":
        raise InputError(f"{name} must hold images [N, H, W] or [N, C, H, W], but they are {images.shape}.")
    if labels is not None and labels.shape != images.shape[:1]:
        raise InputError(f"{name} holds {len(images):,} images, but labels of shape {labels.shape}.")
    if images.ndim == 4 and images.shape[1] not in (1, 3):
        raise InputError(f"{name} holds images of {images.shape[1]} channels: give 1 or 3.")
    if max(images.shape[-2:]) > LARGEST_SIDE:
        raise InputError(
            f"{name} holds images of {images.shape[-2]} × {images.shape[-1]} pixels; at most {LARGEST_SIDE} × "
            f"{LARGEST_SIDE} are columns of a table: make them smaller, or use a folder of files."
        )
    scale = unit or (255.0 if images.dtype == np.uint8 else 1.0)

    def pieces(size: int = 8192) -> Iterator[NDArray[Any]]:
        for start in range(0, len(images), size):
            part = images[start : start + size].astype(np.float64) / scale
            yield part if part.ndim == 3 else np.tensordot(part, _LUMA if part.shape[1] == 3 else [1.0], (1, 0))

    own: dict[str, Sequence[Any]] = {} if labels is None else {LABEL: labels.tolist()}
    return Pictures(name, own, (images.shape[-2], images.shape[-1]), pieces())


def _grey(path: Path) -> NDArray[np.float64]:
    """Return a picture ``[H, W]`` from 0 to 1; a large one is made smaller."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                grey = image.convert("L")
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise FileFormatError(f"{path} is not a readable picture ({' '.join(str(error).split())[:200]}).") from error
    except Image.DecompressionBombWarning as error:
        raise FileFormatError(f"{path} has too many pixels: make it smaller.") from error
    if max(grey.size) > LARGEST_SIDE:
        grey = grey.resize((SMALL_SIDE, SMALL_SIDE), Image.Resampling.BOX)
    return np.asarray(grey, dtype=np.float64) / 255
