"""`Variational` against closed forms of Bayesian linear regression, and everything a recipe promises."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.variational import VariationalPosterior
from torch import Tensor, nn
from variational_cases import Loop, convolutional, mlp

import dubito
from dubito import MAP, Training, Variational, likelihoods, objectives, priors, select
from dubito.core import limits, params
from dubito.methods.variational import convert
from oracles import LinearRegression, fixed_normal, regression_data, seeded

pytestmark = pytest.mark.slow

NOISE, PRECISION = 0.3, 2.0
PRIOR = priors.Normal(0.0, PRECISION**-0.5)
LIKELIHOOD = likelihoods.Gaussian(NOISE)
LONG = Training(epochs=250, lr=0.05, batch_size=1000)
SHORT = Training(epochs=2, lr=1e-2, batch_size=16)


def blank_linear(inputs: int = 3) -> nn.Module:
    layer = nn.Linear(inputs, 1, dtype=torch.float64)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def hadamard(rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Orthogonal inputs in each half of sixteen rows, so that the posterior is a product over weights."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    half = torch.kron(torch.kron(two, two), two)[:, 1:4]
    x = torch.cat([half, half])
    y = x @ torch.tensor([[0.5], [-1.0], [2.0]], dtype=torch.float64) + 0.7 + NOISE * fixed_normal(16, 1)
    return x[rows], y[rows]


def classes(size: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = fixed_normal(size, 3, seed=seed)
    return x, (x[:, 0] + x[:, 1] ** 2 > 0.5).long()


def flat_mean(posterior: Any) -> Tensor:
    return posterior.selection.ravel(posterior.mean())


def assert_close_to(posterior: Any, mean: Tensor, precision: Tensor, off: float = 0.12, ratio: float = 0.1) -> None:
    scale = precision**-0.5
    assert float(((flat_mean(posterior) - mean) / scale).abs().max()) < off
    torch.testing.assert_close(posterior.scale, scale, rtol=ratio, atol=0)


class TestLinearRegression:
    def test_the_closed_form_is_where_the_bound_is_flat(self) -> None:
        """Exact: for a quadratic log-likelihood all signs of the noise stand for the normal distribution."""
        x, y = regression_data(20)
        oracle = LinearRegression(x, y, noise=NOISE, prior_precision=PRECISION)
        module = convert(oracle.model(), prior=PRIOR, biases="random", estimator="weight")
        parts, means = dict(module.parts()), dict(module.network.named_parameters())
        with torch.no_grad():
            for name, span in module.selection.slices.items():
                parts[name].log_scale.copy_(-0.5 * oracle.precision.diagonal()[span].log().reshape(means[name].shape))
        bounds = []
        for signs in itertools.product((-1.0, 1.0), repeat=4):
            noise = module.selection.fill(torch.tensor(signs, dtype=torch.float64))
            weights = {n: means[n] + parts[n].scale * noise[n] for n in parts}
            bounds.append(LIKELIHOOD.log_prob(params.functional_call(module.network, weights, x), y).sum())
        bound = torch.stack(bounds).mean() - module.kl()
        for slope in torch.autograd.grad(bound, list(module.parameters())):
            assert float(slope.abs().max()) < 1e-8
        assert bound.item() < oracle.log_evidence

    @pytest.mark.parametrize(("estimator", "temperature"), [("local", 1.0), ("flipout", 1.0), ("weight", 0.2)])
    def test_the_fit_finds_it(self, estimator: Any, temperature: float) -> None:
        x, y = regression_data(20)
        oracle = LinearRegression(x, y, noise=NOISE, prior_precision=PRECISION, temperature=temperature)
        recipe = Variational(
            prior=PRIOR, biases="random", estimator=estimator, temperature=temperature, objective=objectives.ELBO(8)
        )
        posterior = recipe.fit(blank_linear(), (x, y), likelihood=LIKELIHOOD, training=LONG)
        assert_close_to(posterior, oracle.mean, oracle.precision.diagonal())
        assert posterior.log_evidence() < LinearRegression(x, y, NOISE, PRECISION).log_evidence + 1.0

    def test_the_bound_is_the_evidence_where_the_posterior_is_a_product(self) -> None:
        x, y = hadamard()
        oracle = LinearRegression(x, y, noise=NOISE, prior_precision=PRECISION)
        recipe = Variational(prior=PRIOR, biases="random", objective=objectives.ELBO(8), temperature=1.0)
        posterior: Any = recipe.fit(blank_linear(), (x, y), likelihood=LIKELIHOOD, training=LONG)
        assert_close_to(posterior, oracle.mean, oracle.precision.diagonal())
        error = posterior.record.log_likelihood_error
        assert float(posterior.log_evidence()) == pytest.approx(oracle.log_evidence, abs=0.1 + 5 * error)

    def test_updating_is_learning_from_all(self) -> None:
        """Two halves one after the other, against the closed form of both."""
        both = LinearRegression(*hadamard(), noise=NOISE, prior_precision=PRECISION)
        recipe = Variational(prior=PRIOR, biases="random", objective=objectives.ELBO(8), temperature=1.0)
        first: Any = recipe.fit(blank_linear(), hadamard(slice(0, 8)), likelihood=LIKELIHOOD, training=LONG)
        second: Any = first.update(hadamard(slice(8, 16)), training=LONG)
        assert_close_to(second, both.mean, both.precision.diagonal(), off=0.2)
        assert second.num_data == 16
        prior_mean, prior_variance = second.prior()
        old_mean, old_variance = first.marginals()
        for name in old_mean:
            torch.testing.assert_close(prior_mean[name], old_mean[name])
            torch.testing.assert_close(prior_variance[name], old_variance[name])
        errors = first.record.log_likelihood_error + second.record.log_likelihood_error
        assert float(second.log_evidence()) == pytest.approx(both.log_evidence, abs=0.2 + 5 * errors)

    def test_noise_that_is_learned_maximizes_the_bound(self) -> None:
        """σ² is the expected squared residual: that of the mean, plus what the weights' spread adds."""
        x, y = regression_data(30)
        posterior: Any = Variational(prior=PRIOR, biases="random").fit(
            blank_linear(), (x, y), likelihood="gaussian", training=LONG
        )
        rows = torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], 1)
        residual = y.squeeze(1) - rows @ flat_mean(posterior)
        expected = residual.square().mean() + (rows.square() @ posterior.scale.square()).mean()
        assert posterior.likelihood.noise == pytest.approx(expected.sqrt().item(), rel=0.05)

    def test_a_learned_prior_scale(self) -> None:
        x, y = regression_data(40)
        posterior: Any = Variational(prior=priors.Normal(0.0, "learn")).fit(
            blank_linear(), (x, y), likelihood=LIKELIHOOD, training=LONG
        )
        second_moment = (flat_mean(posterior).square() + posterior.scale.square()).mean()
        _, variance = posterior.prior()
        torch.testing.assert_close(variance["weight"], second_moment.expand(1, 3), rtol=1e-6, atol=0)
        assert float(variance["bias"].max()) == 0.0  # a point

    def test_predictions(self) -> None:
        """Exact moments of the outputs, within the error of 4000 draws."""
        x, y = regression_data(20)
        posterior: Any = Variational(prior=PRIOR, biases="random").fit(
            blank_linear(), (x, y), likelihood=LIKELIHOOD, training=SHORT
        )
        prediction: Any = posterior.predict(x, num_samples=4000)
        rows = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], 1)
        mean, variance = rows @ flat_mean(posterior), rows.square() @ posterior.scale.square()
        assert bool(((prediction.mean.squeeze(1) - mean).abs() < 5 * (variance / 4000).sqrt()).all())
        torch.testing.assert_close(prediction.epistemic.squeeze(1), variance, rtol=0.13, atol=0)
        at_mean: Any = posterior.predict(x, method="mean")
        torch.testing.assert_close(at_mean.mean.squeeze(1), mean)
        assert float(at_mean.epistemic.max()) == 0.0

    def test_many_weights_are_drawn_batch_by_batch(self) -> None:
        x, y = regression_data(20)
        posterior: Any = Variational(prior=PRIOR).fit(blank_linear(), (x, y), likelihood=LIKELIHOOD, training=SHORT)
        with limits.using(kept_weights=4 * 3):
            whole, cut = posterior.predict(x, num_samples=50), posterior.predict(x, num_samples=50, batch_size=7)
        torch.testing.assert_close(whole.means, cut.means)
        assert float(whole.epistemic.min()) > 0


class TestWhatMoves:
    def fit(self, network: nn.Module, **options: Any) -> Any:
        return Variational(**options).fit(network, classes(), training=SHORT)

    def moved(self, network: nn.Module, posterior: Any) -> set[str]:
        before, after = params.of(network), posterior.mean()
        return {name for name in before if not torch.equal(before[name], after[name])}

    def test_from_a_model_the_rest_is_held(self) -> None:
        network = seeded(mlp)
        posterior = self.fit(network, weights=select.layers("2"))
        assert self.moved(network, posterior) == {"2.weight", "2.bias"}
        assert posterior.selection.names == ["2.weight"]
        assert all(value.requires_grad for value in posterior.model.parameters())

    def test_from_fresh_weights_all_is_trained(self) -> None:
        network = seeded(mlp)
        posterior = self.fit(network, weights=select.layers("2"), start="fresh")
        assert self.moved(network, posterior) == {"0.weight", "0.bias", "2.weight", "2.bias"}

    def test_single_weights(self) -> None:
        network = seeded(mlp)
        posterior = self.fit(network, weights=select.random(4), biases="random")
        mean, variance = posterior.marginals()
        assert sum(int((value > 0).sum()) for value in variance.values()) == posterior.selection.num_weights == 4
        for name, value in params.of(network).items():
            assert torch.equal(mean[name] != value, variance[name] > 0)

    def test_an_update_holds_what_is_not_random(self) -> None:
        network = seeded(mlp)
        first = self.fit(network)
        second = first.update(classes(seed=3), training=SHORT)
        assert {n for n, v in first.mean().items() if not torch.equal(v, second.mean()[n])} == {"0.weight", "2.weight"}

    def test_running_statistics_are_kept(self) -> None:
        network, x = seeded(convolutional), fixed_normal(20, 1, 4, 4)
        posterior = Variational().fit(network, (x, torch.arange(20) % 3), training=SHORT)
        assert not torch.equal(posterior.model[1].running_mean, network[1].running_mean)

    def test_weight_decay_is_for_points_only(self) -> None:
        """The prior holds random weights; a penalty beside it would be a second one."""
        network = seeded(mlp)
        plain, decayed = (
            Variational(weights=select.layers("*.weight")).fit(
                network, classes(), training=SHORT.replace(weight_decay=decay)
            )
            for decay in (0.0, 10.0)
        )
        assert plain.digest() == decayed.digest()


class TestTraining:
    def test_the_divergence_warms_up(self) -> None:
        weights: list[float] = []

        class Spy(objectives.ELBO):
            def loss(self, module: Any, step: Any) -> Tensor:
                weights.append(step.temperature)
                return super().loss(module, step)

        recipe = Variational(objective=Spy(), kl_warmup=0.5, temperature=0.8)
        recipe.fit(seeded(mlp), classes(64), training=SHORT.replace(epochs=2, batch_size=8))
        assert weights == pytest.approx([0.8 * min(step / 8, 1.0) for step in range(16)])

    def test_it_warms_up_in_cycles(self) -> None:
        weights: list[float] = []

        class Spy(objectives.ELBO):
            def loss(self, module: Any, step: Any) -> Tensor:
                weights.append(step.temperature)
                return super().loss(module, step)

        recipe = Variational(objective=Spy(), kl_warmup=0.5, kl_cycles=2, temperature=1.0)
        recipe.fit(seeded(mlp), classes(64), training=SHORT.replace(epochs=2, batch_size=8))
        assert weights == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0] * 2)

    @pytest.mark.parametrize("family", ["mean-field", "full"])
    def test_scales_have_a_rate_of_their_own(self, family: Any) -> None:
        """After one step of gradient descent they have moved by that fraction, and the means as ever."""
        one = SHORT.replace(epochs=1, batch_size=60, optimizer="sgd", momentum=0.0, schedule="constant", lr=0.1)
        full, half, held = (
            Variational(scale_rate=rate, family=family, initial_scale=0.1, temperature=1.0).fit(
                seeded(mlp), classes(), training=one
            )
            for rate in (1.0, 0.5, 0.0)
        )
        for other in (half, held):
            torch.testing.assert_close(flat_mean(other), flat_mean(full))
        moved, by_half = ((each.scale / 0.1).log() for each in (full, half))
        assert float(moved.abs().max()) > 1e-3
        if family == "mean-field":
            torch.testing.assert_close(by_half, moved / 2, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(held.scale, torch.full_like(held.scale, 0.1))

    def test_colder_is_narrower(self) -> None:
        cold, warm = (
            Variational(temperature=t).fit(seeded(mlp), classes(), training=LONG.replace(epochs=60))
            for t in (0.01, 1.0)
        )
        assert float(cold.scale.log().mean()) < float(warm.scale.log().mean()) - 0.5

    def test_early_stopping_by_the_network_at_the_means(self) -> None:
        posterior = Variational().fit(
            seeded(mlp), classes(), validation=classes(seed=5), training=SHORT.replace(epochs=6, early_stopping=1)
        )
        assert isinstance(posterior, VariationalPosterior)

    def test_layers_that_are_called_often_are_known_before_the_first_step(self, tmp_path: Path) -> None:
        """Else a resumed run would draw other noise than one that was never stopped."""
        data = (fixed_normal(20, 3, 2), torch.arange(20) % 2)
        whole = Variational().fit(seeded(Loop), data, training=SHORT.replace(epochs=3))
        checkpoint = str(tmp_path / "run")
        stopping = SHORT.replace(epochs=3, checkpoint=checkpoint, checkpoint_every=0.0)
        with pytest.raises(KeyboardInterrupt):
            Variational(objective=Interrupting()).fit(seeded(Loop), data, training=stopping)
        Interrupting.steps_left = 10**9
        resumed = Variational(objective=Interrupting()).fit(seeded(Loop), data, training=stopping)
        assert torch.equal(flat_mean(resumed), flat_mean(whole))
        assert torch.equal(resumed.scale, whole.scale)

    def test_a_fresh_start_underfits_less_than_nothing(self) -> None:
        posterior = Variational(start="fresh").fit(seeded(mlp), classes(200), training=LONG.replace(epochs=150))
        x, y = classes(200, seed=9)
        assert float((posterior.predict(x).mode == y).double().mean()) > 0.75


class Interrupting(objectives.ELBO):
    """Presses Ctrl-C at the fourth step."""

    setting_name = "testing.Interrupting"
    steps_left = 3

    def loss(self, module: Any, step: Any) -> Tensor:
        if Interrupting.steps_left == 0:
            raise KeyboardInterrupt
        Interrupting.steps_left -= 1
        return super().loss(module, step)


class TestDiagnosis:
    def test_a_trustworthy_one(self) -> None:
        posterior: Any = Variational(prior=PRIOR, biases="random").fit(
            blank_linear(), regression_data(40), likelihood=LIKELIHOOD, training=LONG
        )
        diagnosis = posterior.diagnose()
        assert diagnosis.trustworthy, diagnosis
        assert str(diagnosis).endswith("Can it be trusted? Yes.")
        with pytest.warns(DeprecationWarning, match="write `trustworthy`"):
            assert diagnosis.healthy
        record = posterior.record
        assert diagnosis.kl_per_datum == record.kl / 40
        assert diagnosis.nll_per_datum == -record.log_likelihood / 40
        assert record.kl == pytest.approx(float(posterior.divergences().sum()), rel=1e-6)

    def test_scales_that_were_not_learned(self) -> None:
        posterior: Any = Variational().fit(seeded(mlp), classes(), training=SHORT)
        diagnosis = posterior.diagnose()
        assert diagnosis.moving_scales > 0.9
        assert "depend on initial_scale" in str(diagnosis)
        sgd: Any = Variational().fit(seeded(mlp), classes(), training=SHORT.replace(optimizer="sgd"))
        assert sgd.diagnose().moving_scales is None  # it keeps no moments

    def test_too_many_weights_for_the_data(self) -> None:
        x, y = classes(30)
        wide = lambda: nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.Linear(300, 2))  # noqa: E731
        network = MAP().fit(seeded(wide), (x, y), training=LONG.replace(epochs=60)).model
        posterior: Any = Variational().fit(network, (x, y), training=LONG.replace(epochs=300))
        found = str(posterior.diagnose())
        assert "underfits" in found
        assert "temperature" in found
        assert "divergence" in found
        assert posterior.diagnose().verdict == "no"
        record = posterior.fit_record  # as if a search had seen that the plain network does no better on new data
        posterior.fit_record = dataclasses.replace(record, held_out_score=record.training.log_score - 0.1)
        assert posterior.diagnose().verdict == "with care"
        cold: Any = Variational(temperature=1e-3).fit(network, (x, y), training=LONG.replace(epochs=100))
        assert "underfits" not in str(cold.diagnose())

    def test_weights_that_carry_nothing(self) -> None:
        wide = nn.Sequential(nn.Linear(3, 50), nn.Linear(50, 2)).double()
        with torch.no_grad():
            for value in wide.parameters():
                value.mul_(0.01)
        posterior: Any = Variational(initial_scale=1.0).fit(wide, classes(), training=SHORT.replace(epochs=0))
        diagnosis = posterior.diagnose()
        assert diagnosis.collapsed == 1.0  # N(μ, 1) under N(0, 1) with tiny means
        assert "100% of the random weights are back at their prior" in str(diagnosis)

    def test_noise_that_harms_the_means(self) -> None:
        x, y = classes()
        network = MAP().fit(seeded(mlp), (x, y), training=LONG.replace(epochs=60)).model
        rough = Training(epochs=3, lr=0.5, batch_size=2, schedule="constant")
        posterior: Any = Variational(estimator="weight", temperature=1.0).fit(network, (x, y), training=rough)
        diagnosis = posterior.diagnose()
        assert diagnosis.nll_at_mean > diagnosis.nll_at_start + 0.2
        assert diagnosis.gradient_noise > 0.9
        assert "of the last gradients was noise: use larger batches" in str(diagnosis)

    def test_without_a_closed_form_it_says_less(self) -> None:
        posterior: Any = Variational(prior=priors.StudentT()).fit(seeded(mlp), classes(), training=SHORT)
        assert posterior.diagnose().collapsed is None
        assert posterior.divergences() is None


def test_an_improper_prior_has_no_evidence_and_no_moments() -> None:
    posterior = Variational(prior=priors.LogUniform()).fit(seeded(mlp), classes(), training=SHORT)
    for lacking in (posterior.log_evidence, posterior.prior):
        with pytest.raises(UnsupportedError, match=r"priors.ARD\(\)"):
            lacking()


def test_files_keep_priors_by_weight(tmp_path: Path) -> None:
    first: Any = Variational(prior=priors.Normal("model", 0.1)).fit(seeded(mlp), classes(), training=SHORT)
    posterior = first.update(classes(seed=3), training=SHORT)
    posterior.save(tmp_path / "posterior")
    again: Any = dubito.load(tmp_path / "posterior", seeded(mlp))
    assert again.digest() == posterior.digest()
    assert again.priors == posterior.priors
    assert str(again.diagnose()) == str(posterior.diagnose())
    third = again.update(classes(seed=4), training=SHORT)
    assert third.digest() == posterior.update(classes(seed=4), training=SHORT).digest()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": priors.LogNormal()}, "only positive weights"),
        ({"prior": 1.0}, "one of dubito.priors"),
        ({"objective": "elbo"}, "one of dubito.objectives"),
        ({"weights": "all"}, "one of dubito.select"),
        ({"estimator": "exact"}, "`estimator` must be 'local', 'flipout', 'weight' or None, got"),
        ({"biases": True}, "`biases` must be 'deterministic' or 'random', got True"),
        ({"start": "cold"}, "`start` must be 'model', 'fresh' or 'head', got"),
        ({"initial_scale": -1.0}, "`initial_scale` must be .*, got"),
        ({"temperature": 0.0}, "`temperature` must be .*, got"),
        ({"kl_warmup": 2.0}, "`kl_warmup` must be .*, got"),
        ({"kl_warmup": (0.5, 0.5)}, "with begin < end"),
        ({"kl_warmup": (0.5,)}, "`kl_warmup` must be .*, got"),
        ({"kl_cycles": 0}, "`kl_cycles` must be .*, got"),
        ({"scale_rate": -0.1}, "`scale_rate` must be .*, got"),
        ({"initial_scale": "small"}, "`initial_scale` must be .*, got"),
        ({"temperature": None}, "`temperature` must be .*, got"),
        ({"kl_warmup": True}, "`kl_warmup` must be .*, got"),
        ({"kl_cycles": 1.5}, "`kl_cycles` must be .*, got"),
        ({"kl_cycles": 3}, "set kl_warmup, too"),
        ({"objective": objectives.Renyi(-1.0), "estimator": "flipout"}, "estimator='weight'"),
        ({"prior": priors.Normal("model", 1.0), "start": "fresh"}, "use start='model'"),
        ({"prior": priors.ByName({"*": priors.Normal("model", 1.0)}), "start": "fresh"}, "use start='model'"),
    ],
)
def test_bad_settings_are_one_sentence(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Variational(**options)
    assert str(caught.value).endswith(".")


def test_a_recipe_is_read_from_text() -> None:
    text = "variational(prior=laplace(scale=0.5), objective=renyi(alpha=-inf), estimator=weight, weights=last_layer())"
    recipe = dubito.parse(text)
    assert recipe == Variational(
        prior=priors.Laplace(scale=0.5), objective=objectives.Renyi(-float("inf")), estimator="weight",
        weights=select.last_layer(),
    )  # fmt: skip
    assert type(recipe).from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
