"""Write the sections of a report as one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

import dubito
from dubito.core.arguments import checked_arguments
from dubito.core.atomic import write_atomic
from dubito.core.errors import InputError
from dubito.uses.reporting import plots
from dubito.uses.reporting.evaluation import Evaluation
from dubito.uses.reporting.parts import Panel, Section
from dubito.uses.reporting.sections import sections
from dubito.uses.reporting.tables import readable, spans

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

# Colours that the page redefines for light and dark.
_VARIABLES = {
    **{color: f"var(--series-{i})" for i, color in enumerate(plots.PALETTE)},
    plots.INK: "var(--ink)",
    plots.MUTED: "var(--muted)",
    plots.GRID: "var(--grid)",
}

LEADING = 2  # sections of the results that come before those that others add: the verdict and the scores


@checked_arguments
def report(
    results: Mapping[str, Evaluation | Sequence[Evaluation]],
    path: str | os.PathLike[str] = "report.html",
    *,
    title: str | None = None,
    data_name: str | None = None,
    command: str | None = None,
    facts: Mapping[str, str] | None = None,
) -> Path:
    """Write one self-contained HTML page that compares methods, the best (by NLL) first.

    The same results give the same bytes.

    Args:
        results: What `dubito.evaluate` returned, by the method's name; a list of them is one method over several seeds,
            shown as mean ± standard deviation.
        path: The file to write; an existing one is replaced at once.
        title: The heading of the page.
        data_name: The name of the data, for the heading.
        command: How to do it again, for the end of the page.
        facts: What was run, such as ``{"Network": "resnet20", "Training": "50 epochs"}``, for the same place.

    Returns:
        The path of the page.
    """
    return write_page(results, path, title=title, data_name=data_name, command=command, facts=facts)


def write_page(
    results: Mapping[str, Evaluation | Sequence[Evaluation]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    data_name: str | None = None,
    command: str | None = None,
    facts: Mapping[str, str] | None = None,
    first: Sequence[Section] = (),
    more: Sequence[Section] = (),
) -> Path:
    """Write a report; `first` are sections that follow the verdict, `more` others that follow the scores."""
    methods = _best_first(_checked(results))
    about = {"title": title or "How far can it be trusted?", "data_name": data_name, "command": command}
    page = _render(methods, {**about, "facts": _facts(methods, facts or {})}, first, more)
    write_atomic(path, page.encode())
    return Path(path)


def _checked(results: Mapping[str, Evaluation | Sequence[Evaluation]]) -> dict[str, tuple[Evaluation, ...]]:
    if not isinstance(results, Mapping) or not results:
        raise InputError("`results` is empty or no dict: give evaluations by name, such as {'map': evaluate(...)}.")
    methods: dict[str, tuple[Evaluation, ...]] = {}
    for name, value in results.items():
        runs = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not runs or not all(isinstance(run, Evaluation) for run in runs):
            raise InputError(f"'{name}' must be what dubito.evaluate returned, or a list of such, one per seed.")
        methods[str(name)] = runs
    tasks = {run.task: name for name, runs in methods.items() for run in runs}
    if len(tasks) > 1:
        told = " and ".join(f"'{name}' is {task}" for task, name in tasks.items())
        raise InputError(f"One report compares one task, but {told}: write two reports.")
    return methods


def _best_first(methods: dict[str, tuple[Evaluation, ...]]) -> dict[str, tuple[Evaluation, ...]]:
    """Return the methods in the order of their mean negative log-likelihood."""
    means = {name: fmean(run.scores["nll"] for run in runs) for name, runs in methods.items()}
    order = sorted(methods, key=lambda name: means[name] if means[name] == means[name] else math.inf)
    return {name: methods[name] for name in order}


def _facts(methods: Mapping[str, Sequence[Evaluation]], facts: Mapping[str, str]) -> dict[str, str]:
    """Return what was run: what the caller says, the methods as they are typed, and the versions."""
    seeds = {name: len(runs) for name, runs in methods.items()}
    told = "\n".join(f"{name} × {count}" if count > 1 else name for name, count in seeds.items())
    return {**facts, "Methods": told, "Versions": f"dubito {dubito.__version__}, torch {torch.__version__}"}


def _render(
    methods: Mapping[str, Sequence[Evaluation]],
    about: Mapping[str, Any],
    first: Sequence[Section],
    more: Sequence[Section],
) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"spans": spans, "readable": readable, "unbroken": _unbroken}
    files = resources.files("dubito.uses.reporting")
    template = environment.from_string(files.joinpath("template.html").read_text("utf-8"))
    script = f"\n{files.joinpath('page.js').read_text('utf-8')}"
    own = list(sections(methods))
    parts = [own[0], *first, *own[1:LEADING], *more, *own[LEADING:]]  # the verdict is on top
    drawings = {
        id(panel): _drawing(panel, f"{part.key}-{row}-{column}")
        for part in parts
        for row, group in enumerate(part.groups)
        for column, panel in enumerate(group)
    }
    return template.render(
        **about,
        task=next(iter(methods.values()))[0].task,
        sections=parts,
        drawing_of=lambda panel: drawings[id(panel)][0],
        readings_of=lambda panel: drawings[id(panel)][1],
        look_of={name: (_variable(look.color), look.dash, look.key) for name, look in plots.looks(methods).items()},
        variable=_variable,
        script=Markup(script),  # ours
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=dubito.__version__,
    )


def _unbroken(text: str) -> str:
    """Return a sentence in which no line ends before a percent sign."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _variable(color: str) -> str:
    return _VARIABLES[color]


def _drawing(panel: Panel, key: str) -> tuple[Markup, str]:
    """Return a figure as SVG, and what it says at which of its pixels as JSON."""
    drawing = _svg(panel.figure, key, panel.alt)
    width, height = (72 * float(inches) for inches in panel.figure.get_size_inches())  # of the view box
    found = [each.to_json(width, height) for each in panel.readings if each.stops]
    return drawing, json.dumps(found, ensure_ascii=False, separators=(",", ":")) if found else ""


def _svg(figure: Figure, key: str, alt: str) -> Markup:
    """Return a figure as inline SVG: it scales, follows the page's colours, and its ids are its own."""
    from markupsafe import Markup

    buffer = io.StringIO()
    with plots.style():
        figure.savefig(
            buffer,
            format="svg",
            facecolor="none",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    head, body = re.match(r".*?<svg (.*?)>(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    view_box = re.search(r'viewBox="[^"]*"', head).group()  # type: ignore[union-attr]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r"(?<=: )#[0-9a-f]{6}", lambda match: _VARIABLES.get(match.group(), match.group()), body)
    body = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{key}-", body)
    label = html.escape(alt)
    return Markup(  # matplotlib escapes its text, and the label is escaped above
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {view_box} role="img" aria-label="{label}">{body}'
    )
