"""What is known of a posterior's predictions: `evaluate` measures, `plots` draws, `report` lays out one HTML page."""

from __future__ import annotations

from dubito.reporting.evaluation import Evaluation
from dubito.reporting.measure import evaluate
from dubito.reporting.page import report

__all__ = ["Evaluation", "evaluate", "report"]
