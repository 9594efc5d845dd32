"""From any posterior to a really smaller network: plan, shrink, quantize, store, export, and measure."""

from __future__ import annotations

from dubito.compression.entry import compress
from dubito.compression.finetune import GradualMagnitude
from dubito.compression.plan import Plan
from dubito.compression.report import Report
from dubito.compression.result import Compression
from dubito.compression.search import Sweep
from dubito.compression.storage import load, save

__all__ = ["Compression", "GradualMagnitude", "Plan", "Report", "Sweep", "compress", "load", "save"]
