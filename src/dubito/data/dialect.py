"""Find out how a text file is written: its encoding, its separator and its decimal mark."""

from __future__ import annotations

import codecs
import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

from dubito.core.errors import FileFormatError, InputError
from dubito.data.number_text import Mark, decimal_mark, first_groups

SEPARATORS = (",", ";", "\t", "|", " ")
# How much of a file the separator and the decimal mark are found from.
SAMPLE_BYTES = 2**18
SAMPLE_LINES = 1000
_BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_NOT_WINDOWS = {0x81, 0x8D, 0x8F, 0x90, 0x9D}
_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}


@dataclass(frozen=True)
class Dialect:
    """How a text file is written."""

    separator: str = ","  # what separates the cells
    encoding: str = "utf-8"  # the encoding of its characters
    decimal: Mark = "."  # the decimal mark of its numbers
    sure: bool = True  # false if the numbers leave the decimal mark open, as "376,532" does, and it was guessed

    def __str__(self) -> str:
        between = _NAMES.get(self.separator, repr(self.separator))
        numbers = "" if self.decimal == "." else ", decimal commas"
        return f"{self.encoding}, separated by {between}{numbers}"


def starts_with_mark(head: bytes) -> bool:
    """Return whether bytes start with a byte-order mark."""
    return head.startswith(tuple(_BOMS))


def detect_encoding(parts: Iterable[bytes], *, whole: bool = True) -> str:
    """Return the encoding of the bytes: by their byte-order mark, else UTF-8 if they are that, else a Western one.

    Args:
        parts: The bytes, in pieces.
        whole: Whether they are the whole file; if not, the last character may be incomplete.
    """
    decoder, used = codecs.getincrementaldecoder("utf-8")(), set[int]()
    is_utf8, first = True, True
    for part in chain(parts, [b""]):
        marked = next((name for mark, name in _BOMS.items() if first and part.startswith(mark)), None)
        if marked is not None:
            return marked
        first = False
        if not part.isascii():
            used |= set(part)
        try:
            decoder.decode(part, final=whole and not part)
        except UnicodeDecodeError:
            is_utf8 = False
            decoder.reset()
    if is_utf8:
        return "utf-8"
    windows = used & set(range(0x80, 0xA0))
    return "cp1252" if windows and not used & _NOT_WINDOWS else "latin-1"


def detect(
    sample: str, encoding: str, *, separator: str | None, decimal: str | None, usual: Dialect | None = None
) -> Dialect:
    """Return the dialect of a text file.

    Args:
        sample: Its first lines.
        encoding: Its encoding.
        separator: The separator, or None to find it.
        decimal: The decimal mark, or None to find it.
        usual: What to assume where the file leaves something open.
    """
    if separator is None:
        separator = _separator(sample, usual)
    elif len(separator) != 1 or separator in '"\r\n':
        raise InputError(f"The separator must be one character other than a quote or a line end, got {separator!r}.")
    if decimal is not None:
        if decimal not in (".", ","):
            raise InputError(f"The decimal mark must be '.' or ',', got {decimal!r}.")
        return Dialect(separator, encoding, decimal)  # type: ignore[arg-type]
    cells = [cell for row in _parse(sample, separator)[1:] for cell in row]
    mark = decimal_mark(cells)
    if mark is not None:
        return Dialect(separator, encoding, mark)
    if usual is not None and usual.separator == separator:
        return Dialect(separator, encoding, usual.decimal)
    return Dialect(separator, encoding, "," if separator == ";" else ".", sure=first_groups(cells) is None)


def check_encoding(encoding: str) -> str:
    """Return the encoding if Python knows it as one of text; raise otherwise."""
    try:
        if codecs.lookup(encoding)._is_text_encoding:
            b"a,b".decode(encoding, errors="ignore")
            return encoding
    except (LookupError, ValueError):  # ValueError: a NUL within the name, or an encoding of names on the internet
        pass
    raise InputError(f"There is no encoding {encoding!r}; common ones are utf-8, latin-1, cp1252 and utf-16.")


def _separator(sample: str, usual: Dialect | None) -> str:
    """Return the separator that cuts the lines into the most equal numbers of cells."""
    best, found = (0.0, 0), "," if usual is None else usual.separator
    for separator in SEPARATORS:
        widths = [len(row) for row in _parse(sample, separator)]
        if not widths or widths[0] < 2:
            continue
        same = Counter(widths)[widths[0]] / len(widths)
        if separator == " " and (best[1] or same < 1):
            continue  # sentences have spaces too
        if (round(same, 1), widths[0]) > best:
            best, found = (round(same, 1), widths[0]), separator
    return found


def _parse(sample: str, separator: str) -> list[list[str]]:
    lines = sample.splitlines(keepends=True)
    try:
        rows = csv.reader(lines, delimiter=separator, skipinitialspace=separator == " ")
        return [row for row in islice(rows, SAMPLE_LINES) if row]
    except csv.Error:
        return []


def explain_encoding(name: str, encoding: str, error: UnicodeError) -> FileFormatError:
    """Return the error to raise where a file is not in the encoding that was assumed or given."""
    byte = f" (byte {error.object[error.start]:#x})" if isinstance(error, UnicodeDecodeError) else ""
    other = "latin-1" if encoding.replace("_", "-").startswith("utf-8") else "utf-8"
    return FileFormatError(f"{name} is not in the encoding {encoding}{byte}: give the right one, such as {other}.")
