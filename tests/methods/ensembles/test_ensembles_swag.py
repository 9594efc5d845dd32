"""`SWAG`: its moments are those of the networks on the way, and on a quadratic target they are known."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.likelihoods import Gaussian
from ensemble_cases import TRAINING, classes, dense, normalized, numbers
from torch import Tensor, nn

import dubito
from dubito import MAP, SWAG, Training, select
from dubito.core import params
from dubito.core.batches import Source
from dubito.fitting.gradient_training import GradientDescent
from dubito.networks.normalization import recalibrate


def fit(recipe: SWAG, model: nn.Module | None = None, data: Any = None, **options: Any) -> Any:
    options = {"training": TRAINING, **options}
    return recipe.fit(model or dense(), data or classes(), **options)


def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Write down the weights and the learning rate after every step of a fit."""
    path: list[dict[str, Tensor]] = []
    rates: list[float] = []
    original = GradientDescent.update

    def update(self: GradientDescent, *args: Any) -> Any:
        state, info = original(self, *args)
        path.append({name: value.detach().clone() for name, value in state["params"].items()})
        rates.append(float(info["lr"]))
        return state, info

    monkeypatch.setattr(GradientDescent, "update", update)
    return path, rates


class TestMoments:
    @pytest.mark.parametrize("rank", [0, 1, 3, 20])
    @pytest.mark.parametrize("chosen", [select.all(), select.last_layer()], ids=repr)
    def test_are_those_of_the_weights_collected(self, rank: int, chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        path, _ = recorded(monkeypatch)
        found = fit(SWAG(rank=rank, burn_in=0.5, collect_every=1, weights=chosen))
        kept = path[6:]  # of 12 steps
        flat = torch.stack([found.selection.ravel(weights) for weights in kept])
        for name, value in found.mean().items():
            torch.testing.assert_close(value, torch.stack([w[name] for w in kept]).mean(0), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found.variance, flat.var(0), rtol=1e-10, atol=1e-16)
        last = min(rank, 6)
        centred = flat[6 - last :] - flat.mean(0)
        low_rank = centred.mT @ centred / (last * 5 / 6) if last else torch.zeros(1, dtype=torch.float64)
        expected = torch.diag(flat.var(0)) if rank == 0 else (torch.diag(flat.var(0)) + low_rank) / 2
        if rank == 20:
            torch.testing.assert_close(low_rank, flat.T.cov(), rtol=1e-10, atol=1e-16)
        _, variance = found.marginals()
        torch.testing.assert_close(found.selection.ravel(variance), expected.diagonal(), rtol=1e-10, atol=1e-16)
        drawn = found.selection.ravel(found.sample(20_000)) - flat.mean(0)
        error = (drawn.mT @ drawn / len(drawn) - expected).abs()
        assert float(error.max()) < 0.05 * float(expected.diagonal().max())

    def test_once_per_epoch_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path, _ = recorded(monkeypatch)
        found = fit(SWAG(burn_in=0.0))
        expected = torch.stack([path[i]["0.weight"] for i in (3, 7, 11)]).mean(0)
        torch.testing.assert_close(found.mean()["0.weight"], expected, rtol=1e-12, atol=1e-14)
        assert len(found.deviations) == 3

    def test_the_temperature_scales_the_covariance(self) -> None:
        whole, half = fit(SWAG(rank=3)), fit(SWAG(rank=3, temperature=0.5))
        for name, value in whole.marginals()[1].items():
            torch.testing.assert_close(half.marginals()[1][name], value / 2, rtol=1e-12, atol=0.0)


@pytest.mark.slow
def test_on_a_quadratic_target() -> None:
    r"""Descent on ``|w - y|²/2``, one example at a time, wanders with variance ``α/(2-α)`` around the mean."""
    rate, dimension, steps = 0.2, 60, 3000
    targets = 1 + torch.randn(steps, dimension, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(1, dimension, bias=False)
    training = Training(epochs=1, batch_size=1, optimizer="sgd", momentum=0.0, lr=rate)
    recipe = SWAG(rank=300, burn_in=0.1, collect_every=8, lr=rate)
    data = torch.ones(steps, 1), targets
    found = recipe.fit(model, data, likelihood=Gaussian(noise=1.0), training=training)
    assert isinstance(found, dubito.ensembles.SWAGPosterior)
    expected = rate / (2 - rate)
    assert found.variance.mean().item() == pytest.approx(expected, rel=0.05)
    assert found.marginals()[1]["weight"].mean().item() == pytest.approx(expected, rel=0.05)
    assert found.mean()["weight"].mean().item() == pytest.approx(targets.mean().item(), abs=0.02)
    between = found.deviations[:, :2].prod(1).sum()  # two weights that have nothing to do with each other
    assert abs(float(between)) < 0.2 * expected


class TestLearningRate:
    def test_falls_during_the_burn_in_and_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, rates = recorded(monkeypatch)
        fit(SWAG(burn_in=0.5, lr=1e-3))
        assert rates[:4] == [1e-2] * 4
        assert rates[4:6] == pytest.approx([7e-3, 4e-3])
        assert rates[6:] == pytest.approx([1e-3] * 6)

    def test_is_a_fifth_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, rates = recorded(monkeypatch)
        fit(SWAG(burn_in=0.0))
        assert rates == pytest.approx([2e-3] * 12)


class TestBatchNorm:
    def test_statistics_are_those_of_the_training_data(self) -> None:
        """Recalibration against a pass in training mode with cumulative averages, as torch's own update_bn does it."""
        x, y = classes()
        model = MAP().fit(normalized(dropout=0.5), (x, y), training=TRAINING).model
        expected = copy.deepcopy(model)
        batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 50, 16)]
        expected.eval()
        inner = nn.Sequential(expected[0], expected[1])  # what lies before the layer has no dropout
        torch.optim.swa_utils.update_bn(batches, inner)
        source = Source(batches)
        recalibrate(model, source)
        assert not model[1].training
        assert model[1].momentum == 0.1
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(model[1], name), getattr(expected[1], name), rtol=1e-12, atol=1e-12)

    def test_every_sample_has_its_own(self) -> None:
        x, y = classes()
        training = TRAINING.replace(shuffle=False)
        found = fit(SWAG(rank=3, collect_every=1, num_samples=4), normalized(), training=training)
        assert {name: tuple(value.shape) for name, value in found.buffers.items()} == {
            "1.running_mean": (4, 8), "1.running_var": (4, 8)
        }  # fmt: skip
        outputs = []
        for s in range(4):
            model = params.load_(copy.deepcopy(found.model), found.draw(s))
            recalibrate(model, Source((x, y), batch_size=16))
            torch.testing.assert_close(found.buffers["1.running_var"][s], model[1].running_var, rtol=1e-12, atol=0.0)
            outputs.append(model(x).softmax(-1))
        expected = torch.stack(outputs).mean(0).detach()
        torch.testing.assert_close(found.predict(x, num_samples=4).probs, expected, rtol=1e-10, atol=1e-12)
        with pytest.raises(InputError, match="exist for 4 samples, got num_samples=5"):
            found.predict(x, num_samples=5)

    def test_so_has_the_mean(self) -> None:
        x, y = classes()
        found = fit(SWAG(), normalized(), training=TRAINING.replace(shuffle=False))
        again = recalibrate(copy.deepcopy(found.model), Source((x, y), batch_size=16))
        torch.testing.assert_close(again[1].running_mean, found.model[1].running_mean, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(
            found.predict(x, method="mean").probs, found.model(x).softmax(-1).detach(), rtol=1e-12, atol=1e-12
        )

    def test_not_more_of_the_data_than_it_takes(self) -> None:
        x, _ = classes()
        model = recalibrate(normalized(), Source(classes(), batch_size=16), rows=20)
        inner = normalized()[:2].train()
        inner[1].momentum = None
        inner(x[:16])
        inner(x[16:32])
        torch.testing.assert_close(model[1].running_mean, inner[1].running_mean, rtol=1e-12, atol=1e-14)


class TestUse:
    def test_numbers(self) -> None:
        found = fit(SWAG(rank=3), dense(2), numbers(), likelihood="gaussian")
        x, y = numbers()
        residuals = found.model(x).detach() - y
        assert found.likelihood.noise == pytest.approx(float(residuals.square().mean().sqrt()), rel=1e-6)

    def test_the_prior(self) -> None:
        with pytest.raises(UnsupportedError, match="flat prior"):
            fit(SWAG()).prior()
        mean, variance = fit(SWAG(prior_precision=4.0, weights=select.last_layer())).prior()
        assert float(variance["4.weight"].unique()) == 0.25
        assert float(variance["0.weight"].abs().max()) == 0.0
        assert float(mean["4.weight"].abs().max()) == 0.0

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ({"rank": -1}, "`rank` must be .*, got -1"),
            ({"burn_in": 1.0}, "`burn_in` must be .*, got 1.0"),
            ({"collect_every": 0}, "`collect_every` must be .*, got 0"),
            ({"lr": 0.0}, "`lr` must be .*, got 0.0"),
            ({"temperature": 0.0}, "`temperature` must be .*, got 0.0"),
            ({"num_samples": 0}, "`num_samples` must be .*, got 0"),
            ({"weights": "all"}, "one of dubito.select"),
            ({"start": "warm"}, "'model', 'fresh' or 'head'"),
            ({"prior_precision": -1.0}, "of at least 0"),
        ],
        ids=str,
    )
    def test_wrong_settings_are_one_sentence(self, arguments: dict[str, Any], sentence: str) -> None:
        with pytest.raises(InputError, match=sentence):
            SWAG(**arguments)

    def test_too_little_to_collect(self) -> None:
        with pytest.raises(InputError, match=r"would collect 1 networks in 12 steps and needs 2"):
            fit(SWAG(burn_in=0.9))
        with pytest.raises(InputError, match="during training"):
            fit(SWAG(), training=TRAINING.replace(epochs=0))
        with pytest.raises(InputError, match="needs a complete run"):
            fit(SWAG(), validation=classes(), training=TRAINING.replace(early_stopping=1))
        with pytest.raises(InputError, match="'weights' or 'mean'"):
            fit(SWAG()).predict(classes()[0], method="median")
