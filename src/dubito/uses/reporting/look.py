"""The section of a report that shows examples: the least certain, and those that are wrong and certain of it."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

import numpy as np

from dubito.uses.reporting import bars
from dubito.uses.reporting.evaluation import Example
from dubito.uses.reporting.names import in_words
from dubito.uses.reporting.parts import Listing, Looks, Methods, Panel, Section, task

_TITLES = {
    "classification": {"uncertain": "The least certain", "wrong": "Wrong and certain of it"},
    "regression": {"uncertain": "The least certain", "wrong": "The most unexpected"},
}

# How many letters of a class fit below a picture.
_LETTERS = 11


def examples(methods: Methods, look_of: Looks) -> Iterator[Section]:
    """Yield the examples of the first method, the best one, in its first seed."""
    name, runs = next(iter(methods.items()))
    found = runs[0].curves.examples
    if not found:
        return
    kinds = {title: [e for e in found if e.kind == kind] for kind, title in _TITLES[task(methods)].items()}
    panels = [_panel(title, [e for e in each if e.shape]) for title, each in kinds.items()]
    listings = [_listing(title, [e for e in each if not e.shape]) for title, each in kinds.items()]
    what = (
        "those whose truth was most unexpected" if task(methods) == "regression" else "the wrong ones it was surest of"
    )
    note = (
        f"What {in_words(name)} is least certain about, and {what}: are the labels right, or is something new in them?"
    )
    if any(each.shape for each in found):
        note += " Below each picture: the truth, then the answer."
    yield Section(
        "examples",
        "Examples to look at",
        note,
        groups=(tuple(panel for panel in panels if panel is not None),),
        listings=tuple(listing for listing in listings if listing is not None),
    )


def _panel(title: str, found: Sequence[Example]) -> Panel | None:
    if not found:
        return None
    figure = bars.pictures([_image(each) for each in found], [_caption(each) for each in found])
    told = "; ".join(f"truth {each.truth}, answer {each.answer}, {each.sure}" for each in found)
    return Panel(figure, title, f"Pictures: {told}.")


def _caption(each: Example) -> str:
    """Return the truth and the answer, below each other if their names are long, and how sure the answer is."""
    truth, answer = (
        name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…" for name in (each.truth, each.answer)
    )
    between = " → " if len(truth + answer) < _LETTERS - 2 else "\n→ "
    return f"{truth}{between}{answer}\n{each.sure}"


def _image(each: Example) -> np.ndarray:
    pixels = np.frombuffer(base64.b64decode(each.pixels), dtype=np.uint8).reshape(each.shape) / 255
    return pixels[..., 0] if each.shape[-1] == 1 else pixels


def _listing(title: str, found: Sequence[Example]) -> Listing | None:
    if not found:
        return None
    names = tuple(found[0].cells)
    rows = [(each.truth, each.answer, each.sure, *(each.cells.get(name, "–") for name in names)) for each in found]
    return Listing(title, ("truth", "answer", "certainty", *names), tuple(rows))
