"""Predictions: distributions over targets, with their aleatoric and epistemic uncertainty.

`ClassPrediction` holds class probabilities in log space, `TopPrediction` only the most probable ones,
`RegressionPrediction` an equal mixture of Gaussians, `DistributionPrediction` a mixture of other distributions of
numbers, such as counts. All are immutable, can be indexed and concatenated along the batch, and convert to numpy
arrays and pandas data frames.
"""

from dubito.beliefs.prediction.base import Prediction
from dubito.beliefs.prediction.classification import ClassPrediction, TopPrediction
from dubito.beliefs.prediction.distributions import DistributionPrediction
from dubito.beliefs.prediction.regression import RegressionPrediction

__all__ = ["ClassPrediction", "DistributionPrediction", "Prediction", "RegressionPrediction", "TopPrediction"]
