"""Evaluate the predictions of posteriors, draw the results, and write them as one HTML page."""

from dubito.uses.reporting.evaluation import Evaluation
from dubito.uses.reporting.measure import evaluate
from dubito.uses.reporting.page import report

__all__ = ["Evaluation", "evaluate", "report"]
