"""Look at the installation: versions, extras and data sets."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.util import find_spec

import torch

import dubito
from dubito import data
from dubito.uses.runs.doctor import Examined

# What each extra adds, and the packages it needs.
EXTRAS = {
    "tables": ("Parquet files and spreadsheets", ("pandas", "pyarrow", "openpyxl")),
    "onnx": ("ONNX files", ("onnx", "onnxscript", "onnxruntime")),
    "shrink": ("removing units from networks with skip connections", ("torch_pruning",)),
    "quant": ("8-bit weights", ("torchao",)),
    "serve": ("`dubito serve` and `dubito play`", ("starlette", "uvicorn")),
    "samplers": ("ArviZ objects of samplers", ("arviz",)),
}


def examine_machine() -> Iterator[Examined]:
    """Yield what was found about the installation."""
    device = "CUDA" if torch.cuda.is_available() else "no CUDA"
    yield Examined("ok", f"dubito {dubito.__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
                        f"{device}, {torch.get_num_threads()} thread(s).")  # fmt: skip
    yield Examined("ok", "Tables of text (.csv, .tsv) need no extra.")
    for name, (what, packages) in EXTRAS.items():
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            yield Examined("warning", f"{what}: {', '.join(missing)} not installed; pip install 'dubito[{name}]'.")
        else:
            yield Examined("ok", f"{what}: installed.")
    found = [row.name for row in data.available() if row.found]
    yield Examined("ok", f"{len(found)} data sets by name were found; `dubito data list` shows them.")
