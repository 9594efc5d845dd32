"""Write a posterior to one file that predicts with its uncertainty and runs without Dubito."""

from dubito.uses.export.exporting import Exported, export
from dubito.uses.export.few_bits import export_few_bits, export_int8, export_network
from dubito.uses.export.formats import find_format
from dubito.uses.export.inputs import Encoder

__all__ = ["Encoder", "Exported", "export", "export_few_bits", "export_int8", "export_network", "find_format"]
