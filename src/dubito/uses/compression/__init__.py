"""Make a network smaller with any posterior: plan, shrink, quantize, save, export and measure."""

from dubito.uses.compression.budget import Budget, Candidate
from dubito.uses.compression.compress import compress
from dubito.uses.compression.exploration import Exploration, Explored, explore, pick
from dubito.uses.compression.finetune import GradualMagnitude
from dubito.uses.compression.plan import Plan
from dubito.uses.compression.report import Report
from dubito.uses.compression.result import Compression
from dubito.uses.compression.search import Sweep
from dubito.uses.compression.storage import load, save

__all__ = [
    "Budget",
    "Candidate",
    "Compression",
    "Exploration",
    "Explored",
    "GradualMagnitude",
    "Plan",
    "Report",
    "Sweep",
    "compress",
    "explore",
    "load",
    "pick",
    "save",
]
