"""Images: digits, the MNIST family and CIFAR-10, as pixels in [0, 1] standardised per channel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dubito.core.errors import FileFormatError
from dubito.data.formats import Array, read_idx, read_npz
from dubito.data.source import CatalogEntry, Raw, fold_numbers

_TEST_FILES = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
_TRAIN_FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
_CIFAR10_FILES = ("cifar10/data_batch_1.npz", "cifar10/data_batch_2.npz", "cifar10/test_batch.npz")
_DEBIAN = Path("/usr/share/datasets")

_NUMERALS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_HIRAGANA = tuple("おきすつなはまやれを")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _read_digits(root: Path, split: int, gap: bool) -> Raw:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    test = fold_numbers(labels, 5) == split
    images = images.reshape(-1, 1, 8, 8)
    return Raw((images[~test], labels[~test]), (images[test], labels[test]), class_names=_NUMERALS, unit=16.0)


def _idx_reader(folder: str, class_names: tuple[str, ...]) -> Callable[[Path, int, bool], Raw]:
    def read(root: Path, split: int, gap: bool) -> Raw:
        train, test = (
            checked_images(root / folder, read_idx(root / folder / images)[:, None], read_idx(root / folder / labels))
            for images, labels in (_TRAIN_FILES, _TEST_FILES)
        )
        return Raw(train, test, class_names=class_names, unit=255.0)

    return read


def _read_notmnist(root: Path, split: int, gap: bool) -> Raw:
    images, labels = (read_idx(root / "notmnist" / file) for file in _TEST_FILES)
    return Raw(None, checked_images(root / "notmnist", images[:, None], labels), tuple("ABCDEFGHIJ"), unit=255.0)


def _read_kmnist(root: Path, split: int, gap: bool) -> Raw:
    folder = root / "kmnist"
    (images,) = read_npz(folder / "kmnist-test-imgs.npz", "arr_0")
    (labels,) = read_npz(folder / "kmnist-test-labels.npz", "arr_0")
    return Raw(None, checked_images(folder, images[:, None], labels), _HIRAGANA, unit=255.0)


def _read_cifar10(root: Path, split: int, gap: bool) -> Raw:
    batches = [checked_images(root / file, *read_npz(root / file, "images", "labels")) for file in _CIFAR10_FILES]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches[:-1], strict=True))
    return Raw((images, labels), batches[-1], class_names=_CIFAR10, unit=255.0)


def checked_images(path: Path, images: Array, labels: Array) -> tuple[Array, Array]:
    """Return the pair if it consists of bytes `[N, C, H, W]` and labels `[N]` from 0 to 9; otherwise raise."""
    if images.dtype != np.uint8 or images.ndim != 4 or labels.shape != (len(images),):
        raise FileFormatError(
            f"The file {path} holds images {images.shape} and labels {labels.shape}, which do not belong together."
        )
    if len(labels) == 0 or labels.min() < 0 or labels.max() > 9:
        raise FileFormatError(f"The file {path} holds no labels, or labels outside 0 to 9: fetch it again.")
    return images, labels


def _idx_source(
    name: str, class_names: tuple[str, ...], obtain: str, extra_roots: tuple[Path, ...] = ()
) -> CatalogEntry:
    files = tuple(f"{name}/{file}" for file in (*_TRAIN_FILES, *_TEST_FILES))
    read = _idx_reader(name, class_names)
    return CatalogEntry(
        name, "classification", read, 70_000, (1, 28, 28), files, obtain=obtain, extra_roots=extra_roots
    )


SOURCES = (
    CatalogEntry("digits", "classification", _read_digits, 1797, (1, 8, 8), num_splits=5, obtain="scikit-learn"),
    _idx_source("fashion-mnist", _CLOTHES, "the Debian package dataset-fashion-mnist installs it", (_DEBIAN,)),
    _idx_source("mnist", _NUMERALS, "these are the gzipped idx files in which MNIST is published"),
    CatalogEntry(
        "kmnist",
        "classification",
        _read_kmnist,
        10_000,
        (1, 28, 28),
        ("kmnist/kmnist-test-imgs.npz", "kmnist/kmnist-test-labels.npz"),
        obtain="the repository rois-codh/kmnist publishes it",
    ),
    CatalogEntry(
        "notmnist",
        "classification",
        _read_notmnist,
        10_000,
        (1, 28, 28),
        tuple(f"notmnist/{file}" for file in _TEST_FILES),
        obtain="the repository davidflanagan/notMNIST-to-MNIST publishes it",
    ),
    CatalogEntry(
        "cifar10",
        "classification",
        _read_cifar10,
        30_000,
        (3, 32, 32),
        _CIFAR10_FILES,
        obtain="each npz file holds one official batch, as `images` [10000, 3, 32, 32] and `labels` [10000]",
    ),
)
