"""Fits, predictions, files and uses of every recipe on odd networks and data; one argument at most is strange."""

from __future__ import annotations

import contextlib
import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dubito.errors import DubitoError, UnsupportedError
from torch import Tensor

import dubito
from dubito import Training
from fuzz.engine import Case, require
from fuzz.networks import CLASSES, DATA, LIKELIHOODS, NETWORKS, RECIPES, data_of, likelihood_of, outputs_of, tensors_of
from fuzz.strange import NAMES, STRANGE

FIT = ["model", "data", "likelihood", "validation", "training", "num_data", "generator"]
USES = [
    "sample",
    "marginals",
    "save",
    "cuts",
    "evaluate",
    "acquire",
    "temper",
    "conformal",
    "compress",
    "distill",
    "prior",
]
PREDICT = ["x", "num_samples", "batch_size", "generator"]


class Api:
    """One fit and a few uses."""

    def generate(self, rng: random.Random) -> Case:
        likelihood = rng.choice(LIKELIHOODS)
        training: dict[str, Any] = {"epochs": rng.choice([1, 2, 4]), "batch_size": rng.choice([4, 5, 128])}
        if rng.random() < 0.3:
            training["clip"] = rng.choice([0.1, 1.0])
        if rng.random() < 0.3:
            training["optimizer"] = rng.choice(["adam", "adamw", "sgd"])
        if rng.random() < 0.2:
            training["schedule"] = rng.choice(["constant", "linear", "hold", "step"])
        if rng.random() < 0.2:
            training["early_stopping"] = 1
        case: Case = {
            "seed": rng.randrange(2**31),
            "recipe": rng.choice(RECIPES),
            "network": rng.choice(list(NETWORKS)),
            "likelihood": likelihood,
            "classes": rng.choice([2, 3]),
            "rows": rng.choice([2, 6, 9, 13, 16, 24]),
            "scale": rng.choice([1.0, 1.0, 1.0, 0.0, 1e-20, 1e6, 1e30]),
            "data": rng.choice(DATA),
            "double": rng.random() < 0.2,
            "training": training,
            "uses": rng.sample(USES, rng.choice([0, 1, 1, 2])),
        }
        draw = rng.random()
        if draw < 0.25:
            case["strange fit"] = [rng.choice(FIT), rng.choice(NAMES)]
        elif draw < 0.5:
            case["strange predict"] = [rng.choice(PREDICT), rng.choice(NAMES)]
        return case

    def run(self, case: Case) -> None:
        torch.manual_seed(case["seed"] % 1000)
        model = NETWORKS[case["network"]](outputs_of(case["likelihood"], case["classes"]))
        model = model.double() if case["double"] else model
        x, y = tensors_of(case)
        data = data_of(case["data"], x, y)
        arguments: dict[str, Any] = {
            "model": model, "data": data, "likelihood": likelihood_of(case["likelihood"]),
            "training": Training(**case["training"]), "progress": False,
        }  # fmt: skip
        if "early_stopping" in case["training"] or "Auto" in case["recipe"]:
            arguments["validation"] = (x, y)
        if "strange fit" in case:
            name, value = case["strange fit"]
            arguments[name] = STRANGE[value]()
        odd = {each: STRANGE[each]() for each in case.get("strange predict", ())[1:]}
        before = _Before(model, x, y)
        try:
            posterior = dubito.parse(case["recipe"]).fit(**arguments)
            self._ask(case, posterior, x, y, NETWORKS[case["network"]], odd)
        finally:
            before.check()

    def _ask(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any, odd: Case) -> None:
        fine = "strange fit" not in case
        options: dict[str, Any] = {"x": x, "num_samples": 3}
        if "strange predict" in case:
            name, value = case["strange predict"]
            options[name] = odd[value]
        elif not fine and case["strange fit"][0] == "model":
            return  # it has outputs of its own
        digest = posterior.digest()
        prediction = posterior.predict(options.pop("x"), **options)
        _check(prediction, case, len(x) if "strange predict" not in case else None)
        for use in case["uses"] if fine and "strange predict" not in case else ():
            with contextlib.suppress(UnsupportedError), torch.random.fork_rng():
                getattr(self, f"_{use}")(case, posterior, x, y, build)
        require(posterior.digest() == digest, "the posterior has changed")

    def _sample(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any) -> None:
        drawn = posterior.sample(2)
        for name, value in posterior.mean().items():
            require(drawn[name].shape == (2, *value.shape), f"samples of {name} have another shape")
            require(drawn[name].isfinite().all(), f"samples of {name} are not finite")

    def _marginals(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any) -> None:
        for name, value in posterior.marginals()[1].items():
            require(value.isfinite().all() and (value >= 0).all(), f"the variance of {name} is not a variance")

    def _prior(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any) -> None:
        posterior.prior()
        require(repr(posterior), "no words")

    def _save(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "posterior"
            posterior.save(path)
            torch.manual_seed(1)
            model = build(outputs_of(case["likelihood"], case["classes"]))
            loaded = dubito.load(path, model.double() if case["double"] else model)
        require(loaded.digest() == posterior.digest(), "the loaded posterior is another one")
        first, second = (each.predict(x, num_samples=3) for each in (posterior, loaded))
        require(torch.equal(_center(first), _center(second)), "the loaded posterior predicts otherwise")

    def _cuts(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any) -> None:
        whole = _center(posterior.predict(x, num_samples=3))
        parts = _center(posterior.predict(x, num_samples=3, batch_size=4))
        tolerance = 1e-3 * float(whole.abs().max()) + 1e-6
        require(torch.allclose(whole, parts, rtol=1e-3, atol=tolerance), "the cut of the batches matters")

    def _evaluate(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any) -> None:
        dubito.evaluate(posterior, (x, y), num_samples=3)

    def _acquire(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any) -> None:
        chosen = dubito.acquire(posterior, x, 2, num_samples=3)
        require(len(set(chosen.tolist())) == 2, "not two rows")

    def _temper(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any) -> None:
        _check(dubito.decisions.temper(posterior, (x, y), num_samples=3).predict(x, num_samples=3), case, len(x))

    def _conformal(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any) -> None:
        kind = "ConformalSets" if case["likelihood"] in CLASSES else "ConformalIntervals"
        getattr(dubito.decisions, kind)(posterior, (x, y), coverage=0.5, num_samples=3)

    def _compress(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any) -> None:
        dubito.compress(posterior, dubito.rules.Magnitude(0.5), data=(x, y))

    def _distill(self, case: Case, posterior: Any, x: Tensor, y: Tensor, build: Any) -> None:
        student = build(outputs_of(case["likelihood"], case["classes"]))
        dubito.distill(posterior, student, x, training=Training(epochs=1), num_samples=3, progress=False)


class _Before:
    """The user's model, data and global generators before a call, to be compared after it."""

    def __init__(self, model: Any, x: Tensor, y: Tensor) -> None:
        self.model, self.data = model, (x, y)
        self.state = copy.deepcopy(model.state_dict())
        self.flags = [(module.training, [p.requires_grad for p in module.parameters()]) for module in model.modules()]
        self.copies = x.clone(), y.clone()
        self.generators = self._generators()

    def _generators(self) -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

    def check(self) -> None:
        flags = [(module.training, [p.requires_grad for p in module.parameters()]) for module in self.model.modules()]
        require(flags == self.flags, "the model's flags have changed")
        state = self.model.state_dict()
        require(all(torch.equal(state[name], value) for name, value in self.state.items()), "the model has changed")
        require(all(p.grad is None for p in self.model.parameters()), "the model has gradients")
        require(all(map(torch.equal, self.data, self.copies)), "the data has changed")
        require(self._generators() == self.generators, "a global generator has moved")


def _center(prediction: Any) -> Tensor:
    return prediction.probs if hasattr(prediction, "probs") else prediction.mean


def _check(prediction: Any, case: Case, rows: int | None) -> None:
    center = _center(prediction)
    require(center.isfinite().all(), "the prediction is not finite")
    require(rows is None or len(center) == rows, "the prediction has another number of rows")
    parts = prediction.aleatoric + prediction.epistemic
    if hasattr(prediction, "probs"):
        require((prediction.probs >= 0).all(), "a probability is negative")
        if case["likelihood"] in CLASSES:
            require((prediction.probs.sum(-1) - 1).abs().max() < 1e-3, "probabilities do not sum to one")
        require(torch.allclose(prediction.entropy, parts, rtol=1e-3, atol=1e-4), "entropy is not the sum of its parts")
    else:
        require(prediction.stddev.isfinite().all() and (prediction.stddev >= 0).all(), "stddev is not one")
        whole = prediction.stddev**2
        require(torch.allclose(whole, parts, rtol=1e-2, atol=1e-6), "variance is not the sum of its parts")


__all__ = ["Api", "DubitoError"]
