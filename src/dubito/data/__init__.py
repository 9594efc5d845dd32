"""Data sets by name, tables with a target column, toys, and corruptions."""

from __future__ import annotations

from dubito.data.catalog import Availability, Integrity, available, check, load, names
from dubito.data.corruptions import KINDS, SEVERITIES, corrupt, rotate, shifts, shuffle_labels
from dubito.data.dataset import DataSet, Pair, Standardizer, Task
from dubito.data.tables import load_table, read_table
from dubito.data.transform import TableTransform
from dubito.data.vocabulary import Vocabulary, tokenize

__all__ = [
    "KINDS",
    "SEVERITIES",
    "Availability",
    "DataSet",
    "Integrity",
    "Pair",
    "Standardizer",
    "TableTransform",
    "Task",
    "Vocabulary",
    "available",
    "check",
    "corrupt",
    "load",
    "load_table",
    "names",
    "read_table",
    "rotate",
    "shifts",
    "shuffle_labels",
    "tokenize",
]
