"""Optional packages: a test that needs one skips where it is missing, and fails where it should be there."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from typing import Any

import pytest
import torch


@functools.cache
def allow_torchvision() -> None:
    """Declare the two operators that torchvision looks up, where its compiled part cannot be loaded.

    Its wheels link to CUDA. On a build of torch for the CPU alone they cannot be imported, and neither can timm,
    although none of its networks uses these operators.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        return


def needs(name: str) -> Any:
    """Return a module; without it skip, unless `make test-extras` says that everything is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of its import are not ours
        allow_torchvision()  # transformers, timm and laplace-torch import it if it is there
        if os.environ.get("DUBITO_TEST_EXTRAS"):
            return importlib.import_module(name)
        return pytest.importorskip(name)
