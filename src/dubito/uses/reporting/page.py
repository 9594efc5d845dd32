"""Write the sections of a report as one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import dubito
from dubito.core.arguments import checked_arguments
from dubito.core.atomic import write_atomic
from dubito.core.errors import InputError
from dubito.uses.reporting import plots
from dubito.uses.reporting.evaluation import Evaluation
from dubito.uses.reporting.names import readable
from dubito.uses.reporting.sections import Section, sections
from dubito.uses.reporting.tables import spans

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


@checked_arguments
def report(
    results: Mapping[str, Evaluation | Sequence[Evaluation]],
    path: str | os.PathLike[str] = "report.html",
    *,
    title: str | None = None,
    data_name: str | None = None,
    command: str | None = None,
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

    Returns:
        The path of the page.
    """
    return write_page(results, path, title=title, data_name=data_name, command=command)


def write_page(
    results: Mapping[str, Evaluation | Sequence[Evaluation]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    data_name: str | None = None,
    command: str | None = None,
    first: Sequence[Section] = (),
    more: Sequence[Section] = (),
) -> Path:
    """Write a report; `first` and `more` are sections that come before and after those of the results."""
    page = _render(
        _best_first(_checked(results)), title or "How far can it be trusted?", data_name, command, first, more
    )
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


def _render(
    methods: Mapping[str, Sequence[Evaluation]],
    title: str,
    data_name: str | None,
    command: str | None,
    first: Sequence[Section],
    more: Sequence[Section],
) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"spans": spans, "readable": readable}
    files = resources.files("dubito.uses.reporting")
    template = environment.from_string(files.joinpath("template.html").read_text("utf-8"))
    script = f"\n{files.joinpath('page.js').read_text('utf-8')}"
    parts = [*first, *sections(methods), *more]
    drawings = {
        id(panel): _svg(panel.figure, f"{part.key}-{row}-{column}", panel.alt)
        for part in parts
        for row, group in enumerate(part.groups)
        for column, panel in enumerate(group)
    }
    return template.render(
        title=title,
        data_name=data_name,
        task=next(iter(methods.values()))[0].task,
        sections=parts,
        drawing_of=lambda panel: drawings[id(panel)],
        look_of={name: (_variable(look.color), look.dash, look.key) for name, look in plots.looks(methods).items()},
        variable=_variable,
        command=command,
        script=Markup(script),  # ours
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=dubito.__version__,
    )


def _variable(color: str) -> str:
    return _VARIABLES[color]


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
