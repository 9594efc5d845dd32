"""Compare the outputs of a file with those of `predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dubito.core.errors import DubitoError, UnsupportedError
from dubito.uses.export.outputs import Output

# The largest difference that rounding explains, by the precision of the network.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
# The largest difference of a form that is an approximation.
APPROXIMATION = 0.05


# Margins of decisions below this are rounding errors.
_SMALLEST_MARGIN = 1e-7


def usual_tolerance(dtype: torch.dtype, exact: bool) -> float:
    """Return the largest difference that is allowed by default."""
    rounding = ROUNDING.get(dtype, ROUNDING[torch.float32])
    return rounding if exact else max(rounding, APPROXIMATION)


def differences(
    outputs: Sequence[Output], found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> dict[str, float]:
    """Return by name how far each output is from what it should be.

    Numbers: the largest difference, relative to the largest number if that is above 1. Decisions and classes: the
    fraction that is decided otherwise, of those that are not undecided within the tolerance.

    Args:
        outputs: The outputs.
        found: What the file gives.
        expected: What `Output.value` computes from the prediction of the posterior.
        tolerance: What counts as rounding.
    """
    return {
        output.name: _difference(output.kind, one.cpu(), other.detach().cpu(), tolerance)
        for output, one, other in zip(outputs, found, expected, strict=True)
    }


def _difference(kind: str, found: Tensor, expected: Tensor, tolerance: float) -> float:
    expected = expected.double()
    if kind == "number":
        return float((found.double() - expected).abs().max() / expected.abs().max().clamp_min(1.0))
    if kind == "class":
        chosen = expected.gather(-1, found.unsqueeze(-1)).squeeze(-1)
        return float((chosen < expected.amax(dim=-1) - tolerance).double().mean())
    decided = expected > 0 if kind == "above" else expected >= 0
    clear = expected.abs() > max(_SMALLEST_MARGIN, tolerance * float(expected.abs().max()))
    return float(((decided != found) & clear).double().mean())


def exceeded(outputs: Sequence[Output], errors: Mapping[str, float], tolerance: float, exact: bool) -> str | None:
    """Return the output that differs too much, or None; an exact form must make the same decisions."""
    for output in outputs:
        limit = tolerance if output.kind == "number" or not exact else 0.0
        if not errors[output.name] <= limit:  # also if it is NaN
            return output.name
    return None


def can_take_any_number_of_rows(program: nn.Module, rows: tuple[Tensor, ...]) -> None:
    """Call a program; raise an error if it cannot take this number of rows, while it could take the example."""
    try:
        program(*rows)
    except DubitoError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"This network cannot be exported: it failed on {len(rows[0])} rows, so write it for any batch."
        ) from error
