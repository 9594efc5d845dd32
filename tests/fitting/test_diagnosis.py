"""Every complaint of a diagnosis, provoked by a fit that deserves it, and none by one that does not."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import NotConvergedWarning, TrustWarning
from torch import Tensor, nn

import dubito
from dubito import HMC, MAP, Laplace, MCDropout, Posterior, Training, Variational, likelihoods, priors, select
from dubito.core.randomness import Stream
from dubito.fitting import automatic
from dubito.fitting.diagnosis import warn_about
from dubito.fitting.fit_record import shift_between
from dubito.fitting.held_out_scores import gain_of_heavy_tails
from dubito.fitting.neighbours import likeness_of_neighbours
from dubito.fitting.search import Curve

LONG = Training(epochs=60, lr=0.03, batch_size=20)


def network(outputs: int = 3, scale: float = 1.0) -> nn.Module:
    with Stream(1).active():
        model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, outputs))
    with torch.no_grad():
        model[2].weight.mul_(scale)
    return model


def classes(rows: int = 120, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1)


def numbers(rows: int = 120) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1].sin() + 0.3 * torch.randn(rows, 1, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return MAP().fit(network(), classes(), training=LONG, progress=False).model


def found(posterior: Posterior, name: str) -> str:
    """Return the finding of this name."""
    matching = [finding for finding in posterior.diagnose().findings if finding.name == name]
    assert len(matching) == 1, str(posterior.diagnose())
    return matching[0]


@pytest.mark.slow
def test_validation_data_that_differ(trained: nn.Module) -> None:
    x, y = classes(80, seed=1)
    posterior = Laplace().fit(
        trained, classes(), validation=(x + torch.tensor([0.0, 0.0, 2.0, 0.0]), y), progress=False
    )
    assert "the mean of one feature by 1.8" in found(posterior, "validation data differ")
    alike = Laplace().fit(trained, classes(), validation=(x, y), progress=False)
    assert alike.diagnose().trustworthy, str(alike.diagnose())
    assert shift_between(torch.zeros(9, 3, 20), torch.ones(9, 3, 30)) is None  # sequences of another length
    assert shift_between(torch.zeros(0, 3), torch.ones(9, 3)) is None


@pytest.mark.slow
def test_worse_than_the_plain_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "MOST_STEPS", 800)
    x, _ = numbers()
    model, data = network(1), (x, 0.3 * x[:, :1])  # without noise
    posterior = MCDropout(rate=0.8).fit(model, data, likelihood="gaussian", progress=False)
    assert "a plain network had" in found(posterior, "worse than the plain network")
    plain = MAP().fit(model, data, likelihood="gaussian", progress=False)
    assert "worse than the plain network" not in [each.name for each in plain.diagnose().findings]


def test_a_good_posterior_is_trusted(trained: nn.Module) -> None:
    posterior = Laplace().fit(trained, classes(), progress=False)
    diagnosis = posterior.diagnose()
    assert (diagnosis.verdict, diagnosis.trustworthy) == ("yes", True)
    assert str(diagnosis).startswith("On 64 training examples: log score ")
    assert str(diagnosis).endswith("Can it be trusted? Yes.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about(posterior)


def test_a_network_that_is_worse_than_a_constant() -> None:
    with pytest.warns(NotConvergedWarning, match="worse than one constant prediction"):
        posterior = MAP(train=False).fit(network(scale=40.0), classes(), progress=False)
    assert "not trained, or its training diverged" in found(posterior, "worse than a constant")
    assert posterior.diagnose().verdict == "no"
    with pytest.warns(NotConvergedWarning, match="diverged"):
        MAP().fit(network(1), numbers(), likelihood="gaussian", training=Training(epochs=2, lr=10.0), progress=False)


def test_a_network_that_is_not_at_an_optimum() -> None:
    with pytest.warns(NotConvergedWarning, match="one more step would gain"):
        posterior = Laplace().fit(network(scale=0.01), classes(), progress=False)
    found(posterior, "not at an optimum")
    posterior.fit_record = replace(posterior.fit_record, remaining_gain=257.0)
    missing = -posterior.fit_record.centre.log_score
    assert f"would gain {missing:.2f} nats" in found(posterior, "not at an optimum")  # no step gains more
    given = Laplace(prior_precision=1.0).fit(network(scale=0.01), classes(), progress=False)
    assert not any(finding.name == "not at an optimum" for finding in given.diagnose().findings)


def test_a_network_that_has_learned_nothing() -> None:
    posterior = MAP(train=False).fit(network(scale=0.01), classes(), progress=False)
    assert "it is not trained, or the inputs say nothing" in found(posterior, "no better than a constant")
    assert posterior.diagnose().verdict == "with care"


def test_labels_that_are_noise() -> None:
    """Held-out or validation examples say so where there are some; else the weights are too many for what they gain."""
    x, labels = classes()[0], torch.randint(3, (120,), generator=torch.Generator().manual_seed(2))
    point = MAP().fit(network(), (x, labels), training=Training(epochs=15, lr=0.01), progress=False)
    assert "nothing was held out" in found(point, "no better than a constant")
    point.fit_record = replace(point.fit_record, held_out=120, held_out_gain=0.05, held_out_error=0.03)
    assert "On 120 held-out examples" in found(point, "no better than a constant")
    point.fit_record = replace(point.fit_record, held_out_gain=0.07)
    assert point.diagnose().verdict == "yes"
    posterior = Laplace().fit(point.model, (x, labels), progress=False)
    assert "could be chance" in found(posterior, "no better than a constant")
    held = Laplace().fit(point.model, (x, labels), validation=classes(100, 5), progress=False)
    assert "It predicts validation examples" in found(held, "no better than a constant")


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_noise_that_was_learned_by_heart(task: str) -> None:
    """The curvature of a perfect fit is zero and tells nothing, but labels of neighbours are alike only by chance."""
    x, labels = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    noise, kind, outputs = (labels, "categorical", 3) if task == "classes" else (torch.randn(60, 1), "gaussian", 1)
    with Stream(1).active():
        model = nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, outputs))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(300):
        optimizer.zero_grad()
        error = model(x) - noise if task == "numbers" else model(x)
        (error.square().mean() if task == "numbers" else nn.functional.cross_entropy(error, noise)).backward()
        optimizer.step()
    posterior = Laplace().fit(model, (x, noise), likelihood=kind, progress=False)
    if task == "classes":
        assert posterior.fit_record.training.log_score > posterior.fit_record.constant + 0.5
    else:  # leave-one-out residuals are those of a network that knows nothing
        assert posterior.predict(x).stddev.mean() > 0.9 * noise.std()
    found(posterior, "no better than a constant")


def test_the_likeness_of_neighbours() -> None:
    """It is standard normal for noise, large for what can be learned, and copies of rows do not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=generator)
    labels = [torch.randint(3, (100,), generator=generator) for _ in range(40)]
    by_chance = torch.tensor([likeness_of_neighbours(x, label, classes=True) for label in labels])
    assert abs(float(by_chance.mean())) < 0.6
    assert 0.6 < float(by_chance.std()) < 1.4
    assert likeness_of_neighbours(x, (x[:, 0] > 0).long(), classes=True) > 5
    assert likeness_of_neighbours(x, x[:, :2], classes=False) > 5
    twice = likeness_of_neighbours(x.repeat(2, 1), labels[0].repeat(2), classes=True)
    assert twice == pytest.approx(float(by_chance[0]), abs=0.05)
    assert likeness_of_neighbours(x[:29], labels[0][:29], classes=True) is None
    assert likeness_of_neighbours(torch.ones(50, 2), labels[0][:50], classes=True) is None


@pytest.mark.parametrize(("errors", "gain"), [("normal", 0.0), ("t3", 0.195), ("Cauchy", None)])
def test_errors_with_heavy_tails(errors: str, gain: float | None) -> None:
    """The gain of a Student-t distribution is the difference of the two entropies."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4, 20_000, dtype=torch.float64, generator=generator)
    wide = {"normal": 1.0, "t3": (normal[1:] ** 2).mean(0).rsqrt(), "Cauchy": 1 / normal[1].abs()}[errors]
    curve = Curve()
    curve.add(1, 0.0, 20_000, -0.5 * (normal[0] * wide).square() - 0.5 * math.log(2 * math.pi), 0.0)
    found_gain = gain_of_heavy_tails([curve], 1)
    assert found_gain is not None
    if gain is None:
        assert found_gain > 1
    else:
        assert found_gain == pytest.approx(gain, abs=0.05)


@pytest.mark.slow
def test_outputs_of_different_size() -> None:
    """One noise level for both is far too large for the first."""
    x, y = numbers()
    noise = torch.randn(len(x), 1, generator=torch.Generator().manual_seed(2))
    both = torch.cat([y, 100 * (x[:, 1:2] + 0.3 * noise)], 1)
    short = Training(epochs=30, lr=0.03)
    for targets, is_found in ((both, True), (both / both.std(0), False)):
        posterior = MAP().fit(network(2), (x, targets), likelihood="gaussian", training=short, progress=False)
        assert ("outputs of different size" in [each.name for each in posterior.diagnose().findings]) == is_found


@pytest.mark.slow
def test_a_regression_with_heavy_tails_is_not_trusted() -> None:
    x, y = numbers()
    search = Training(batch_size=60)  # few steps
    y[::15] += 20.0
    posterior = MAP().fit(network(1), (x, y), likelihood="gaussian", training=search, progress=False)
    assert "likelihood='student-t'" in found(posterior, "errors not normal")
    assert posterior.diagnose().verdict == "with care"


@pytest.mark.parametrize("scale", [1e6, 1e-6])
@pytest.mark.filterwarnings("ignore::dubito.errors.NotConvergedWarning")
def test_inputs_that_should_be_standardized(scale: float) -> None:
    x, labels = classes()
    training = Training(epochs=3, lr=0.01)
    posterior = MAP().fit(network(), (scale * x, labels), training=training, progress=False)
    assert f"inputs are about {scale:.0e} in size: standardize them" in str(posterior.diagnose())
    x, targets = numbers()
    posterior = MAP().fit(
        network(1), (x, scale * (1 + targets)), likelihood="gaussian", training=training, progress=False
    )
    assert scale < 1 or "targets are about 1e+06 in size: standardize them" in str(posterior.diagnose())


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_targets_that_are_equal(task: str) -> None:
    x, labels = classes()
    targets, kind, outputs = (0 * labels, "categorical", 3) if task == "classes" else (x[:, :1] * 0 + 3, "gaussian", 1)
    with pytest.warns(TrustWarning, match="All training targets are equal"):
        posterior = MAP(train=False).fit(network(outputs), (x, targets), likelihood=kind, progress=False)
    assert posterior.diagnose().verdict == "no"


def test_a_network_that_takes_no_single_row() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
    posterior = MAP().fit(model, classes(), training=Training(epochs=2), progress=False)
    assert posterior.fit_record.training.num_rows > 1


def test_few_data(trained: nn.Module) -> None:
    posterior = Laplace().fit(trained, classes(40), progress=False)
    assert "only 40 training examples" in found(posterior, "few data")


def test_epistemic_zero(trained: nn.Module) -> None:
    with pytest.warns(TrustWarning, match="as good as a single network"):
        posterior = Laplace(prior_precision=1e9).fit(trained, classes(), progress=False)
    found(posterior, "epistemic zero")
    assert posterior.diagnose().verdict == "with care"


def test_underconfident(trained: nn.Module) -> None:
    posterior = Laplace(prior_precision=1e-4, temperature=30.0).fit(
        trained, classes(), validation=classes(100, 5), progress=False
    )
    assert "of validation labels are right" in found(posterior, "underconfident")
    data = numbers()
    wide = MAP(train=False).fit(network(1), data, likelihood=likelihoods.Gaussian(9.0), progress=False)
    assert "predicted standard deviations" in found(wide, "underconfident")


@pytest.mark.slow
def test_overconfident() -> None:
    x = classes()[0]
    labels = torch.randint(3, (120,), generator=torch.Generator().manual_seed(2))
    model = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 3))
    training = Training(epochs=150, lr=0.03, batch_size=20)
    posterior = MAP().fit(model, (x, labels), validation=classes(100, 5), training=training, progress=False)
    assert "decisions.temper" in found(posterior, "overconfident")
    data = numbers()
    narrow = MAP(train=False).fit(
        network(1), data, likelihood=likelihoods.Gaussian(0.01), validation=data, progress=False
    )
    assert "predicted standard deviations" in found(narrow, "overconfident")


def test_accuracy_dropped(trained: nn.Module) -> None:
    with pytest.warns(TrustWarning, match="it is too wide"):
        posterior = Variational(initial_scale=3.0).fit(trained, classes(), training=Training(epochs=0), progress=False)
    assert "its central network" in found(posterior, "accuracy dropped")
    assert posterior.diagnose().verdict == "no"


def test_the_prior_at_an_edge() -> None:
    model = network(1, scale=0.0)
    nn.init.zeros_(model[2].bias)  # where all weights are zero, no prior can be narrow enough
    recipe = Laplace(prior_precision="evidence", weights=select.last_layer())
    with pytest.warns(TrustWarning, match="at the edge"):
        posterior = recipe.fit(model, numbers(), likelihood=likelihoods.Gaussian(1.0), progress=False)
    found(posterior, "prior at an edge")


@pytest.mark.slow
def test_everything_equally_uncertain(trained: nn.Module) -> None:
    recipe = HMC(burn_in=20, num_samples=40, chains=1, weights=select.layers("2.bias"), prior=priors.Normal())
    posterior: Any = recipe.fit(network(scale=0.0), classes(), progress=False)
    assert "equally uncertain about all inputs" in found(posterior, "equally uncertain")


def test_noise_taken_for_ignorance() -> None:
    recipe = Laplace(structure="full", prior_precision=0.1, temperature=100.0)
    model = MAP().fit(network(1), numbers(), likelihood="gaussian", training=LONG, progress=False).model
    posterior = recipe.fit(model, numbers(), likelihood=likelihoods.Gaussian(0.3), progress=False)
    assert "is called epistemic" in found(posterior, "noise taken for ignorance")


def test_few_validation_data(trained: nn.Module) -> None:
    posterior = Laplace().fit(trained, classes(), validation=classes(12, 3), progress=False)
    assert "only 12 validation examples" in found(posterior, "few validation data")


def test_chains_that_did_not_mix(trained: nn.Module) -> None:
    recipe = HMC(burn_in=1, num_samples=10, chains=2, max_depth=1, step_size=1e-6)
    posterior: Any = recipe.fit(trained, classes(), progress=False)
    diagnosis = posterior.diagnose()
    assert not diagnosis.trustworthy
    assert "R-hat" in str(diagnosis)
    assert diagnosis.verdict in ("no", "with care")


def test_the_record_is_saved_and_is_no_part_of_the_content(trained: nn.Module, tmp_path: Path) -> None:
    posterior = Laplace().fit(trained, classes(), progress=False)
    posterior.save(tmp_path / "file")
    again = dubito.load(tmp_path / "file", network())
    assert again.fit_record == posterior.fit_record
    assert str(again.diagnose()) == str(posterior.diagnose())
    digest = again.digest()
    again.fit_record = None
    assert again.digest() == digest
    assert [finding.name for finding in again.diagnose().findings] == ["not measured"]
