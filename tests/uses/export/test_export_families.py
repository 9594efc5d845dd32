"""Every family of posteriors, for classes and for numbers, as one file whose numbers are those of `predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from export_cases import (
    DIRICHLET,
    RECIPES,
    SHORT,
    SUFFIX,
    TASKS,
    any_format,
    calibration,
    describe,
    expected,
    fitted,
    inputs,
    network,
    run_file,
    share,
)
from torch import nn

import dubito
from dubito import MAP, BatchEnsemble, Laplace, Posterior, Training, Variational, decisions, select
from dubito.core.settings import load_all
from dubito.methods.map.posterior import PointPosterior
from dubito.uses.runs.guard import GuardedPosterior, TrainingRange

pytestmark = pytest.mark.slow

OUTPUTS = {"classes": ("probs", "aleatoric", "epistemic"), "numbers": ("mean", "aleatoric", "epistemic")}
APPROXIMATE = {"variational"}
FORMS = {
    "map": "one network",
    "laplace of all layers": "linearized, by the Jacobian of the random layers",
    "laplace of the last layer": "closed form of the last layer",
    "laplace of a subnetwork": "linearized, by the Jacobian of the random layers",
    "variational": "moments propagated through the layers",
    "variational in groups": "3 weight samples",
    "rank1": "one network on 4 copies of the inputs",
    "batch ensemble": "one network on 2 copies of the inputs",
    "ensemble": "2 networks",
    "ensemble of laplace": "2 members, each: closed form of the last layer",
    "sgmcmc of the last layer": "3 weight samples",
}


def chosen() -> list[tuple[str, str]]:
    """Every other pair of family and task; `make test` writes one half in one format, `make test-extras` the other."""
    pairs = [(name, TASKS[(k + t) % 2]) for t in range(2) for k, name in enumerate(RECIPES)]
    half = len(pairs) // 2
    return pairs[half:] if SUFFIX == ".onnx" else pairs[:half]


@pytest.mark.parametrize(("name", "task"), chosen())
def test_a_file_computes_what_predict_does(name: str, task: str, tmp_path: Path) -> None:
    posterior, path = fitted(name, task), tmp_path / f"net{SUFFIX}"
    made = posterior.export(path, OUTPUTS[task], example=inputs(7, 2), num_samples=3)
    assert bool(made.approximations) == (name in APPROXIMATE)
    assert made.form == FORMS.get(name, made.form)
    assert made.outputs == OUTPUTS[task]
    assert made.num_bytes == path.stat().st_size
    assert describe(path)["form"] == made.form
    count, tolerance = (512, 0.05) if made.approximations else (3, 2e-5)
    for rows in (1, 5):  # others than the example's, and any number of them
        x = inputs(rows, 3)
        found, wanted = run_file(path, x), expected(posterior, x, OUTPUTS[task], num_samples=count)
        for output in OUTPUTS[task]:
            assert found[output].dtype == torch.float32
            torch.testing.assert_close(found[output], wanted[output], rtol=tolerance, atol=tolerance)


def test_every_family_has_a_file() -> None:
    tested = {fitted(name, task).family for name, task in chosen()}
    load_all()
    elsewhere = {"Tempered", "Guarded"}
    known = {name for name, family in Posterior._families.items() if family.__module__.startswith("dubito.")}
    assert known - elsewhere == tested


@pytest.mark.parametrize("name", share(["laplace of the last layer", "ensemble"]))
def test_tempered_posteriors(name: str, tmp_path: Path) -> None:
    posterior = decisions.TemperedPosterior(fitted(name), 2.0)
    posterior.export(tmp_path / f"net{SUFFIX}", example=inputs(5, 2))
    found, wanted = (
        run_file(tmp_path / f"net{SUFFIX}", inputs(5, 3)),
        expected(posterior, inputs(5, 3), ("probs", "entropy")),
    )
    assert all(torch.allclose(found[key], wanted[key], atol=1e-5) for key in wanted)


@pytest.mark.parametrize(
    ("task", "category"), share([("classes", True), ("classes", False), ("numbers", False), ("numbers", True)])
)
def test_guarded_posteriors(task: str, category: bool, tmp_path: Path) -> None:
    """Usual rows, rows outside of the range, and rows with an unseen category."""
    levels = ((2, 4, torch.tensor([0.3, 0.7])),) if category else ()
    known = TrainingRange(torch.full((4,), -1.0), torch.ones(4), levels)
    posterior, x = GuardedPosterior(fitted("laplace of the last layer", task), known), inputs(6, 2).clamp(-1, 1)
    x[1:3, 0], x[2:4, 2:] = 4.0, 0.0
    outputs = OUTPUTS[task]
    made = posterior.export(tmp_path / f"net{SUFFIX}", outputs, example=x)
    assert made.form.endswith(f"on {8 if levels else 2} readings of each row")
    found, wanted = run_file(tmp_path / f"net{SUFFIX}", x[1:]), expected(posterior, x[1:], outputs)
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", share(["laplace of the last layer", "map"]))
def test_guarded_posteriors_of_other_distributions(name: str, tmp_path: Path) -> None:
    """Components, one or many of equal weight, are dealt to the readings of a row as `predict` does."""
    x, model = inputs(40, 0), network(1)
    recipe, y = RECIPES[name], (3 * x[:, 0].sigmoid()).round()
    inside = recipe.fit(model, (x, y), likelihood="poisson", training=SHORT if name == "map" else None, progress=False)
    known = TrainingRange(torch.full((4,), -1.0), torch.ones(4), ((2, 4, torch.tensor([0.3, 0.7])),))
    posterior, rows = GuardedPosterior(inside, known), inputs(6, 2).clamp(-1, 1)
    rows[1:3, 0], rows[2:4, 2:] = 4.0, 0.0
    posterior.export(tmp_path / f"net{SUFFIX}", OUTPUTS["numbers"], example=rows)
    found = run_file(tmp_path / f"net{SUFFIX}", rows[1:])
    for key, wanted in expected(posterior, rows[1:], OUTPUTS["numbers"]).items():
        torch.testing.assert_close(found[key], wanted, rtol=1e-4, atol=1e-5)


def test_distilled_students_in_full(tmp_path: Path) -> None:
    """A Dirichlet needs the digamma function, which file formats lack."""
    student = PointPosterior(network(3), DIRICHLET(), MAP(train=False), 60)
    student.export(tmp_path / f"net{SUFFIX}", example=inputs(5, 2))
    x = 3 * inputs(8, 4)
    found = run_file(tmp_path / f"net{SUFFIX}", x)
    for key, value in expected(student, x, ("probs", "aleatoric", "epistemic")).items():
        assert torch.allclose(found[key], value, atol=1e-6), key
    assert float(found["epistemic"].min()) > 0.01


@pytest.mark.parametrize(
    ("name", "likelihood"),
    share(
        [
            ("laplace of the last layer", "bernoulli"),
            ("ensemble", "bernoulli"),
            ("ensemble", "heteroscedastic"),
            ("laplace of the last layer", "heteroscedastic"),
        ]
    ),
)
def test_other_likelihoods(name: str, likelihood: str, tmp_path: Path) -> None:
    x = inputs(40, 0)
    y = (x[:, :2] > 0).float() if likelihood == "bernoulli" else x[:, :1].sin()
    posterior = RECIPES[name].fit(
        network(2), (x, y), likelihood=likelihood, training=None if "laplace" in name else SHORT
    )
    made = posterior.export(tmp_path / f"net{SUFFIX}", example=x[:5], num_samples=4)
    found = run_file(tmp_path / f"net{SUFFIX}", x[:3])
    wanted = expected(posterior, x[:3], [key for key in made.outputs if key not in ("lower", "upper")], num_samples=4)
    for key, value in wanted.items():
        assert torch.allclose(found[key].to(value), value, atol=2e-5), key


def test_known_noise_is_an_input_of_the_file(tmp_path: Path) -> None:
    x, noise = inputs(20, 0), 0.1 + inputs(20, 1)[:, 0].abs()
    options: Any = {"likelihood": "heteroscedastic", "progress": False}
    model = dubito.models.KnownNoise(network(2))
    posterior = MAP(train=False).fit(model, ((x, noise), x[:, :2]), **options)
    posterior.export(tmp_path / f"net{SUFFIX}", ("mean", "stddev"), example=(x, noise))
    found = run_file(tmp_path / f"net{SUFFIX}", x[:3], noise[:3])
    for key, value in expected(posterior, (x[:3], noise[:3]), ("mean", "stddev")).items():
        assert torch.allclose(found[key], value, atol=2e-5), key


def test_images_and_sequences(tmp_path: Path) -> None:
    """The Jacobian goes through convolutions, pooling, normalization and shortcuts, and through embeddings."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1, stride=1), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(self.conv(x)).relu()

    torch.manual_seed(0)
    images = torch.randn(30, 1, 9, 9)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), nn.ReLU(inplace=True), Block(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    ).eval()
    tokens = torch.randint(7, (30, 5))
    words = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)).eval()
    for model, x in share([(net, images), (words, tokens)]):
        posterior = Laplace(prior_precision=1.0).fit(model, (x, torch.arange(30) % 3))
        made = posterior.export(tmp_path / f"net{SUFFIX}", ("probs", "epistemic"), example=x[:5])
        assert made.difference < 1e-5
        found, wanted = run_file(tmp_path / f"net{SUFFIX}", x[5:6]), expected(posterior, x[5:6], made.outputs)
        assert all(torch.allclose(found[key], wanted[key], atol=1e-5) for key in wanted)


def test_members_of_a_convolutional_network_share_its_weights(tmp_path: Path) -> None:
    """An ONNX file makes the weights of members when it is loaded; a program of torch would do so in every call."""
    torch.manual_seed(0)
    images, made = torch.randn(20, 1, 6, 6), {}
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 48, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 3),
    )  # fmt: skip
    for members in (1, 4):
        recipe = BatchEnsemble(members=members, start="model", spread=0.3)
        posterior = recipe.fit(model, (images, torch.arange(20) % 3), training=SHORT, progress=False)
        made[members] = posterior.export(tmp_path / f"net{SUFFIX}", ("probs", "epistemic"), example=images[:5])
    assert made[4].form == (
        "4 networks with shared weights" if SUFFIX == ".onnx" else "one network on 4 copies of the inputs"
    )
    assert made[4].num_bytes < 1.5 * made[1].num_bytes
    for rows in (1, 7):
        found, wanted = run_file(made[4].path, images[-rows:]), expected(posterior, images[-rows:], made[4].outputs)
        assert all(torch.allclose(found[key], wanted[key], atol=1e-5) for key in wanted)


@any_format
def test_layers_without_a_rule_need_weight_samples(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight.mT).sin()

    x = inputs(20, 0)
    model = nn.Sequential(Own(), nn.Linear(3, 3))
    posterior = Laplace(prior_precision=1.0).fit(model, (x, torch.arange(20) % 3))
    with pytest.raises(UnsupportedError, match="method='weights'"):
        posterior.export(tmp_path / "net.pt2", example=x)
    assert list(tmp_path.iterdir()) == []
    made = posterior.export(tmp_path / "net.pt2", ("probs",), example=x, method="weights", num_samples=2)
    wanted = posterior.predict(x, method="weights", num_samples=2).probs
    assert made.form == "2 weight samples"
    assert torch.allclose(run_file(tmp_path / "net.pt2", x)["probs"], wanted, atol=1e-5)


@any_format
def test_moments_that_are_too_far_off_give_way_to_samples(tmp_path: Path) -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 3))
    x = inputs(40, 0)
    recipe = Variational(initial_scale=0.8, weights=select.all())
    posterior = recipe.fit(model, (x, torch.arange(40) % 3), training=Training(epochs=1, lr=1e-6), progress=False)
    made = posterior.export(tmp_path / "net.pt2", ("probs",), example=x, num_samples=3, tolerance=1e-3)
    assert made.form == "3 weight samples"
    assert not made.approximations
    assert made.difference < 1e-5


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_a_posterior_predicts_as_before_after_its_export(tmp_path: Path, structure: Any) -> None:
    """Recording must leave no tensors without values in what a covariance keeps between calls."""
    x = torch.randn(30, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    posterior = Laplace(structure=structure, prior_precision=1.0).fit(net, (x, torch.arange(30) % 3), progress=False)
    posterior.export(tmp_path / f"first{SUFFIX}", ("probs", "epistemic"), example=x[:10])
    before = posterior.predict(x).probs
    posterior.export(tmp_path / f"second{SUFFIX}", ("probs", "epistemic"), example=x[:10])
    assert torch.equal(posterior.predict(x).probs, before)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.inner(x).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(*parts)
        return self.outer(found.transpose(1, 2).flatten(2).mean(1))


def test_attention_without_dropout_draws_nothing(tmp_path: Path) -> None:
    x = torch.randn(20, 5, 8, generator=torch.Generator().manual_seed(0))
    posterior = MAP(train=False).fit(Attends(), (x, torch.arange(20) % 3))
    assert posterior.export(tmp_path / f"attends{SUFFIX}", example=x[:10]).difference < 1e-5


@any_format
def test_decisions_of_another_prediction_are_refused(tmp_path: Path) -> None:
    posterior = fitted("laplace of all layers")
    with pytest.raises(InputError, match="method='weights' changes it"):
        posterior.export(tmp_path / f"set{SUFFIX}", ("set",), calibration=calibration(), method="weights")
    posterior.export(tmp_path / f"set{SUFFIX}", ("set",), calibration=calibration(), method="linearized")


def test_wide_last_layers_join_directions_and_say_so(tmp_path: Path) -> None:
    """Variances of the file are at most 0.1 % too large for inputs of every kind; a small tolerance gets exact ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Linear(300, 2))
    x = inputs(80, 0)
    y = torch.stack([x[:, 0].sin(), x[:, 1]], 1)
    recipe = Laplace(weights=select.last_layer(), prior_precision=10.0)
    posterior = recipe.fit(model, (x, y), likelihood="gaussian", progress=False)
    made = posterior.export(tmp_path / f"wide{SUFFIX}", ("mean", "epistemic"), example=x)
    assert made.approximations == ("variances may be up to 0.1% too large",)
    assert describe(made.path)["approximations"] == list(made.approximations)
    assert made.difference < 1e-4
    new = torch.cat([inputs(50, 5), 100 * inputs(50, 6)])
    ratios = run_file(made.path, new)["epistemic"] / posterior.predict(new).epistemic
    assert 1 - 1e-4 < float(ratios.min()) <= float(ratios.max()) < 1 + 1.1e-3
    assert float(ratios.max()) > 1 + 1e-5
    exact = posterior.export(tmp_path / f"exact{SUFFIX}", ("mean", "epistemic"), example=x, tolerance=1e-6)
    assert exact.approximations == ()
