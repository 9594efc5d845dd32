"""Decisions on inputs with several labels and of several lengths: every labelled position is one datum."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dubito import MAP, Laplace, Training, decisions, select
from dubito.core import params


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.words(input_ids))


def batch(length: int, size: int = 30) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(9, (size, length), generator=generator)
    labels = torch.where(torch.rand(size, length, generator=generator) < 0.7, ids % 3, (ids + 1) % 3)
    labels[:, -1] = -100
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


DATA = [batch(4), batch(6), batch(6), batch(3)]


@pytest.fixture(scope="module")
def posterior():
    torch.manual_seed(0)
    point = MAP().fit(Tagger(), DATA, training=Training(epochs=8, lr=0.05))
    return Laplace(weights=select.last_layer(), structure="diag").fit(point.model, DATA)


def positions(posterior) -> tuple[Tensor, Tensor]:
    """The log-probabilities and the labels of all labelled positions."""
    found = []
    for one in DATA:
        inputs = {key: value for key, value in one.items() if key != "labels"}
        kept = one["labels"] != -100
        found.append((posterior.predict(inputs).log_probs[kept], one["labels"][kept]))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def test_temper(posterior) -> None:
    log_probs, labels = positions(posterior)
    found = decisions.temper(posterior, DATA).temperature

    def loss(temperature: float) -> float:
        scaled = (log_probs.double() / temperature).log_softmax(-1)
        prior = math.log1p((math.log(temperature) / 0.3) ** 2)
        return -float(scaled.gather(1, labels[:, None]).sum()) + prior

    assert loss(found) < min(loss(found * 1.02), loss(found / 1.02))


@pytest.mark.parametrize("method", ["thr", "aps"])
def test_conformal_sets(posterior, method: str) -> None:
    sets = decisions.ConformalSets(posterior, DATA, coverage=0.8, method=method)
    log_probs, labels = positions(posterior)
    covered = []
    for one in DATA:
        inside = sets.predict({key: value for key, value in one.items() if key != "labels"})
        assert inside.shape == (*one["labels"].shape, 3)
        kept = one["labels"] != -100
        covered.append(inside[kept].gather(1, one["labels"][kept][:, None]))
    assert 0.8 <= float(torch.cat(covered).double().mean()) < 0.9
    assert len(log_probs) == len(labels) == len(torch.cat(covered))


@pytest.mark.parametrize("score", ["max-probability", "energy"])
def test_detector(posterior, score: str) -> None:
    detector = decisions.Detector(posterior, DATA, score=score, false_positive_rate=0.1)
    inputs = {key: DATA[0][key] for key in ("input_ids", "attention_mask")}
    assert detector.detect(inputs).shape == (30,)
    # padding has no say
    longer = {"input_ids": torch.cat([inputs["input_ids"], torch.full((30, 5), 8)], 1)}
    longer["attention_mask"] = torch.cat([inputs["attention_mask"], torch.zeros(30, 5, dtype=torch.long)], 1)
    torch.testing.assert_close(detector.scores(longer), detector.scores(inputs))
    flags = [detector.detect({k: v for k, v in one.items() if k != "labels"}) for one in DATA]
    assert 0 < float(torch.cat(flags).double().mean()) <= 0.11


def test_the_given_data_stays(posterior) -> None:
    before = [{key: value.clone() for key, value in one.items()} for one in DATA]
    decisions.temper(posterior, DATA)
    for one, copy in zip(DATA, before, strict=True):
        params.check_same(one, copy)
        assert all(torch.equal(one[key], copy[key]) for key in one)
