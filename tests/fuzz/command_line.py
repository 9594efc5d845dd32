"""Commands with odd options on a small table: a result, or one line on stderr and an exit code that says why."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from pathlib import Path

from typer.testing import CliRunner, Result

from dubito.cli.app import app
from dubito.core.errors import InputError
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
OPTIONS = {
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
    "data": {"list": [None], "check": [None, "digits", "nothing", "", "\x00"], "--json": [None], "x": [None]},
    "version": {"x": [None], "--json": [None], "--help": [None]},
}  # fmt: skip
# What a command gets unless a case says otherwise: small enough for thousands of cases.
USUAL = {"--data": "t.csv", "--target": "y", "--model": "mlp(hidden=[3])", "--method": "map()", "--epochs": "1"}


class CommandLine:
    """A command in a folder of its own that holds two tables."""

    def generate(self, rng: random.Random) -> Case:
        command = rng.choice(["compare"] * 6 + ["compress"] * 4 + ["demo", "data", "data", "version", "x", ""])
        odd = OPTIONS.get(command, {})
        chosen: dict[str, str | None] = dict(USUAL) if command in ("compare", "compress") else {}
        if command == "compare":
            chosen |= {"--seeds": "1", "--limit": "20"}
        for name in rng.sample(list(odd), min(len(odd), rng.choice([0, 1, 1, 1, 2, 3]))):
            chosen[name] = rng.choice(odd[name])
        if chosen and rng.random() < 0.2:
            chosen["--data"] = rng.choice(DATA)
        if chosen and rng.random() < 0.05:
            chosen.pop(rng.choice(list(chosen)))
        if command == "demo":
            chosen.setdefault("--out", "/nonexistent/x")
        words = [word for pair in chosen.items() for word in pair if word is not None]
        if rng.random() < 0.05:
            words.insert(
                rng.randint(0, len(words)), rng.choice(["--", "-", "-h", "x", "--=", "", "--json=1", "\ud800"])
            )
        return {"words": [command, *words] if command else words}

    def run(self, case: Case) -> None:
        words = case["words"]
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            _make_tables(Path(folder))
            before = dict(os.environ)
            os.environ.pop("DUBITO_DATA", None)
            os.environ["XDG_CACHE_HOME"] = folder
            try:
                result = CliRunner().invoke(app, words, prog_name="dubito")
            finally:
                os.environ.clear()
                os.environ.update(before)
        _check(result)


def _check(result: Result) -> None:
    require(result.exception is None or isinstance(result.exception, SystemExit), f"raised {result.exception!r}")
    require("Traceback" not in result.output, "a traceback")
    require("run again with --debug" not in result.stderr, f"a raw error: {result.stderr[-300:]}")
    require(result.exit_code in (0, 1, 2, 3), f"exit code {result.exit_code}")
    errors = [line for line in result.stderr.splitlines() if line.startswith("dubito: error: ")]
    told = bool(errors) or "failed. " in result.stderr  # of one method among several, or of all
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
