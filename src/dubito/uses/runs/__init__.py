"""Runs: from a table to predictions with intervals and decisions, kept in a folder.

run = dubito.runs.fit("houses.csv", "price")
dubito.runs.save(run, "houses/")
run = dubito.runs.load("houses/")
run.predict("new.csv")["prediction"]
"""

from dubito.uses.runs.calibration import Calibration
from dubito.uses.runs.change import update
from dubito.uses.runs.doctor import Examined, examine
from dubito.uses.runs.explanation import Cause, Explanation, explain
from dubito.uses.runs.folder import is_run, load, save
from dubito.uses.runs.guard import GuardedPosterior, TrainingRange
from dubito.uses.runs.networks import NetworkSource
from dubito.uses.runs.packed import export, pack
from dubito.uses.runs.prediction import TablePrediction
from dubito.uses.runs.run import TableEvaluation, TableRun
from dubito.uses.runs.shrinking import compressed, explored
from dubito.uses.runs.table_fit import fit, fit_dataset

__all__ = [
    "Calibration",
    "Cause",
    "Examined",
    "Explanation",
    "GuardedPosterior",
    "NetworkSource",
    "TableEvaluation",
    "TablePrediction",
    "TableRun",
    "TrainingRange",
    "compressed",
    "examine",
    "explain",
    "explored",
    "export",
    "fit",
    "fit_dataset",
    "is_run",
    "load",
    "pack",
    "save",
    "update",
]
