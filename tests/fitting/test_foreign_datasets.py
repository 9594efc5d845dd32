"""Datasets of other libraries, which are no `torch.utils.data.Dataset`: Hugging Face's give dicts of lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import MAP, Laplace

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2


class Rows:
    """As `datasets.Dataset`: lists, or tensors after `with_format("torch")`."""

    def __init__(self, kind: str | None = None) -> None:
        self.format = {"type": kind}

    def with_format(self, kind: str) -> Rows:
        return Rows(kind)

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(X):
            raise IndexError(index)
        row: dict[str, Any] = {"input": X[index], "label": Y[index]}
        return row if self.format["type"] else {name: value.tolist() for name, value in row.items()}


class Net(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


@pytest.mark.parametrize("kind", [None, "torch"])
def test_fit_predict_and_evaluate(kind: str | None) -> None:
    data = Rows(kind)
    posterior = Laplace().fit(Net(4, 2), data, progress=False)
    torch.testing.assert_close(posterior.predict(data).probs, posterior.predict(X).probs)
    found = dubito.evaluate(posterior, data).scores
    assert found["nll"] == pytest.approx(dubito.evaluate(posterior, (X, Y)).scores["nll"])
    assert dubito.decisions.temper(posterior, data).temperature > 0


def test_what_is_no_dataset() -> None:
    posterior = MAP(train=False).fit(Net(4, 2), (X, Y), progress=False)
    for inputs in (X, {"input": X}, (X,), X.numpy()):
        assert len(posterior.predict(inputs).probs) == 12
