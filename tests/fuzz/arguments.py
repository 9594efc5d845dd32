"""Every function of `metrics`, `decisions`, `data`, `models` and the top level, with one strange argument at most."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dubito
from dubito import Training, data, decisions, metrics, models, select
from fitting.valid_networks import mlp
from fuzz.engine import Case, require
from fuzz.strange import NAMES, STRANGE

PROBS = [[0.2, 0.8], [0.6, 0.4], [0.5, 0.5], [0.9, 0.1]]
CLASSES = [1, 0, 0, 1]
SCORES = [0.1, 0.4, 0.2, 0.9]
FLAGS = [0, 1, 0, 1]
MEANS = [0.1, -0.4, 0.2, 0.9]
SPREADS = [1.0, 0.5, 0.2, 0.9]

CLASSIFYING = {"probs": PROBS, "targets": CLASSES}
RANKING = {"scores": SCORES, "labels": FLAGS}
GAUSSIAN = {"mean": MEANS, "stddev": SPREADS, "targets": SCORES}

# name: (function, its valid arguments); lists become tensors unless a case says otherwise
METRICS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{name: (getattr(metrics, name), CLASSIFYING) for name in ("accuracy", "brier")},
    **{
        name: (getattr(metrics, name), {**CLASSIFYING, "num_bins": 5, "binning": "equal-mass"})
        for name in ("ece", "mce", "classwise_ece", "reliability")
    },
    "nll": (metrics.nll, {"log_probs": PROBS, "targets": CLASSES, "ignore_index": -100}),
    **{name: (getattr(metrics, name), RANKING) for name in ("auroc", "aupr", "fpr95")},
    **{
        name: (getattr(metrics, name), {"uncertainty": SCORES, "losses": SPREADS}) for name in ("aurc", "risk_coverage")
    },
    **{name: (getattr(metrics, name), GAUSSIAN) for name in ("gaussian_nll", "crps", "pit")},
    "rmse": (metrics.rmse, {"mean": MEANS, "targets": SCORES}),
    "interval_coverage": (metrics.interval_coverage, {"lower": MEANS, "upper": SPREADS, "targets": SCORES}),
    "interval_width": (metrics.interval_width, {"lower": MEANS, "upper": SPREADS}),
    "quantile_calibration": (metrics.quantile_calibration, {"pit": SCORES, "levels": [0.1, 0.5]}),
    "quantile_calibration_error": (metrics.quantile_calibration_error, {"pit": SCORES, "levels": None}),
    "entropy_decomposition": (metrics.entropy_decomposition, {"log_probs": [PROBS, PROBS]}),
    "joint_information": (decisions.joint_information, {"probs": [PROBS, PROBS]}),
}


@cache
def posterior(kind: str = "classes") -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(8, 5)
        options = {"training": Training(epochs=1), "progress": False}
        if kind == "classes":
            return dubito.Laplace().fit(mlp(2), (x, torch.arange(8) % 2), **options)
        return dubito.Variational().fit(mlp(1), (x, torch.randn(8, 1)), likelihood="gaussian", **options)


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 40).reshape(8, 5)


def pair() -> tuple[Tensor, Tensor]:
    return inputs(), torch.arange(8) % 2


def network() -> nn.Module:
    with torch.random.fork_rng():
        return mlp(2)


def _distill(**options: Any) -> Any:
    return dubito.distill(**{"training": Training(epochs=1), "progress": False, **options})


def _report(**options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return dubito.report(**{"path": Path(folder) / "r.html", **options})


@cache
def evaluation() -> Any:
    return dubito.evaluate(posterior(), pair(), num_samples=2)


def _load(**options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        posterior().save(Path(folder) / "p")
        return dubito.load(**{"path": Path(folder) / "p", **options})


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "sample": (lambda **o: posterior().sample(**o), lambda: {"num_samples": 2, "generator": None}),
    "predict": (lambda **o: posterior().predict(**o), lambda: {"x": inputs(), "num_samples": 2, "batch_size": 4}),
    "predict numbers": (lambda **o: posterior("numbers").predict(**o), lambda: {"x": inputs(), "num_samples": 2}),
    "quantile": (lambda **o: posterior("numbers").predict(inputs()).quantile(**o), lambda: {"q": 0.5}),
    "interval": (lambda **o: posterior("numbers").predict(inputs()).interval(**o), lambda: {"level": 0.5}),
    "log_prob": (lambda **o: posterior().predict(inputs()).log_prob(**o), lambda: {"y": pair()[1]}),
    "save": (lambda **o: posterior().save(**o), lambda: {"path": "/nonexistent/p"}),
    "load": (_load, lambda: {"model": network()}),
    "update": (lambda **o: posterior().update(progress=False, **o), lambda: {"data": pair(), "training": None}),
    "evaluate": (dubito.evaluate, lambda: {
        "posterior": posterior(), "data": pair(), "ood": {"other": inputs()}, "num_samples": 2, "batch_size": 4,
        "name": "x", "generator": None, "shifts": None, "target_scale": None,
    }),
    "report": (_report, lambda: {"results": {"a": evaluation()}, "title": "t", "data_name": "d"}),
    "acquire": (dubito.acquire, lambda: {
        "posterior": posterior(), "pool": inputs(), "num": 2, "method": "bald", "num_samples": 2, "generator": None
    }),
    "compress": (dubito.compress, lambda: {
        "posterior": posterior(), "rule": dubito.rules.Magnitude(0.5), "structure": "weights", "data": pair(),
        "example": inputs(), "temperature": 1.0, "training": None, "teacher": None, "generator": None,
    }),
    "distill": (_distill, lambda: {
        "posterior": posterior(), "student": network(), "data": inputs(), "keep": "mean", "num_samples": 2,
        "temperature": 1.0, "validation": None, "concentration_weight": None, "generator": None,
    }),
    "share_weights": (dubito.share_weights, lambda: {"posterior": posterior(), "tolerance": 1e-6}),
    "temper": (decisions.temper, lambda: {"posterior": posterior(), "calibration": pair(), "num_samples": 2}),
    "TemperedPosterior": (decisions.TemperedPosterior, lambda: {"posterior": posterior(), "temperature": 2.0}),
    "Detector": (decisions.Detector, lambda: {
        "posterior": posterior(), "calibration": inputs(), "score": "entropy", "false_positive_rate": 0.2,
        "num_samples": 2, "generator": None,
    }),
    "Rejector": (decisions.Rejector, lambda: {
        "posterior": posterior(), "calibration": pair(), "risk": 0.3, "score": "entropy", "confidence": None,
        "num_samples": 2,
    }),
    "ConformalSets": (decisions.ConformalSets, lambda: {
        "posterior": posterior(), "calibration": pair(), "coverage": 0.5, "method": "thr", "randomized": False,
        "num_samples": 2,
    }),
    "ConformalIntervals": (decisions.ConformalIntervals, lambda: {
        "posterior": posterior("numbers"), "calibration": (inputs(), inputs()[:, :1]), "coverage": 0.5,
        "method": "stddev", "num_samples": 2,
    }),
    "energy": (decisions.energy, lambda: {"posterior": posterior(), "x": inputs()}),
    "parse": (dubito.parse, lambda: {"text": "map()", "namespace": ""}),
    "mlp": (models.mlp, lambda: {"inputs": 5, "outputs": 2, "hidden": (4,), "activation": "relu"}),
    "build": (models.build, lambda: {"name": "mlp", "input_shape": (5,), "num_outputs": 2}),
    "lstm": (models.lstm, lambda: {"vocabulary": 9, "outputs": 2, "width": 4, "embedding": 4, "depth": 1, "dropout": 0.1}),
    "corrupt": (data.corrupt, lambda: {
        "inputs": torch.zeros(2, 1, 8, 8), "kind": "noise", "severity": 1, "generator": None
    }),
    "rotate": (data.rotate, lambda: {"inputs": torch.zeros(2, 1, 8, 8), "degrees": 10.0}),
    "shuffle_labels": (data.shuffle_labels, lambda: {"targets": torch.arange(4), "fraction": 0.5, "generator": None}),
    "tokenize": (data.tokenize, lambda: {"text": "a b"}),
    "load data": (data.load, lambda: {
        "name": "diabetes", "split": 0, "gap": False, "validation": 0.1, "limit": 20, "limit_test": 5, "generator": None
    }),
    "load_table": (data.load_table, lambda: {
        "table": STRANGE["data frame"](), "target": "a", "test": 0.5, "validation": 0.0, "limit": None, "task": None,
        "categorical": (), "dates": None, "ignore": (), "generator": None,
    }),
    "resolve": (dubito.likelihoods.resolve, lambda: {"likelihood": "gaussian"}),
    "select report": (lambda **o: select.random(4).report(**o), lambda: {"model": network(), "data": pair()}),
    "variational.convert": (dubito.variational.convert, lambda: {
        "model": network(), "estimator": "local", "initial_scale": 0.03, "biases": "random", "weights": select.all()
    }),
    "rank1.convert": (dubito.rank1.convert, lambda: {"model": network(), "recipe": None, "inputs": None}),
}  # fmt: skip


class Arguments:
    """A call of a public function; metrics may be given lists."""

    def generate(self, rng: random.Random) -> Case:
        name = rng.choice([*METRICS, *CALLS])
        known = METRICS[name][1] if name in METRICS else CALLS[name][1]()
        case: Case = {"name": name, "lists": rng.random() < 0.5}
        if rng.random() < 0.9:
            case["strange"] = [rng.choice(sorted(known)), rng.choice(NAMES)]
        return case

    def run(self, case: Case) -> None:
        if case["name"] in METRICS:
            return self._metric(case)
        function, make = CALLS[case["name"]]
        options = make()
        if "strange" in case:
            options[case["strange"][0]] = STRANGE[case["strange"][1]]()
        function(**options)
        return None

    def _metric(self, case: Case) -> None:
        function, known = METRICS[case["name"]]
        options = {
            name: value if case["lists"] or not isinstance(value, list) else torch.tensor(value)
            for name, value in known.items()
        }
        if "strange" in case:
            options[case["strange"][0]] = STRANGE[case["strange"][1]]()
        found = function(**options)
        if "strange" not in case:
            plain = {name: torch.tensor(v) if isinstance(v, list) else v for name, v in known.items()}
            truth = function(**plain)
            if isinstance(found, Tensor):
                require(torch.equal(found, truth) or bool(found.isnan()), "lists and tensors give different scores")
