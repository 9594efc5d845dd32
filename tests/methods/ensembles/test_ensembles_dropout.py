"""`MCDropout`: where it drops, what its masks are, and what it learns."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from ensemble_cases import TRAINING, classes, convolutional, dense, images, normalized, numbers
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import MAP, MCDropout, Training
from dubito.beliefs.likelihoods import Gaussian
from dubito.core import params
from dubito.fitting.functions import weight_predictor
from dubito.methods.ensembles.masks import bernoulli, channel_axis, concrete, dropping, inner_layers
from oracles import seeded_layers, weights_of

pytestmark = pytest.mark.slow

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def fit(recipe: MCDropout, model: nn.Module | None = None, data: Any = None, **options: Any) -> Any:
    return recipe.fit(model or dense(), data or classes(), **{"training": TRAINING, **options})


class TestPlaces:
    def test_all_layers_but_the_first_without_dropout_layers(self) -> None:
        assert list(fit(MCDropout()).rates) == ["2", "4"]
        assert set(fit(MCDropout()).rates.values()) == {0.1}

    def test_its_own_layers_with_them(self) -> None:
        assert fit(MCDropout(), normalized(0.3)).rates == {"3": 0.3}
        assert fit(MCDropout(0.2), normalized(0.3)).rates == {"3": 0.2}
        assert fit(MCDropout(where="layers"), normalized(0.3)).rates == {"4": 0.1}
        assert fit(MCDropout(learn=True), normalized(0.3), training=TRAINING.replace(epochs=0)).rates.keys() == {"4"}
        assert fit(MCDropout(), normalized(0.0)).rates == {"4": 0.1}  # one that drops nothing is none

    @pytest.mark.parametrize(("noise", "rate"), [(0.5, 0.1 * 0.25 / 4), (3.0, 0.1), ("learn", 0.005)])
    def test_a_regression_drops_by_its_share_of_noise(self, noise: float | str, rate: float) -> None:
        x = classes()[0]
        wide = torch.tensor([-2.0, 2.0]).repeat(len(x) // 2)  # of variance 4
        targets = torch.stack([wide, wide / 2, 0 * wide], 1)
        posterior = fit(MCDropout(), data=(x, targets), likelihood=Gaussian(noise=noise))
        assert list(posterior.rates.values()) == pytest.approx([rate, rate])

    def test_rates_by_name(self) -> None:
        assert fit(MCDropout({"4": 0.3})).rates == {"4": 0.3}
        with pytest.raises(InputError, match="no place '3' to drop at; there are 2, 4"):
            fit(MCDropout({"3": 0.3}))

    def test_what_follows_an_embedding_is_not_the_data(self) -> None:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        assert inner_layers(model, torch.zeros(1, 2, dtype=torch.long)) == ["1", "2"]

    def test_the_order_is_that_of_a_pass(self) -> None:
        class Backwards(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.last, self.first, self.unused = nn.Linear(4, 3), nn.Linear(4, 4), nn.Linear(2, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.last(self.first(x))

        assert inner_layers(Backwards(), torch.zeros(1, 4)) == ["last"]

    def test_a_first_layer_that_takes_no_masks(self) -> None:
        """The layer after it does not see the data."""
        bag = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 2))
        assert inner_layers(bag, torch.zeros(1, 2, dtype=torch.long)) == ["1"]
        normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2))
        assert inner_layers(normed, torch.zeros(1, 4)) == ["1"]

    @pytest.mark.parametrize(
        ("model", "recipe", "sentence"),
        [
            (nn.Linear(4, 3).double(), MCDropout(), "nothing to drop: .* no plain layer whose inputs are not the data"),
            (dense(), MCDropout(where="dropout"), "nothing to drop: the network has no dropout layer that drops"),
            (normalized(1.0), MCDropout(), "has rate 1 and drops everything"),
        ],
        ids=["one layer", "no dropout layer", "rate 1"],
    )
    def test_nothing_to_drop(self, model: nn.Module, recipe: MCDropout, sentence: str) -> None:
        with pytest.raises(InputError, match=sentence):
            fit(recipe, model)


class TestMasks:
    @pytest.mark.parametrize("filterwise", [True, False])
    def test_what_is_dropped_and_how_often(self, filterwise: bool) -> None:
        layer, seen = nn.Conv2d(40, 2, 1), []
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        model, x = nn.Sequential(layer), torch.ones(300, 40, 2, 2)
        with dropping(model, ["0"], bernoulli({"0": 0.25}), filterwise=filterwise, shared=False):
            layer._forward_pre_hooks.move_to_end(next(iter(layer._forward_pre_hooks)))  # ours last: it sees the rest
            model(x)
        (dropped,) = seen
        assert dropped.unique().tolist() == pytest.approx([0.0, 4 / 3])
        assert (dropped == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
        whole = (dropped.flatten(2).std(-1) == 0).all()
        assert bool(whole) == filterwise
        assert not torch.equal(dropped[0], dropped[1])

    def test_a_layer_that_is_called_twice_has_one_mask(self) -> None:
        layer = nn.Linear(4, 4)

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x) - self.layer(x)

        with dropping(Twice(), ["layer"], bernoulli({"layer": 0.5}), filterwise=True, shared=False):
            assert torch.equal(Twice()(torch.randn(6, 4)), torch.zeros(6, 4))

    def test_no_hook_stays(self) -> None:
        model = dense()
        with pytest.raises(RuntimeError), dropping(model, ["2"], bernoulli({"2": 0.5}), filterwise=True, shared=True):
            model(torch.zeros(2, 3, dtype=torch.float64))
        assert not any(module._forward_pre_hooks for module in model.modules())

    @pytest.mark.parametrize(("layer", "ndim", "axis"), [(nn.Dropout(), 2, 1), (nn.Dropout(), 3, 2),
        (nn.Dropout(), 4, 1), (nn.Dropout1d(), 3, 1), (nn.Dropout2d(), 4, 1), (nn.Linear(2, 2), 3, 2)])  # fmt: skip
    def test_the_axis_of_channels(self, layer: nn.Module, ndim: int, axis: int) -> None:
        assert channel_axis(layer, ndim) == axis

    def test_the_concrete_relaxation_is_nearly_binary_and_unbiased(self) -> None:
        torch.manual_seed(0)
        logit = torch.tensor(0.2).logit().double().requires_grad_()
        masks = concrete({"a": logit})("a", (200_000,), torch.zeros(()))
        assert (masks < 0.5 / 0.8).double().mean().item() == pytest.approx(0.2, abs=0.005)
        assert masks.mean().item() == pytest.approx(1.0, abs=0.01)
        nearly = ((masks < 0.1) | (masks > 0.9 / 0.8)).double().mean().item()
        assert nearly > 0.85
        (slope,) = torch.autograd.grad((masks * torch.sigmoid(-logit)).mean(), logit)
        assert slope.item() == pytest.approx(-0.2 * 0.8, abs=0.01)  # of 1 - p by the logit of p

    def test_every_pass_has_its_own(self) -> None:
        model, x = dense(), classes()[0]
        with dropping(model, ["2", "4"], bernoulli({"2": 0.5, "4": 0.5}), filterwise=True, shared=False):
            assert not torch.equal(model(x), model(x))


class TestPredictive:
    @pytest.mark.parametrize(("network", "data"), [(dense, classes), (convolutional, images)], ids=["dense", "conv"])
    def test_masks_are_weights(self, network: Any, data: Any) -> None:
        """The network under masks is the network at sampled weights, exactly."""
        x, _ = data()
        found = fit(MCDropout(0.4), network(), data())
        seeds = [torch.Generator().manual_seed(7) for _ in range(2)]
        by_masks = found.predict(x, num_samples=6, generator=seeds[0])
        drawn = found.sample(6, generator=seeds[1])
        by_weights = weight_predictor(found.model, found.likelihood, drawn)(x)
        torch.testing.assert_close(by_masks.samples, by_weights.samples.detach(), **EXACT)
        zeros = {name: (value == 0).double().mean().item() for name, value in drawn.items() if value.ndim > 2}
        assert all(value > 0.1 for name, value in zeros.items() if not name.startswith("0"))

    def test_transposed_convolutions_too(self) -> None:
        model = seeded_layers(
            lambda: nn.Conv2d(1, 4, 3), nn.Tanh, lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Flatten,
            lambda: nn.Linear(150, 2),
        )  # fmt: skip
        x, y = images()
        found = fit(MCDropout(0.4), model, (x, y))
        seeds = [torch.Generator().manual_seed(7) for _ in range(2)]
        by_weights = weight_predictor(found.model, found.likelihood, found.sample(6, generator=seeds[1]))(x)
        found_samples = found.predict(x, num_samples=6, generator=seeds[0]).samples
        torch.testing.assert_close(found_samples, by_weights.samples.detach(), **EXACT)

    @pytest.mark.parametrize("filterwise", [True, False])
    def test_many_samples_against_all_masks(self, filterwise: bool) -> None:
        """Two hidden units have four masks: the expectation is a sum."""
        model = seeded_layers(lambda: nn.Linear(4, 2), nn.Tanh, lambda: nn.Linear(2, 3))
        x, _ = classes(10)
        found = fit(MCDropout(0.3, filterwise=filterwise), model)
        hidden, expected = found.model[:2](x), 0.0
        for kept in ((0, 0), (0, 1), (1, 0), (1, 1)):
            weight = 0.7 ** sum(kept) * 0.3 ** (2 - sum(kept))
            mask = torch.tensor(kept, dtype=torch.float64) / 0.7
            expected = expected + weight * found.model[2](hidden * mask).softmax(-1)
        probs = found.predict(x, num_samples=3000).probs
        torch.testing.assert_close(probs, expected.detach(), rtol=0.0, atol=0.02)

    def test_the_weight_scaling_rule(self) -> None:
        x, _ = classes()
        found = fit(MCDropout(), normalized(0.3))
        prediction = found.predict(x, method="mean")
        torch.testing.assert_close(prediction.probs, found.model(x).softmax(-1).detach(), **EXACT)
        assert float(prediction.epistemic.abs().max()) == 0.0
        assert float(found.predict(x).epistemic.max()) > 0.0
        with pytest.raises(InputError, match="'masks' or 'mean'"):
            found.predict(x, method="median")

    def test_marginals(self) -> None:
        found = fit(MCDropout(0.2))
        mean, variance = found.marginals()
        torch.testing.assert_close(variance["2.weight"], mean["2.weight"].square() * 0.25, **EXACT)
        assert float(variance["0.weight"].max()) == 0.0
        assert float(variance["2.bias"].max()) == 0.0

    @pytest.mark.parametrize(
        ("model", "recipe"),
        [(dense(), MCDropout(filterwise=False)), (normalized(0.3), MCDropout())],
        ids=["single", "own"],
    )
    def test_activations_are_no_weights(self, model: nn.Module, recipe: MCDropout) -> None:
        found = fit(recipe, model)
        for method in (found.marginals, lambda: found.sample(2)):
            with pytest.raises(UnsupportedError, match="drops activations, not weights"):
                method()

    def test_the_networks_own_layers_stay_what_they_were(self) -> None:
        model = normalized(0.3)
        found = fit(MCDropout(0.2), model)
        assert model[3].p == found.model[3].p == 0.3


class TestTraining:
    @pytest.mark.parametrize("repeats", [1, 4])
    def test_the_loss_is_that_of_dropout(self, repeats: int) -> None:
        x, y = classes(4000, seed=5)
        torch.manual_seed(0)
        found = _loss_of(MCDropout(0.5, repeats=repeats), dense(), (x, y))
        model, total = dense(), 0.0
        with torch.no_grad():
            for _ in range(20):
                hidden = F.dropout(model[2:4](F.dropout(model[:2](x), 0.5)), 0.5)
                total += float(F.cross_entropy(model[4](hidden), y))
        assert found == pytest.approx(total / 20, rel=0.01)

    def test_repeats_lower_the_noise(self) -> None:
        torch.manual_seed(0)
        spread = [
            torch.tensor([_loss_of(MCDropout(0.5, repeats=r), dense(), classes()) for _ in range(60)]).std()
            for r in (1, 16)
        ]
        assert float(spread[0] / spread[1]) == pytest.approx(4.0, rel=0.4)

    def test_fixed_rates_and_the_prior(self) -> None:
        """The penalty is λ/(1-p) on weights whose inputs are dropped: that of their expected square."""
        narrow = fit(MCDropout(0.5, prior_precision=1e4), training=Training(epochs=200, lr=1e-2, batch_size=50))
        assert float(weights_of(narrow).abs().max()) < 0.05
        prior = fit(MCDropout(0.5, prior_precision=2.0)).prior()[1]
        assert float(prior["2.weight"].unique()) == 0.5
        assert float(prior["2.bias"].abs().max()) == 0.0

    def test_learned_rates_follow_the_signal(self) -> None:
        """Units that must be kept to explain the data are dropped less than units that do not matter."""
        x, y = numbers(300)
        training = Training(epochs=25, lr=1e-2, batch_size=30)
        recipe = MCDropout(0.3, learn=True, prior_precision=1e-3)
        signal = fit(recipe, dense(2), (x, y), likelihood=dubito.likelihoods.Gaussian(noise=0.1), training=training)
        noise = fit(recipe, dense(2), (x, y), likelihood=dubito.likelihoods.Gaussian(noise=30.0), training=training)
        assert max(signal.rates.values()) < 0.2
        assert min(noise.rates.values()) > 0.35

    def test_the_divergence_of_concrete_dropout(self) -> None:
        x, y = classes()
        recipe, rate = MCDropout(0.2, learn=True, prior_precision=3.0), 0.2
        torch.manual_seed(0)
        with_it = _loss_of(recipe, dense(), (x, y))
        model = dense()
        draw = concrete({name: torch.tensor(rate).logit().double() for name in ("2", "4")})
        torch.manual_seed(0)
        with dropping(model, ["2", "4"], draw, filterwise=True, shared=False):
            without = float(F.cross_entropy(model(x), y).detach())
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        expected = sum(
            3.0 * float(layer.weight.detach().square().sum()) / (2 * (1 - rate)) - layer.in_features * entropy
            for layer in (model[2], model[4])
        )
        assert with_it - without == pytest.approx(expected / 50, rel=1e-6)

    def test_noise_of_a_regression_is_what_explains_it_while_it_drops(self) -> None:
        x, y = numbers(2000)
        found = fit(MCDropout(0.4), dense(2), (x, y), likelihood="gaussian")
        draws = weight_predictor(found.model, found.likelihood, found.sample(300))(x)
        expected = (draws.means - y).square().mean().sqrt().item()
        assert found.likelihood.noise == pytest.approx(expected, rel=0.05)

    def test_a_trained_network_is_only_asked_differently(self) -> None:
        model = MAP().fit(dense(), classes(), training=TRAINING).model
        found = fit(MCDropout(train=False), model)
        assert all(torch.equal(value, params.of(model)[name]) for name, value in found.mean().items())

    def test_learning_on_keeps_the_rates(self) -> None:
        found = fit(MCDropout(learn=True))
        updated = found.update(classes(30, seed=2), training=TRAINING.replace(epochs=0))
        assert updated.rates == pytest.approx(found.rates, rel=1e-5)


def _loss_of(recipe: MCDropout, model: nn.Module, data: Any) -> float:
    """The loss of the first step, on all data at once."""
    from dubito.core.batches import Batch, Source
    from dubito.fitting.inference import Problem
    from dubito.methods.ensembles.mc_dropout import _Trainer

    source = Source(data, batch_size=len(data[1]))
    likelihood = dubito.likelihoods.Categorical()
    generator = torch.Generator()
    problem = Problem(copy.deepcopy(model), likelihood, source, None, Training(), generator, False)
    trainer = _Trainer(recipe, problem)
    batch: Batch = source.first()
    return float(trainer._loss(problem.model, batch, trainer.descent.hyper, generator).detach())


class TestSettings:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ({"rate": 1.0}, "a probability above 0 and below 1, a dict of them or None, got 1.0"),
            ({"rate": 0.0}, "a probability above 0 and below 1, a dict of them or None, got 0.0"),
            ({"rate": -0.5}, "a probability above 0 and below 1, a dict of them or None, got -0.5"),
            ({"rate": {"2": 1}}, "a probability above 0 and below 1, a dict of them or None, got"),
            ({"where": "inputs"}, "'auto', 'dropout' or 'layers'"),
            ({"learn": True, "where": "dropout"}, "learned at the inputs of layers"),
            ({"repeats": 0}, "at least 1"),
            ({"train": False, "start": "fresh"}, "keeps the network as it is"),
        ],
        ids=str,
    )
    def test_wrong_ones_are_one_sentence(self, arguments: dict[str, Any], sentence: str) -> None:
        with pytest.raises(InputError, match=sentence):
            MCDropout(**arguments)

    def test_by_text(self) -> None:
        assert dubito.parse("mc-dropout(0.2, filterwise=false)") == MCDropout(0.2, filterwise=False)
