"""Predictions: noise on outputs, shared first layers, and as many samples as a standard error takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dubito.errors import InputError
from test_variational_fit import LIKELIHOOD, PRIOR, classes
from torch import Tensor, nn
from variational_cases import Recurrent, convolutional, mlp

from dubito import Training, Variational, select
from dubito.core import params
from dubito.methods.variational import predicting
from oracles import fixed_normal, regression_data, seeded

SHORT = Training(epochs=2, lr=1e-2, batch_size=16)


def fitted(make: Any = mlp, data: Any = None, **options: Any) -> Any:
    given = {"initial_scale": 0.3, **options}
    return Variational(**given).fit(seeded(make), data or classes(), training=SHORT)


class TestLocal:
    @pytest.mark.slow
    def test_the_distribution_of_weight_samples(self) -> None:
        """In a dense network each row has the same mean and covariance over classes, up to Monte Carlo error."""
        posterior, x = fitted(biases="random"), classes()[0][:6]
        draws = [posterior.predict(x, method=m, num_samples=6000).samples for m in ("weights", "local")]
        logits = [each[..., 1] - each[..., 0] for each in draws]
        torch.testing.assert_close(logits[1].mean(0), logits[0].mean(0), rtol=0, atol=0.07)
        torch.testing.assert_close(logits[1].std(0), logits[0].std(0), rtol=0.05, atol=0)

    @pytest.mark.slow
    def test_exact_on_a_linear_model(self) -> None:
        x, y = regression_data(20)
        posterior: Any = Variational(prior=PRIOR, biases="random", initial_scale=0.3).fit(
            seeded(lambda: nn.Linear(3, 1)), (x, y), likelihood=LIKELIHOOD, training=SHORT
        )
        prediction = posterior.predict(x, method="local", num_samples=15_000)
        _, variance = posterior.marginals()
        expected = x.square() @ variance["weight"].mT + variance["bias"]
        torch.testing.assert_close(prediction.epistemic, expected, rtol=0.06, atol=0)

    def test_it_is_repeatable_and_seeded(self) -> None:
        posterior, (x, _) = fitted(), classes()
        first, second = (posterior.predict(x, method="local", num_samples=3).samples for _ in range(2))
        assert torch.equal(first, second)
        other = posterior.predict(x, method="local", num_samples=3, generator=torch.Generator().manual_seed(5)).samples
        assert not torch.equal(first, other)
        assert not torch.equal(first[0], first[1])

    @pytest.mark.parametrize(
        ("make", "inputs"),
        [(convolutional, fixed_normal(20, 1, 4, 4)), (lambda: Recurrent(nn.LSTM), fixed_normal(20, 5, 3))],
    )
    def test_other_networks(self, make: Any, inputs: Tensor) -> None:
        posterior = fitted(make, (inputs, torch.arange(20) % 2), weights=select.all())
        prediction = posterior.predict(inputs, method="local", num_samples=8)
        assert float(prediction.epistemic.min()) > 0

    def test_single_weights(self) -> None:
        posterior, (x, _) = fitted(weights=select.random(0.5) & select.layers("*.weight")), classes()
        assert float(posterior.predict(x, method="local", num_samples=8).epistemic.max()) > 0

    def test_the_first_layers_work_is_done_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from dubito.networks.layers.linear import LinearRule

        posterior, (x, _) = fitted(lambda: nn.Sequential(nn.Flatten(), *mlp())), classes()
        calls: list[int] = []
        before = LinearRule.apply_variance

        def counted(self: Any, layer: Any, *args: Any) -> Tensor:
            calls.append(layer.in_features)
            return before(self, layer, *args)

        monkeypatch.setattr(LinearRule, "apply_variance", counted)
        posterior.predict(x, method="local", num_samples=10)
        assert calls.count(3) == 1
        assert calls.count(5) == 10
        calls.clear()
        posterior.predict(x, method="local", num_samples=4, batch_size=20)
        assert calls.count(3) == 3

    def test_correlations_have_no_noise_on_outputs(self) -> None:
        with pytest.raises(InputError, match="method='weights'"):
            fitted(family="full").predict(classes()[0], method="local")

    def test_an_unknown_method(self) -> None:
        with pytest.raises(InputError, match="'weights', 'local' or 'mean'"):
            fitted().predict(classes()[0], method="exact")


class TestStandardError:
    @pytest.mark.parametrize("method", ["weights", "local"])
    def test_it_is_reached(self, method: str) -> None:
        posterior, (x, _) = fitted(), classes()
        prediction = posterior.predict(x, standard_error=0.01, method=method)
        count = len(prediction.samples)
        errors = prediction.samples.exp().std(0) / count**0.5
        assert float(errors.max()) <= 0.01
        assert predicting.PILOT < count < predicting.MOST
        fewer = posterior.predict(x, standard_error=0.05, method=method)
        assert len(fewer.samples) < count

    def test_of_the_mean_in_regression(self) -> None:
        posterior: Any = Variational(initial_scale=0.5).fit(
            seeded(lambda: nn.Linear(3, 1)), regression_data(30), likelihood=LIKELIHOOD, training=SHORT
        )
        prediction = posterior.predict(regression_data(30)[0], standard_error=0.1)
        assert float((prediction.means.std(0) / len(prediction.means) ** 0.5).max()) <= 0.1

    @pytest.mark.slow
    def test_against_the_truth(self) -> None:
        """The stated error is that of the probabilities, measured on calls with other seeds."""
        posterior, x = fitted(), classes()[0][:10]
        truth = posterior.predict(x, num_samples=8000).probs
        generators = [torch.Generator().manual_seed(seed) for seed in range(20)]
        found = torch.stack([posterior.predict(x, standard_error=0.02, generator=g).probs for g in generators])
        rms = (found - truth).square().mean(0).sqrt()
        assert 0.005 < float(rms.max()) < 0.03

    def test_it_stops_at_the_most(self) -> None:
        posterior, (x, _) = fitted(), classes()
        assert len(posterior.predict(x, standard_error=1e-6, num_samples=50).samples) == 50
        assert len(posterior.predict(x, standard_error=0.5, num_samples=5).samples) == 5

    def test_the_same_call_gives_the_same_numbers(self) -> None:
        posterior, (x, _) = fitted(), classes()
        first, second = (posterior.predict(x, standard_error=0.02).probs for _ in range(2))
        assert torch.equal(first, second)

    @pytest.mark.parametrize("given", [0.0, -1.0, float("nan"), "small"])
    def test_a_bad_number(self, given: Any) -> None:
        with pytest.raises(InputError, match="positive number"):
            fitted().predict(classes()[0], standard_error=given)

    def test_the_network_at_the_means_has_none(self) -> None:
        with pytest.raises(InputError, match="draws no samples"):
            fitted().predict(classes()[0], standard_error=0.1, method="mean")


def test_the_network_at_the_means() -> None:
    posterior, (x, _) = fitted(), classes()
    prediction = posterior.predict(x, method="mean")
    expected = params.call(posterior.model, x).softmax(-1)
    torch.testing.assert_close(prediction.probs, expected)
    assert float(prediction.epistemic.abs().max()) < 1e-12
