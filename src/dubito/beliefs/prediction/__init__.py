"""What a posterior predicts: a distribution over targets, and how much of its spread is doubt about the weights.

`ClassPrediction` holds class probabilities in log space, `RegressionPrediction` an equal mixture of Gaussians. Both are
immutable, index and concatenate along the batch, and become numpy arrays or a pandas frame.
"""

from dubito.beliefs.prediction.base import Prediction
from dubito.beliefs.prediction.classification import ClassPrediction
from dubito.beliefs.prediction.regression import RegressionPrediction

__all__ = ["ClassPrediction", "Prediction", "RegressionPrediction"]
