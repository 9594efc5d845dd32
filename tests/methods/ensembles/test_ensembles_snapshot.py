"""`Snapshot`: the learning rate of its paper, and a member at the end of every cycle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dubito.ensembles import EnsemblePosterior
from dubito.errors import InputError
from ensemble_cases import TRAINING, classes, dense, normalized, numbers

from dubito import MAP, Snapshot, Training
from dubito.fitting.gradient_training import GradientDescent
from oracles import weights_of


def fit(recipe: Snapshot, model: Any = None, **options: Any) -> EnsemblePosterior:
    found = recipe.fit(model or normalized(), options.pop("data", classes()), **{"training": TRAINING, **options})
    assert isinstance(found, EnsemblePosterior)
    return found


@pytest.mark.parametrize(("cycles", "ends"), [(1, [12]), (3, [4, 8, 12]), (5, [3, 5, 8, 10, 12]), (12, range(1, 13))])
def test_members_are_the_network_at_the_end_of_each_cycle(
    cycles: int, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: list[torch.Tensor] = []
    rates: list[float] = []
    original = GradientDescent.update

    def update(self: GradientDescent, *args: Any) -> Any:
        state, info = original(self, *args)
        tensors = (*state["params"].values(), *state["buffers"].values())
        path.append(torch.cat([tensor.detach().flatten().double() for tensor in tensors]))
        rates.append(float(info["lr"]))
        return state, info

    monkeypatch.setattr(GradientDescent, "update", update)
    found = fit(Snapshot(cycles))
    assert len(found.members) == cycles
    for member, end in zip(found.members, ends, strict=True):
        assert torch.equal(weights_of(member), path[end - 1])
    expected = [0.01 / 2 * (math.cos(math.pi * (t % (12 / cycles)) / (12 / cycles)) + 1) for t in range(12)]
    assert rates == pytest.approx(expected, abs=1e-12)


def test_one_cycle_is_plain_training() -> None:
    plain = MAP(prior_precision=1.0).fit(normalized(), classes(), training=TRAINING.replace(schedule="cosine"))
    assert torch.equal(weights_of(fit(Snapshot(1, prior_precision=1.0))), weights_of(plain))


def test_the_mixture_is_over_the_members() -> None:
    x, _ = classes(20, seed=1)
    found = fit(Snapshot(3))
    expected = torch.stack([member.model(x).softmax(-1) for member in found.members]).mean(0).detach()
    torch.testing.assert_close(found.predict(x).probs, expected, rtol=1e-12, atol=1e-12)


def test_each_member_of_a_regression_has_its_own_noise() -> None:
    x, y = numbers()
    found = fit(Snapshot(2), dense(2), data=(x, y), likelihood="gaussian")
    for member in found.members:
        residuals = member.model(x).detach() - y
        assert member.likelihood.noise == pytest.approx(float(residuals.square().mean().sqrt()), rel=1e-6)
    assert found.members[0].likelihood != found.members[1].likelihood


def test_a_warm_up_comes_once() -> None:
    from dubito.methods.ensembles.snapshot import Cyclic

    training = Cyclic(lr=1.0, warmup=0.1, cycles=2)
    assert [training.rate(progress) for progress in (0.0, 0.05, 0.5)] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("cycles", [0, -1, 2.5, True])
def test_a_number_of_cycles_that_is_none(cycles: Any) -> None:
    with pytest.raises(InputError, match="`cycles` must be a whole number of at least 1"):
        Snapshot(cycles)


def test_bad_runs_are_one_sentence() -> None:
    with pytest.raises(InputError, match="13 cycles do not fit into 12 steps"):
        fit(Snapshot(13))
    with pytest.raises(InputError, match="during training"):
        fit(Snapshot(2), training=Training(epochs=0))
    with pytest.raises(InputError, match="needs a complete run"):
        fit(Snapshot(2), validation=classes(), training=TRAINING.replace(restore_best=True))
