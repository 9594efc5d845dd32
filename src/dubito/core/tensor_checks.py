"""Check the arguments of metrics cheaply: one pass over the rows, never a second pass over all N·C entries."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.core.errors import InputError

# Wide enough for the rounding of bfloat16 probabilities, narrow enough to tell logits from probabilities.
_TOLERANCE = 1e-2


def class_rows(name: str, values: Tensor, targets: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Flatten `values` [..., C] to [N, C] and `targets` [...] to [N], without the rows to ignore; check the targets."""
    if not values.is_floating_point() or values.ndim < 2 or values.shape[-1] < 2:
        raise InputError(
            f"{name} must be floating point with at least two classes on the last axis, but it is {values.dtype} of "
            f"shape {tuple(values.shape)}; for one sigmoid output p stack 1 - p and p."
        )
    if targets.shape != values.shape[:-1]:
        raise InputError(
            f"{name} of shape {tuple(values.shape)} needs targets of shape {tuple(values.shape[:-1])}, one class index "
            f"per row, but targets has shape {tuple(targets.shape)}."
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise InputError(f"targets must be integer class indices, but they are {targets.dtype}; convert with .long().")
    rows, labels = widen(values).flatten(0, -2), targets.flatten().long()
    if ignore_index is not None:
        keep = labels != ignore_index
        rows, labels = rows[keep], labels[keep]
    if labels.numel() == 0:
        raise InputError(f"{name} has no row to measure: it is empty, or every target is the ignored index.")
    low, high = (int(bound) for bound in labels.aminmax())
    if low < 0 or high >= rows.shape[1]:
        raise InputError(
            f"targets must lie in 0..{rows.shape[1] - 1}, but {low if low < 0 else high} was found; relabel them or "
            "name it with ignore_index."
        )
    return rows, labels


def widen(values: Tensor) -> Tensor:
    """Detach the tensor and convert half precision to float32."""
    return at_least_float32(values.detach())


def at_least_float32(values: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def check_confidence(name: str, confidence: Tensor, num_classes: int) -> None:
    """Check the largest value of each row, which shows NaN anywhere in the row, and logits given as probabilities."""
    low, high = (float(bound) for bound in confidence.aminmax())
    if low != low:
        raise InputError(f"{name} contains NaN; check the model's outputs before measuring them.")
    if low * num_classes < 1 - _TOLERANCE or high > 1 + _TOLERANCE:
        raise InputError(
            f"{name} is not normalized over its last axis: the largest probability of a row must lie in "
            f"[1/{num_classes}, 1], but {high if high > 1 + _TOLERANCE else low:.4g} was found; apply softmax (or "
            "log_softmax where log_probs are asked for)."
        )


def top_class(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest probability of each row, at most 1, and its class (the first in a tie)."""
    confidence, prediction = probs.max(dim=-1)
    check_confidence("probs", confidence, probs.shape[-1])
    return confidence.clamp_(max=1), prediction


def check_same_shape(**tensors: Tensor) -> None:
    """Check that the named tensors have one shape, are not empty and hold no NaN; nothing is broadcast."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(f"All must have the same shape, but these differ: {listed}; reshape them first.")
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise InputError(f"{name} is empty; give at least one value.")
        if tensor.is_complex():
            raise InputError(f"{name} must hold real numbers, but it is {tensor.dtype}.")
        if bool(tensor.isnan().any()):
            raise InputError(f"{name} contains NaN; check the model's outputs and the data before measuring them.")


def check_num_bins(num_bins: int) -> None:
    """Check a number of bins; many more would be narrower than the rounding of a float32 confidence."""
    if not 1 <= num_bins <= 100_000:
        raise InputError(f"num_bins must lie between 1 and 100000, but it is {num_bins}.")
