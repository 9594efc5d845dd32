"""The tables of `defaults.py`: differences to the careful network, and how often they are significant.

A method is *worse* on a data set if its mean difference of the negative log-likelihood is more than 1.96 standard
errors above zero, over the test examples of all splits (paired), or, with three or more splits, by a paired t-test over
splits at 5 %. It is *better* only if every test that applies says so. So doubt counts against the recipes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

Row = dict[str, Any]


class Difference(NamedTuple):
    """The mean difference to the careful network over splits, its standard error and what the tests say."""

    mean: float
    error: float
    mark: str  # "!" worse, "*" better, or empty


def difference(found: Sequence[Row]) -> Difference:
    """Return the difference of one method on one data set; one row per split.

    >>> difference([{"gap": 0.1, "gap_error": 0.01}, {"gap": 0.3, "gap_error": 0.01}]).mark
    '!'
    >>> rows = [{"gap": gap, "gap_error": 0.01} for gap in (-0.5, -0.1, 0.1)]
    >>> difference(rows).mark  # over test examples it is better, over splits it is not
    ''
    """
    gaps = np.array([row["gap"] for row in found])
    mean, points = float(gaps.mean()), math.sqrt(sum(row["gap_error"] ** 2 for row in found)) / len(gaps)
    tests, error = [1.96 * points], points
    if len(gaps) > 2:
        splits = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
        tests.append(float(stats.t.ppf(0.975, len(gaps) - 1)) * splits)
        error = max(points, splits)
    worse, better = mean > min(tests), -mean > max(tests)
    return Difference(mean, error, "!" if worse else "*" if better else "")


def tables(rows: Sequence[Row], proved: Sequence[str], developed: Sequence[str]) -> str:
    """Return all tables as Markdown."""
    done = [row for row in rows if "gap" in row]
    refused = [
        f"{row['data']}, split {row['split']}, {row['method']}: {row['verdict']}" for row in rows if "gap" not in row
    ]
    parts = [
        "### Data that the defaults were not developed on", _gaps(done, proved),
        "### Data that the defaults were developed on", _gaps(done, developed),
        "### All data sets", _summary(done, [*proved, *developed]),
    ]  # fmt: skip
    return "\n\n".join(parts + (["Refused: " + "; ".join(refused)] if refused else []))


def _by_cell(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["data"], row["method"]), []).append(row)
    return found


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _gaps(rows: Sequence[Row], names: Sequence[str]) -> str:
    cells = _by_cell(rows)
    names = [name for name in names if (name, "Careful") in cells]
    heads = [f"{name.split('/')[-1]} ({len(cells[name, 'Careful'])})" for name in names]
    firsts = [_value(cells[name, "Careful"]) for name in names]
    lines = [["", *heads], ["---"] * (len(names) + 1), ["Careful: NLL ± s.e.", *firsts]]
    for method in _methods(rows):
        if method != "Careful":
            found = [difference(cells[name, method]) if (name, method) in cells else None for name in names]
            if any(found):
                words = ["" if each is None else f"{each.mean:+.3f} ± {each.error:.3f}{each.mark}" for each in found]
                lines.append([method, *words])
    return _markdown(lines)


def _value(own: Sequence[Row]) -> str:
    error = math.sqrt(sum(row["error"] ** 2 for row in own)) / len(own)
    return f"{np.mean([row['nll'] for row in own]):.3f} ± {error:.3f}"


def _summary(rows: Sequence[Row], names: Sequence[str]) -> str:
    cells, places = _by_cell(rows), _places(rows)
    heads = [
        "",
        "sets",
        "worse",
        "better",
        "mean rank",
        "CRPS, relative",
        "ECE",
        "coverage of 90 %",
        "OOD AUROC",
        "CPU s",
    ]
    lines = [heads, ["---"] * len(heads)]
    for method in _methods(rows):
        own = {name: cells[name, method] for name in names if (name, method) in cells}
        marks = [difference(found).mark for found in own.values()] if method != "Careful" else []
        all_rows = [row for found in own.values() for row in found]
        base = {(row["data"], row["split"]): row for row in rows if row["method"] == "Careful"}
        relative = [row["crps"] / base[row["data"], row["split"]]["crps"] for row in all_rows if "crps" in row]
        lines.append(
            [
                method, str(len(own)), str(marks.count("!")), str(marks.count("*")), _mean(places[method], ".1f"),
                f"{math.exp(np.mean(np.log(relative))):.3f}" if relative else "",
                *(_mean([row[key] for row in all_rows if key in row], ".3f") for key in ("ece", "coverage", "ood")),
                f"{np.median([row['seconds'] for row in all_rows]):.1f}",
            ]
        )  # fmt: skip
    return _markdown(lines)


def _places(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Return the rank of each method on each split of each data set, by its negative log-likelihood."""
    places: dict[str, list[int]] = {method: [] for method in _methods(rows)}
    for cell in {(row["data"], row["split"]) for row in rows}:
        own = sorted((row["nll"], row["method"]) for row in rows if (row["data"], row["split"]) == cell)
        for place, (_, method) in enumerate(own, 1):
            places[method].append(place)
    return places


def _mean(values: Sequence[float], form: str) -> str:
    return format(float(np.mean(values)), form) if values else ""


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
