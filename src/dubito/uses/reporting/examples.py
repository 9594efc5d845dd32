"""Find and show the examples worth a look: the least certain, and those that are wrong and certain of it."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dubito.core import batches, distributed
from dubito.core.errors import InputError
from dubito.uses.reporting import bars
from dubito.uses.reporting.collect import Vectors
from dubito.uses.reporting.evaluation import Example
from dubito.uses.reporting.parts import Listing, Looks, Methods, Panel, Section, task
from dubito.uses.reporting.readings import number
from dubito.uses.reporting.tables import in_words

SHOWN = 5  # of each kind
_CELLS = 8  # numbers of an input that is neither picture nor text
_LETTERS = 400  # of a text
_SIDE = 64  # pixels; larger pictures are shrunk
_SMALLEST = 4  # side of a picture

Decode = Callable[[Tensor], Any]

_TITLES = {
    "classification": {"uncertain": "The least certain", "wrong": "Wrong and certain of it"},
    "regression": {"uncertain": "The least certain", "wrong": "The most unexpected"},
}
# How many letters of a class fit below a picture.
_CLASS_LETTERS = 11


@dataclass
class ExampleFinder:
    """Keeps the few most remarkable examples while a data set is predicted batch by batch."""

    seen: int = 0
    lowest: float = math.inf
    rows: dict[str, list[tuple[float, int, Tensor, float, float, float]]] = field(default_factory=dict)

    def __call__(self, inputs: Any, vectors: Vectors) -> None:
        """Look at a batch; examples with several inputs or targets are left out."""
        first, size = self.seen, batches.num_rows(inputs)
        self.seen += size
        if not isinstance(inputs, Tensor) or "answer" not in vectors or distributed.is_active():
            return
        numbers = "stddev" in vectors
        uncertainty = vectors["stddev" if numbers else "max-probability"].double()
        if numbers:
            surprise = (vectors["truth"] - vectors["answer"]).abs().double() / uncertainty
            surprise = surprise.where(surprise > 2, -torch.inf)  # what a 95 % interval holds is no surprise
        else:
            surprise = (1 - uncertainty).where(vectors["loss"].bool(), -torch.inf)
        self.lowest = min(self.lowest, float(uncertainty.min()))
        for kind, scores in (("uncertain", uncertainty), ("wrong", surprise)):
            best = scores.topk(min(SHOWN, size))
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            found = [
                (-score, first + place, inputs[place].detach().cpu().clone(), *_numbers(vectors, uncertainty, place))
                for score, place in pairs
                if score > -torch.inf
            ]
            self.rows[kind] = sorted([*self.rows.get(kind, []), *found], key=lambda row: row[:2])[:SHOWN]

    def examples(self, decode: Decode | None, class_names: Sequence[str], classes: bool) -> tuple[Example, ...]:
        """Return what was found, as a person recognizes it; see `evaluate`."""
        found = []
        for kind, rows in self.rows.items():
            if rows and (kind == "wrong" or -rows[0][0] > self.lowest):  # nothing is least certain if all are the same
                inputs = torch.stack([row[2] for row in rows])
                decoded = inputs if decode is None else decode(inputs)
                for place, (_, index, _, truth, answer, unsure) in enumerate(rows):
                    told = _class_words if classes else _number_words
                    found.append(
                        Example(kind, index, *told(truth, answer, unsure, class_names), **_shown(decoded, place))
                    )
        return tuple(found)


def _numbers(vectors: Vectors, uncertainty: Tensor, place: int) -> tuple[float, float, float]:
    return float(vectors["truth"][place]), float(vectors["answer"][place]), float(uncertainty[place])


def _class_words(truth: float, answer: float, unsure: float, names: Sequence[str]) -> tuple[str, str, str]:
    told = [names[int(label)] if int(label) < len(names) else str(int(label)) for label in (truth, answer)]
    return told[0], told[1], f"{1 - unsure:.0%} sure"


def _number_words(truth: float, answer: float, unsure: float, names: Sequence[str]) -> tuple[str, str, str]:
    return number(truth), number(answer), f"± {number(unsure)}"


def _shown(decoded: Any, place: int) -> dict[str, Any]:
    """Return one decoded input as a picture or as text: the last fields of an `Example`."""
    if isinstance(decoded, Mapping):
        return {"cells": {str(name): _text(cells[place]) for name, cells in list(decoded.items())[:_CELLS]}}
    if isinstance(decoded, Tensor):
        return _of_tensor(decoded[place])
    if isinstance(decoded, Sequence):
        text = str(decoded[place])
        return {"cells": {"text": text if len(text) <= _LETTERS else f"{text[:_LETTERS]}…"}}
    raise InputError(
        f"`decode` must return a tensor, a list of texts or a dict of columns, but returned a {type(decoded).__name__}."
    )


def _of_tensor(value: Tensor) -> dict[str, Any]:
    if value.ndim == 3 and value.shape[0] in (1, 3) and min(value.shape[1:]) >= _SMALLEST:
        return _picture(value.double())
    flat = value.flatten()[:_CELLS].tolist()
    return {"cells": {f"input {i}": _text(cell) for i, cell in enumerate(flat, 1)}}


def _picture(image: Tensor) -> dict[str, Any]:
    """Return a picture ``[C, H, W]``; values that are not from 0 to 1 are brought there by its own range."""
    side = max(image.shape[1:])
    if side > _SIDE:
        size = [max(1, round(_SIDE * length / side)) for length in image.shape[1:]]
        image = F.interpolate(image[None], size=size, mode="area")[0]
    low, high = image.min(), image.max()
    if not (low >= -1e-6 and high <= 1 + 1e-6):
        image = (image - low) / (high - low)
    whole = (255 * image.clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    return {"shape": tuple(whole.shape), "pixels": base64.b64encode(whole.numpy().tobytes()).decode()}


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


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
        name if len(name) <= _CLASS_LETTERS else f"{name[: _CLASS_LETTERS - 1]}…" for name in (each.truth, each.answer)
    )
    between = " → " if len(truth + answer) < _CLASS_LETTERS - 2 else "\n→ "
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
