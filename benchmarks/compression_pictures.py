"""The pictures of `compression.py`: weights through training, and errors against the fraction of weights removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

PICTURES = Path(__file__).parents[1] / "docs" / "img"
CURVES = {
    "kron obs, updated": ("Kronecker Laplace, surgeon's update", "tab:blue", "-"),
    "magnitude": ("magnitude, over all layers", "black", "-"),
    "kron obs": ("Kronecker Laplace, signal to noise", "tab:blue", "--"),
    "kron opd": ("Kronecker Laplace, damage", "tab:blue", ":"),
    "diag opd": ("diagonal Laplace, damage", "tab:orange", "-"),
    "magnitude by layer": ("magnitude, by layer", "gray", "--"),
    "random": ("random", "lightgray", "-"),
}


def draw_strip(shots: list[tuple[int, tuple[Tensor, Tensor]]]) -> None:
    """Draw inputs of units and a patch of a matrix, a column for each epoch."""
    figure = Figure(figsize=(1.7 * len(shots), 6.2), layout="constrained")
    axes = figure.subplots(2, len(shots), height_ratios=(3, 1))
    for column, (epoch, (filters, patch)) in enumerate(shots):
        axes[0, column].imshow(filters, cmap="RdBu", vmin=-0.15, vmax=0.15)
        axes[1, column].imshow(patch, cmap="RdBu", vmin=-0.15, vmax=0.15)
        axes[0, column].set_title(f"epoch {epoch}", fontsize=9)
        axes[1, column].set_title(f"{100 * float((patch != 0).double().mean()):.0f} % left", fontsize=9)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    _save(figure, "sparse-variational-dropout.png")


def draw_curves(found: dict[str, list[dict[str, Any]]]) -> None:
    """Draw test errors against what is gone, a panel for each data set, with one standard deviation over seeds."""
    figure = Figure(figsize=(4.6 * len(found), 4.2), layout="constrained")
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (name, seeds) in zip(axes, found.items(), strict=True):
        gone = [100 * one for one in seeds[0]["grid"]]
        for key, (label, color, style) in CURVES.items():
            errors = np.array([one[key] for one in seeds])
            axis.errorbar(gone, errors.mean(0), errors.std(0), label=label, color=color, linestyle=style, capsize=2)
        axis.set(title=f"{name}, {len(seeds)} seeds", xlabel="weights removed, no retraining (%)", yscale="log")
        axis.set_xticks(gone)
        axis.tick_params(axis="x", labelsize=7)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0].set_ylabel("test error (%)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
    _save(figure, "oneshot.png")


def _save(figure: Figure, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / name, dpi=110)
    print(f"wrote {name}")
