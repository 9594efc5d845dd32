"""Data sets by name, tables with a target column, toys, and corruptions."""

from dubito.data.catalog import Availability, Integrity, available, check, load, names
from dubito.data.corruptions import KINDS, SEVERITIES, corrupt, rotate, shifts, shuffle_labels
from dubito.data.dataset import DataSet, Pair, Standardizer, Task
from dubito.data.describe import ColumnDescription, TableDescription, describe_table
from dubito.data.table import Table
from dubito.data.table_files import read_table
from dubito.data.tables import load_table
from dubito.data.tally import Tally
from dubito.data.transform import TableTransform
from dubito.data.vocabulary import Vocabulary, tokenize

__all__ = [
    "KINDS",
    "SEVERITIES",
    "Availability",
    "ColumnDescription",
    "DataSet",
    "Integrity",
    "Pair",
    "Standardizer",
    "Table",
    "TableDescription",
    "TableTransform",
    "Tally",
    "Task",
    "Vocabulary",
    "available",
    "check",
    "corrupt",
    "describe_table",
    "load",
    "load_table",
    "names",
    "read_table",
    "rotate",
    "shifts",
    "shuffle_labels",
    "tokenize",
]
