"""Every function of `metrics`, `decisions`, `data`, `models` and the top level, with one strange argument at most."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dubito import decisions, metrics, priors, select
from dubito.core.settings import _REGISTRY, Setting, _default, load_all
from fuzz.calls import CALLS
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
def settings() -> dict[str, type[Setting]]:
    """Every setting that has fields, by name."""
    load_all()
    known = {name: cls for name, cls in _REGISTRY.items() if cls.__module__.startswith("dubito")}
    return {name: cls for name, cls in sorted(known.items()) if dataclasses.fields(cls)}


def _required(cls: type[Setting]) -> dict[str, Any]:
    """Valid values of the fields that have no default."""
    known: dict[str, Any] = {
        "pattern": "0",
        "params": {"0.weight": [0]},
        "priors": {"0": priors.Normal()},
        "target": 0.5,
    }
    known |= dict.fromkeys(("first", "second", "rule"), select.all())
    needed = [field.name for field in dataclasses.fields(cls) if _default(field) is dataclasses.MISSING]  # type: ignore[arg-type]
    return {name: known.get(name, 1) for name in needed}


class Arguments:
    """A call of a public function, or a setting; one or two arguments are strange. Metrics may be given lists."""

    def generate(self, rng: random.Random) -> Case:
        name = rng.choice([*METRICS, *CALLS, "setting"])
        case: Case = {"name": name, "lists": rng.random() < 0.5}
        if name == "setting":
            case["setting"] = rng.choice(list(settings()))
        known = self._known(case)
        if rng.random() < 0.95:
            case["strange"] = [rng.choice(known), rng.choice(NAMES)]
            if len(known) > 1 and rng.random() < 0.3:
                case["strange too"] = [rng.choice(known), rng.choice(NAMES)]
        return case

    def _known(self, case: Case) -> list[str]:
        if case["name"] == "setting":
            return sorted(field.name for field in dataclasses.fields(settings()[case["setting"]]))
        return sorted(METRICS[case["name"]][1] if case["name"] in METRICS else CALLS[case["name"]][1]())

    def run(self, case: Case) -> None:
        odd = {name: STRANGE[value]() for name, value in (case[k] for k in ("strange", "strange too") if k in case)}
        if case["name"] in METRICS:
            self._metric(case, odd)
        elif case["name"] == "setting":
            cls = settings()[case["setting"]]
            made = cls(**{**_required(cls), **odd})
            require(repr(made) and hash(made) == hash(made.replace()), "a setting without words or a hash")
        else:
            function, make = CALLS[case["name"]]
            function(**{**make(), **odd})

    def _metric(self, case: Case, odd: Case) -> None:
        function, known = METRICS[case["name"]]
        options = {
            name: value if case["lists"] or not isinstance(value, list) else torch.tensor(value)
            for name, value in known.items()
        }
        found = function(**{**options, **odd})
        if not odd:
            plain = {name: torch.tensor(v) if isinstance(v, list) else v for name, v in known.items()}
            truth = function(**plain)
            if isinstance(found, Tensor):
                require(torch.equal(found, truth) or bool(found.isnan()), "lists and tensors give different scores")
