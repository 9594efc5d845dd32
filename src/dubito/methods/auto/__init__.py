"""`Auto`: try several methods on held-out examples and return the best posterior."""

from dubito.fitting.auto_explanation import AutoExplanation, CandidateScore
from dubito.methods.auto.recipe import Auto

__all__ = ["Auto", "AutoExplanation", "CandidateScore"]
