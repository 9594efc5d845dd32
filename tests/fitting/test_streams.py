"""Predictions on long streams: summaries stay exact, samples are kept on request, and memory does not grow with S."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dubito import Posterior, Training, Variational
from dubito.core import limits

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["categorical", "gaussian"])
def fitted(request: pytest.FixtureRequest) -> Posterior:
    targets = torch.arange(50) % 3 if request.param == "categorical" else X[:, :3]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    options: Any = {"training": Training(epochs=2), "progress": False}
    return Variational().fit(model, (X, targets), likelihood=request.param, **options)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, X[:, 0]), batch_size=7)


def headlines(prediction: Any) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value) for name, value in prediction.numpy().items()}


def test_a_summary_has_the_same_headlines(fitted: Posterior) -> None:
    whole = fitted.predict(loader())
    assert whole.samples is not None  # few enough
    with limits.using(kept_samples=4 * 3000):  # which some of the batches stay below
        streamed = fitted.predict(loader())
    for summary in (streamed, fitted.predict(X, keep_samples=False)):
        assert summary.samples is None
        assert len(summary) == len(X)
        for name, value in headlines(whole).items():
            torch.testing.assert_close(headlines(summary)[name], value, rtol=1e-5, atol=1e-6)
    kept = fitted.predict(loader(), keep_samples=True)
    assert kept.samples is not None
    assert torch.equal(kept.samples, whole.samples)
    assert fitted.predict(X).samples is not None


def test_batches_come_one_by_one(fitted: Posterior) -> None:
    parts: list[Any] = []
    for part in fitted.predict_batches(loader()):
        assert torch.is_grad_enabled()
        parts.append(part)
    assert [len(part) for part in parts] == [7] * 7 + [1]
    whole = headlines(fitted.predict(loader()))
    for name, value in headlines(type(parts[0]).cat(parts)).items():
        assert torch.equal(value, whole[name])


def test_a_stream_may_be_left_before_its_end(fitted: Posterior) -> None:
    expected = headlines(fitted.predict(X))
    next(fitted.predict_batches(loader()))
    for name, value in headlines(fitted.predict(X)).items():
        assert torch.equal(value, expected[name])


def test_a_standard_error_needs_no_samples_in_the_result(fitted: Posterior) -> None:
    prediction = fitted.predict(X, standard_error=0.05, num_samples=64, keep_samples=False)
    assert prediction.samples is None
