"""The methods that `dubito demo` shows and that `dubito compare` tries when none is named; a new one is one line."""

from __future__ import annotations

METHODS: tuple[str, ...] = (
    "map()",
    "map(temperature=validation)",
    "laplace()",
    "laplace(weights=select.last_layer(), structure=full)",
    "laplace(weights=select.subnetwork(0.03), structure=full)",
    "variational()",
)
