"""`dubito compress` from the outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dubito.cli.app import app

Run = Callable[..., Result]
TINY = ["--data", "digits", "--limit", "100", "--epochs", "1"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, ["compress", *map(str, words)], prog_name="dubito")


@pytest.mark.slow
def test_it_prints_a_report_and_writes_the_network(run: Run, tmp_path: Path) -> None:
    result = run(*TINY, "--rule", "signal_to_noise(target=0.5)", "--save", "net.dubito")
    assert result.exit_code == 0, result.output
    assert "bytes on disk" in result.stdout
    assert (tmp_path / "net.dubito").is_file()


def test_units_as_json(run: Run) -> None:
    words = ["--method", "laplace()", "--rule", "posterior_damage(0.5, scope=layer)", "--structure", "units"]
    result = run(*TINY, *words, "--finetune", 1, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["parameters"][1] < json.loads(result.stdout)["parameters"][0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rule", "map()"], "is not a rule"),
        (["--rule", "magnitude(2)"], "fraction from 0 to 1"),
        (["--structure", "rows"], "'weights', 'units' or 'heads'"),
        (["--save", "nowhere/net"], "does not exist"),
    ],
)
def test_bad_input_is_one_line(run: Run, words: list[str], says: str) -> None:
    result = run(*TINY, *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("dubito: error: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
