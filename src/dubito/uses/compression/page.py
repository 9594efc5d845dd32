"""The section of a report that shows what compression removed from each layer, and what it gained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dubito.uses.reporting import bars, readings
from dubito.uses.reporting.parts import Listing, Panel, Section

if TYPE_CHECKING:
    from dubito.uses.compression.report import Report


def compression_section(report: Report) -> Section:
    """Return the section: sizes and times in words, and the share of weights that every layer lost."""
    names = [row.name for row in report.layers]
    gone = [row.sparsity for row in report.layers]
    figure = bars.shares(names, gone, xlabel="Share of weights that were removed")
    values = [
        [
            ("removed", row.sparsity, readings.percent(row.sparsity)),
            ("weights", None, f"{row.weights:,} → {row.kept:,}"),
            ("units", None, f"{row.units:,} → {row.units_kept:,}"),
        ]
        for row in report.layers
    ]
    told = ", ".join(f"{name} {readings.percent(share)}" for name, share in zip(names, gone, strict=True))
    alt = f"Share of weights that were removed from each layer: {told}."
    panel = Panel(figure, "Sparsity by layer", alt, readings.rows(figure, names, values))
    head = ("layer", "weights", "left", "removed", "units", "units left", "bits")
    rows = tuple(
        (row.name, f"{row.weights:,}", f"{row.kept:,}", readings.percent(row.sparsity), f"{row.units:,}",
         f"{row.units_kept:,}", str(row.bits))
        for row in report.layers
    )  # fmt: skip
    note = f"What {report.rule} removed from each layer, and what that saves in files and time on this machine."
    return Section(
        "compression",
        "What was removed",
        note,
        words=tuple(_gains(report)),
        groups=((panel,),),
        listings=(Listing("Layers", head, rows),),
    )


def _gains(report: Report) -> Iterator[str]:
    before, after = report.parameters
    yield f"Parameters: {before:,} before, {after:,} after, of which {report.nonzeros:,} are not zero."
    sizes = report.num_bytes
    yield f"File: {sizes['before']:,} bytes before; {sizes['dense']:,} after, {sizes['coded']:,} entropy-coded."
    if report.macs is not None:
        yield f"Multiply-accumulates for one input: {report.macs[0]:,} before, {report.macs[1]:,} after."
    for size, (slow, fast) in report.latency.items():
        yield f"Time for {size:,} at once: {slow:.3f} ms before, {fast:.3f} ms after ({slow / fast:.2f}×)."
    if report.removed_inputs:
        yield f"Inputs that are not used any more: {', '.join(report.removed_inputs)}."
