"""`dubito fit`, `predict` and `evaluate` from the outside, as a stranger would type them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dubito.cli.app import app
from dubito.cli.methods import METHODS
from interrupting import before_updates, interrupt_at

sys.path.insert(0, str(Path(__file__).parents[1] / "uses" / "runs"))
from run_cases import houses, write

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the command line prints warnings

Run = Callable[..., Result]
LAPLACE = ["--method", "laplace(structure=kron)"]
QUICK = ["--model", "mlp(hidden=[6])", "--epochs", "15", "--lr", "0.03", "--ignore", "cheap", *LAPLACE]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "houses.csv", {"id": list(range(100, 260)), **houses()})
    write(tmp_path / "new.csv", {name: values for name, values in houses(12, seed=1).items() if name != "price"})
    write(tmp_path / "sold.csv", houses(30, seed=2))
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words], prog_name="dubito")


@pytest.fixture
def fitted(run: Run, tmp_path: Path) -> Run:
    result = run("fit", "houses.csv", "--target", "price", "-o", "run", "--risk", 15, *QUICK)
    assert result.exit_code == 0, result.stderr
    return run


def test_from_a_table_to_predictions(fitted: Run, tmp_path: Path) -> None:
    result = fitted("predict", "run", "new.csv", "-o", "out.csv")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    header, *rows = (tmp_path / "out.csv").read_text().splitlines()
    columns = "prediction,stddev,lower,upper,epistemic,aleatoric,unfamiliar,decision"
    assert header == f"size,town,cheap,{columns}"
    assert len(rows) == 12
    scores = fitted("evaluate", "run", "sold.csv", "--json", "--report", "sold.html")
    found = json.loads(scores.stdout)
    assert found["evaluation"]["scores"]["rmse"] > 5  # in original units: the noise alone is 20
    assert {"coverage", "answered", "unfamiliar"} <= set(found["decisions"])
    assert (tmp_path / "sold.html").is_file()
    assert "RMSE" in fitted("evaluate", "run", "sold.csv").stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "houses.csv", "new.csv", "out.csv", "run", "sold.csv", "sold.html"
    ]  # fmt: skip


def test_what_was_understood_is_said_before_training(run: Run, tmp_path: Path) -> None:
    result = run("fit", "houses.csv", "--target", "cheap", "-o", "run", "--ignore", "price", "--epochs", 1, "--json")
    assert result.exit_code == 0, result.stderr
    lines = result.stderr.splitlines()
    assert lines[0] == "houses.csv (utf-8, separated by commas): 160 rows"
    assert lines[2].split()[:2] == ["id", "number"]
    assert "looks like an id: left out" in lines[2]
    assert lines[6].rstrip().endswith("target: 2 classes")
    assert lines[7] == "training on 115 rows; 13 choose settings, 32 are held out"
    found = json.loads(result.stdout)
    assert found["settings"]["table"] == "houses.csv"
    assert found["settings"]["recipe"] == "Auto()"
    assert found["settings"]["chosen"].startswith("Chosen: ")
    assert not [path.name for path in tmp_path.iterdir() if "checkpoint" in path.name]
    quiet = run(
        "fit", "houses.csv", "--target", "cheap", "-o", "quiet", "--ignore", "price", "--epochs", 2, "-q", *LAPLACE
    )
    assert "houses.csv" not in quiet.stderr
    assert "Accuracy" in quiet.stdout


@pytest.mark.filterwarnings("ignore")
def test_many_columns_and_one_that_predictions_have(run: Run, tmp_path: Path) -> None:
    many = {f"x{place}": [row * place % 7 for row in range(30)] for place in range(1, 61)}
    write(
        tmp_path / "wide.csv", {**many, "empty": [""] * 30, "lower": list(range(30)), "y": [r / 3 for r in range(30)]}
    )
    result = run("fit", "wide.csv", "--target", "y", "-o", "run")
    assert result.exit_code == 2
    *told, error = result.stderr.splitlines()
    assert "'lower'" in error and "--ignore lower" in error  # noqa: PT018 - one sentence
    assert told[-1].startswith("and 23 more columns")
    assert len(told) == 2 + 40 + 1
    assert any(line.startswith("empty") for line in told)


def test_a_diverged_training_fails(run: Run) -> None:
    words = ["--target", "cheap", "--ignore", "price", "--epochs", 3, "--lr", 1e9, "--method", "map()"]
    result = run("fit", "houses.csv", "-o", "run", *words)
    assert result.exit_code == 1
    assert "Can it be trusted? No." in result.stdout
    assert "cannot be trusted" in result.stderr


def test_a_file_of_options(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "# options\ntable: houses.csv\ntarget: price\nout: run\nignore:\n  - cheap\n  - id\nepochs: 2\n"
        'model: "mlp(hidden=[3])"\nseed: 3\nmethod: "map()"\n'
    )
    result = run("fit", "--config", "run.yaml", "--seed", 5, "--json")
    assert result.exit_code == 0, result.stderr
    settings = json.loads(result.stdout)["settings"]
    assert settings["recipe"] == "MAP()"
    assert settings["seed"] == 5  # what is typed takes precedence
    assert settings["training"] == {"epochs": 2}
    assert settings["options"]["ignore"] == ["cheap", "id"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("epocks: 3", "'fit' has no option 'epocks'; it has batch-size"),
        ("a: {b: 1}", "line 1 uses YAML that is not read here"),
        ("  x: 1", "line 1 is not 'name: value'"),
        ("- a", "line 1 is not 'name: value'"),
        ("epochs: many", "Invalid value for '--epochs'"),
    ],
)
def test_a_wrong_file_of_options(run: Run, tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "run.yaml").write_text(content)
    result = run("fit", "houses.csv", "--target", "price", "-o", "run", "--config", "run.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_odd_rows_are_counted(fitted: Run, tmp_path: Path) -> None:
    table = houses(12, seed=1)
    table["town"][0], table["size"][1] = "Rom", 999.0
    write(tmp_path / "new.csv", table)
    result = fitted("predict", "run", "new.csv", "-o", "out.csv", "--json")
    assert json.loads(result.stdout)["odd_cells"]["unseen"] == {"town": 1}
    assert "1 cell(s) hold a category that the training rows did not have (town 1; the first is 'Rom'" in result.stderr
    assert "1 cell(s) lie outside of the range of the training rows (size 1" in result.stderr
    assert "2 of 12 rows hold such cells" in result.stderr


def test_runs_are_explained_examined_and_compared(fitted: Run, tmp_path: Path) -> None:
    found = json.loads(fitted("explain", "run", "sold.csv", "--row", 3, "--json").stdout)
    assert {cause["column"] for cause in found["causes"]} == {"size", "town"}
    assert "epistemic uncertainty" in fitted("explain", "run", "--row", 17).stdout  # of the table of the fit
    assert "there is no row 999" in fitted("explain", "run", "--row", 999).stderr
    doctor = fitted("doctor", "run")
    assert doctor.exit_code == 0, doctor.output
    assert "give the same scores as when the run was made" in doctor.stdout
    assert "need no extra" in fitted("doctor").stdout
    assert (
        fitted("fit", "houses.csv", "--target", "price", "-o", "other", *QUICK[:-2], "--method", "map()").exit_code == 0
    )
    report = fitted("report", "run", "other", "--out", "both.html")
    assert [line.split()[0] for line in report.stdout.splitlines()] == ["RMSE", "run", "other"]
    assert "<html" in (tmp_path / "both.html").read_text()
    assert "different rows" not in report.stderr
    assert set(json.loads(fitted("report", "run", "other", "--json").stdout)) == {"run", "other"}


def test_a_run_is_compressed_exported_and_updated(fitted: Run, tmp_path: Path) -> None:
    result = fitted("compress", "run", "--at-most", "5%", "-o", "small", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["report"]["parameters"][1] <= found["report"]["parameters"][0]
    assert found["before"]["rmse"] > 5  # in original units
    assert fitted("predict", "small", "new.csv", "-o", "out.csv").exit_code == 0
    (tmp_path / "houses.csv").rename(tmp_path / "moved.csv")
    assert "give it as --data" in fitted("compress", "run", "-o", "x").stderr
    assert "unit" in fitted("compress", "run", "-o", "x", "--data", "moved.csv", "--at-most", "50%").stdout
    assert "its content differs" in fitted("compress", "run", "-o", "y", "--data", "sold.csv").stderr
    export = fitted("export", "run", "-o", "net.pt2", "--json", "--plain")
    assert json.loads(export.stdout)["inputs"][0] == "size"
    result = fitted("update", "run", "sold.csv", "-o", "new", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["settings"]["updates"] == [{"rows": 24, "held_out": 6}]
    assert fitted("update", "run", "sold.csv").exit_code == 0  # in place
    assert "more rows than its table" in fitted("compress", "run", "-o", "y", "--data", "moved.csv").stderr
    for words, sentence in (
        (["compress", "run", "--at-most", "much", "-o", "z"], "'much' is not a share"),
        (["compress", "run"], "say where to write the smaller run"),
        (["compress", "--at-most", "1%"], "for a RUN, which was not given"),
        (["compress"], "give a RUN that `dubito fit` wrote, or --data"),
        (["export", "run", "-o", "net.txt"], "must end in .onnx or .pt2"),
        (["update", "run", "new.csv"], "no target column 'price'"),
    ):
        result = fitted(*words)
        assert (result.exit_code, sentence in result.stderr) == (2, True), result.output


def test_one_of_many_smaller_runs_is_picked_and_packed(fitted: Run, tmp_path: Path) -> None:
    result = fitted("compress", "run", "--explore", "--method", "laplace(prior_precision=1)", "--json")
    assert result.exit_code == 0, result.stderr
    numbers = [each["number"] for each in json.loads(result.stdout)["candidates"]]
    assert {1, 13} <= set(numbers)
    page = (tmp_path / "run" / "explore.html").read_text()
    assert "dubito compress run --method &#39;laplace(prior_precision=1)&#39; --pick 13 -o run-13" in page
    result = fitted("compress", "run", "--pick", 4, "-o", "small", "--save", "small.dubito")
    assert result.exit_code == 0, result.stderr
    assert "`dubito predict small.dubito TABLE`" in result.stderr
    for run in ("small", "small.dubito"):
        assert fitted("predict", run, "new.csv", "-o", f"{run}.csv").exit_code == 0
    assert (tmp_path / "small.csv").read_text() == (tmp_path / "small.dubito.csv").read_text()
    assert set(json.loads(fitted("report", "run", "small.dubito", "--json").stdout)) == {"run", "small.dubito"}
    words = ["--data", "houses.csv", "--target", "price", "--ignore", "id", "--epochs", 2, "--save", "one.dubito"]
    result = fitted("compress", *words)
    assert result.exit_code == 0, result.stderr
    assert fitted("predict", "one.dubito", "new.csv", "-o", "one.csv").exit_code == 0
    assert len((tmp_path / "one.csv").read_text().splitlines()) == 13
    for words, sentence in (
        (["compress", "run", "--explore", "-o", "x"], "it only measures: leave out --out"),
        (["compress", "run", "--pick", 3, "--structure", "units", "-o", "x"], "leave --at-most and --structure out"),
        (["compress", "run", "-o", "x", "--target", "price"], "a RUN knows its table"),
        (["compress", "run", "-o", "x", "--report", "x.html"], "is written to the folder of --out"),
    ):
        result = fitted(*words)
        assert (result.exit_code, sentence in result.stderr) == (2, True), result.output


def test_methods_are_listed(run: Run) -> None:
    lines = run("methods").stdout.splitlines()
    assert len(lines) == 1 + len(METHODS)
    found = {row["method"]: row for row in json.loads(run("methods", "--json").stdout)}
    assert found["laplace()"]["trains"] is False


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["fit", "houses.csv", "-o", "run"], 2, "to predict as --target; its columns are"),
        (["fit", "houses.csv", "--target", "price"], 2, "Missing option '--out'"),
        (["fit", "houses.csv", "--target", "cost", "-o", "run"], 2, "no target column 'cost'"),
        (["fit", "none.csv", "--target", "price", "-o", "run"], 3, "There is no file none.csv"),
        (["fit", ".", "--target", "price", "-o", "run"], 2, "is a folder, not a table"),
        (["fit", "houses.csv", "--target", "price", "-o", "new.csv"], 2, "something else is there"),
        (["fit", "houses.csv", "--target", "price", "-o", "a/b"], 2, "does not exist"),
        (["fit", "houses.csv", "--target", "price", "-o", "run", "--method", "mop()"], 2, "no setting called 'mop'"),
        (["fit", "houses.csv", "--target", "price", "-o", "run", "--model", "mlb"], 2, "did you mean 'mlp'"),
        (["fit", "houses.csv", "--target", "price", "-o", "run", "--model", "none.py:build"], 3, "There is no file"),
        (["fit", "houses.csv", "--target", "price", "-o", "run", "--weights", "w.safetensors"], 3, "no file w.safe"),
        (["fit", "houses.csv", "--target", "price", "-o", "run", "--risk", "-1"], 2, "`risk` must be a positive"),
        (["fit", "houses.csv", "--target", "price", "-o", "run", "--coverage", "1"], 2, "`coverage` must"),
        (["fit", "houses.csv", "--target", "price", "-o", "run", "--task", "x"], 2, "neither classification nor"),
        (["fit", "houses.csv", "--target", "price", "-o", "run", "--date", "x"], 2, "is not COLUMN=FORMAT"),
        (["fit", "houses.csv", "--target", "price", "-o", "run", "--ignore", "x"], 2, "no column 'x'"),
        (["fit", "houses.csv", "--target", "price", "-o", "run", "--sep", "ab"], 2, "must be one character"),
        (["fit", "houses.csv", "--target", "price", "-o", "run", "--epochs", "-1"], 2, "`epochs` must be"),
        (["predict", "none", "new.csv", "-o", "out.csv"], 3, "does not exist: give the folder"),
        (["predict", "houses.csv", "new.csv", "-o", "out.csv"], 2, "is no run: give the folder"),
        (["predict", ".", "new.csv", "-o", "out.csv"], 2, "lacks run.json"),
        (["predict", ".", "new.csv", "-o", "a/out.csv"], 2, "does not exist"),
        (["evaluate", "none", "new.csv"], 3, "does not exist: give the folder"),
        (["report", "none"], 3, "does not exist: give the folder"),
    ],
)
def test_mistakes_are_one_line(run: Run, words: list[str], code: int, sentence: str) -> None:
    result = run(*words, "-q")
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert sentence in result.stderr
    assert result.stderr.startswith("dubito: error: ")
    assert result.stderr.count("\n") == 1


def test_mistakes_with_a_run(fitted: Run) -> None:
    for words, sentence in (
        (["predict", "run", "new.csv", "-o", "new.csv"], "it is the input itself"),
        (["predict", "run", "new.csv", "-o", "-", "--json"], "choose one of them"),
        (["evaluate", "run", "new.csv"], "no target column 'price'"),
        (["fit", "houses.csv", "--target", "price", "-o", "run"], "There is a run in 'run' already"),
    ):
        result = fitted(*words)
        assert result.exit_code == 2
        assert sentence in result.stderr
    assert fitted("predict", "run", "new.csv", "-o", "-").stdout.count("\n") == 13


def test_an_interrupted_fit_goes_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["fit", "houses.csv", "--target", "price", "-o", "run", *QUICK]
    whole = json.loads(run(*words, "--json").stdout)["evaluation"]["scores"]
    updates = []
    with monkeypatch.context() as patched:
        interrupt_at(8, patched)
        result = run(*words, "--overwrite")
    assert result.exit_code == 130
    assert result.stderr.endswith(
        "dubito: interrupted; the same command goes on from the last checkpoint, if there is one yet\n"
    )
    assert (tmp_path / "run.checkpoint.training").is_file()
    before_updates(updates.append, monkeypatch)
    assert json.loads(run(*words, "--json", "--overwrite").stdout)["evaluation"]["scores"] == whole
    assert len(updates) == 15 * 8 - 8 + 1  # eight batches an epoch: those that were left, and one for the curvature
    assert sorted(path.name for path in tmp_path.iterdir()) == ["houses.csv", "new.csv", "run", "sold.csv"]


def test_a_compression_that_costs_more_on_held_out_rows_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from dubito.cli.shrinking import _note_cost

    _note_cost({"rmse": 100.0}, {"rmse": 104.0}, 0.05)
    _note_cost({"accuracy": 0.9}, {"accuracy": 0.9}, 0.0)
    assert capsys.readouterr().err == ""
    _note_cost({"rmse": 100.0}, {"rmse": 116.0}, 0.05)
    _note_cost({"accuracy": 0.9}, {"accuracy": 0.8}, 0.01)
    told = capsys.readouterr().err
    assert "root mean squared error grew by 16.00%, more than the 5.00% allowed" in told
    assert "the accuracy fell by 10.00%" in told
