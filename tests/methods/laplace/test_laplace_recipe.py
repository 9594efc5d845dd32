"""The recipe around the numbers: tuning on validation data, saving, resuming, what is left untouched, and errors."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from dubito.errors import InputError, NonFiniteError
from dubito.likelihoods import Bernoulli, Categorical, Gaussian
from laplace_cases import STRUCTURES, case, dense
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dubito
from dubito import Laplace, Training, select
from dubito.core import limits, params
from dubito.core.batches import Source
from dubito.core.randomness import Stream
from dubito.curvature.engine import Tape
from dubito.curvature.leave_one_out import RATIOS, LeaveOneOut, linearized_variance
from dubito.methods.laplace import tuning
from dubito.methods.laplace.findings import Tuning
from dubito.networks.selection import Selection
from oracles import Case

# ---------------------------------------------------------------------- validation


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["categorical", "gaussian", "bernoulli", "sequence"])
@pytest.mark.parametrize("by", ["validation", "training"])
def test_log_scores_and_a_prior_pick_the_precision(name: str, structure: str, by: str) -> None:
    problem = case(name)
    train, held_out = ((problem.inputs[rows], problem.targets[rows]) for rows in (slice(8), slice(8, 12)))
    weights, ignored = select.last_layer(), getattr(problem.likelihood, "ignore_index", None)
    judged = held_out if by == "validation" else train

    def fit(precision: float | str) -> dubito.Posterior:
        recipe = Laplace(structure=structure, weights=weights, prior_precision=precision)
        return recipe.fit(problem.model, train, likelihood=problem.likelihood, validation=held_out)

    found = fit(by)
    deviation = found.selection.ravel(found.mean()).double().square()
    centre = fit("evidence").prior_precision if name == "gaussian" else 1 / deviation.mean()
    if name == "gaussian" and by == "training":  # residuals of training data would choose no posterior at all
        assert found.prior_precision == pytest.approx(float(centre), rel=1e-3)
        return

    def score(precision: float) -> float:
        prediction = fit(precision).predict(judged[0])
        options = {} if ignored is None else {"ignore_index": ignored}
        far = (math.log(precision) - math.log(centre)) / tuning.PRIOR_SCALE
        return prediction.log_prob(judged[1], **options).sum().item() - far**2 / 2

    best = max(score(float(value)) for value in tuning.GRID[::6])
    assert score(float(found.prior_precision)) >= best - 0.01
    assert found.tuning == Tuning(by, False, len(judged[1]))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_validation_computes_each_jacobian_once(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, pulls = case("categorical"), []
    pull = Tape.pull
    monkeypatch.setattr(Tape, "pull", lambda self, *args: pulls.append(len(args[0])) or pull(self, *args))

    def count(settings: dict) -> int:
        pulls.clear()
        Laplace(structure=structure, **settings).fit(problem.model, problem.data, validation=problem.data)
        return len(pulls)

    plain = count({"prior_precision": 1.0})
    tuned = count({"prior_precision": "validation"})
    monkeypatch.setattr(tuning, "GRID", tuning.GRID[:1])
    assert tuned == count({"prior_precision": "validation"})  # many values cost what one does
    assert tuned - plain <= 3  # one for the batch, the others for the engine's check of itself


def test_validation_data_decides_by_default() -> None:
    problem = case("categorical")

    def fit(validation=problem.data, **settings):
        return Laplace(structure="diag", **settings).fit(problem.model, problem.data, validation=validation)

    assert fit().prior_precision == fit(prior_precision="validation").prior_precision
    assert fit(validation=None).prior_precision == fit(prior_precision="training").prior_precision
    layers = fit(prior_groups="layer").prior_precision
    assert torch.equal(layers, fit(prior_groups="layer", prior_precision="evidence").prior_precision)
    assert fit().recipe == Laplace(structure="diag")  # what was typed


def test_validation_with_noise_by_evidence() -> None:
    problem, likelihood = case("gaussian"), Gaussian(noise="evidence")
    recipe = Laplace(structure="full", prior_precision="validation")
    posterior = recipe.fit(problem.model, problem.data, likelihood=likelihood, validation=problem.data)
    evidence = Laplace(structure="full", prior_precision="evidence").fit(
        problem.model, problem.data, likelihood=likelihood
    )
    assert posterior.likelihood.noise == pytest.approx(evidence.likelihood.noise)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_validation_chooses_noise_and_precision_together(temperature: float) -> None:
    """No noise at the chosen precision scores better, but for the few residuals that are assumed."""
    torch.manual_seed(0)
    x = torch.randn(200, 3).double()
    y = x @ torch.tensor([[1.0], [2.0], [0.0]]).double() + 0.3 * torch.randn(200, 1).double()
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    trained = dubito.MAP().fit(model, (x[:40], y[:40]), likelihood="gaussian", training=Training(epochs=200, lr=0.02))
    recipe = Laplace(structure="full", temperature=temperature)
    found = recipe.fit(trained.model, (x[:40], y[:40]), likelihood="gaussian", validation=(x[40:], y[40:]))

    def score(noise: float) -> float:
        given = recipe.replace(prior_precision=float(found.prior_precision))
        posterior = given.fit(trained.model, (x[:40], y[:40]), likelihood=Gaussian(noise=noise))
        return posterior.predict(x[40:]).log_prob(y[40:]).mean().item()

    noise = found.likelihood.noise
    assert score(noise) > max(score(noise * 0.8), score(noise * 1.25))


@pytest.mark.slow
def test_data_that_are_fitted_perfectly_do_not_widen_the_posterior() -> None:
    """The evidence would choose a posterior that is far too wide here, validation data alone none at all."""
    digits = dubito.data.load("digits", limit=300)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    trained = dubito.MAP().fit(model, digits.train, training=Training(epochs=100, lr=3e-3)).model
    plain = dubito.MAP(train=False).fit(trained, digits.train).predict(digits.test[0]).log_prob(digits.test[1])

    def nll(**options: Any) -> float:
        posterior = Laplace().fit(trained, digits.train, **options)
        assert 1 < posterior.prior_precision < 1e5
        return -posterior.predict(digits.test[0]).log_prob(digits.test[1]).mean().item()

    assert nll() < -plain.mean() + 0.005
    assert nll(validation=digits.validation) < -plain.mean() + 0.02  # 30 rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_repeat_and_are_fitted_exactly_have_leverages(dtype: torch.dtype) -> None:
    """There is no noise, and the features have rank 2 of 4: every leverage is 2/8, up to rounding."""
    x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 0.0]], dtype=dtype).repeat(4, 1)
    model = nn.Sequential(nn.Linear(3, 1)).to(dtype)
    factors = LeaveOneOut(model, Source((x, model(x).detach()), batch_size=5)).factors(x)
    expected = torch.full((8, 1), 4 / 3, dtype=torch.float64)
    torch.testing.assert_close(factors, expected, rtol=0.02, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [1, 2])
def test_leave_one_out_residuals_are_those_of_refits(outputs: int) -> None:
    """For a linear network at its most probable weights, they are exact."""
    torch.manual_seed(0)
    x, model = torch.randn(12, 3).double(), nn.Linear(3, outputs).double()
    y = x @ torch.randn(3, outputs).double() + 0.5 * torch.randn(12, outputs).double()
    features = torch.cat([x, torch.ones(12, 1).double()], dim=1)

    def solve(rows: Tensor, ratio: float) -> Tensor:
        return torch.linalg.solve(rows_gram(features[rows], ratio), features[rows].T @ y[rows])

    def rows_gram(some: Tensor, ratio: float) -> Tensor:
        return some.T @ some + ratio * torch.eye(4).double()

    everything, ratio = torch.arange(12), 0.7
    for _ in range(50):  # until the evidence's ratio of noise to prior variance belongs to the weights
        best = solve(everything, ratio)
        params.load_(model, {"weight": best[:-1].T, "bias": best[-1]})
        left_out = LeaveOneOut(model, Source((x, y), batch_size=5))
        ratio = float(left_out.ratio)
    expected = torch.stack([y[n] - features[n] @ solve(everything[everything != n], ratio) for n in range(12)])
    torch.testing.assert_close((y - model(x)) * left_out.factors(x), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("outputs", [1, 2])
def test_linearized_residuals_are_those_of_refits(outputs: int) -> None:
    """They are those of a ridge regression on the Jacobian, fitted without each example in turn, at the best ratio."""
    torch.manual_seed(0)
    x, y = torch.randn(10, 3).double(), torch.randn(10, outputs).double()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    total = 0.0
    for output in range(outputs):
        own = list(model.parameters())
        gradients = [torch.autograd.grad(model(row)[output], own, materialize_grads=True) for row in x]
        rows = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in gradients])
        targets = (y - model(x))[:, output].detach() + rows @ weights
        best = math.inf
        for ratio in RATIOS * (rows @ rows.T).diagonal().mean():
            residuals = []
            for n in range(10):
                others = torch.arange(10) != n
                kept = rows[others]
                inner = kept.T @ kept + ratio * torch.eye(len(weights)).double()
                residuals.append(targets[n] - rows[n] @ torch.linalg.solve(inner, kept.T @ targets[others]))
            best = min(best, float(torch.stack(residuals).square().mean()))
        total += best / outputs
    assert linearized_variance(model, Source((x, y), batch_size=4)) == pytest.approx(total, rel=1e-6)
    with limits.using(kept_gradients=64):
        assert linearized_variance(model, Source((x, y))) is None


def test_the_noise_of_a_network_that_fits_exactly() -> None:
    """Without validation data, predictive standard deviations are about as large as the errors on new data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 3, generator=generator)
    y = x[:, :1].sin() + 0.5 * torch.randn(160, 1, generator=generator)
    with Stream(0).active():
        model = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    training = Training(epochs=400, lr=1e-2, batch_size=64)
    point = dubito.MAP().fit(model, (x[:64], y[:64]), likelihood="gaussian", training=training, progress=False)
    assert float((point.model(x[:64]).detach() - y[:64]).square().mean().sqrt()) < 0.05
    for posterior in (point, Laplace().fit(point.model, (x[:64], y[:64]), likelihood="gaussian", progress=False)):
        prediction = posterior.predict(x[64:])
        assert 0.2 < float(((y[64:] - prediction.mean) / prediction.stddev).square().mean()) < 4


# ---------------------------------------------------------------------- saving and resuming


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("weights", [select.all(), select.random(20), select.last_layer()])
def test_save_and_load(structure: str, weights, tmp_path) -> None:
    problem = case("norm")
    posterior = problem.fit(structure=structure, weights=weights)
    posterior.save(tmp_path / "p.safetensors")
    blank = copy.deepcopy(problem.model)
    for value in blank.parameters():
        nn.init.zeros_(value)
    loaded = dubito.load(tmp_path / "p.safetensors", blank)
    assert loaded.recipe == posterior.recipe
    assert loaded.selection == posterior.selection
    torch.testing.assert_close(loaded.log_evidence(), posterior.log_evidence(), rtol=1e-12, atol=0)
    first, second = (p.predict(problem.inputs) for p in (posterior, loaded))
    torch.testing.assert_close(second.log_probs, first.log_probs, rtol=1e-12, atol=0)
    torch.testing.assert_close(second.epistemic, first.epistemic, rtol=1e-10, atol=1e-12)
    assert loaded.digest() == posterior.digest()


def test_two_subnetworks_of_one_size_are_not_mixed_up(tmp_path) -> None:
    """The indices are part of the file, so a posterior never lands on other weights."""
    problem = case("categorical")
    for seed in (0, 1):
        recipe = Laplace(structure="full", weights=select.random(5))
        posterior = recipe.fit(problem.model, problem.data, generator=torch.Generator().manual_seed(seed))
        posterior.save(tmp_path / f"{seed}.safetensors")
    one, other = (dubito.load(tmp_path / f"{seed}.safetensors", problem.model) for seed in (0, 1))
    assert one.selection.num_weights == other.selection.num_weights == 5
    assert one.selection != other.selection
    assert one.marginals()[1].keys() == other.marginals()[1].keys()


class Failing(Dataset):
    """The data of a case; reading a row fails after a while."""

    def __init__(self, problem: Case, after: int) -> None:
        self.problem, self.left = problem, after

    def __len__(self) -> int:
        return len(self.problem.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left == 0:
            raise ConnectionError("the disk is gone")
        return self.problem.inputs[index], self.problem.targets[index]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"curvature": "ggn"}, {"curvature": "fisher-mc", "fisher_samples": 2}])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("after", [8, 13])
def test_an_interrupted_fit_goes_on(structure: str, settings: dict, after: int, tmp_path) -> None:
    problem = case("norm")
    recipe = Laplace(structure=structure, rank=5, **settings)
    training = Training(epochs=1, batch_size=3, checkpoint=str(tmp_path / "c.safetensors"), checkpoint_every=0.0)
    whole = recipe.fit(problem.model, Failing(problem, 10**6), training=training.replace(checkpoint=None))
    with pytest.raises(ConnectionError):
        recipe.fit(problem.model, Failing(problem, after), training=training)
    resumed = recipe.fit(problem.model, Failing(problem, 10**6), training=training)
    assert torch.equal(resumed.log_evidence(), whole.log_evidence())
    assert torch.equal(dense(resumed), dense(whole))


# ---------------------------------------------------------------------- what the user gave stays as it was


def snapshot(model: nn.Module) -> tuple:
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), m.training, sorted(vars(m)))
        for m in model.modules()
    ]
    values = [(n, v.clone(), v.requires_grad, v.grad) for n, v in [*model.named_parameters(), *model.named_buffers()]]
    return hooks, values


def assert_unchanged(model: nn.Module, before: tuple) -> None:
    hooks, values = snapshot(model)
    assert hooks == before[0]
    for (name, value, flag, grad), (old_name, old_value, old_flag, old_grad) in zip(values, before[1], strict=True):
        assert (name, flag, grad) == (old_name, old_flag, old_grad)
        assert torch.equal(value, old_value)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_model_is_left_alone(structure: str) -> None:
    problem = case("norm")
    model = problem.model.train()
    model[0].bias.requires_grad_(False)
    before = snapshot(model)
    posterior = problem.fit(structure=structure)
    assert "0.bias" not in posterior.selection.names
    posterior.predict(problem.inputs)
    posterior.predict(problem.inputs, method="weights", num_samples=2)
    posterior.update(problem.data)
    assert_unchanged(model, before)


@pytest.mark.parametrize("error", [ConnectionError, KeyboardInterrupt])
def test_the_model_is_left_alone_after_a_failure(error: type[BaseException]) -> None:
    problem = case("norm")
    before = snapshot(problem.model)

    def batches():
        yield problem.data
        raise error

    class Broken:
        __iter__ = staticmethod(batches)

    with pytest.raises(error):
        Laplace().fit(problem.model, Broken(), num_data=24)
    assert_unchanged(problem.model, before)
    problem.fit()  # and can be used again


def test_fitting_twice_gives_the_same() -> None:
    problem = case("norm")
    torch.manual_seed(0)
    first = problem.fit(curvature="fisher-mc")
    after = torch.rand(())
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(()))  # the global generator is not touched
    second = problem.fit(curvature="fisher-mc")
    assert first.digest() == second.digest()
    other = Laplace(curvature="fisher-mc").fit(problem.model, problem.data, generator=torch.Generator().manual_seed(5))
    assert other.digest() != first.digest()


# ---------------------------------------------------------------------- data and precision as users have them


def test_kinds_of_data() -> None:
    problem = case("categorical")
    expected = problem.fit().log_evidence()
    split = torch.arange(12).split(5)
    for data in (
        DataLoader(TensorDataset(*problem.data), batch_size=5),
        TensorDataset(*problem.data),
        [(problem.inputs[rows], problem.targets[rows]) for rows in split],
        [{"input": problem.inputs[rows], "labels": problem.targets[rows]} for rows in split],
        (problem.inputs.numpy(), problem.targets.numpy()),
    ):
        torch.testing.assert_close(Laplace().fit(problem.model, data).log_evidence(), expected, rtol=1e-9, atol=1e-9)


def test_batches_of_three() -> None:
    """Everything but the last item of a batch goes to the model."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(2, 3), nn.Linear(1, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.left(a) + self.right(b)

    torch.manual_seed(0)
    model, a, b, y = Two(), torch.randn(20, 2), torch.randn(20, 1), torch.randint(3, (20,))
    loader = DataLoader(TensorDataset(a, b, y), batch_size=6)
    for structure in STRUCTURES:
        posterior = Laplace(structure=structure).fit(model, loader)
        assert posterior.predict((a, b)).probs.shape == (20, 3)
        assert posterior.predict((a, b), method="weights", num_samples=3).probs.shape == (20, 3)
        torch.testing.assert_close(posterior.predict(loader).probs, posterior.predict((a, b)).probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_precision_follows_the_model(structure: str, dtype: torch.dtype) -> None:
    problem = case("categorical")
    posterior = Laplace(structure=structure).fit(copy.deepcopy(problem.model).to(dtype), problem.data)
    prediction = posterior.predict(problem.inputs)
    tensors = [prediction.log_probs, prediction.epistemic, *posterior.functional(problem.inputs)]
    tensors += [*posterior.sample(2).values(), *posterior.marginals()[1].values(), *posterior.prior()[1].values()]
    tensors += [*posterior.functional(problem.inputs, joint=True)]
    assert {tensor.dtype for tensor in tensors} == {dtype}
    exact = Laplace(structure=structure).fit(problem.model, problem.data)
    torch.testing.assert_close(
        prediction.log_probs.double(), exact.predict(problem.inputs).log_probs, rtol=1e-4, atol=1e-4
    )


def test_single_outputs() -> None:
    """A one-output network is a Bernoulli model; as a categorical one it would be certain of everything."""
    problem = case("bernoulli")
    one = nn.Sequential(nn.Linear(3, 1)).double()
    with pytest.raises(InputError, match=r"(?i)bernoulli"):
        Laplace().fit(one, (problem.inputs, problem.targets.long()))
    for targets in (problem.targets, problem.targets.long(), problem.targets[:, None]):
        posterior = Laplace(structure="full").fit(one, (problem.inputs, targets), likelihood="bernoulli")
        prediction = posterior.predict(problem.inputs)
        assert prediction.probs.shape == (12, 2)
        assert ((prediction.probs > 0.01) & (prediction.probs < 0.99)).all()
        assert (prediction.epistemic > 0).all()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(5), nn.LayerNorm(5), nn.RMSNorm(5), nn.GroupNorm(1, 5)])
def test_normalization_layers_in_kron(norm: nn.Module) -> None:
    """Their scales and shifts are independent weights: the block is the diagonal of the whole matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), copy.deepcopy(norm), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(20, 3).double(), torch.randint(3, (20,))
    model(x)
    kron, full = (Laplace(structure=s, prior_precision=1.0).fit(model, (x, y)) for s in ("kron", "full"))
    where = kron.selection.slices["1.weight"]
    exact = full.matrix.diagonal()[where]
    torch.testing.assert_close(kron.matrix.diagonal()[where], exact)
    assert (kron.predict(x).epistemic > 0).all()


@pytest.mark.parametrize("structure", ["full", "diag", "low-rank"])
def test_precision_per_weight_of_a_subnetwork(structure: str) -> None:
    problem = case("categorical")
    precision = torch.linspace(0.5, 4.0, 9, dtype=torch.float64)
    weights = select.random(9)
    posterior = problem.fit(structure=structure, weights=weights, prior_precision=precision, rank=9)
    plain = problem.fit(structure=structure, weights=weights, prior_precision=1.0, rank=9)
    difference = torch.linalg.inv(dense(posterior)) - torch.linalg.inv(dense(plain))
    torch.testing.assert_close(difference, torch.diag(precision - 1.0), rtol=1e-8, atol=1e-8)
    assert (posterior.predict(problem.inputs).epistemic > 0).all()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("weights", [select.all(), select.random(9)])
def test_density_of_weights(structure: str, weights) -> None:
    problem = case("categorical")
    posterior = problem.fit(structure=structure, weights=weights, prior_precision=1.0)
    draws = posterior.sample(4)
    flat, mean = (posterior.selection.ravel(p) for p in (draws, posterior.mean()))
    expected = torch.distributions.MultivariateNormal(mean, dense(posterior)).log_prob(flat)
    torch.testing.assert_close(posterior.log_prob(draws), expected)


def test_recipes_as_text() -> None:
    recipe = Laplace(structure="full", weights=select.last_layer() | select.random(10), prior_precision=2.0)
    assert (
        repr(recipe)
        == "Laplace(structure='full', weights=select.last_layer() | select.random(10), prior_precision=2.0)"
    )
    assert dubito.parse("laplace(structure=full, weights=random(10))") == Laplace(
        structure="full", weights=select.random(10)
    )
    assert hash(recipe) == hash(Laplace(structure="full", weights=recipe.weights, prior_precision=2))


# ---------------------------------------------------------------------- bad input: one clear sentence

BAD_SETTINGS: dict[str, tuple[dict, str]] = {
    "weights": ({"weights": "sub"}, "`weights` must be one of dubito.select, got 'sub'"),
    "structure": (
        {"structure": "eigen"},
        "`structure` must be 'kron', 'ekfac', 'full', 'diag', 'low-rank' or 'sampled', got 'eigen'",
    ),
    "curvature": ({"curvature": "fisher"}, "`curvature` must be 'auto', .* got 'fisher'. Did you mean 'fisher-mc'"),
    "word": (
        {"prior_precision": "marglik"},
        "a dict of positive numbers, 'auto', 'evidence', 'training' or 'validation', got 'marglik'",
    ),
    "zero": ({"prior_precision": 0.0}, "`prior_precision` must be a positive number, .*, got 0.0"),
    "negative": ({"prior_precision": -1}, "`prior_precision` must be a positive number, .*, got -1"),
    "nan": ({"prior_precision": math.nan}, "`prior_precision` must be a positive number, .*, got nan"),
    "temperature": ({"temperature": 0.0}, "`temperature` must be a positive number, got 0.0"),
    "rank": ({"rank": 0}, "`rank` must be a whole number of at least 1, got 0"),
    "weight groups": ({"prior_groups": "weight"}, "prior_groups='weight' needs structure='diag'"),
    "groups": (
        {"prior_groups": "layer", "prior_precision": 1.0},
        "prior_groups='layer' needs prior_precision='evidence'",
    ),
    "hessian": ({"curvature": "hessian"}, "curvature='hessian' needs structure='full'"),
    "scaling": ({"prior_scaling": "S/D"}, "prior_scaling='S/D' needs a given prior_precision"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings(name: str) -> None:
    settings, message = BAD_SETTINGS[name]
    with pytest.raises(InputError, match=message):
        Laplace(**settings)


BAD_FITS: dict[str, tuple[dict, str]] = {
    "validation": ({"prior_precision": "validation"}, "pass `validation=` to fit"),
    "shape": ({"prior_precision": torch.ones(3)}, r"each of the 31 random weights, got shape \(3,\)"),
    "sign": ({"prior_precision": torch.linspace(-1, 1, 31), "structure": "diag"}, "must be a positive number"),
    "missing": ({"prior_precision": {"0": 1.0}}, "no entry for '2.weight'"),
    "unused": ({"prior_precision": {"0": 1.0, "2": 1.0, "3": 1.0}}, "names '3', which matches no random weight"),
    "named sign": ({"prior_precision": {"0": 1.0, "2": -1.0}}, "must be a positive number"),
    "mean": ({"prior_mean": torch.zeros(4)}, r"`prior_mean` .* each of the 31 random weights, got shape \(4,\)"),
    "nan mean": ({"prior_mean": math.nan}, "`prior_mean` must be a finite number or a finite tensor, got nan"),
    "kron": (
        {"prior_precision": torch.linspace(1, 2, 31)},
        "structure='kron' needs one prior precision for all of '0.weight'",
    ),
    "nothing": ({"weights": ~select.all()}, "selects no weight"),
    "too many": ({"weights": select.random(32)}, "size 32 is not possible"),
}


@pytest.mark.parametrize("name", BAD_FITS)
def test_bad_fits(name: str) -> None:
    settings, message = BAD_FITS[name]
    with pytest.raises(InputError, match=message):
        case("categorical").fit(**settings)


def test_single_precisions_of_a_kronecker_block() -> None:
    posterior = case("categorical").fit(prior_precision=1.0)
    with pytest.raises(InputError, match=r"structure='kron' needs one prior precision for all of '0.weight'"):
        posterior.log_evidence(torch.linspace(1, 2, 31))


@pytest.mark.parametrize("num_data", [11, 13, 24])
def test_several_passes_need_the_number_of_examples(num_data: int) -> None:
    problem = case("categorical")
    with pytest.raises(InputError, match=f"num_data is {num_data}, but the data has another number"):
        Laplace(structure="low-rank").fit(problem.model, [problem.data], num_data=num_data)
    assert Laplace(structure="diag").fit(problem.model, [problem.data], num_data=num_data).num_data == num_data


def test_a_full_matrix_over_too_many_weights() -> None:
    model, x = nn.Linear(200, 200), torch.randn(4, 200)
    with pytest.raises(InputError, match=r"over 40,200 weights would need 12 GB: select fewer"):
        Laplace(structure="full").fit(model, (x, torch.zeros(4, dtype=torch.long)))


def test_inputs_that_are_not_finite() -> None:
    problem = case("categorical")
    broken = problem.inputs.clone()
    broken[7, 1] = math.inf
    with pytest.raises(InputError, match="NaN or infinite"):
        Laplace().fit(problem.model, (broken, problem.targets))


class Overflow(nn.Module):
    """Finite inputs, but one of them is too large for the network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((1e30 * x.relu()).square() * 1e-30 if x.max() > 50 else x)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(noise=1.0), Bernoulli()])
def test_outputs_that_are_not_finite(likelihood) -> None:
    inputs = torch.rand(20, 3)
    inputs[17] = 100.0
    targets = torch.zeros(20, dtype=torch.long) if likelihood == Categorical() else torch.zeros(20, 2)
    data = [(inputs[rows], targets[rows]) for rows in torch.arange(20).split(5)]
    with pytest.raises((NonFiniteError, InputError), match=r"not finite|NaN"):
        Laplace().fit(Overflow(), data, likelihood=likelihood)


def test_a_selection_object_of_another_model() -> None:
    problem = case("categorical")
    other = Selection.all_of(nn.Linear(2, 2))
    with pytest.raises(InputError, match="no parameter 'weight'"):
        problem.fit(weights=select.mask(other.masks()))


def test_frozen_models() -> None:
    problem = case("categorical")
    frozen = copy.deepcopy(problem.model).requires_grad_(False)
    for weights in (select.all(), select.last_layer()):
        with pytest.raises(InputError, match=r"frozen|no trainable parameters"):
            Laplace(weights=weights).fit(frozen, problem.data)


def test_a_posterior_over_some_weights_says_how_many() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    recipe = Laplace(structure="full", weights=select.last_layer(), prior_precision=1.0)
    posterior = recipe.fit(model, (torch.randn(8, 3), torch.tensor([0, 1] * 4)), progress=False)
    assert repr(posterior).startswith("<Laplace posterior over 10 of 26 weights by Laplace(")
