"""What a file returns: names, decisions, preprocessing, units; and what is refused, without leaving a file."""

from __future__ import annotations

import builtins
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import FileFormatError, InputError, UnsupportedError
from export_cases import (
    DECISIONS,
    SHORT,
    SUFFIX,
    any_format,
    calibration,
    describe,
    expected,
    fitted,
    inputs,
    network,
    run_file,
    targets,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import MAP, Ensemble, Laplace, Variational, decisions, select
from dubito.methods.map.posterior import PointPosterior
from dubito.uses.export import check, export_network
from dubito.uses.export.formats import DESCRIBED

pytestmark = pytest.mark.slow

LAST = "laplace of the last layer"
EVERY = ("probs", "entropy", "aleatoric", "epistemic", "label", "set", "answer", "unfamiliar")


def test_counts_have_no_quantiles_in_a_file(tmp_path: Path) -> None:
    """By default `lower` and `upper` are left out; who asks for them is told."""
    x, counts = inputs(40, 0), torch.randint(4, (40, 1), generator=torch.Generator().manual_seed(0)).float()
    posterior = MAP(train=False).fit(nn.Linear(4, 1), (x, counts), likelihood="poisson", progress=False)
    made = posterior.export(tmp_path / f"counts{SUFFIX}", example=x)
    assert made.outputs == ("mean", "stddev", "aleatoric", "epistemic")
    found = run_file(tmp_path / f"counts{SUFFIX}", x)
    torch.testing.assert_close(found["mean"], posterior.predict(x).mean, rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedError, match="leave 'lower' and 'upper' out"):
        posterior.export(tmp_path / f"ends{SUFFIX}", ("mean", "lower"), example=x)


def test_all_outputs_and_decisions_for_classes(tmp_path: Path) -> None:
    posterior, path = fitted(LAST), tmp_path / f"net{SUFFIX}"
    rejector = decisions.Rejector(posterior, calibration(), risk=0.2)
    detector = decisions.Detector(posterior, calibration(), false_positive_rate=0.2)
    sets = decisions.ConformalSets(posterior, calibration(), coverage=0.6, method="aps")
    made = posterior.export(path, EVERY, example=calibration()[0], decisions=[rejector, detector, sets])
    assert made.outputs == EVERY == tuple(describe(path)["outputs"])
    assert max(made.errors.values()) < 1e-5
    x = 2 * inputs(50, 5)
    found = run_file(path, x)
    for name, value in expected(posterior, x, EVERY[:5]).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
    wanted = {"answer": rejector.predict(x).accepted, "unfamiliar": detector.detect(x), "set": sets.predict(x)}
    for name, value in wanted.items():
        assert found[name].dtype == torch.bool
        assert torch.equal(found[name], value), name
        assert 0 < float(value.double().mean()) < 1
    assert any("Rejector" in text for text in describe(path)["decisions"])


@pytest.mark.skipif(SUFFIX == ".pt2", reason="make test-extras runs it: its graph takes seconds to record")
def test_intervals_of_a_mixture(tmp_path: Path) -> None:
    posterior, path = fitted("ensemble", "numbers"), tmp_path / f"own{SUFFIX}"
    x, (low, high) = inputs(9, 5), posterior.predict(inputs(9, 5)).interval(0.8)  # type: ignore[attr-defined]
    posterior.export(path, ("mean", "stddev", "lower", "upper"), example=inputs(5, 2), level=0.8)
    found = run_file(path, x)
    torch.testing.assert_close(found["lower"], low, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(found["upper"], high, rtol=1e-5, atol=2e-5)


@any_format
def test_intervals_and_decisions_for_numbers(tmp_path: Path) -> None:
    posterior = fitted("ensemble", "numbers")
    names = ("mean", "stddev", "lower", "upper", "answer", "unfamiliar")
    x, data = inputs(9, 5), calibration("numbers")
    made = [
        decisions.Rejector(posterior, data, risk=1.0),
        decisions.Detector(posterior, data, score="variance"),
        decisions.ConformalIntervals(posterior, data),
    ]
    posterior.export(
        tmp_path / "net.pt2", names, example=data[0], decisions=made, target_scale=([5.0, 0.0], [2.0, 3.0])
    )
    found, scale, loc = run_file(tmp_path / "net.pt2", x), torch.tensor([2.0, 3.0]), torch.tensor([5.0, 0.0])
    lower, upper = made[2].predict(x)
    assert torch.allclose(found["lower"], loc + scale * lower.float(), atol=1e-5)
    assert torch.allclose(found["upper"], loc + scale * upper.float(), atol=1e-5)
    assert torch.allclose(found["stddev"], scale * posterior.predict(x).stddev, atol=1e-5)  # type: ignore[attr-defined]
    assert torch.equal(found["unfamiliar"], made[1].detect(x))


@any_format
@pytest.mark.parametrize("outputs", [1, 2])
def test_a_target_scale_of_another_length_is_refused(outputs: int, tmp_path: Path) -> None:
    """Of one target a file returned three numbers."""
    x = inputs(6, 0)
    posterior = MAP(train=False).fit(nn.Linear(4, outputs), (x, x[:, :outputs]), likelihood="gaussian", progress=False)
    with pytest.raises(InputError, match=f"holds 3 numbers for a prediction of {outputs}"):
        posterior.export(tmp_path / "net.pt2", example=x, target_scale=([0.0, 1.0, 2.0], 1.0))


@any_format
@pytest.mark.parametrize("score", ["energy", "variance", "entropy", "max-probability"])
def test_scores_of_detectors(score: Any, tmp_path: Path) -> None:
    posterior = fitted("ensemble")
    detector = decisions.Detector(posterior, calibration(), score=score, false_positive_rate=0.3)
    posterior.export(tmp_path / "net.pt2", ("unfamiliar",), example=inputs(5, 2), decisions=[detector])
    x = 2 * inputs(40, 5)
    assert torch.equal(run_file(tmp_path / "net.pt2", x)["unfamiliar"], detector.detect(x))


@any_format
def test_decisions_are_fitted_to_calibration_data(tmp_path: Path) -> None:
    """And hold at the threshold itself, where the score of one calibration datum lies."""
    posterior = fitted(LAST)
    names = ("unfamiliar", "set")
    made = posterior.export(tmp_path / "net.pt2", names, calibration=calibration(), num_samples=8)
    assert made.inputs == ("input",)
    assert made.difference == 0
    for name in names:
        decision = DECISIONS[name](posterior, calibration(), num_samples=8)
        x = inputs(30, 6)
        wanted = decision.detect(x) if name == "unfamiliar" else decision.predict(x)
        assert torch.equal(run_file(tmp_path / "net.pt2", x)[name], wanted)
    loader = DataLoader(TensorDataset(*calibration()), batch_size=16)
    assert posterior.export(tmp_path / "net.pt2", ("label",), calibration=loader).difference == 0


def test_preprocessing_is_part_of_the_file(tmp_path: Path) -> None:
    class Normalize(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return (image.float() / 255 - 0.5).flatten(1)

    class Encoder:  # as the encoder of a table: numbers, and the code of a category
        def to_module(self) -> nn.Module:
            return Table()

    class Table(nn.Module):
        def forward(self, numbers: Tensor, category: Tensor) -> Tensor:
            filled = torch.where(numbers.isnan(), 0.5, numbers)
            return torch.cat([filled, nn.functional.one_hot(category, 2).to(filled.dtype)], dim=1)

    posterior = fitted("map")
    pixels = torch.randint(256, (6, 1, 2, 2), dtype=torch.uint8)
    posterior.export(tmp_path / f"net{SUFFIX}", ("probs",), example=pixels, preprocess=Normalize())
    wanted = posterior.predict(Normalize()(pixels)).probs  # type: ignore[attr-defined]
    assert torch.allclose(run_file(tmp_path / f"net{SUFFIX}", pixels)["probs"], wanted, atol=1e-6)
    rows = (torch.tensor([[0.1, float("nan")], [1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1, 1]))
    made = posterior.export(tmp_path / "table.pt2", ("probs",), example=rows, preprocess=Encoder())
    assert made.inputs == ("numbers", "category")
    wanted = posterior.predict(Table()(*rows)).probs  # type: ignore[attr-defined]
    assert torch.allclose(run_file(tmp_path / "table.pt2", *rows)["probs"], wanted, atol=1e-6)


def test_networks_with_several_inputs(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 3), nn.Embedding(5, 3)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.one(left) + self.other(right)

    left, right = inputs(6, 0), torch.arange(6) % 5
    posterior = PointPosterior(Two().eval(), dubito.likelihoods.Categorical(), MAP(train=False), 6)
    for example in ((left, right), {"right": right, "left": left}):
        made = posterior.export(tmp_path / f"net{SUFFIX}", ("probs",), example=example)
        assert made.inputs == (("left", "right") if isinstance(example, tuple) else ("right", "left"))
        given = example if isinstance(example, tuple) else tuple(example.values())
        found = run_file(tmp_path / f"net{SUFFIX}", *given)["probs"]
        assert torch.allclose(found, posterior.predict(example).probs, atol=1e-6)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype: torch.dtype, tmp_path: Path) -> None:
    """Half precision is written in float32, double precision as it is."""
    x = inputs(30, 0)
    plain = MAP().fit(network(3), (x, targets(x, "classes")), training=SHORT, progress=False).model
    posterior = Laplace(weights=select.last_layer(), prior_precision=1.0).fit(
        plain.to(dtype), (x.to(dtype), targets(x, "classes"))
    )
    made = posterior.export(tmp_path / f"net{SUFFIX}", ("probs", "epistemic"), example=x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found, wanted = run_file(tmp_path / f"net{SUFFIX}", x.to(wide)), expected(posterior, x, made.outputs)
    tolerance = {torch.float64: 1e-9, torch.bfloat16: 0.03, torch.float16: 0.004}[dtype]
    assert made.difference < tolerance
    for name in wanted:
        assert torch.allclose(found[name].double(), wanted[name].double(), atol=tolerance)
    network_file = export_network(plain, tmp_path / f"plain{SUFFIX}", x)
    assert network_file.difference < check.usual_tolerance(dtype, exact=True)


@any_format
def test_many_threads_export_and_predict_at_once(tmp_path: Path) -> None:
    posterior, x = fitted(LAST), inputs(5, 2)
    wanted = posterior.predict(x).probs  # type: ignore[attr-defined]
    digest, state = posterior.digest(), torch.get_rng_state()
    barrier = threading.Barrier(4)

    def work(k: int) -> Tensor:
        barrier.wait(timeout=60)
        if k % 2:
            return posterior.predict(x).probs  # type: ignore[attr-defined]
        assert posterior.export(tmp_path / f"{k}.pt2", ("probs",), example=x).difference < 1e-6
        return wanted

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.allclose(found, wanted, atol=1e-6) for found in pool.map(work, range(4)))
    for k in (0, 2):
        assert torch.allclose(run_file(tmp_path / f"{k}.pt2", x)["probs"], wanted, atol=1e-6)
    assert posterior.digest() == digest
    assert torch.equal(torch.get_rng_state(), state)


class Stubborn(nn.Module):
    """Computes something else for other rows than for these."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "values" and bool(y.sum() > 0):
            return y + 1
        if self.how == "rows":
            return y + torch.arange(6.0)[:, None].expand(6, 3)
        if self.how == "random":
            return y + torch.rand(3)
        return y - y.mean(0) if self.how == "mixes" else y


@any_format
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("values", "depends on values"),
        ("rows", "cannot be"),
        ("random", "draws random numbers"),
        ("mixes", "differs by"),
    ],
)
def test_networks_that_cannot_be_exported(how: str, sentence: str, tmp_path: Path) -> None:
    posterior = PointPosterior(Stubborn(how).eval(), dubito.likelihoods.Categorical(), MAP(train=False), 6)
    with pytest.raises((UnsupportedError, FileFormatError), match=sentence) as caught:
        posterior.export(tmp_path / "net.pt2", ("probs",), example=inputs(6, 0))
    assert str(caught.value)[0].isupper()
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []  # no file, and no temporary one either


@any_format
def test_an_old_file_survives_a_failure(tmp_path: Path) -> None:
    (tmp_path / "net.pt2").write_bytes(b"old")
    posterior = PointPosterior(Stubborn("mixes").eval(), dubito.likelihoods.Categorical(), MAP(train=False), 6)
    with pytest.raises(FileFormatError, match="was not written"):
        posterior.export(tmp_path / "net.pt2", example=inputs(6, 0))
    assert (tmp_path / "net.pt2").read_bytes() == b"old"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no example": ({"example": None}, "give `example=`"),
    "an empty example": ({"example": torch.empty(0, 4)}, "is empty"),
    "a number": ({"example": 3.0}, "takes tensors"),
    "another width": ({"example": torch.randn(3, 5)}, "cannot be called on inputs of shape"),
    "another ending": ({"path": "net.zip"}, "must end in .onnx or .pt2"),
    "no folder": ({"path": "nowhere/net.pt2"}, "does not exist"),
    "an unknown output": ({"outputs": ("probs", "certainty")}, "no output 'certainty'"),
    "an output of regression": ({"outputs": ("mean",)}, "no output 'mean' for a prediction of classes"),
    "one name": ({"outputs": "probs"}, "must be a tuple of names"),
    "a name twice": ({"outputs": ("probs", "probs")}, "each output once"),
    "no output": ({"outputs": ()}, "at least one"),
    "no decision": ({"outputs": ("answer",)}, r"needs decisions=\[dubito.decisions.Rejector"),
    "something else than a decision": ({"decisions": [3]}, "must be of Rejector"),
    "a level of 2": ({"level": 2.0}, "`level`"),
    "a tolerance of 0": ({"tolerance": 0}, "`tolerance`"),
    "metadata with a tensor": ({"metadata": {"mean": torch.ones(2)}}, "what JSON can hold.*Tensor"),
    "metadata with NaN": ({"metadata": {"score": float("nan")}}, "what JSON can hold"),
    "metadata that is a text": ({"metadata": "cats"}, "must be a dict"),
    "metadata of the file's own": ({"metadata": {"version": 3}}, "must not hold 'version'"),
    "an unknown option": ({"sure": True}, "no predict option 'sure'"),
    "no preprocessing": ({"preprocess": 3}, "`preprocess` must be"),
    "preprocessing of another width": ({"preprocess": nn.Linear(5, 4)}, "`preprocess` cannot take the example: mat1"),
    "preprocessing of more inputs": ({"preprocess": nn.Bilinear(4, 4, 4)}, "`preprocess` cannot take the example"),
    "preprocessing that joins rows": ({"preprocess": nn.Flatten(0)}, "one row per example: of 4 it made 16"),
    "a scale of classes": ({"target_scale": (0.0, 1.0)}, "is for regression"),
    "a negative scale": ({"target_scale": (0.0, -1.0)}, "positive deviation"),
    "a link without a closed form": ({"link": "mc"}, "Only link='probit'"),
}


@any_format
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, tmp_path: Path) -> None:
    options, sentence = BAD[name]
    options = {"path": "net.pt2", "example": inputs(4, 0), **options}
    with pytest.raises((InputError, UnsupportedError), match=sentence):
        fitted(LAST).export(tmp_path / options.pop("path"), **options)
    assert list(tmp_path.iterdir()) == []


@any_format
@pytest.mark.parametrize("recipe", [MAP(train=False), Variational()])
def test_a_network_may_overwrite_its_input(recipe: Any, tmp_path: Path) -> None:
    """As a ReLU in place at the start does; the new input is not taken for an output, and the example stays."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    x = inputs(6, 0)
    how = {} if recipe == MAP(train=False) else {"training": SHORT}
    posterior = recipe.fit(model, (x.clone(), torch.arange(6) % 3), progress=False, **how)
    posterior.export(tmp_path / "net.pt2", ("probs",), example=x)
    assert torch.equal(x, inputs(6, 0))
    found = run_file(tmp_path / "net.pt2", x)["probs"]
    torch.testing.assert_close(found, posterior.predict(x).probs, atol=1e-6 if not how else 0.1, rtol=0)
    assert export_network(model, tmp_path / "plain.pt2", inputs(6, 0)).difference < 1e-6


@any_format
def test_a_network_that_changes_a_buffer_is_refused(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    posterior = MAP(train=False).fit(Counting(), (inputs(6, 0), torch.arange(6) % 3), progress=False)
    with pytest.raises(UnsupportedError, match="changes a buffer in `forward`"):
        posterior.export(tmp_path / "net.pt2", example=inputs(6, 0))


@any_format
def test_decisions_of_others_are_refused(tmp_path: Path) -> None:
    posterior, x = fitted(LAST), inputs(4, 0)
    foreign = decisions.Detector(fitted("ensemble"), calibration())
    own = decisions.Detector(posterior, calibration(), num_samples=5)
    loud = decisions.ConformalSets(posterior, calibration(), method="aps", randomized=True)
    for given, options, sentence in (
        ([foreign], {}, "fitted with another posterior"),
        ([own], {"num_samples": 6}, "other posterior samples"),
        ([own, decisions.ConformalSets(posterior, calibration())], {}, "other posterior samples"),
        ([own, own], {}, "holds two Detector"),
        ([loud], {}, "Randomized sets"),
    ):
        with pytest.raises(InputError, match=sentence):
            posterior.export(tmp_path / "net.pt2", ("probs",), example=x, decisions=given, **options)
    with pytest.raises(InputError, match="is not a posterior"):
        dubito.export(network(3), tmp_path / "net.pt2", example=x)  # type: ignore[arg-type]


@any_format
def test_missing_packages_are_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("onnx"):
            raise ImportError(name)
        return original(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnsupportedError, match=r"pip install 'dubito\[onnx\]'"):
        fitted(LAST).export(tmp_path / "net.onnx", example=None)


@any_format
def test_shared_layers_are_stored_and_computed_once(tmp_path: Path) -> None:
    """Members with a common trunk, in copies of their own, make a graph with one trunk."""
    trunk = nn.Linear(4, 50)
    torch.manual_seed(0)
    members = [nn.Sequential(trunk, nn.ReLU(), nn.Linear(50, 3)).eval() for _ in range(3)]
    posterior = Ensemble.of(members) if hasattr(Ensemble, "of") else _ensemble(members)
    posterior.export(tmp_path / "net.pt2", ("probs",), example=inputs(4, 0))
    program = torch.export.load(tmp_path / "net.pt2")
    linears = [node for node in program.graph.nodes if "linear" in str(node.target)]
    assert len(linears) == 4
    sizes = [value.numel() for value in {**program.state_dict, **program.constants}.values()]
    assert sum(size == trunk.weight.numel() for size in sizes) == 1


def _ensemble(models: list[nn.Module]) -> Any:
    from dubito.methods.ensembles.posterior import EnsemblePosterior

    likelihood = dubito.likelihoods.Categorical()
    return EnsemblePosterior(
        [PointPosterior(m, likelihood, MAP(train=False), 6) for m in models], Ensemble(len(models))
    )


def test_metadata_and_standard_operators(tmp_path: Path) -> None:
    posterior, path = fitted("rank1"), tmp_path / f"net{SUFFIX}"
    posterior.export(path, example=inputs(4, 0), metadata={"classes": ["a", "b", "c"]})
    about = describe(path)
    assert set(DESCRIBED) <= set(about)
    assert about["classes"] == ["a", "b", "c"]
    assert about["approximations"] == []
    assert about["family"] == "Rank1"
    if SUFFIX == ".onnx":
        import onnx

        model = onnx.load(str(path))
        assert {one.domain: one.version >= 18 for one in model.opset_import} == {"": True}
        assert {node.domain for node in model.graph.node} == {""}
        assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param  # the batch has a name, not a number
