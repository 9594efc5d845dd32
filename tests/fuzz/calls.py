"""Public functions and methods of the arguments target, each with valid arguments that are made anew for every call."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dubito
from dubito import Training, compression, data, decisions, metrics, models, rules, select
from fitting.valid_networks import mlp
from fuzz.strange import STRANGE

Call = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]


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


def _in_folder(function: Callable[..., Any], name: str = "file") -> Callable[..., Any]:
    """Call a function in an empty working folder, with a file in it as its path unless another is given."""

    def call(**options: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            return function(**{"path": Path(folder) / name, **options})

    return call


@cache
def small() -> Any:
    return dubito.compress(posterior(), rules.Magnitude(0.5), data=pair())


@cache
def digits() -> Any:
    return data.load("digits", limit=20, limit_test=6)


@cache
def transform() -> Any:
    return data.TableTransform.fit(table(), "y")


def table() -> dict[str, list[Any]]:
    return {"a": [float(i % 7) for i in range(20)], "b": ["u", "v"] * 10, "y": [i % 2 for i in range(20)]}


def _updated(kind: type, settings: dict[str, Any], **options: Any) -> Any:
    made = kind(**settings)
    made.update(**options)
    return made.compute()


def _stored(**options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        compression.save(Path(folder) / "net", mlp(2), "dense")
        return compression.load(**{"path": Path(folder) / "net", **options})


def _csv(path: Path) -> Path:
    path.write_text("a,b,y\n" + "\n".join(f"{i % 7},{i % 3},{i % 2}" for i in range(20)))
    return path


MORE: dict[str, Call] = {
    "compare": (lambda **o: dubito.compare(**{"training": Training(epochs=1), "progress": False, **o}), lambda: {
        "model": network(), "data": pair(), "recipes": {"a": dubito.MAP()}, "test": pair(), "seeds": 1, "validation": None,
        "ood": {"o": inputs()}, "shifts": None, "target_scale": None, "base": None, "likelihood": "categorical",
    }),
    "predict_batches": (lambda **o: list(posterior().predict_batches(**o)), lambda: {
        "x": inputs(), "num_samples": 2, "batch_size": 4, "generator": None, "link": "probit",
    }),
    "predict options": (lambda **o: posterior().predict(inputs(), **o), lambda: {
        "keep_samples": None, "link": "probit", "method": "linearized", "nothing": 1,
    }),
    "conditional_mean": (lambda **o: posterior().conditional_mean(**o), lambda: {
        "keep": {name: value > 0 for name, value in posterior().mean().items()}
    }),
    "detect": (lambda **o: decisions.Detector(posterior(), inputs(), false_positive_rate=0.3).detect(**o), lambda: {"x": inputs()}),
    "reject": (lambda **o: decisions.Rejector(posterior(), pair(), risk=0.9).predict(**o), lambda: {"x": inputs()}),
    "conformal sets": (lambda **o: decisions.ConformalSets(posterior(), pair(), coverage=0.5).predict(**o), lambda: {"x": inputs()}),
    "score_prediction": (decisions.score_prediction, lambda: {"prediction": posterior().predict(inputs()), "score": "entropy"}),
    "tempered": (decisions.tempered, lambda: {"prediction": posterior().predict(inputs()), "temperature": 2.0}),
    "small.report": (lambda **o: small().report(**{"seconds": 0.001, **o}), lambda: {
        "data": pair(), "feature_names": (), "rounding": 0.002, "target_scale": None
    }),
    "small.save": (_in_folder(lambda **o: small().save(**o)), lambda: {"format": "coded", "rounding": 0.002}),
    "small.save path": (_in_folder(lambda **o: small().save(**o)), lambda: {"path": "net"}),
    "small.sweep": (lambda **o: small().sweep(**o), lambda: {"data": pair(), "targets": (0.1, 0.5)}),
    "small.bits": (lambda **o: small().bits(**o), lambda: {"rounding": 0.1}),
    "small.posterior": (lambda **o: small().posterior(**o), lambda: {
        "recipe": dubito.Laplace(structure="diag"), "data": pair(), "validation": None, "training": None, "generator": None
    }),
    "compression.save": (_in_folder(compression.save), lambda: {"model": mlp(2), "format": "dense", "steps": None}),
    "compression.load": (_stored, lambda: {"model": mlp(2)}),
    "compression.load path": (compression.load, lambda: {"path": "/nonexistent/net", "model": mlp(2)}),
    "save path": (_in_folder(lambda **o: posterior().save(**o)), lambda: {"path": "posterior"}),
    "report path": (_in_folder(dubito.report), lambda: {"results": {"a": evaluation()}, "path": "report.html"}),
    "lowest_removed": (rules.lowest_removed, lambda: {"relevance": {"a": torch.rand(4)}, "fraction": 0.5}),
    "data.check": (data.check, lambda: {"name": "digits"}),
    "data.shifts": (data.shifts, lambda: {"dataset": digits(), "kinds": ("noise",), "severities": (1, 2), "generator": None}),
    "read_table": (_in_folder(lambda path, **o: data.read_table(**{"path": _csv(path), **o}), "t.csv"), lambda: {
        "separator": None, "encoding": None, "decimal": None, "max_ratio": 100.0
    }),
    "read_table path": (data.read_table, lambda: {"path": "/nonexistent/t.csv"}),
    "describe_table": (data.describe_table, lambda: {
        "table": table(), "target": "y", "task": None, "categorical": (), "dates": None, "ignore": ()
    }),
    "TableTransform.fit": (data.TableTransform.fit, lambda: {"table": table(), "target": "y", "task": None}),
    "transform.encode": (lambda **o: transform().encode(**o), lambda: {"table": table()}),
    "transform.encode_targets": (lambda **o: transform().encode_targets(**o), lambda: {"table": table()}),
    "TableTransform.from_json": (data.TableTransform.from_json, lambda: {"text": transform().to_json()}),
    "Standardizer.fit": (data.Standardizer.fit, lambda: {"values": inputs()}),
    "standardizer.encode": (lambda **o: data.Standardizer.fit(inputs()).encode(**o), lambda: {"values": inputs()}),
    "Vocabulary.fit": (data.Vocabulary.fit, lambda: {"texts": ["a b", "b"], "max_words": 9, "min_count": 1, "max_length": 5}),
    "vocabulary.encode": (lambda **o: data.Vocabulary.fit(["a b", "b"], min_count=1).encode(**o), lambda: {"texts": ["a"]}),
    "vocabulary.decode": (lambda **o: data.Vocabulary.fit(["a b", "b"], min_count=1).decode(**o), lambda: {
        "numbers": torch.tensor([[0, 1]])
    }),
    "Vocabulary.from_json": (data.Vocabulary.from_json, lambda: {"text": "{}"}),
    "ClassificationMetrics": (metrics.ClassificationMetrics, lambda: {"num_bins": 5, "ignore_index": None}),
    "RegressionMetrics": (metrics.RegressionMetrics, lambda: {"levels": (0.5, 0.9)}),
    "classification.update": (lambda **o: _updated(metrics.ClassificationMetrics, {}, **o), lambda: {
        "log_probs": torch.tensor([[0.2, 0.8], [0.5, 0.5]]).log(), "targets": torch.tensor([0, 1])
    }),
    "regression.update": (lambda **o: _updated(metrics.RegressionMetrics, {}, **o), lambda: {
        "mean": torch.zeros(4), "stddev": torch.ones(4), "targets": torch.zeros(4), "weights": None
    }),
    "lenet5": (models.lenet5, lambda: {"input_shape": (1, 28, 28), "outputs": 10}),
    "lenet_300_100": (models.lenet_300_100, lambda: {"inputs": 4, "outputs": 3}),
    "resnet20": (models.resnet20, lambda: {"input_shape": (3, 8, 8), "outputs": 3, "width": 2, "shortcut": "pad"}),
    "resnet18": (models.resnet18, lambda: {"input_shape": (3, 8, 8), "outputs": 3, "width": 2}),
    "transformer": (models.transformer, lambda: {
        "vocabulary": 9, "outputs": 2, "length": 4, "width": 8, "depth": 1, "heads": 2, "dropout": 0.1
    }),
    **{
        f"resolve {rule!r}": (lambda rule=rule, **o: rule.resolve(**o), lambda: {
            "model": network(), "data": pair(), "likelihood": "categorical", "prior_precision": 1.0, "generator": None
        })
        for rule in (select.all(), select.last_layer(), select.layers("0"), select.random(3), select.subnetwork(3),
                     select.subspace(1, epochs=2), select.largest_magnitude(2) | select.last_layer())
    },
    "variational.kl": (dubito.variational.kl, lambda: {"module": dubito.variational.convert(network())}),
}  # fmt: skip


CALLS: dict[str, Call] = {
    "sample": (lambda **o: posterior().sample(**o), lambda: {"num_samples": 2, "generator": None}),
    "predict": (lambda **o: posterior().predict(**o), lambda: {"x": inputs(), "num_samples": 2, "batch_size": 4}),
    "predict numbers": (lambda **o: posterior("numbers").predict(**o), lambda: {"x": inputs(), "num_samples": 2}),
    "quantile": (lambda **o: posterior("numbers").predict(inputs()).quantile(**o), lambda: {"q": 0.5}),
    "interval": (lambda **o: posterior("numbers").predict(inputs()).interval(**o), lambda: {"level": 0.5}),
    "log_prob": (lambda **o: posterior().predict(inputs()).log_prob(**o), lambda: {"y": pair()[1]}),
    "save": (_in_folder(lambda **o: posterior().save(**o)), lambda: {"path": "/nonexistent/p"}),
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
    **MORE,
    "variational.convert": (dubito.variational.convert, lambda: {
        "model": network(), "estimator": "local", "initial_scale": 0.03, "biases": "random", "weights": select.all()
    }),
    "rank1.convert": (dubito.rank1.convert, lambda: {"model": network(), "recipe": None, "inputs": None}),
}  # fmt: skip
