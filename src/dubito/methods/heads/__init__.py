"""Random last layers that are trained with the network: `VBLL`, `SNGP` and `DKL`."""

from dubito.methods.heads.posterior import HeadPosterior
from dubito.methods.heads.recipes import DKL, SNGP, VBLL

__all__ = ["DKL", "SNGP", "VBLL", "HeadPosterior"]
