"""The commands from the outside: what they print where, what they write, and their exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import dubito
from dubito.cli.app import app
from dubito.cli.delivery import Experiment
from dubito.cli.methods import METHODS
from dubito.fitting.recipe import Recipe
from dubito.uses.comparison.compare import FitsOfSeed

pytestmark = pytest.mark.slow

FEW = ["--method", "map()", "--method", "laplace()", "--method", "variational()"]
TINY = ["--data", "digits", "--limit", "60", "--epochs", "1", "--seeds", "1"]

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in an empty folder, on a machine without data sets, as if it were typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DUBITO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words], prog_name="dubito")


def failed(result: Result, code: int) -> str:
    """Check that a command failed with one line on stderr and nothing on stdout; return that line."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("dubito: error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


class TestHelp:
    @pytest.mark.parametrize(
        ("words", "wanted"),
        [
            ((), ["Examples:", "Exit codes:", "130", "DUBITO_DATA", "demo", "compare", "data"]),
            (("demo",), ["Examples:", "Exit codes:", "--fast", "--out"]),
            (("compare",), ["Examples:", "Exit codes:", "DUBITO_DATA", "--method", "--seeds", *METHODS]),
            (("data",), ["DUBITO_DATA", "list", "check"]),
            (("data", "list"), ["Examples:", "--json"]),
            (("data", "check"), ["Examples:", "Exit codes:"]),
        ],
    )
    def test_says_what_how_and_which_exit_codes(self, run: Run, words: tuple[str, ...], wanted: list[str]) -> None:
        result = run(*words, "--help")
        assert result.exit_code == 0
        assert [part for part in wanted if part not in result.stdout] == []

    @pytest.mark.parametrize("words", [(), ("data",)])
    def test_alone_a_group_shows_its_help(self, run: Run, words: tuple[str, ...]) -> None:
        assert run(*words).stdout == run(*words, "--help").stdout
        assert run(*words).exit_code == 0

    def test_needs_no_torch(self) -> None:
        code = (
            "import sys; from dubito.cli.app import app\n"
            "try: app(['compare', '--help'], prog_name='dubito')\n"
            "except SystemExit as end: assert end.code == 0\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

    def test_every_recipe_is_among_the_methods(self) -> None:
        recipes = [name for name in dubito.__all__ if isinstance(value := getattr(dubito, name), type)
                   and issubclass(value, Recipe)]  # fmt: skip
        shown = {text.partition("(")[0] for text in METHODS}
        assert {name.lower() for name in recipes} == shown

    @pytest.mark.parametrize("words", [("version",), ("--version",)])
    def test_version(self, run: Run, words: tuple[str, ...]) -> None:
        assert run(*words).stdout == f"dubito {dubito.__version__}\n"


class TestCompare:
    def test_prints_a_table_and_writes_a_report(self, run: Run, tmp_path: Path) -> None:
        words = ["--limit-test", 60, "--method", "map()", "--method", "map(temperature=validation)"]
        result = run("compare", *TINY, *words, "--shifts")
        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[0].split() == ["Accuracy", "↑", "NLL", "↓", "ECE", "↓", "shifted", "NLL", "↓"]
        assert [line.split()[0] for line in lines[1:]] == ["MAP()", "MAP(temperature='validation')"]
        assert "<html" in (tmp_path / "report.html").read_text()
        assert "MAP(), seed 1 of 1" in result.stderr

    def test_without_a_method_all_are_tried(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        few = dict(list(METHODS.items())[:2])  # the demo, below, runs them all
        monkeypatch.setattr("dubito.cli.comparing.METHODS", few)
        result = run("compare", *TINY, "--epochs", 6)
        names = [line.split("   ")[0] for line in result.stdout.splitlines()[1:]]
        assert names == [repr(dubito.parse(text)) for text in few]

    def test_several_seeds_have_a_spread(self, run: Run) -> None:
        (line,) = run("compare", *TINY, "--seeds", 2, "--method", "map()").stdout.splitlines()[1:]
        assert line.count(" ± ") == 3

    def test_rows_are_limited(self, run: Run) -> None:
        words = ["--limit-test", 50, "--ood", "digits", "--method", "map()", "--json"]
        found = json.loads(run("compare", *TINY, *words).stdout)
        assert found["data"]["rows"] == {"train": 54, "validation": 6, "test": 50}
        histogram = found["runs"][0]["evaluation"]["curves"]["histograms"]["entropy"]
        assert sum(histogram["inside"]) == sum(histogram["outside"]["digits"]) == 50

    def test_names_make_way_for_numbers_where_they_do_not_fit(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dubito.cli.output._WIDE", 50)
        words = ["--method", "map()", "--method", "map(prior_precision=1)"]
        lines = [line.split() for line in run("compare", *TINY, *words).stdout.splitlines()]
        assert lines[:2] == [["1", "MAP()"], ["2", "MAP(prior_precision=1)"]]
        assert [line[0] for line in lines[3:]] == ["1", "2"]

    def test_json_is_all_there_is_on_stdout(self, run: Run, tmp_path: Path) -> None:
        result = run("compare", *TINY, "--method", "map()", "--seeds", 2, "--json", "--out", "other.html")
        found = json.loads(result.stdout)
        assert found["finished"] is True
        assert found["data"] == {"name": "digits", "task": "classification", "rows": {"train": 54, "validation": 6,
                                                                                      "test": 360}}  # fmt: skip
        assert [(one["method"], one["seed"]) for one in found["runs"]] == [("MAP()", 0), ("MAP()", 1)]
        accuracies = [one["evaluation"]["scores"]["accuracy"] for one in found["runs"]]
        assert found["summary"]["MAP()"]["mean"]["accuracy"] == pytest.approx(sum(accuracies) / 2)
        assert accuracies[0] != accuracies[1]
        assert (tmp_path / "other.html").is_file()

    def test_the_same_words_give_the_same_numbers(self, run: Run) -> None:
        scores = [json.loads(run("compare", *TINY, "--method", "map()", "--json").stdout)["summary"] for _ in (1, 2)]
        assert scores[0] == scores[1]

    def test_options_reach_the_fit(self, run: Run) -> None:
        words = ["compare", "--data", "digits", "--limit", 60, "--seeds", 1, "--method", "map()", "--json"]
        by_text = run(*words, "--training", "training(epochs=2, lr=0.01, batch_size=20)")
        by_option = run(*words, "--epochs", 2, "--lr", 0.01, "--batch-size", 20)
        slower = run(*words, "--epochs", 2, "--lr", 0.001, "--batch-size", 20)
        scores = [json.loads(result.stdout)["summary"] for result in (by_text, by_option, slower)]
        assert scores[0] == scores[1] != scores[2]

    def test_regression_is_scored_in_original_units(self, run: Run) -> None:
        result = run("compare", "--data", "diabetes", "--seeds", 1, "--epochs", 1, "--method", "map()", "--json")
        (one,) = json.loads(result.stdout)["runs"]
        assert 40 < one["evaluation"]["scores"]["rmse"] < 120  # the targets' standard deviation is 77

    @pytest.mark.parametrize("likelihood", ["heteroscedastic", "gaussian(noise=0.5)"])
    def test_other_likelihoods(self, run: Run, likelihood: str) -> None:
        words = ["--data", "diabetes", "--seeds", 1, "--epochs", 1, *FEW]
        result = run("compare", *words, "--likelihood", likelihood)
        assert result.exit_code == 0, result.stderr

    def test_foreign_data(self, run: Run) -> None:
        words = ["compare", "--data", "toy/moons", "--epochs", 1, "--seeds", 1, "--likelihood", "bernoulli"]
        result = run(*words, "--method", "map()", "--ood", "toy/moons", "--json")
        assert result.exit_code == 0, result.stderr
        ood = json.loads(result.stdout)["runs"][0]["evaluation"]["ood"]
        assert ood["toy/moons"]["entropy"]["auroc"] == pytest.approx(0.5)  # the same data cannot be told apart

    @pytest.mark.filterwarnings("default")
    def test_tables(self, run: Run, tmp_path: Path) -> None:
        rows = [f"{i},{'red' if i % 3 else 'blue'},{2 * i + i % 3}" for i in range(60)]
        (tmp_path / "table.csv").write_text("\n".join(["size,colour,price", *rows, "61,red,"]))
        words = ["--data", "table.csv", "--epochs", 1, "--seeds", 1, *FEW]
        price = run("compare", *words, "--target", "price")
        assert price.exit_code == 0, price.stderr
        assert "RMSE" in price.stdout
        assert "dubito: warning: 1 of 61 rows have no 'price' and are left out.\n" in price.stderr
        colour = run("compare", *words, "--target", "colour")
        assert "Accuracy" in colour.stdout


class TestBadInput:
    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["nope"], "No such command 'nope'"),
            (["compare"], "Missing option '--data'"),
            (["compare", "--nope"], "No such option"),
            (["compare", *TINY, "--seeds", "0"], "Invalid value for '--seeds'"),
            (["compare", *TINY, "--seeds", "1" + 23 * "0"], "Invalid value for '--seeds'"),
            (["compare", *TINY, "--seeds", "1e23"], "Invalid value for '--seeds'"),
            (["compare", *TINY, "--epochs", "1000000000"], "`epochs` must be at most 100,000,000, got 1000000000."),
            (["compare", *TINY, "--method", "ensemble(members=1000000000000)"], "`members` must be at most"),
            (["compare", *TINY, "--method", "ensemble(members=1e12)"], "`members` must be a whole number"),
            (
                ["compare", *TINY, "--model", "mlp(hidden=[10000000000])"],
                "`hidden` must be at most 100,000,000",
            ),
            (["compare", *TINY, "--out", 300 * "x"], "cannot be written to"),
            (["compare", *TINY, "--epochs", "many"], "Invalid value for '--epochs'"),
            (["compare", *TINY, "--epochs", "-1"], "`epochs` must be a whole number of at least 0 or 'auto', got -1."),
            (["compare", *TINY, "--lr", "0"], "`lr` must be a positive number or 'auto', got 0.0."),
            (["compare", *TINY, "--method", "mop()"], "no setting called 'mop'"),
            (["compare", *TINY, "--method", "map("], "Cannot read 'map('"),
            (["compare", *TINY, "--method", "map(temp=1)"], "no argument 'temp'"),
            (["compare", *TINY, "--method", "map(temperature=-1)"], "`temperature` must be"),
            (["compare", *TINY, "--method", "training()"], "'training()' is not a method"),
            (["compare", *TINY, "--method", "map", "--method", "MAP()"], "given twice"),
            (["compare", *TINY, "--training", "map()"], "does not describe training"),
            (["compare", *TINY, "--model", "lenet5"], "at least 16 x 16 pixels"),
            (["compare", *TINY, "--model", "mlb"], "did you mean 'mlp'?"),
            (["compare", *TINY, "--likelihood", "poison"], "no likelihood 'poison'"),
            (["compare", *TINY, "--likelihood", "map()"], "'map()' is not a likelihood"),
            (["compare", *TINY, "--likelihood", "gaussian"], "is a classification data set"),
            (["compare", *TINY, "--likelihood", "bernoulli"], "Bernoulli"),
            (["compare", *TINY, "--out", "nowhere/report.html"], "the folder 'nowhere' does not exist"),
            (["compare", *TINY, "--out", "."], "it is a folder"),
            (["compare", *TINY, "--target", "x"], "--target is for tables"),
            (["compare", *TINY, "--gap"], "has no gap splits"),
            (["compare", *TINY, "--split", "7"], "has 5 split(s)"),
            (["compare", *TINY, "--ood", "diabetes"], "cannot be prepared like 'digits'"),
            (["compare", "--data", "digitz"], "did you mean 'digits'"),
            (["compare", "--data", "diabetes", "--shifts"], "Corruptions need a data set of images"),
            (["data", "check", "digitz"], "did you mean 'digits'"),
            (["demo", "--out", "nowhere/report.html"], "the folder 'nowhere' does not exist"),
        ],
    )
    def test_is_one_line_and_exit_code_2(self, run: Run, words: list[str], sentence: str) -> None:
        assert sentence in failed(run(*words), 2)

    def test_a_table_without_target_names_its_columns(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "table.csv").write_text("size,price\n1,2\n")
        assert "its columns are: size, price" in failed(run("compare", "--data", "table.csv"), 2)
        assert "'cost'" in failed(run("compare", "--data", "table.csv", "--target", "cost"), 2)
        for option in (["--gap"], ["--limit-test", "5"]):
            assert option[0] in failed(run("compare", "--data", "table.csv", "--target", "price", *option), 2)

    def test_missing_data_is_exit_code_3(self, run: Run) -> None:
        assert "mnist" in failed(run("compare", "--data", "mnist"), 3)
        assert "uci/boston" in failed(run("data", "check", "uci/boston"), 3)
        assert "nowhere.csv" in failed(run("compare", "--data", "nowhere.csv", "--target", "y"), 3)

    def test_debug_shows_the_traceback(self, run: Run) -> None:
        result = run("compare", "--data", "digitz", "--debug")
        assert isinstance(result.exception, dubito.errors.InputError)

    def test_anything_else_is_one_line_and_exit_code_1(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("out of\nluck")

        monkeypatch.setattr(Experiment, "network", fail)
        assert "RuntimeError: out of luck (run again with --debug" in failed(run("compare", *TINY), 1)


class TestWhatWasFinishedIsKept:
    def test_when_interrupted(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fit, calls = FitsOfSeed._fit, []

        def interrupted(self: FitsOfSeed, *words: object) -> object:
            calls.append(words)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return fit(self, *words)  # type: ignore[arg-type]

        monkeypatch.setattr(FitsOfSeed, "_fit", interrupted)
        result = run("compare", *TINY, "--json")
        assert result.exit_code == 130
        found = json.loads(result.stdout)
        assert found["finished"] is False
        assert list(found["summary"]) == ["Auto()"]
        assert (tmp_path / "report.html").is_file()

    def test_when_interrupted_before_anything(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(FitsOfSeed, "_fit", interrupted)
        result = run("compare", *TINY)
        assert (result.exit_code, result.stdout) == (130, "")
        assert "nothing was finished" in result.stderr
        assert not (tmp_path / "report.html").exists()

    def test_by_a_real_signal(self, tmp_path: Path) -> None:
        words = ["compare", *TINY, "--seeds", "100000", "--method", "map()", "--json"]
        code = "import torch; torch.set_num_threads(1); from dubito.cli import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if "seed 1 of" in line:
                break
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 130, stderr
        assert json.loads(stdout)["summary"]["MAP()"]["seeds"] >= 1
        assert "Traceback" not in stderr
        assert (tmp_path / "report.html").is_file()

    def test_when_a_method_fails(self, run: Run, tmp_path: Path) -> None:
        words = ["--data", "digits", "--limit", 60, "--training", "training(epochs=3, lr=0.1, optimizer=sgd)"]
        result = run("compare", *words, "--method", "map(prior_precision=1e30)", "--method", "map()", "--json")
        assert result.exit_code == 1, result.stderr
        found = json.loads(result.stdout)
        assert {method: summary["seeds"] for method, summary in found["summary"].items()} == {"MAP()": 3}
        assert [failure["method"] for failure in found["failures"]] == ["MAP(prior_precision=1e+30)"]
        assert "MAP(prior_precision=1e+30), seed 1 of 3: failed" in result.stderr
        assert (tmp_path / "report.html").is_file()

    def test_a_method_that_cannot_be_trusted_is_named(self, run: Run) -> None:
        words = ["--data", "digits", "--limit", 60, "--seeds", 1, "--training", "training(epochs=1, lr=5.0)"]
        result = run("compare", *words, "--method", "map()")
        assert result.exit_code == 0, result.stderr
        assert "do not trust these, the report says why: MAP()" in result.stderr

    @pytest.mark.parametrize(
        ("words", "code", "sentence"),
        [
            (["--training", "training(epochs=3, lr=1e30, optimizer=sgd)"], 1, "lower the learning rate"),
            (["--method", "laplace(weights=select.layers(nowhere))", "--epochs", "1"], 2, "nowhere"),
        ],
    )
    def test_when_every_method_fails_the_first_error_decides(
        self, run: Run, tmp_path: Path, words: list[str], code: int, sentence: str
    ) -> None:
        result = run("compare", "--data", "digits", *words, "--limit", 60)
        assert (result.exit_code, result.stdout) == (code, "")
        assert sentence in result.stderr
        assert not (tmp_path / "report.html").exists()


class TestDemo:
    def test_fast(self, run: Run, tmp_path: Path) -> None:
        result = run("demo", "--fast", "--json")
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        assert len(found["summary"]) == len(METHODS)
        assert found["summary"]["plain network"]["mean"]["accuracy"] > 0.85
        likelihoods = [row["mean"]["nll"] for row in found["summary"].values()]
        assert likelihoods == sorted(likelihoods)
        assert "The same network at a twentieth of its size" in result.stderr
        evaluation = found["runs"][0]["evaluation"]
        assert evaluation["ood"]["scrambled digits"]["entropy"]["auroc"] > 0.8
        assert set(evaluation["shifts"]) == {"rotation", "noise"}
        assert (tmp_path / "report.html").stat().st_size > 10_000


class TestData:
    def test_list(self, run: Run) -> None:
        lines = run("data", "list").stdout.splitlines()
        rows = {line.split()[0]: line for line in lines}
        assert "scikit-learn" in rows["digits"]
        assert rows["mnist"].rstrip().endswith("not found")

    def test_list_as_json(self, run: Run) -> None:
        found = {row["name"]: row for row in json.loads(run("data", "list", "--json").stdout)}
        assert found["digits"]["found"] is True
        assert found["mnist"]["found"] is False

    def test_check(self, run: Run) -> None:
        result = run("data", "check", "digits", "diabetes")
        assert result.exit_code == 0
        assert [line.partition(" (")[0] for line in result.stdout.splitlines()] == ["digits: ok", "diabetes: ok"]

    def test_check_finds_what_is_wrong(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "text").mkdir()
        (tmp_path / "text" / "SMSSpamCollection.tsv.gz").write_bytes(b"no gzip")
        monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
        result = run("data", "check", "sms", "--json")
        assert result.exit_code == 1
        (row,) = json.loads(result.stdout)
        assert row["ok"] is False
        assert row["problems"]
