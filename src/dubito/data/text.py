"""Sentences with a label: movie reviews and text messages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dubito.core.errors import FileFormatError
from dubito.data.formats import read_gzip
from dubito.data.source import CatalogEntry, Raw, fold_numbers


def _read_reviews(root: Path, split: int, gap: bool) -> Raw:
    """Sentences of movie reviews (Pang and Lee 2005): fold `split` of ten is the test part, as is usual."""
    negative, positive = (_read_lines(root / f"text/rt-polarity.{kind}.gz", "latin-1") for kind in ("neg", "pos"))
    return _fold(negative + positive, [0] * len(negative) + [1] * len(positive), split, ("negative", "positive"))


def _read_messages(root: Path, split: int, gap: bool) -> Raw:
    """Text messages, spam or not (SMS Spam Collection): fold `split` of ten is the test part."""
    path = root / "text/SMSSpamCollection.tsv.gz"
    rows = [line.partition("\t") for line in _read_lines(path, "utf-8")]
    if {label for label, _, _ in rows} != {"ham", "spam"}:
        raise FileFormatError(
            f"The file {path} does not consist of lines of `ham` or `spam`, a tab and a text: fetch it again."
        )
    return _fold([text for _, _, text in rows], [int(label == "spam") for label, _, _ in rows], split, ("ham", "spam"))


def _read_lines(path: Path, encoding: str) -> list[str]:
    # Not `splitlines`: these texts hold control characters that it would take for line ends.
    try:
        return [line for line in read_gzip(path).decode(encoding).split("\n") if line]
    except UnicodeDecodeError as error:
        raise FileFormatError(f"The file {path} is not text in {encoding} ({error}): fetch it again.") from error


def _fold(texts: list[str], labels: list[int], split: int, class_names: tuple[str, ...]) -> Raw:
    # The files are sorted by class; a loader that does not shuffle should still see both.
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).numpy()
    inputs, targets = np.array(texts, dtype=object)[order], np.array(labels)[order]
    test = fold_numbers(targets, 10) == split
    return Raw((inputs[~test], targets[~test]), (inputs[test], targets[test]), class_names=class_names)


SOURCES = (
    CatalogEntry(
        "mr",
        "classification",
        _read_reviews,
        10_662,
        (),
        ("text/rt-polarity.pos.gz", "text/rt-polarity.neg.gz"),
        num_splits=10,
        obtain="the repository yoonkim/CNN_sentence carries both files, to be gzipped",
    ),
    CatalogEntry(
        "sms",
        "classification",
        _read_messages,
        5_574,
        (),
        ("text/SMSSpamCollection.tsv.gz",),
        num_splits=10,
        obtain="the SMS Spam Collection, gzipped",
    ),
)
