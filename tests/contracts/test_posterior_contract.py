"""One executable contract for all posteriors: every recipe, every method, classification and regression.

A new recipe joins by one line in `RECIPES`, and one in `REFUSED` if its family cannot give something: that must raise
`UnsupportedError`, in one sentence.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.ensembles import MIMO, SWAG, Ensemble, MCDropout, Packed, Snapshot, TestTimeAugmentation
from dubito.errors import InputError, UnsupportedError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import (
    DKL,
    HMC,
    MAP,
    SGMCMC,
    SNGP,
    SVGD,
    VBLL,
    BatchEnsemble,
    Laplace,
    Posterior,
    Rank1,
    Training,
    Variational,
    objectives,
    priors,
    select,
)
from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction
from dubito.core.settings import Setting
from dubito.fitting.recipe import Recipe

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"burn_in": 20, "num_samples": 30, "chains": 1, "temperature": 0.1}  # the longest fit
RECIPES: list[Recipe] = [
    MAP(),
    MAP(prior_precision=1.0, temperature="validation"),
    MAP(prior=priors.Mixture(4), prior_weight=0.1),
    Laplace(),
    Laplace(structure="diag", prior_precision=2.0),
    Laplace(structure="full", weights=select.last_layer(), prior_precision="validation"),
    Laplace(structure="low-rank", rank=10),
    Variational(),
    Variational(prior=priors.ARD(), estimator="flipout", biases="random", kl_warmup=0.5),
    Variational(prior=priors.LogUniform(), weights=select.last_layer(), temperature=0.1),
    Variational(prior=priors.StudentT(3.0), objective=objectives.Renyi(0.5, num_samples=2), estimator="weight"),
    Variational(prior=priors.Normal("model", 0.1), weights=select.random(0.5), biases="random"),
    Variational(optimizer="natural", biases="random"),
    Variational(family="full", weights=select.last_layer()),
    Variational(family="low-rank", rank=3, kl_warmup=0.5, kl_cycles=2),
    Variational(prior=priors.NormalJeffreys()),
    Variational(prior=priors.Horseshoe(scale=0.1, groups="outputs"), estimator="weight"),
    Variational(prior=priors.TruncatedLogUniform(), start="fresh", kl_warmup=0.5),
    SGMCMC(burn_in=30, thinning=1, num_samples=30, temperature=0.01),
    SGMCMC(
        "sgld",
        "decay",
        weights=select.last_layer(),
        chains=2,
        burn_in=10,
        num_samples=20,
        prior=priors.Normal(),
        thinning=1,
    ),
    SGMCMC(
        "psgld",
        weights=select.random(0.5),
        burn_in=20,
        thinning=1,
        num_samples=30,
        prior=priors.Normal(),
        temperature=0.5,
    ),
    SGMCMC("sgnht", prior=priors.StudentT(3.0), start="fresh", burn_in=30, thinning=2, num_samples=30),
    HMC(**LONG),
    HMC("hmc", weights=select.last_layer(), burn_in=20, num_samples=30, num_steps=5, temperature=0.1),
    SVGD(num_particles=10),
    HMC(weights=select.subspace(4, "random"), burn_in=20, num_samples=30, chains=1, temperature=0.1),
    Ensemble(members=2),
    Ensemble(members=2, recipe=Laplace(structure="diag", prior_precision=2.0), start="model", bootstrap=True),
    Ensemble(members=2, recipe=SWAG(rank=3, prior_precision=1.0)),
    Snapshot(cycles=2, prior_precision=1.0),
    SWAG(),
    SWAG(rank=2, collect_every=1, weights=select.last_layer(), temperature=0.5),
    MCDropout(0.5),
    MCDropout(learn=True, filterwise=False, repeats=2, prior_precision=1.0),
    TestTimeAugmentation(noise=0.1),
    Rank1(),
    Rank1(components=1, batch="split", sample="batch"),
    Rank1(components=2, prior=priors.Cauchy(1.0, 0.1), family="cauchy", bound="mixture", kl_warmup=0.5),
    Rank1(components=2, prior=priors.HalfCauchy(), family="log-normal", normalization="component", start="fresh"),
    Rank1(components=2, perturbation="additive", factors="output"),
    BatchEnsemble(),
    VBLL(),
    SNGP(num_features=16),
    DKL(inducing=8),
    Packed(members=2),
    MIMO(members=2, repetition=0.5),
    HMC("microcanonical", weights=select.last_layer(), burn_in=20, num_samples=30, num_steps=5, temperature=0.1),
]
REFUSED: dict[type[Recipe], str] = {
    MAP: "log_evidence",
    Laplace: "",
    Variational: "",
    SGMCMC: "log_evidence",
    HMC: "log_evidence",
    SVGD: "log_evidence",
    Ensemble: "log_evidence marginals",
    Snapshot: "log_evidence marginals",
    SWAG: "log_evidence prior update",
    MCDropout: "log_evidence prior",
    TestTimeAugmentation: "log_evidence prior",
    Rank1: "log_evidence prior update",
    BatchEnsemble: "log_evidence prior update marginals",
    VBLL: "log_evidence update",
    SNGP: "log_evidence update",
    DKL: "log_evidence update",
    Packed: "log_evidence update sample marginals prior",
    MIMO: "log_evidence update sample marginals prior",
}
ALSO_REFUSED: dict[Recipe, str] = {
    MAP(): "prior",
    MAP(prior=priors.Mixture(4), prior_weight=0.1): "prior",
    Variational(prior=priors.LogUniform(), weights=select.last_layer(), temperature=0.1): "log_evidence prior",
    Variational(prior=priors.NormalJeffreys()): "log_evidence prior update",
    Variational(prior=priors.Horseshoe(scale=0.1, groups="outputs"), estimator="weight"): "prior update",
    Variational(prior=priors.TruncatedLogUniform(), start="fresh", kl_warmup=0.5): "prior update",
    Ensemble(members=2): "prior",
    Ensemble(members=2, recipe=SWAG(rank=3, prior_precision=1.0)): "update",
    MCDropout(learn=True, filterwise=False, repeats=2, prior_precision=1.0): "sample marginals",
    Rank1(): "marginals",
    Rank1(components=2, prior=priors.Cauchy(1.0, 0.1), family="cauchy", bound="mixture", kl_warmup=0.5): "marginals",
    Rank1(components=2, prior=priors.HalfCauchy(), family="log-normal", normalization="component", start="fresh"):
        "marginals",
    Rank1(components=2, perturbation="additive", factors="output"): "sample marginals",
}  # fmt: skip
TASKS = ("classification", "regression")
TRAINING = Training(epochs=3, lr=1e-2, batch_size=16)


@dataclass(frozen=True, eq=False)
class Case:
    """One recipe fitted to one task."""

    task: str
    recipe: Recipe
    model: nn.Module
    data: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    posterior: Posterior
    before: dict[str, Tensor]  # the weights that were given
    attributes: list[list[str]]  # of the modules that were given
    generator_stayed: bool


def problem(task: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(45, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1) if task == "classification" else torch.stack([x[:, 0].sin(), x[:, 1]], 1)
    return x.to(dtype), y if task == "classification" else y.to(dtype)


def network(task: str, dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = (nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3 if task == "classification" else 2))
        return nn.Sequential(*layers).to(dtype)


@cache
def fitted(recipe: Recipe, task: str, dtype: torch.dtype = torch.float32) -> Case:
    data, validation, model = problem(task, dtype), problem(task, dtype, seed=1), network(task, dtype)
    likelihood: Any = "categorical" if task == "classification" else "gaussian"
    trained = recipe.needs_trained_model
    if trained:
        model = MAP().fit(model, data, likelihood=likelihood, training=TRAINING).model
    before, attributes = copy.deepcopy(model.train().state_dict()), attributes_of(model)
    training, state = None if trained else TRAINING, torch.get_rng_state()
    posterior = recipe.fit(model, data, likelihood=likelihood, validation=validation, training=training)
    posterior.predict(data[0])
    stayed = torch.equal(torch.get_rng_state(), state)
    return Case(task, recipe, model, data, validation, posterior, before, attributes, stayed)


def attributes_of(model: nn.Module) -> list[list[str]]:
    return [sorted(vars(module)) for module in model.modules()]


# of module scope, so that the tests of one fit run one after the other, in one process
@pytest.fixture(scope="module", params=TASKS)
def task(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module", params=RECIPES, ids=repr)
def case(request: pytest.FixtureRequest, task: str) -> Case:
    return fitted(request.param, task)


def quantities(prediction: Any) -> dict[str, Tensor]:
    names = ("probs", "entropy") if isinstance(prediction, ClassPrediction) else ("mean", "stddev")
    return {name: getattr(prediction, name) for name in (*names, "aleatoric", "epistemic")}


def assert_same(first: Any, second: Any, **tolerance: Any) -> None:
    for name, value in quantities(first).items():
        torch.testing.assert_close(quantities(second)[name], value, **(tolerance or {"rtol": 0.0, "atol": 0.0}))


def refused(recipe: Recipe) -> set[str]:
    """The methods that a posterior of this recipe cannot answer; all of them it must refuse, and no others."""
    curvature = () if isinstance(recipe, Laplace) else ("precision_diagonal", "conditional_mean")
    return {*curvature, *REFUSED.get(type(recipe), "").split(), *ALSO_REFUSED.get(recipe, "").split()}


def answer(posterior: Posterior, method: str, *args: Any, **options: Any) -> Any:
    """Return what the method gives, or None where the family has to say in one sentence that it cannot."""
    ask = getattr(posterior, method)
    if method not in refused(posterior.recipe):
        return ask(*args, **options)
    with pytest.raises(UnsupportedError) as caught:
        ask(*args, **options)
    sentence = str(caught.value)
    assert sentence[0].isupper()
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return None


def test_samples_are_counted_from_one(case: Case) -> None:
    for count in (-1, 0, 2.5, 10**30):
        with pytest.raises(InputError, match="num_samples"):
            case.posterior.sample(count)  # type: ignore[arg-type]


class TestPredict:
    def test_the_kind_and_the_size(self, case: Case) -> None:
        x, y = case.data
        prediction = case.posterior.predict(x)
        assert isinstance(prediction, ClassPrediction if case.task == "classification" else RegressionPrediction)
        assert len(prediction) == len(x)
        assert all(bool(value.isfinite().all()) for value in quantities(prediction).values())
        assert bool(prediction.log_prob(y).isfinite().all())
        assert not any(value.requires_grad for value in quantities(prediction).values())

    def test_the_uncertainty_is_the_sum_of_its_parts(self, case: Case) -> None:
        prediction: Any = case.posterior.predict(case.data[0])
        total = prediction.entropy if case.task == "classification" else prediction.stddev.square()
        torch.testing.assert_close(total, prediction.aleatoric + prediction.epistemic, rtol=1e-5, atol=1e-6)
        assert float(prediction.aleatoric.min()) >= 0
        assert float(prediction.epistemic.min()) >= -1e-6
        if case.task == "classification":
            torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(len(prediction)), rtol=1e-5, atol=1e-5)

    def test_every_kind_of_input_gives_the_same(self, case: Case) -> None:
        x, y = case.data
        expected = case.posterior.predict(x)
        kinds = (x.numpy(), TensorDataset(x, y), TensorDataset(x), DataLoader(TensorDataset(x, y), batch_size=45))
        for kind in kinds:
            assert_same(expected, case.posterior.predict(kind))

    def test_how_it_is_cut_does_not_matter(self, case: Case) -> None:
        x, y = case.data
        expected = case.posterior.predict(x)
        assert_same(expected, case.posterior.predict(x, batch_size=7), rtol=1e-4, atol=1e-5)
        assert_same(expected, case.posterior.predict(DataLoader(TensorDataset(x, y), 7)), rtol=1e-4, atol=1e-5)

    def test_the_same_call_gives_the_same_numbers(self, case: Case) -> None:
        x, _ = case.data
        assert_same(case.posterior.predict(x), case.posterior.predict(x))
        generator = torch.Generator().manual_seed(1)
        shuffled = DataLoader(TensorDataset(*case.data), 45, shuffle=True, generator=generator)
        assert_same(case.posterior.predict(shuffled), case.posterior.predict(shuffled))
        seeded = [case.posterior.predict(x, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
        assert_same(*seeded)

    def test_bad_input_is_one_sentence(self, case: Case) -> None:
        x, _ = case.data
        broken = x.clone()
        broken[3, 1] = float("nan")
        with pytest.raises(InputError, match="NaN or infinite"):
            case.posterior.predict(broken)
        with pytest.raises(InputError, match="cannot be called on inputs of shape"):
            case.posterior.predict(x[:, :1].repeat(1, x.shape[1] + 3))
        with pytest.raises(InputError, match="empty"):
            case.posterior.predict(x[:0])
        for wrong in ({"num_samples": 0}, {"num_samples": 2.5}, {"batch_size": 0}, {"batch_size": "all"}):
            with pytest.raises(InputError, match=f"`{next(iter(wrong))}` must be a whole number of at least 1"):
                case.posterior.predict(x, **wrong)
        with pytest.raises(InputError, match="no predict option 'colour'"):
            case.posterior.predict(x, colour="red")


class TestWeights:
    def shapes(self, case: Case, *lead: int) -> dict[str, tuple[int, ...]]:
        return {name: (*lead, *value.shape) for name, value in case.posterior.model.named_parameters()}

    def test_samples_have_the_users_names_and_a_leading_axis(self, case: Case) -> None:
        drawn = answer(case.posterior, "sample", 5)
        if drawn is not None:
            assert {name: tuple(value.shape) for name, value in drawn.items()} == self.shapes(case, 5)
            assert all(bool(value.isfinite().all()) for value in drawn.values())

    def test_samples_are_repeatable_and_the_generator_moves_on(self, case: Case) -> None:
        drawn = [answer(case.posterior, "sample", 2) for _ in range(2)]
        if drawn[0] is not None:
            assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
            generator = torch.Generator().manual_seed(1)
            first, second = (case.posterior.sample(2, generator=generator) for _ in range(2))
            marginals = answer(case.posterior, "marginals")
            for name, value in first.items() if marginals is not None else ():
                assert torch.equal(value, second[name]) == bool((marginals[1][name] == 0).all())

    def test_samples_agree_with_the_marginals(self, case: Case) -> None:
        marginals, drawn = answer(case.posterior, "marginals"), answer(case.posterior, "sample", 4000)
        if marginals is not None and drawn is not None:
            mean, variance = marginals
            for name, values in drawn.items():
                spread = variance[name].sqrt()
                error = (values.mean(0) - mean[name]).abs()
                assert bool((error <= 6 * spread / math.sqrt(4000) + 1e-6).all())
                torch.testing.assert_close(values.var(0), variance[name], rtol=0.2, atol=1e-7)

    @pytest.mark.parametrize("which", ["marginals", "prior"])
    def test_means_and_variances(self, case: Case, which: str) -> None:
        moments = answer(case.posterior, which)
        if moments is not None:
            for part in moments:
                assert {name: tuple(value.shape) for name, value in part.items()} == self.shapes(case)
                assert all(bool(value.isfinite().all()) for value in part.values())
            assert all(float(value.min()) >= 0 for value in moments[1].values())

    def test_the_mean_is_that_of_the_marginals(self, case: Case) -> None:
        mean = case.posterior.mean()
        assert {name: tuple(value.shape) for name, value in mean.items()} == self.shapes(case)
        first = next(iter(mean))
        mean[first].zero_()  # it is a copy
        assert bool((case.posterior.mean()[first] != 0).any())

    def test_data_only_narrow_a_prior(self, case: Case) -> None:
        marginals, prior = answer(case.posterior, "marginals"), answer(case.posterior, "prior")
        if marginals is not None and prior is not None:
            for name, variance in marginals[1].items():
                assert bool((variance <= prior[1][name] * (1 + 1e-4) + 1e-9).all())


class TestConditioning:
    def masks(self, case: Case) -> dict[str, Tensor]:
        return {"0.weight": torch.arange(24).reshape(6, 4) % 3 > 0}

    def test_a_weight_given_all_others_is_at_least_as_certain(self, case: Case) -> None:
        precision, marginals = answer(case.posterior, "precision_diagonal"), answer(case.posterior, "marginals")
        if precision is not None:
            for name, variance in marginals[1].items():
                assert precision[name].shape == variance.shape
                assert bool(((precision[name] == 0) == (variance == 0)).all())
                assert bool((precision[name] * variance >= (variance > 0) * (1 - 1e-4)).all())

    def test_nothing_moves_where_nothing_is_removed(self, case: Case) -> None:
        mean = answer(case.posterior, "conditional_mean", {})
        if mean is not None:
            for name, value in case.posterior.mean().items():
                torch.testing.assert_close(mean[name], value, rtol=1e-4, atol=1e-6)

    def test_removed_weights_are_zero_in_the_conditional_mean(self, case: Case) -> None:
        keep, marginals = self.masks(case), answer(case.posterior, "marginals")
        mean = answer(case.posterior, "conditional_mean", keep)
        if mean is not None:
            gone = ~keep["0.weight"] & (marginals[1]["0.weight"] > 0)
            assert bool((mean["0.weight"][gone] == 0).all())
            assert all(bool(value.isfinite().all()) for value in mean.values())


class TestEvidence:
    def test_a_finite_number_or_one_sentence(self, case: Case) -> None:
        evidence = answer(case.posterior, "log_evidence")
        if evidence is not None:
            assert evidence.shape == ()
            assert bool(evidence.isfinite())


class TestUpdate:
    def test_a_new_posterior_that_has_seen_more(self, case: Case) -> None:
        new = problem(case.task, torch.float32, seed=7)
        before, data = case.posterior.digest(), [part.clone() for part in new]
        updated = answer(case.posterior, "update", new, training=TRAINING.replace(epochs=1), progress=False)
        assert case.posterior.digest() == before
        assert all(map(torch.equal, new, data))
        if updated is not None:
            assert type(updated) is type(case.posterior)
            assert updated.digest() != before
            assert updated.num_data == 90
            assert len(updated.predict(new[0])) == 45


class TestFiles:
    def test_saved_loaded_and_asked_again(self, case: Case, tmp_path: Path) -> None:
        x, _ = case.data
        case.posterior.save(tmp_path / "posterior")
        model = network(case.task, torch.float32)
        again = dubito.load(tmp_path / "posterior", model)
        assert type(again) is type(case.posterior)
        assert again.recipe == case.posterior.recipe
        assert again.likelihood == case.posterior.likelihood
        assert again.num_data == case.posterior.num_data
        assert again.digest() == case.posterior.digest()
        assert_same(case.posterior.predict(x), again.predict(x))
        for method in ("sample", "marginals", "prior", "log_evidence"):
            first, second = (answer(p, method, *[3] * (method == "sample")) for p in (case.posterior, again))
            torch.testing.assert_close(second, first, rtol=0.0, atol=0.0)

    def test_the_model_that_is_loaded_into_stays(self, case: Case, tmp_path: Path) -> None:
        case.posterior.save(tmp_path / "posterior")
        model = network(case.task, torch.float32)
        before = copy.deepcopy(model.state_dict())
        dubito.load(tmp_path / "posterior", model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class TestNothingElseChanges:
    def test_the_users_model_and_data(self, case: Case) -> None:
        """The fit and all that was asked since leave them alone."""
        assert case.generator_stayed
        assert all(torch.equal(value, case.before[name]) for name, value in case.model.state_dict().items())
        made = (*problem(case.task, torch.float32), *problem(case.task, torch.float32, seed=1))
        assert all(map(torch.equal, (*case.data, *case.validation), made))
        assert attributes_of(case.model) == case.attributes
        assert all(module.training for module in case.model.modules())
        assert all(p.grad is None and p.requires_grad for p in case.model.parameters())
        hooks = [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in case.model.modules()]
        assert not any(len(kind) for each in hooks for kind in each)

    def test_asking_does_not_change_the_posterior(self, case: Case) -> None:
        before = case.posterior.digest()
        case.posterior.predict(case.data[0])
        for method in ("sample", "marginals", "log_evidence"):
            answer(case.posterior, method, *[2] * (method == "sample"))
        assert case.posterior.digest() == before

    def test_double_precision_stays(self, case: Case) -> None:
        short: dict[str, Any] = {"burn_in": 5, "num_samples": 5} if isinstance(case.recipe, (HMC, SGMCMC)) else {}
        if isinstance(case.recipe, SVGD):
            short = {"num_particles": 2}
        wide = fitted(case.recipe.replace(**short), case.task, torch.float64)
        assert wide.posterior.dtype == torch.float64
        prediction = wide.posterior.predict(wide.data[0])
        assert all(value.dtype == torch.float64 for value in quantities(prediction).values())
        drawn, marginals = answer(wide.posterior, "sample", 2), answer(wide.posterior, "marginals")
        for tensors in [each for each in (drawn, *(marginals or ())) if each is not None]:
            assert {value.dtype for value in tensors.values()} == {torch.float64}


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
class TestRecipe:
    def test_it_prints_as_typed(self, recipe: Recipe) -> None:
        assert dubito.parse(repr(recipe)) == recipe
        assert eval(repr(recipe), {name: getattr(dubito, name) for name in dubito.__all__}) == recipe

    def test_it_hashes_and_travels(self, recipe: Recipe) -> None:
        again = Setting.from_json(json.loads(json.dumps(recipe.to_json())))
        assert again == recipe
        assert hash(again) == hash(recipe)
        assert len({recipe, again}) == 1


@pytest.mark.parametrize(("recipe", "task"), [(r, TASKS[k % 2]) for k, r in enumerate(RECIPES)], ids=repr)
def test_the_same_call_gives_the_same_posterior(recipe: Recipe, task: str) -> None:
    again = fitted.__wrapped__(recipe, task)  # the stored outputs check that for both tasks, where their bits can be
    assert again.posterior.digest() == fitted(recipe, task).posterior.digest()


def test_recipes_are_different() -> None:
    assert len(set(RECIPES)) == len(RECIPES)
