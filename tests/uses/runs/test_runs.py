"""Runs: fitted, saved, loaded, and refused where they do not fit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import FileFormatError, InputError, MissingDataError, UnsupportedError
from run_cases import houses, run_of, write
from safetensors.torch import save_file
from torch import nn

import dubito
from dubito import data, decisions, models, runs
from dubito.uses.runs import scoring
from dubito.uses.runs.table_fit import share_held_out

pytestmark = pytest.mark.slow

NET = """
from torch import nn
def build(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))
"""
FILES = (
    "run.json", "encoder.json", "scores.json", "posterior.safetensors", "calibration.safetensors", "rows.safetensors",
)  # fmt: skip


def same(one: runs.TablePrediction, other: runs.TablePrediction) -> bool:
    return all((one[name] == other[name]).all() for name in one.columns)


@pytest.mark.parametrize("target", ["price", "cheap"])
def test_a_folder_gives_the_same_predictions(tmp_path: Path, target: str) -> None:
    run = run_of(target)
    run.save(tmp_path / "run")
    again = dubito.runs.load(tmp_path / "run")
    new = houses(20, seed=1)
    assert same(run.predict(new), again.predict(new))
    assert again.evaluate(new).decisions == run.evaluate(new).decisions
    assert again.scores == run.scores
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {*FILES, "report.html"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_decision_rules_are_kept_in_the_folder(tmp_path: Path) -> None:
    run = run_of()
    held_out, scale = run.parts["held_out"], run.target_scale
    rejector = decisions.Rejector(run.posterior, held_out, risk=30.0, target_scale=scale)
    both = run.with_decision("answer", rejector)
    both = both.with_decision("odd", decisions.Detector(run.posterior, held_out, false_positive_rate=0.2))
    both.save(tmp_path / "run")
    again = runs.load(tmp_path / "run")
    assert sorted(again.decisions) == ["answer", "odd"]
    inputs = again.encoder.encode(houses(30, seed=2))
    found: Any = again.decisions["answer"]
    assert torch.equal(found.predict(inputs).accepted, rejector.predict(inputs).accepted)
    assert found.risk == 30.0
    again.save(tmp_path / "copy")
    assert sorted(runs.load(tmp_path / "copy").decisions) == ["answer", "odd"]
    assert not run.decisions
    with pytest.raises(InputError, match="fitted with another posterior"):
        run_of("cheap").with_decision("answer", rejector)
    with pytest.raises(InputError, match="letters, digits"):
        run.with_decision("../answer", rejector)
    (tmp_path / "run" / "decisions" / "odd.safetensors").write_bytes(b"nonsense")
    with pytest.raises(FileFormatError, match=r"odd.safetensors"):
        runs.load(tmp_path / "run")


def test_the_columns() -> None:
    new = houses(5, seed=1)
    numbers, classes = run_of("price").predict(new), run_of("cheap").predict(new)
    rest = ["epistemic", "aleatoric", "unfamiliar", "decision"]
    assert list(numbers.columns) == ["prediction", "stddev", "lower", "upper", *rest]
    assert list(classes.columns) == ["prediction", "confidence", "p_no", "p_yes", *rest]
    assert (numbers["lower"] < numbers["prediction"]).all()
    assert numbers["stddev"] ** 2 == pytest.approx(numbers["epistemic"] + numbers["aleatoric"])
    assert set(classes["prediction"]) <= {"yes", "no"}
    assert classes["p_no"] + classes["p_yes"] == pytest.approx(1)
    assert len(classes.to_frame()) == len(numbers) == 5


def test_scores_are_in_original_units() -> None:
    run = run_of()
    assert 10 < run.scores.scores["rmse"] < 60
    found = run.evaluate(houses(400, seed=5))
    assert found.scores.scores["rmse"] == pytest.approx(run.scores.scores["rmse"], rel=0.5)
    assert 0.8 < found.decisions["coverage"] < 0.99
    assert "coverage" in str(found)
    assert json.loads(json.dumps(found.to_json()))["odd_cells"]["rows"] == 400


def test_a_small_table_holds_out_enough_for_intervals() -> None:
    assert [round(n * share_held_out(n)) for n in (10, 27, 30, 50, 100)] == [3, 9, 10, 10, 20]
    table = houses(12)
    run = runs.fit(table, "price", network="mlp(hidden=[4])", training={"epochs": 2}, ignore=["cheap"], progress=False)
    assert run.calibration.reach(0.9) is None
    found = run.predict(table)
    low, _ = found.distribution.interval(0.9)
    assert found["lower"] == pytest.approx(low[:, 0].numpy())


@pytest.mark.filterwarnings("ignore:The predictions for held-out rows")
def test_a_network_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(NET)
    options = {"network": f"{path}:build", "training": {"epochs": 3}, "ignore": ["cheap"], "progress": False}
    options["recipe"] = dubito.Laplace()
    run = runs.fit(houses(60), "price", **options)
    assert isinstance(run.posterior.model[1], nn.Tanh)
    run.save(tmp_path / "run")
    assert same(runs.load(tmp_path / "run").predict(houses(5)), run.predict(houses(5)))
    path.write_text(NET + "# changed\n")
    with pytest.raises(FileFormatError, match=r"was changed since: give the network as model="):
        runs.load(tmp_path / "run")
    path.rename(tmp_path / "moved.py")
    with pytest.raises(MissingDataError, match=r"is gone: give its place as model="):
        runs.load(tmp_path / "run")
    moved = runs.load(tmp_path / "run", model=f"{tmp_path / 'moved.py'}:build")
    given = runs.load(tmp_path / "run", model=run.posterior.model)
    assert same(moved.predict(houses(5)), run.predict(houses(5)))
    assert same(given.predict(houses(5)), run.predict(houses(5)))


def test_code_inside_of_a_run_is_not_run(tmp_path: Path) -> None:
    run_of().save(tmp_path / "run")
    net = tmp_path / "run" / "net.py"
    net.write_text("raise SystemExit('code was run')")
    settings = json.loads((tmp_path / "run" / "run.json").read_text())

    settings["network"] |= {
        "text": "net.py:build",
        "path": str(net),
        "sha256": hashlib.sha256(net.read_bytes()).hexdigest(),
    }
    (tmp_path / "run" / "run.json").write_text(json.dumps(settings))
    with pytest.raises(FileFormatError, match="inside of the run's own folder, which is not trusted"):
        runs.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "name", "sentence"),
    [
        ("def build(a, b, c): pass", "build", "takes 3 arguments"),
        ("def build(a, b): return 3", "build", "must return a torch.nn.Module, but it returned a int"),
        ("def build(a, b): return 1 / 0", "build", "failed: ZeroDivisionError"),
        ("1 / 0", "build", "cannot be imported: ZeroDivisionError"),
        ("def other(): pass", "build", "has no function 'build'; it has other"),
    ],
)
def test_wrong_functions_of_networks(tmp_path: Path, content: str, name: str, sentence: str) -> None:
    (tmp_path / "net.py").write_text(content)
    with pytest.raises(InputError, match=sentence):
        runs.fit(houses(40), "price", network=f"{tmp_path / 'net.py'}:{name}", ignore=["cheap"], progress=False)


def test_weights_are_taken_as_they_are(tmp_path: Path) -> None:
    trained = run_of().posterior.model
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    options = {"network": "mlp(hidden=[8], activation=tanh)", "ignore": ["cheap"], "progress": False}
    run = runs.fit(houses(), "price", weights=tmp_path / "w.safetensors", **options)
    chosen = runs.fit(houses(), "price", weights=tmp_path / "w.safetensors", validation=0.2, **options)
    assert chosen.settings["recipe"] == "Auto(train=False)"
    for name, value in [*run.posterior.mean().items(), *chosen.posterior.mean().items()]:
        assert torch.equal(value, dict(trained.named_parameters())[name])
    with pytest.raises(
        FileFormatError, match=r"saved for another network: '1.weight' is \(8, 5\) in the file and \(9, 5\)"
    ):
        runs.fit(houses(), "price", weights=tmp_path / "w.safetensors", network="mlp(hidden=[9])", ignore=["cheap"])
    (tmp_path / "w.pt").touch()
    with pytest.raises(UnsupportedError, match="may run code"):
        runs.fit(houses(), "price", weights=tmp_path / "w.pt", **options)
    with pytest.raises(MissingDataError, match="There is no file"):
        runs.fit(houses(), "price", weights=tmp_path / "none.safetensors", **options)
    wrong = models.mlp(5, 1, hidden=[8], activation="tanh")
    with torch.no_grad():
        wrong[-1].bias.fill_(30.0)
    save_file(wrong.state_dict(), tmp_path / "w.safetensors")
    options |= {"recipe": dubito.MAP(train=False), "likelihood": "gaussian(noise=0.5)"}
    with pytest.warns(UserWarning, match=r"worse .* than one answer for every row"):
        runs.fit(houses(), "price", weights=tmp_path / "w.safetensors", **options)


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="does not exist: give the folder that `dubito fit"):
        runs.load(tmp_path / "nothing")
    with pytest.raises(FileFormatError, match=r"lacks run\.json"):
        runs.load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FileFormatError, match="is no run: give the folder"):
        runs.load(tmp_path / "file")
    run = run_of()
    with pytest.raises(InputError, match="something else is there"):
        run.save(tmp_path)
    run.save(tmp_path / "run")
    with pytest.raises(InputError, match=r"a run in .* already"):
        run.save(tmp_path / "run")
    run.save(tmp_path / "run", overwrite=True)
    with pytest.raises(InputError, match="does not exist"):
        run.save(tmp_path / "a" / "b")


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    run_of().save(tmp_path / "run")
    path = tmp_path / "run" / name
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"{}", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(FileFormatError):
            runs.load(tmp_path / "run")


@pytest.mark.filterwarnings("ignore:The predictions for held-out rows")
def test_other_recipes_and_files(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", houses(80), separator=";", decimal=",")
    options = {"network": "mlp(hidden=[4])", "training": {"epochs": 2}, "ignore": ["cheap"], "progress": False}
    run = runs.fit(path, "price", recipe=dubito.Ensemble(members=2), **options)
    assert run.settings["dialect"]["separator"] == ";"
    assert len(run.predict(path)) == 80
    assert len(run.predict(data.read_table(path).to_frame())) == 80
    with pytest.raises(InputError, match="does not fit"):
        runs.fit(path, "price", likelihood="categorical", **options)
    assert run_of("cheap", "map()").posterior.recipe == dubito.MAP()


def test_a_run_is_diagnosed_as_its_posterior(tmp_path: Path) -> None:
    run = run_of()
    run.save(tmp_path / "run")
    for each in (run, runs.load(tmp_path / "run")):
        assert each.posterior.fit_record == each.unguarded.fit_record is not None
        assert each.posterior.diagnose().measured is not None


@pytest.mark.parametrize("target", ["price", "cheap"])
def test_the_report_shows_rows_and_groups(target: str) -> None:
    run = run_of(target)
    inputs, targets = run.parts["held_out"]
    found, curves = run.predict_inputs(inputs), run.scores.curves
    worst = found["stddev"].argsort()[::-1] if target == "price" else found["confidence"].argsort()
    unsure = [each for each in curves.examples if each.kind == "uncertain"]
    assert [each.index for each in unsure] == worst[:5].tolist()
    towns = run.encoder.decode(inputs)["town"]
    assert [each.cells["town"] for each in unsure] == [towns[place] for place in worst[:5]]
    groups = curves.groups["town"]
    assert sum(groups.counts) == len(inputs)
    right = sum(n * share for n, share in zip(groups.counts, groups.observed, strict=True)) / len(inputs)
    if target == "price":  # by the calibrated intervals
        assert right == pytest.approx(run.evaluate_pair((inputs, targets)).decisions["coverage"])
    else:
        assert right == pytest.approx(run.scores.scores["accuracy"])


def test_pixels_are_shown_as_pictures() -> None:
    columns = {"pixel_0_1": [0.25, None], "pixel_2_0": [1.0, 0.5]}  # columns that never vary are not there
    found = scoring._pictures_or_columns(columns)
    assert found.tolist() == [[[[0, 0.25], [0, 0], [1, 0]]], [[[0, 0], [0, 0], [0.5, 0]]]]
    assert scoring._pictures_or_columns({**columns, "age": [1, 2]})["age"] == [1, 2]
