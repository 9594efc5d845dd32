"""Fitting: identities, bounds, batches, upgrades, resume, and what a mixture can and cannot say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError, NonFiniteError, UnsupportedError
from dubito.rank1 import BatchEnsemble, Rank1, convert
from rank1_cases import blobs, small
from torch import Tensor, nn

import dubito
from dubito import MAP, Laplace, Training, priors
from dubito.core import params
from dubito.core.settings import Absent, Setting
from dubito.methods.rank1.trainer import expected_log_prob

pytestmark = pytest.mark.slow

TRAINING = Training(epochs=4, lr=1e-2, batch_size=16)


def image_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    return nn.Sequential(*layers)


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 1, 4, 4, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long()


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("batch", ["repeat", "split"])
def test_one_component_without_variance_is_map(optimizer: Any, batch: Any) -> None:
    """The same weights after every epoch, up to rounding in float64."""
    data, model = blobs(dtype=torch.float64), small(torch.float64)
    one = Rank1(components=1, family="delta", prior=None, factor_rate=0.0, weight_decay=0.0, batch=batch)
    for epochs in (1, 2, 5):
        training = TRAINING.replace(epochs=epochs, optimizer=optimizer, weight_decay=0.01)
        point = MAP().fit(model, data, training=training)
        found = one.fit(model, data, training=training)
        torch.testing.assert_close(found.mean(), point.mean(), rtol=1e-9, atol=1e-11)
        assert bool((found.center() == 1).all())


def test_one_component_of_vanishing_variance_is_map_with_factors_held() -> None:
    data, model = blobs(dtype=torch.float64), small(torch.float64)
    recipe = Rank1(components=1, initial_scale=1e-12, factor_rate=0.0, weight_decay=0.0)
    found, point = (r.fit(model, data, training=TRAINING) for r in (recipe, MAP()))
    torch.testing.assert_close(found.mean(), point.mean(), rtol=1e-7, atol=1e-8)


def test_the_mixture_bound_is_at_least_as_tight() -> None:
    log_prob = torch.randn(4, 500, dtype=torch.float64)
    average, mixture = (expected_log_prob(log_prob, bound) for bound in ("average", "mixture"))
    assert bool((mixture >= average).all())
    same = torch.randn(1, 500, dtype=torch.float64).expand(4, 500)
    torch.testing.assert_close(expected_log_prob(same, "mixture"), expected_log_prob(same, "average"))


def test_the_loss_is_the_negative_bound_of_the_stated_kind() -> None:
    """A step of size zero reports the loss: the mixture's is no larger, and their difference is that of the terms."""
    data = blobs(64)
    losses = {}
    for bound in ("average", "mixture"):
        for mixture_kl in ("mean", "sum"):
            recipe = Rank1(bound=bound, mixture_kl=mixture_kl, family="delta", spread=0.3)
            losses[bound, mixture_kl] = first_loss(recipe, data)
    assert losses["mixture", "mean"] < losses["average", "mean"]
    module = convert(small(), Rank1(family="delta", spread=0.3), generator=seeded())
    log_prob = torch.stack([torch.log_softmax(out, -1)[torch.arange(64), data[1]] for out in module(data[0])])
    kl = -torch.distributions.Normal(1.0, 0.1).log_prob(module.loc).sum() / 64
    expected = {
        ("average", "mean"): -log_prob.mean() + kl / 4,
        ("average", "sum"): -log_prob.mean() + kl,
        ("mixture", "mean"): -(log_prob.logsumexp(0) - math.log(4)).mean() + kl / 4,
        ("mixture", "sum"): -(log_prob.logsumexp(0) - math.log(4)).mean() + kl,
    }
    for key, loss in losses.items():
        assert loss == pytest.approx(float(expected[key].detach()), rel=1e-5)


def seeded() -> torch.Generator:
    """The generator as it is when `build` is called: the loop has drawn one seed from it."""
    generator = torch.Generator().manual_seed(0)
    torch.randint(2**62, (), generator=generator)
    return generator


def first_loss(recipe: Rank1 | BatchEnsemble, data: tuple[Tensor, Tensor]) -> float:
    from dubito.methods.rank1.trainer import Rank1Trainer

    seen: list[float] = []
    original = Rank1Trainer.update

    def update(self: Rank1Trainer, *args: Any) -> Any:
        state, info = original(self, *args)
        seen.append(float(info["loss"]))
        return state, info

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rank1Trainer, "update", update)
        recipe.fit(small(), data, training=Training(epochs=1, batch_size=len(data[0]), shuffle=False))
    return seen[0]


def test_the_divergence_warms_up() -> None:
    data = blobs(64)
    cold = first_loss(Rank1(family="delta", spread=0.3, kl_warmup=0.5), data)
    none = first_loss(BatchEnsemble(spread=0.3, batch="repeat"), data)
    assert cold == pytest.approx(none, rel=1e-6)
    assert first_loss(Rank1(family="delta", spread=0.3), data) > none + 0.1


@pytest.mark.parametrize("rows", [1, 3, 5, 23])
@pytest.mark.parametrize("batch", ["repeat", "split"])
def test_any_number_of_rows_trains(rows: int, batch: Any) -> None:
    x, y = blobs(rows)
    for model in (small(), nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))):
        if rows == 1 and len(model) == 3 and isinstance(model[1], nn.BatchNorm1d):
            continue
        for normalization in ("shared", "component"):
            recipe = Rank1(components=4, batch=batch, normalization=normalization)
            posterior = recipe.fit(model, (x, y), training=Training(epochs=1, batch_size=7 if rows == 23 else rows))
            assert bool(posterior.predict(x).probs.isfinite().all())


@pytest.mark.parametrize(
    "settings",
    [
        {"prior": priors.Cauchy(1.0, 0.1), "family": "cauchy"},
        {"prior": priors.LogNormal(0.0, 0.1), "family": "log-normal"},
        {"prior": priors.HalfCauchy(), "family": "log-normal"},
        {"prior": priors.LogUniform()},
        {"prior": priors.Normal(1.0, "learn")},
        {"prior": priors.Cauchy(1.0, 0.1)},
        {"family": "delta"},
        {"factors": "input"},
        {"factors": "output", "batch": "split"},
        {"perturbation": "additive"},
        {"sample": "batch", "scales": "component"},
        {"bound": "mixture", "mixture_kl": "sum", "kl_warmup": 0.5},
        {"start": "fresh", "prior": priors.Normal(1.0, 1.0)},
        {"start": "fresh", "initial": "normal", "spread": 0.5},
    ],
    ids=str,
)
def test_every_argument_trains(settings: dict[str, Any]) -> None:
    data = blobs(300)
    posterior = Rank1(**settings).fit(small(), data, training=Training(epochs=25, lr=3e-2, batch_size=50))
    prediction = posterior.predict(data[0], num_samples=16)
    assert float((prediction.probs.argmax(-1) == data[1]).float().mean()) > 0.85
    assert dubito.parse(repr(posterior.recipe)) == posterior.recipe


def test_random_signs_only_with_a_fresh_start() -> None:
    assert set(convert(small(), Rank1(start="fresh")).loc.unique().tolist()) == {-1.0, 1.0}
    near = convert(small(), Rank1()).loc
    assert 0.05 < float(near.detach().std()) < 0.2
    assert float((near.detach() - 1).abs().max()) < 0.6
    positive = convert(small(), Rank1(start="fresh", family="log-normal", prior=priors.LogNormal(0.0, 0.1)))
    assert float(positive.draw([(0, 5)]).detach().min()) > 0


def test_predictions_are_mixtures_with_components_on_the_sample_axis() -> None:
    data = blobs()
    posterior = BatchEnsemble(members=3, spread=0.5).fit(small(), data, training=TRAINING)
    prediction = posterior.predict(data[0])
    assert prediction.samples.shape == (3, 90, 3)
    for k in range(3):
        weights = {name: value[k] for name, value in ordered_weights(posterior).items()}
        alone = params.functional_call(posterior.model, weights, data[0]).log_softmax(-1).detach()
        torch.testing.assert_close(prediction.samples[k].log_softmax(-1), alone, rtol=1e-5, atol=1e-6)
    probs = prediction.samples.softmax(-1).mean(0)
    torch.testing.assert_close(prediction.probs, probs, rtol=1e-5, atol=1e-6)
    assert float(prediction.epistemic.mean()) > 1e-5
    assert posterior.predict(data[0], num_samples=50).samples.shape[0] == 3  # points have no other draws
    normal = Rank1(components=3).fit(small(), data, training=TRAINING)
    assert normal.predict(data[0], num_samples=4).samples.shape[0] == 6
    heavy = Rank1(components=2, prior=priors.Cauchy(1.0, 0.1), family="cauchy").fit(small(), data, training=TRAINING)
    assert heavy.predict(data[0]).samples.shape[0] == 8


def ordered_weights(posterior: Any) -> dict[str, Tensor]:
    return params.stack([posterior._weights(k, factors) for k, factors in enumerate(posterior.center())])  # one by one


def test_samples_come_from_every_component() -> None:
    posterior = BatchEnsemble(members=3, spread=0.5).fit(small(), blobs(), training=TRAINING)
    drawn = posterior.sample(3)["0.weight"]
    expected = ordered_weights(posterior)["0.weight"]
    assert all(any(torch.equal(a, b) for b in expected) for a in drawn)
    assert len(drawn.unique(dim=0)) == 3
    torch.testing.assert_close(posterior.mean()["0.weight"], expected.mean(0))


def test_the_marginals_of_a_mixture_are_one_sentence_and_of_one_component_exact() -> None:
    data = blobs()
    mixture = Rank1().fit(small(), data, training=TRAINING)
    with pytest.raises(UnsupportedError, match="do not describe a mixture of 4 components"):
        mixture.marginals()
    with pytest.raises(UnsupportedError, match="over factors"):
        mixture.prior()
    with pytest.raises(UnsupportedError, match="cannot be updated"):
        mixture.update(data)
    one = Rank1(components=1, initial_scale=0.2).fit(small(), data, training=TRAINING)
    mean, variance = one.marginals()
    drawn = one.sample(20_000)
    for name, values in drawn.items():
        error = float(variance[name].max().sqrt()) / 141
        torch.testing.assert_close(values.mean(0), mean[name], rtol=0, atol=5 * error + 1e-6)
        torch.testing.assert_close(values.var(0), variance[name], rtol=0.1, atol=1e-7)
    assert float(variance["0.bias"].max()) == 0
    heavy = Rank1(components=1, prior=priors.Cauchy(1.0, 0.1), family="cauchy").fit(small(), data, training=TRAINING)
    with pytest.raises(UnsupportedError, match="neither mean nor variance"):
        heavy.marginals()


def test_a_trained_network_and_a_batch_ensemble_can_be_upgraded() -> None:
    data, stay = blobs(), Training(epochs=0)
    point = MAP().fit(small(), data, training=Training(epochs=20, lr=1e-2))
    by_model, by_posterior = (
        r.fit(m, data, training=stay) for r, m in ((Rank1(), point.model), (Rank1(start=point), small()))
    )
    assert torch.equal(by_model.predict(data[0]).probs, by_posterior.predict(data[0]).probs)
    exact = Rank1(spread=0.0, initial_scale=1e-9).fit(point.model, data, training=stay)
    torch.testing.assert_close(exact.predict(data[0]).probs, point.predict(data[0]).probs, rtol=1e-5, atol=1e-6)

    members = BatchEnsemble(spread=0.5).fit(point.model, data, training=TRAINING)
    mixture = Rank1(start=members, initial_scale=1e-9).fit(small(), data, training=stay)
    torch.testing.assert_close(mixture.predict(data[0]).samples, members.predict(data[0]).samples, rtol=1e-4, atol=1e-5)
    again = Rank1(start=mixture, scales="component").fit(small(), data, training=TRAINING)
    assert again.mixture.scale.shape == again.mixture.loc.shape


def test_a_start_that_does_not_fit_is_one_sentence() -> None:
    data = blobs()
    members = BatchEnsemble(members=3).fit(small(), data, training=TRAINING)
    with pytest.raises(InputError, match="has 3 components"):
        Rank1(start=members).fit(small(), data)
    with pytest.raises(InputError, match="must have the same number, on the same layers"):
        Rank1(components=3, start=members, factors="input").fit(small(), data)
    other = Laplace().fit(members.model, data)
    with pytest.raises(InputError, match="can start from a MAP"):
        Rank1(start=other).fit(small(), data)
    read = Setting.from_json(Rank1(components=3, start=members).to_json())
    assert isinstance(read.start, Absent)
    with pytest.raises(InputError, match="not saved with it"):
        read.fit(small(), data)
    signs = BatchEnsemble(members=3, start="fresh").fit(small(), data, training=Training(epochs=1))
    positive = Rank1(components=3, start=signs, family="log-normal", prior=priors.LogNormal(0.0, 0.1))
    with pytest.raises(InputError, match="below zero"):
        positive.fit(small(), data)


@pytest.mark.parametrize("normalization", ["shared", "component"])
def test_batch_norm_statistics_are_taken_again(normalization: Any) -> None:
    data, training = images(), Training(epochs=2, lr=1e-2, batch_size=25)
    recipe = Rank1(components=2, spread=0.5, family="delta", normalization=normalization, recalibrate=True)
    posterior = recipe.fit(image_net(), data, validation=data, training=training.replace(restore_best=True))
    module = posterior._module
    x, seen = data[0], []
    module.network[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    members = torch.arange(2)
    assert len(list(posterior._by_module(x, list(zip(members.tolist(), posterior.center(), strict=True))))) == 2
    means = torch.stack([part.mean((0, 2, 3)) for part in seen])  # two equal batches: a mean of means
    if normalization == "shared":
        torch.testing.assert_close(posterior.model[1].running_mean, means.mean(0), rtol=1e-4, atol=1e-5)
        assert len(posterior.sample(2)["0.weight"]) == 2
    else:
        torch.testing.assert_close(posterior.mixture.norms["1.running_mean"], means, rtol=1e-4, atol=1e-5)
        with pytest.raises(UnsupportedError, match="its own normalization statistics"):
            posterior.sample(2)
    merged = torch.stack(list(posterior.networks(members, posterior.center())(x)))
    by_module = torch.stack(list(posterior._by_module(x, list(zip(members.tolist(), posterior.center(), strict=True)))))
    torch.testing.assert_close(merged, by_module, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", [Rank1(normalization="component", kl_warmup=0.5), BatchEnsemble()], ids=repr)
def test_an_interrupted_run_goes_on_to_the_same_result(recipe: Any, tmp_path: Path) -> None:
    from dubito.methods.rank1.trainer import Rank1Trainer

    data = images()
    training = Training(epochs=4, batch_size=16, checkpoint=str(tmp_path / "run"), checkpoint_every=0.0)
    whole = recipe.fit(image_net(), data, training=training.replace(checkpoint=None))
    original, calls = Rank1Trainer.update, []

    def update(self: Rank1Trainer, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rank1Trainer, "update", update)
        with pytest.raises(KeyboardInterrupt):
            recipe.fit(image_net(), data, training=training)
    resumed = recipe.fit(image_net(), data, training=training)
    assert resumed.digest() == whole.digest()


def test_saved_and_loaded(tmp_path: Path) -> None:
    data = images()
    recipes = (Rank1(normalization="component"), Rank1(perturbation="additive"), BatchEnsemble())
    for number, recipe in enumerate(recipes):
        posterior = recipe.fit(image_net(), data, training=Training(epochs=1))
        posterior.save(tmp_path / str(number))
        again = dubito.load(tmp_path / str(number), image_net())
        assert torch.equal(again.predict(data[0]).probs, posterior.predict(data[0]).probs)
        assert again.digest() == posterior.digest()
        assert again.num_parameters == posterior.num_parameters


def test_the_number_of_parameters() -> None:
    posterior = Rank1(components=2).fit(small(), blobs(), training=Training(epochs=0))
    factors = 4 + 8 + 8 + 3
    assert posterior.num_parameters == (4 * 8 + 8 * 3) + 2 * factors + factors + 2 * (8 + 3)


class Named(nn.Module):
    """A network with two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"logits": self.left(left) + self.right(right)}


@pytest.mark.parametrize("batch", ["repeat", "split"])
def test_inputs_by_name(batch: Any) -> None:
    x, y = blobs()
    inputs = {"left": x[:, :2], "right": x[:, 2:]}
    posterior = Rank1(components=2, batch=batch).fit(Named(), [{**inputs, "labels": y}], training=TRAINING)
    assert len(posterior.predict(inputs)) == 90
    module = convert(Named(), Rank1(components=2))
    assert module(**inputs).shape == (2, 90, 3)
    with pytest.raises(InputError, match="all of them by name"):
        module(inputs["left"], right=inputs["right"])


def test_early_stopping_goes_by_the_mixture() -> None:
    training = Training(epochs=6, lr=1e-2, restore_best=True)
    posterior = Rank1().fit(small(), blobs(), validation=blobs(40), training=training)
    assert len(posterior.predict(blobs()[0])) == 90


def test_a_loss_that_explodes_names_the_place() -> None:
    x, y = blobs()
    with pytest.raises(NonFiniteError, match="epoch 1") as raised:
        Rank1(prior=priors.Normal(1.0, 1e-25)).fit(small(), (x, y), training=Training(lr=1e20, epochs=3))
    assert raised.value.posterior is not None


def test_regression_learns_its_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 200)[:, None]
    y = x.sin() + 0.1 * torch.randn(200, 1, generator=generator)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    training = Training(epochs=40, lr=2e-2, batch_size=50)
    for recipe in (Rank1(), BatchEnsemble()):
        posterior = recipe.fit(model, (x, y), likelihood="gaussian", training=training)
        assert 0.07 < posterior.likelihood.noise < 0.2
        assert posterior.predict(x).mean.shape == (200, 1)
