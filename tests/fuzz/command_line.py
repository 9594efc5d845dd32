"""Commands with odd options on a small table: a result, or one line on stderr and an exit code that says why."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import typer
from typer.testing import CliRunner, Result

from dubito.cli.app import app
from dubito.core.errors import InputError
from dubito.uses.export.building import Built
from fuzz.engine import Case, require

NUMBERS = ["0", "1", "2", "-1", "1e9", "1e12", "99999999999999999999999", "1000000000000", "nan", "inf", "-inf", "1.5", "",
           "x", "0x10", "1_0", "٣", " 2 ", "2\x00", "true", "None", "1e400", "-0"]  # fmt: skip
METHODS = ["map()", "map", "laplace()", "laplace(structure=diag)", "laplace(weights=select.last_layer(), structure=full)",
           "variational()", "ensemble(members=2)", "ensemble(members=1e12)", "ensemble(members=1000000000000)",
           "ensemble(members=0)", "hmc(num_samples=1000000000000)", "sgmcmc(burn_in=10000000000000)", "swag(rank=1e30)",
           "map(", "training()", "priors.Normal()", "nothing()", "", "map(map())", "map()map()", "laplace(structure=x)",
           "snapshot(members=10000000000000000)", "map(prior_precision=nan)", "map(temperature=1e999)"]  # fmt: skip
MODELS = ["mlp", "mlp(hidden=[3])", "mlp(hidden=[])", "mlp(hidden=[0])", "mlp(hidden=[-1])", "mlp(hidden=[100000000000])",
          "mlp(hidden=3)", "mlp(hidden=x)", "lenet-5", "resnet-8", "cnn", "lstm", "transformer", "nothing", "", "mlp(", "mlp()",
          "mlp(hidden=[3], activation=x)", "mlp(hidden=[3], nothing=1)", "mlp(hidden=[1e30])"]  # fmt: skip
DATA = ["t.csv", "t.csv", "t.csv", "t.csv", "n.csv", "n.csv", "digits", "diabetes", "nothing", "", "empty.csv", "missing.csv",
        ".", "t.csv.gz", "t.parquet", "/dev/null", "\x00", "uci/nothing", "../t.csv", "t.csv/x"]  # fmt: skip
LIKELIHOODS = [
    "categorical",
    "gaussian",
    "bernoulli",
    "heteroscedastic",
    "gaussian(0.1)",
    "gaussian(noise=nan)",
    "x",
    "",
    "map()",
]
TRAININGS = ["training(epochs=1)", "training(epochs=1000000000)", "training(lr=0)", "training(batch_size=0)", "map()", "x(",
             "training(epochs=1, clip=0)", "training(epochs=1, early_stopping=1)", "training(optimizer=x)"]  # fmt: skip
RULES = [
    "magnitude(0.5)",
    "magnitude(2)",
    "magnitude(nan)",
    "log_alpha(3)",
    "signal_to_noise(1)",
    "x",
    "",
    "map()",
    "magnitude()",
]
FILES = ["out.html", "", ".", "/nonexistent/x", "t.csv/x", "a/b", "\x00", "x" * 300, "out.onnx", "out.pt2", "é.html"]
TABLES = {
    "--sep": [",", ";", "tab", "ab", "", '"', "\n"], "--encoding": ["utf-8", "latin-1", "utf-16", "klingon", "", "\x00"],
    "--decimal": [".", ",", ";", ""],
}  # fmt: skip
COLUMNS = {
    **TABLES, "--task": ["classification", "regression", "x", ""], "--ignore": ["a", "b", "y", "x", ""], "--keep": ["a", "x"],
    "--categorical": ["a", "y", "x"], "--date": ["a=%d", "a=%d.%m.%Y", "a", "=", "x=%Y-%m-%d", "a=%"],
}  # fmt: skip
RUN_OPTIONS = {
    "--risk": ["0.1", *NUMBERS], "--coverage": ["0.5", *NUMBERS], "--model": ["net.py:build", "net.py:none", "none.py:build", "mlp", "x"],
    "--config": ["c.yaml", "bad.yaml", "missing.yaml", "t.csv", ".", ""], "--json": [None], **TABLES,
}  # fmt: skip
RUNS = [*["run"] * 12, "t.csv", "missing", ".", "", "broken", "\x00", "x" * 300]
OUTPUTS = ["out.csv", "out.csv", "out.tsv", "out.parquet", "out.xlsx", "out.gz", "-", ".", "a/b", "t.csv", "", "\x00"]
OPTIONS = {
    "fit": {
        "--target": ["y", "y", "a", "nothing", ""], "--out": ["new", "run", "t.csv", ".", "a/b", "", "\x00", "x" * 300],
        "--model": [*MODELS, "net.py:build", "net.py:none", "none.py:build", "t.csv:build", "bad.py:build"], "--method": METHODS,
        "--weights": ["w.safetensors", "t.csv", "w.pt", "missing.safetensors", "."], "--likelihood": LIKELIHOODS,
        "--risk": ["0.1", *NUMBERS], "--coverage": ["0.5", *NUMBERS], "--held-out": ["0.3", *NUMBERS], "--epochs": NUMBERS,
        "--lr": NUMBERS, "--batch-size": NUMBERS, "--training": TRAININGS, "--limit": NUMBERS, "--seed": NUMBERS,
        "--no-scale": [None], "--overwrite": [None], "--config": ["c.yaml", "bad.yaml", "missing.yaml", "t.csv"], "--json": [None],
        **COLUMNS,
    },
    "predict": {"--out": OUTPUTS, **RUN_OPTIONS},
    "evaluate": {"--report": FILES, **{k: v for k, v in RUN_OPTIONS.items() if k not in ("--risk", "--coverage")}},
    "update": {"--out": ["new", "run", "t.csv", "a/b", ""], "--epochs": NUMBERS, "--seed": NUMBERS, "--overwrite": [None], **TABLES},
    "explain": {"--row": ["1", "3", "24", *NUMBERS], "--json": [None], **TABLES},
    "report": {"--out": FILES, "--json": [None]},
    "doctor": {"--json": [None], "--model": ["net.py:build", "x"]},
    "export": {"--out": ["net.pt2", "net.onnx", "net.txt", "a/b.pt2", "", "."], "--json": [None]},
    "methods": {"--json": [None], "x": [None]},
    "compress run": {
        "--at-most": ["5%", "0.005", "0", "100%", "-1%", "x", "", "nan%", "1e400%"], "--out": ["small", "run", "a/b", "", "t.csv"],
        "--data": ["t.csv", "n.csv", "missing.csv", "", "digits"], "--rule": RULES, "--structure": ["weights", "units", "x", ""],
        "--method": METHODS, "--finetune": ["1", "-1", "x", "1e12"], "--json": [None],
    },
    "compare": {
        "--target": ["y", "y", "y", "a", "nothing", "", "\x00"], "--model": MODELS, "--method": METHODS,
        "--likelihood": LIKELIHOODS, "--seeds": NUMBERS, "--epochs": NUMBERS, "--lr": NUMBERS, "--batch-size": NUMBERS,
        "--training": TRAININGS, "--split": NUMBERS, "--gap": [None], "--limit": NUMBERS, "--limit-test": NUMBERS,
        "--shifts": [None], "--ood": ["digits", "nothing", "", "t.csv"], "--out": FILES, "--json": [None],
        "--nothing": ["x"], "--debug=x": [None],
    },
    "compress": {
        "--target": ["y", "y", "a", "nothing", ""], "--model": MODELS, "--method": METHODS, "--rule": RULES,
        "--structure": ["weights", "units", "x", ""], "--finetune": NUMBERS, "--epochs": NUMBERS, "--lr": NUMBERS,
        "--batch-size": NUMBERS, "--limit": NUMBERS, "--seed": NUMBERS, "--save": FILES, "--export": FILES,
        "--json": [None],
    },
    "demo": {"--out": ["/nonexistent/x", ".", "a/b"], "--nothing": ["x"]},
    "data": {"list": [None], "check": [None, "digits", "nothing", "", "\x00"], "--json": [None], "x": [None],
             "describe": ["t.csv", "n.csv", "empty.csv", "missing.csv", ".", "", "\x00", "run"]},
    "version": {"x": [None], "--json": [None], "--help": [None]},
}  # fmt: skip
# What a command gets unless a case says otherwise: small enough for thousands of cases.
USUAL = {"--data": "t.csv", "--target": "y", "--model": "mlp(hidden=[3])", "--method": "map()", "--epochs": "1"}
WITH_RUN = {
    "predict": {"--out": "out.csv"}, "evaluate": {}, "update": {"--out": "new"}, "explain": {"--row": "2"}, "report": {}, "doctor": {},
    "export": {"--out": "net.pt2"}, "compress run": {"--out": "small", "--at-most": "50%", "--method": "map(train=false)"},
}  # fmt: skip


class CommandLine:
    """A command in a folder of its own that holds two tables."""

    def generate(self, rng: random.Random) -> Case:
        command = rng.choice(
            ["compare"] * 5
            + ["compress"] * 3
            + ["fit"] * 6
            + [*WITH_RUN] * 2
            + ["demo", "data", "data", "version", "methods", "x", ""]
        )
        odd = OPTIONS.get(command, {})
        chosen: dict[str, str | None] = dict(USUAL) if command in ("compare", "compress", "fit") else {}
        places: list[str] = []
        if command == "compare":
            chosen |= {"--seeds": "1", "--limit": "20"}
        if command == "fit":
            del chosen["--data"]
            chosen |= {"--out": "new"}
            places = [rng.choice(["t.csv", "t.csv", "n.csv", *DATA])]
        if command in WITH_RUN:
            chosen |= WITH_RUN[command]
            places = [rng.choice(RUNS)]
            if command in ("predict", "evaluate", "update", "explain"):
                places.append(rng.choice(["t.csv", "t.csv", "t.csv", *DATA]))
        for name in rng.sample(list(odd), min(len(odd), rng.choice([0, 1, 1, 1, 2, 3]))):
            chosen[name] = rng.choice(odd[name])
        if "--data" in chosen and rng.random() < 0.2:
            chosen["--data"] = rng.choice(DATA)
        if chosen and rng.random() < 0.05:
            chosen.pop(rng.choice(list(chosen)))
        if command == "demo":
            chosen.setdefault("--out", "/nonexistent/x")
        words = [*places, *(word for pair in chosen.items() for word in pair if word is not None)]
        if rng.random() < 0.05:
            words.insert(
                rng.randint(0, len(words)), rng.choice(["--", "-", "-h", "x", "--=", "", "--json=1", "\ud800", "-q"])
            )
        return {
            "words": [*command.split()[:1], *words] if command else words,
            "depth": rng.choices(["all", "words", "none"], [1, 9, 90])[0],
        }

    def run(self, case: Case) -> None:
        words = case["words"]
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            _make_tables(Path(folder))
            _make_run(Path(folder))
            before = dict(os.environ)
            os.environ.pop("DUBITO_DATA", None)
            os.environ["XDG_CACHE_HOME"] = folder
            try:
                with _shallow(case.get("depth", "all")):
                    result = _invoke(words)
            finally:
                os.environ.clear()
                os.environ.update(before)
        _check(result)


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def _invoke(words: list[str]) -> Result:
    with mock.patch(
        "typer.testing._get_command", return_value=_command()
    ):  # built once: it takes as long as a short fit
        return CliRunner().invoke(app, words, prog_name="dubito")


@contextlib.contextmanager
def _shallow(depth: str) -> Iterator[None]:
    """Leave out what takes longer than all else: drawings ("words"), also pages and conversions by torch ("none")."""
    left_out: dict[str, Any] = {"dubito.uses.reporting.page._svg": lambda *_: ""}
    if depth == "none":
        built = Built(b"", "mean", (), {"mean": 0.0})
        left_out |= {
            "dubito.uses.reporting.page._render": lambda *_: "",
            "dubito.uses.export.building.Job.build": lambda *_: built,
        }
    with contextlib.ExitStack() as stack:
        for name, value in left_out.items() if depth != "all" else ():
            stack.enter_context(mock.patch(name, value))
        yield


def _check(result: Result) -> None:
    require(result.exception is None or isinstance(result.exception, SystemExit), f"raised {result.exception!r}")
    require("Traceback" not in result.output, "a traceback")
    require("run again with --debug" not in result.stderr, f"a raw error: {result.stderr[-300:]}")
    require(result.exit_code in (0, 1, 2, 3), f"exit code {result.exit_code}")
    errors = [line for line in result.stderr.splitlines() if line.startswith("dubito: error: ")]
    told = bool(errors) or "failed. " in result.stderr  # of one method among several, or of all
    told = told or "problem: " in result.stdout  # of `doctor`
    told = told or "cannot be trusted" in result.stderr  # the predictions of a run
    require(told == (result.exit_code != 0), f"exit code {result.exit_code} with {result.stderr[-300:]!r}")
    require(len(errors) <= 1, f"{len(errors)} sentences: {result.stderr[-300:]}")
    if errors:
        raise InputError(errors[0])


def _make_tables(folder: Path) -> None:
    rows = [f"{i % 7},{(i * 5) % 11 / 3},{'uv'[i % 2]}" for i in range(24)]
    (folder / "t.csv").write_text("\n".join(["a,b,y", *rows]))
    rows = [f"{i % 7},{(i * 5) % 11 / 3},{i % 5 + 0.5}" for i in range(24)]
    (folder / "n.csv").write_text("\n".join(["a,b,y", *rows]))
    (folder / "empty.csv").write_text("")
    (folder / "c.yaml").write_text("json: true\n")
    (folder / "bad.yaml").write_text("nothing: 1\n")
    (folder / "net.py").write_text(
        "from torch import nn\ndef build(inputs, outputs): return nn.Linear(inputs, outputs)\n"
    )
    (folder / "bad.py").write_text("raise RuntimeError('no')\n")
    (folder / "w.pt").write_text("")


def _make_run(folder: Path) -> None:
    for name, content in run_files().items():
        (folder / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "run" / name).write_bytes(content)
    (folder / "broken").mkdir()
    (folder / "broken" / "run.json").write_text("{}")


@cache
def run_files() -> dict[str, bytes]:
    """Return the files of a run on the first table."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _make_tables(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            words = [
                "fit",
                "t.csv",
                "--target",
                "y",
                "-o",
                "run",
                "--model",
                "mlp(hidden=[3])",
                "--epochs",
                "1",
                "--risk",
                "0.4",
                "-q",
            ]
            with contextlib.chdir(folder):
                result = _invoke(words)
        require(result.exit_code == 0, f"the run could not be fitted: {result.stderr}")
        found = (path for path in (folder / "run").rglob("*") if path.is_file())
        return {str(path.relative_to(folder / "run")): path.read_bytes() for path in found}
