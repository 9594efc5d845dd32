"""`TableRun`: a posterior with the encoder of its table and the calibration of its decisions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import OpenProbability, check
from dubito.core.errors import InputError
from dubito.data import Pair, Standardizer, TableTransform, Tally
from dubito.data.tables import as_table, with_target
from dubito.fitting.decision_rule import DecisionRule
from dubito.fitting.posterior import Posterior
from dubito.uses.fixed_draws import FixedDraws
from dubito.uses.reporting import Evaluation
from dubito.uses.reporting.collect import RescaledDraws
from dubito.uses.runs.calibration import UNFAMILIAR, Calibration
from dubito.uses.runs.guard import GuardedPosterior, TrainingRange
from dubito.uses.runs.networks import NetworkSource
from dubito.uses.runs.prediction import ANSWER, TablePrediction, column_names, columns_of
from dubito.uses.runs.scoring import scored

BATCH_SIZE = 8192
# Columns of free text by name.
Texts = Mapping[str, Sequence[str | None]]
COVERAGE = 0.9  # of intervals, unless another is chosen


@dataclass(frozen=True, eq=False)
class TableRun:
    """What `runs.fit` returns and `runs.load` reads: everything that is needed to predict rows of a table.

    Attributes:
        posterior: The posterior, which is less certain outside of the range of its training rows.
        encoder: Turns rows into inputs.
        network: How to build the network again.
        calibration: What held-out rows say about intervals and decisions.
        parts: Encoded rows: those that were not trained on under ``"validation"`` and ``"held_out"``, and a sample of
            the training rows under ``"train"``.
        scores: The evaluation on the held-out rows.
        settings: What else was chosen: the table, the recipe, the seed, and so on; plain values.
        decisions: Decision rules of the posterior by name, which are saved with the run.
        texts: Of the parts ``"train"`` and ``"held_out"``, the columns of free text.
    """

    posterior: Posterior
    encoder: TableTransform
    network: NetworkSource
    calibration: Calibration
    parts: Mapping[str, Pair]
    scores: Evaluation
    settings: Mapping[str, Any] = field(default_factory=dict)
    decisions: Mapping[str, DecisionRule] = field(default_factory=dict)
    texts: Mapping[str, Texts] = field(default_factory=dict)

    @checked_arguments
    def with_decision(self, name: str, rule: DecisionRule) -> TableRun:
        """Return the run with one more decision rule, such as a `Detector`, under a name; it is saved with the run.

        Args:
            name: Letters, digits, "-" and "_".
            rule: A rule that was fitted with the posterior of this run; its inputs are ``run.encoder.encode(table)``.
        """
        if re.fullmatch(r"[\w-]{1,100}", name) is None:
            raise InputError(f"The name of a decision rule must be letters, digits, '-' and '_', got {name!r}.")
        if rule.posterior is not self.posterior and rule.posterior.digest() != self.posterior.digest():
            raise InputError(f"The rule {name!r} was fitted with another posterior: fit it with `run.posterior`.")
        return replace(self, decisions={**self.decisions, name: rule})

    @property
    def unguarded(self) -> Posterior:
        """The posterior without the guard for rows outside of the range of the training rows."""
        return self.posterior.posterior if isinstance(self.posterior, GuardedPosterior) else self.posterior

    @property
    def task(self) -> str:
        """``"classification"`` or ``"regression"``."""
        return self.encoder.task

    @property
    def target(self) -> str:
        """The column that is predicted."""
        return self.encoder.target

    @property
    def coverage(self) -> float:
        """The probability with which an interval holds the truth, unless another is asked for."""
        return float(self.settings.get("coverage", COVERAGE))

    @property
    def risk(self) -> float | None:
        """The largest risk of an answer, unless another is asked for: an error rate, or a mean absolute error."""
        found = self.settings.get("risk")
        return None if found is None else float(found)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of a prediction."""
        return column_names(self.encoder.class_names)

    @property
    def target_scale(self) -> Standardizer | None:
        """The map from standardised targets to original units; None for classes."""
        return target_scale(self.encoder)

    def cells(self, part: str, places: Sequence[int] | None = None) -> dict[str, list[Any]]:
        """Return rows of a part as columns, as far as the run knows them; see `TableTransform.decode`."""
        inputs = self.parts[part][0]
        chosen = list(range(len(inputs)) if places is None else places)
        found = self.encoder.decode(inputs[chosen])
        texts = {name: [column[place] for place in chosen] for name, column in self.texts.get(part, {}).items()}
        return found | texts

    @cached_property
    def _draws(self) -> RescaledDraws:
        return rescaled_draws(self.posterior, self.encoder)

    def predict(
        self, table: Any, *, coverage: float | None = None, risk: float | None = None, tally: Tally | None = None
    ) -> TablePrediction:
        """Predict the rows of a table.

        Args:
            table: A pandas frame, a dict of columns, a `Table`, or the path of a file.
            coverage: The probability with which an interval holds the truth; that of the run if None.
            risk: The largest risk of an answer; that of the run if None.
            tally: Counts cells that the training rows did not prepare for; without it many stray cells are an error.
        """
        inputs = self.encoder.encode(as_table(table), tally)
        return self.predict_inputs(inputs, coverage=coverage, risk=risk)

    def predict_inputs(
        self, inputs: Tensor, *, coverage: float | None = None, risk: float | None = None
    ) -> TablePrediction:
        """Predict rows that the encoder has encoded ``[N, features]``; see `predict`."""
        coverage = self.coverage if coverage is None else coverage
        check("coverage", OpenProbability, coverage)
        found = self._draws.predict(inputs)
        columns = columns_of(found, self.encoder.class_names, self.calibration, coverage, risk or self.risk)
        return TablePrediction(columns, found)

    @checked_arguments
    def evaluate(self, table: Any, *, name: str | None = None) -> TableEvaluation:
        """Score the predictions for a table that has the target column."""
        rows = with_target(as_table(table), self.target)
        tally = Tally()
        pair = self.encoder.encode(rows, tally), self.encoder.encode_targets(rows)
        return self.evaluate_pair(pair, name=name, tally=tally)

    def evaluate_pair(self, pair: Pair, *, name: str | None = None, tally: Tally | None = None) -> TableEvaluation:
        """Score the predictions for encoded rows and their targets."""
        found = self.predict_inputs(pair[0])
        scores = scored(
            self.posterior, pair, found.distribution, encoder=self.encoder, draws=self._draws,
            calibration=self.calibration, coverage=self.coverage, name=name or self.settings.get("name"),
        )  # fmt: skip
        truth = self._draws.scaled(pair[1])
        return TableEvaluation(scores, decision_scores(found, self.encoder, truth), tally)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the run as a folder, which `dubito.runs.load` and the command line read; see `runs.save`."""
        from dubito.uses.runs.folder import save

        save(self, path, overwrite=overwrite)

    def __repr__(self) -> str:
        what = f"{len(self.encoder.class_names)} classes of" if self.task == "classification" else "the number"
        return f"<TableRun: predicts {what} {self.target!r} by {self.posterior.recipe!r}>"


@dataclass(frozen=True)
class TableEvaluation:
    """What `TableRun.evaluate` measured; ``print`` it.

    Attributes:
        scores: The scores of the predictions, in original units.
        decisions: How intervals and decisions did: ``coverage`` and ``width`` of the intervals (numbers only),
            ``answered`` (the share of rows that were answered), ``risk`` (the mean loss of these) and ``unfamiliar``
            (the share of rows that were less familiar than 99 % of the held-out rows).
        tally: The cells that the training rows did not prepare for.
    """

    scores: Evaluation
    decisions: dict[str, float]
    tally: Tally | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        odd = None if self.tally is None else self.tally.to_json()
        return {"evaluation": self.scores.to_json(), "decisions": self.decisions, "odd_cells": odd}

    def __str__(self) -> str:
        told = "   ".join(f"{name} {value:.4g}" for name, value in self.decisions.items())
        return f"{self.scores}\n\ndecisions: {told}"


def decision_scores(found: TablePrediction, encoder: TableTransform, truth: Tensor) -> dict[str, float]:
    """Return how intervals and decisions did on rows whose targets are known; see `TableEvaluation`."""
    answered = found["decision"] == ANSWER
    scores: dict[str, float] = {}
    if encoder.task == "regression":
        values = truth[:, 0].double().numpy()
        scores["coverage"] = float(((values >= found["lower"]) & (values <= found["upper"])).mean())
        scores["width"] = float((found["upper"] - found["lower"]).mean())
        loss = np.abs(values - found["prediction"])
    else:
        names = np.array(encoder.class_names, dtype=object)
        loss = (names[truth.numpy()] != found["prediction"]).astype(np.float64)
    scores["answered"] = float(answered.mean())
    if answered.any():
        scores["risk"] = float(loss[answered].mean())
    scores["unfamiliar"] = float((found["unfamiliar"] >= UNFAMILIAR).mean())
    return scores


def target_scale(encoder: TableTransform) -> Standardizer | None:
    """Return the map from standardised targets to original units; None for classes."""
    if encoder.task == "classification":
        return None
    loc, scale = torch.tensor([[encoder.target_loc], [encoder.target_scale]], dtype=torch.float64)
    return Standardizer(loc, scale)


def rescaled_draws(posterior: Posterior, encoder: TableTransform) -> RescaledDraws:
    """Return how a run predicts: always with the same posterior samples, and in original units."""
    return RescaledDraws(FixedDraws(posterior, None, None, batch_size=BATCH_SIZE), target_scale(encoder))


def calibrated(
    posterior: Posterior,
    encoder: TableTransform,
    network: NetworkSource,
    parts: Mapping[str, Pair],
    settings: Mapping[str, Any],
) -> TableRun:
    """Return the run of a posterior, calibrated and scored on the held-out rows."""
    if "held_out" not in parts:
        raise InputError("A run needs held-out rows to calibrate its decisions: give some.")
    guarded = (
        posterior if isinstance(posterior, GuardedPosterior) else GuardedPosterior(posterior, TrainingRange.of(encoder))
    )
    draws, (inputs, targets) = rescaled_draws(guarded, encoder), parts["held_out"]
    prediction = draws.predict(inputs)
    calibration = Calibration.of(prediction, draws.scaled(targets))
    scores = scored(
        guarded, (inputs, targets), prediction, encoder=encoder, draws=draws, calibration=calibration,
        coverage=float(settings.get("coverage", COVERAGE)), name=settings.get("name"),
    )  # fmt: skip
    return TableRun(guarded, encoder, network, calibration, parts, scores, settings)
