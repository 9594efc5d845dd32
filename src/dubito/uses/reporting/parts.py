"""What a report is made of: sections with sentences, tables, listings and figures, and helpers that fill them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dubito.uses.reporting.evaluation import Evaluation
from dubito.uses.reporting.plots import Look
from dubito.uses.reporting.readings import Readings
from dubito.uses.reporting.tables import Column, score_column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Methods = Mapping[str, Sequence[Evaluation]]  # one evaluation per seed
Looks = Mapping[str, Look]


@dataclass(frozen=True)
class ReportTable:
    """A table that compares methods, one row each."""

    caption: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Listing:
    """A table of examples: its caption, the names of its columns, its cells as text, and what each row chooses.

    A row chooses nothing if its key is empty; see `Section.choices`.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Panel:
    """A figure, its caption, its text alternative, and the values that it says where the pointer is."""

    figure: Figure
    caption: str
    alt: str
    readings: tuple[Readings, ...] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        key: Its address.
        title: Its heading.
        note: How to read it.
        tables: Its tables.
        groups: Its figures; those of one group stand side by side.
        legend: Whether the figures need the methods' colours named.
        sets: The out-of-distribution sets or chains that the legend names, and how their lines are drawn.
        words: Sentences, each on a line of its own.
        terms: Words and their definitions.
        listings: Tables of examples.
        choices: Commands by key: pressing a row of a listing with that key, or the point ``candidate-KEY`` of a
            figure, shows the command and copies it.
    """

    key: str
    title: str
    note: str
    tables: tuple[ReportTable, ...] = ()
    groups: tuple[tuple[Panel, ...], ...] = ()
    legend: bool = False
    sets: tuple[tuple[str, Look], ...] = ()
    words: tuple[str, ...] = ()
    terms: tuple[tuple[str, str], ...] = ()
    listings: tuple[Listing, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)


def task(methods: Methods) -> str:
    """Return the task, which all methods share."""
    return next(iter(methods.values()))[0].task


def table(caption: str, methods: Methods, columns: Sequence[Column]) -> ReportTable:
    """Return a table with one row for each method."""
    return ReportTable(caption, tuple(methods), tuple(columns))


def column(name: str, methods: Methods, value: Callable[[Evaluation], float | None], **texts: str) -> Column:
    """Compare `value` over methods; a method that lacks it in any seed has none."""
    found = [[value(run) for run in runs] for runs in methods.values()]
    return score_column(name, [None if None in values else values for values in found], **texts)  # type: ignore[misc]


def means(methods: Methods, value: Callable[[Evaluation], float]) -> str:
    """Return the mean of a value over the seeds of each method, as text."""
    return ", ".join(f"{name} {statistics.fmean(map(value, runs)):.3g}" for name, runs in methods.items())


def first_seed(methods: Methods) -> str:
    """Return a sentence on the seeds that figures leave out, if there are several."""
    return " Of several seeds the figures show the first." if any(len(runs) > 1 for runs in methods.values()) else ""
