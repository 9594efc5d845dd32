"""Values that no argument expects, by name: a case says which, so it stays plain JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def _frame() -> Any:
    import pandas as pd

    return pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]})


def _series() -> Any:
    import pandas as pd

    return pd.Series([1.0, 2.0, 3.0])


def _generator() -> Iterator[int]:
    yield 1


class Odd:
    """An object that nobody knows."""


STRANGE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "text": lambda: "x",
    "empty text": lambda: "",
    "bytes": lambda: b"x",
    "true": lambda: True,
    "zero": lambda: 0,
    "minus one": lambda: -1,
    "half": lambda: 2.5,
    "huge": lambda: 10**30,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "complex": lambda: 1j,
    "list": lambda: [1, 2],
    "empty list": list,
    "tuple": lambda: (1, 2, 3),
    "empty tuple": tuple,
    "dict": lambda: {"a": 1},
    "empty dict": dict,
    "set": lambda: {1, 2},
    "type": lambda: int,
    "function": lambda: len,
    "object": Odd,
    "python generator": _generator,
    "range": lambda: range(3),
    "0-dim": lambda: torch.tensor(1.0),
    "empty tensor": lambda: torch.zeros(0, 5),
    "nan tensor": lambda: torch.full((6, 5), math.nan),
    "inf tensor": lambda: torch.full((6, 5), math.inf),
    "bool tensor": lambda: torch.ones(6, dtype=torch.bool),
    "int tensor": lambda: torch.arange(6),
    "complex tensor": lambda: torch.ones(6, 5, dtype=torch.complex64),
    "half tensor": lambda: torch.ones(6, 5, dtype=torch.float16),
    "sparse tensor": lambda: torch.eye(5).to_sparse(),
    "meta tensor": lambda: torch.ones(6, 5, device="meta"),
    "needs grad": lambda: torch.ones(6, 5, requires_grad=True) * 2,
    "strided": lambda: torch.ones(6, 10)[:, ::2],
    "wide tensor": lambda: torch.ones(6, 7),
    "deep tensor": lambda: torch.ones(6, 5, 3),
    "object array": lambda: np.array([1, "x", None], dtype=object),
    "text array": lambda: np.array(["a", "b"]),
    "date array": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "record array": lambda: np.zeros(3, dtype=[("a", float)]),
    "float array": lambda: np.ones((6, 5)),
    "read-only array": lambda: np.broadcast_to(np.ones(5), (6, 5)),
    "big-endian array": lambda: np.ones((6, 5), dtype=">f8"),
    "uint16 array": lambda: np.ones((6, 5), dtype=np.uint16),
    "masked array": lambda: np.ma.masked_array(np.ones(6), mask=[1, 0, 0, 0, 0, 0]),
    "data frame": _frame,
    "series": _series,
    "module": lambda: nn.Linear(5, 3),
    "empty module": nn.ReLU,
    "lazy module": lambda: nn.LazyLinear(3),
    "generator": lambda: torch.Generator().manual_seed(1),
    "dtype": lambda: torch.float32,
    "loader": lambda: DataLoader(TensorDataset(torch.ones(6, 5), torch.zeros(6, dtype=torch.long)), batch_size=4),
    "empty loader": lambda: DataLoader(TensorDataset(torch.ones(0, 5), torch.zeros(0)), batch_size=4),
    "ragged list": lambda: [[1, 2], [3]],
    "ragged batches": lambda: [(torch.ones(4, 5), torch.zeros(4)), (torch.ones(4, 6), torch.zeros(4))],
    "other width": lambda: [
        (torch.ones(4, 5), torch.zeros(4, dtype=torch.long)),
        (torch.ones(4, 6), torch.zeros(4, dtype=torch.long)),
    ],
    "unequal rows": lambda: (torch.ones(4, 5), torch.zeros(3, dtype=torch.long)),
    "float labels": lambda: (torch.ones(4, 5), torch.zeros(4)),
    "labels too large": lambda: (torch.ones(4, 5), torch.full((4,), 99)),
    "negative labels": lambda: (torch.ones(4, 5), torch.full((4,), -5)),
    "pair of lists": lambda: ([[1.0] * 5] * 4, [0, 1, 0, 1]),
    "pair of text": lambda: ("ab", "cd"),
    "pair of objects": lambda: (np.array([[None] * 5] * 4), np.array([0, 1, 0, 1])),
    "pair with nan": lambda: (torch.full((4, 5), math.nan), torch.zeros(4, dtype=torch.long)),
    "pair of sparse": lambda: (torch.eye(5).to_sparse(), torch.zeros(5, dtype=torch.long)),
    "pair of meta": lambda: (torch.ones(4, 5, device="meta"), torch.zeros(4, dtype=torch.long, device="meta")),
    "nested dict": lambda: {"x": {"y": torch.ones(4, 5)}, "labels": torch.zeros(4)},
    "folder": lambda: "/tmp",
    "missing file": lambda: "/nonexistent/file",
    "device file": lambda: "/dev/null",
}
NAMES = sorted(STRANGE)
