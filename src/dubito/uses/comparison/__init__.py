"""Fit several recipes to the same data, evaluate each of them, and show the scores side by side."""

from dubito.uses.comparison.compare import compare
from dubito.uses.comparison.result import Comparison, Failure, Run

__all__ = ["Comparison", "Failure", "Run", "compare"]
