"""The sections of a report on compression: what it removed and gained, and the candidates of `explore`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dubito.uses.reporting import bars, plots, readings
from dubito.uses.reporting.parts import Listing, Panel, Section
from dubito.uses.reporting.readings import Readings, Stop
from dubito.uses.reporting.tables import describe

if TYPE_CHECKING:
    from dubito.uses.compression.exploration import Exploration, Explored
    from dubito.uses.compression.report import Report

Value = Callable[["Explored"], float]
KINDS = ("before", "units", "weights")


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


def explore_section(found: Exploration, pick: str) -> Section:
    """Return the section; `pick` says how a candidate is made, with ``{}`` in place of its number."""
    from dubito.uses.compression.exploration import CALIBRATION, ERROR

    task = found.evaluation.task
    error, calibration = ERROR[task], CALIBRATION[task]
    size: tuple[str, Value] = ("Size of the file (kB)", lambda each: each.num_bytes / 1000)
    times = f"Time for {found.batch_size:,} at once (ms)"
    axes: tuple[tuple[str, Value], ...] = (
        size, (times, lambda each: 1000 * each.seconds), ("MACs left (%)", lambda each: 100 * each.macs),
    )  # fmt: skip
    panels = [_panel(found, x, error) for x in axes] + [_panel(found, size, calibration)]
    scores = [error, "nll", calibration, *(name for name in found.before.scores if name.startswith("auroc"))]
    head = ("candidate", "network", "bytes", "MACs left", times, *(_title(name) for name in scores))
    everything = (found.before, *found.candidates)
    rows = tuple(
        (
            str(each.number) if each.number else "–", each.name, f"{each.num_bytes:,}",
            readings.percent(each.macs), readings.number(1000 * each.seconds),
            *(readings.number(each.scores[name]) for name in scores),
        )
        for each in everything
    )  # fmt: skip
    keys = tuple(str(each.number) if each.number else "" for each in everything)
    note = (
        f"Smaller networks of the same posterior, without fine-tuning, scored on {found.evaluation.count:,} targets "
        "that were not trained on. Press a point or a row to see how to make that network."
    )
    return Section(
        "explore",
        "Candidates",
        note,
        words=found.notes,
        sets=tuple((kind, look) for kind, look in plots.looks(KINDS).items()),
        groups=(tuple(panels),),
        listings=(Listing("Candidates", head, rows, keys),),
        choices={str(each.number): pick.replace("{}", str(each.number)) for each in found.candidates},
    )


def _title(name: str) -> str:
    return name.replace("auroc", "AUROC") if name.startswith("auroc") else describe(name)


def _panel(found: Exploration, axis: tuple[str, Value], score: str) -> Panel:
    """Draw a score against what a network costs."""
    (xlabel, value), look_of = axis, plots.looks(KINDS)
    everything = (*found.candidates, found.before)
    kinds = ["before" if each.number == 0 else each.structure for each in everything]
    places = [(value(each), each.scores[score]) for each in everything]
    names = [f"candidate-{each.number}" for each in everything]
    figure = plots.scatter(
        places, xlabel=xlabel, ylabel=describe(score), look_of=[look_of[kind] for kind in kinds], names=names,
        labels=[str(each.number) if each.number else "" for each in everything], logarithmic="kB" in xlabel,
    )  # fmt: skip
    stops = [
        Stop(
            x,
            f"{each.number}: {each.name}" if each.number else "before",
            ((describe(score), y, readings.number(y)), (xlabel, None, readings.number(x))),
        )
        for each, (x, y) in zip(everything, places, strict=True)
    ]
    stops.sort(key=lambda stop: stop.at)
    told = "; ".join(f"{stop.title}: {stop.values[1][2]}, {stop.values[0][2]}" for stop in stops)
    caption = f"{describe(score)} against {xlabel[0].lower() if xlabel[:4] != 'MACs' else 'M'}{xlabel[1:]}"
    return Panel(figure, caption, f"{caption}. {told}.", (Readings(figure.axes[0], tuple(stops)),))
