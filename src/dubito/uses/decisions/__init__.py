"""Act on predictions: detect, abstain, guarantee coverage, calibrate, and choose which inputs to label.

Everything here works on any posterior; thresholds and temperatures are fitted on data held out from training.
"""

from dubito.fitting.decision_rule import DecisionRule
from dubito.uses.decisions.acquisition import Acquirer, acquire
from dubito.uses.decisions.batch_information import joint_information
from dubito.uses.decisions.calibration_scores import density_ratio
from dubito.uses.decisions.conformal import ConformalIntervals, ConformalSets
from dubito.uses.decisions.detection import Detector
from dubito.uses.decisions.online import OnlineConformal
from dubito.uses.decisions.rejection import Decision, Rejector
from dubito.uses.decisions.scores import energy, score_prediction
from dubito.uses.decisions.temperature import TemperedPosterior, temper, tempered

__all__ = [
    "Acquirer",
    "ConformalIntervals",
    "ConformalSets",
    "Decision",
    "DecisionRule",
    "Detector",
    "OnlineConformal",
    "Rejector",
    "TemperedPosterior",
    "acquire",
    "density_ratio",
    "energy",
    "joint_information",
    "score_prediction",
    "temper",
    "tempered",
]
