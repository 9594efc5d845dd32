"""What is known of a posterior's predictions: `evaluate` measures, `plots` draws, `report` lays out one HTML page."""

from __future__ import annotations

from dubito.uses.reporting.evaluation import Evaluation
from dubito.uses.reporting.measure import evaluate
from dubito.uses.reporting.page import report

__all__ = ["Evaluation", "evaluate", "report"]
