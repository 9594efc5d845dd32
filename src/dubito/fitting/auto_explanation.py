"""`AutoExplanation`: which method `Auto` chose, in words, with the table behind them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CandidateScore:
    """How one candidate did on held-out examples.

    Attributes:
        name: Its name, such as ``"last layer"``.
        recipe: Its recipe in text.
        score: Its mean score, higher is better; None if it could not be fitted.
        gain: The mean difference to the temperature-scaled network, example by example.
        error: The standard error of that difference.
        problem: Why it could not be fitted, or could not be chosen; empty if it could.
    """

    name: str
    recipe: str
    score: float | None = None
    gain: float | None = None
    error: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class AutoExplanation:
    """Why `Auto` returned this posterior; printed as words and a table.

    Attributes:
        goal: The goal.
        chosen: The name of the candidate that was chosen.
        measure: What the scores are, in words.
        num_rows: The number of held-out examples.
        held_out: Where the held-out examples came from, in words.
        candidates: All candidates, the simplest first.
    """

    goal: str
    chosen: str
    measure: str
    num_rows: int
    held_out: str
    candidates: tuple[CandidateScore, ...]

    @property
    def words(self) -> str:
        """Return what was chosen and why, in two or three sentences."""
        compared = [each for each in self.candidates if each.score is not None and not each.problem]
        best = max(compared, key=lambda each: each.score or 0.0)
        own = next(each for each in compared if each.name == self.chosen)
        text = [f"Chosen: {own.name}, {own.recipe}."]
        if best is own and len(compared) > 1 and own is not compared[0]:
            text.append(f"It has the best {self.measure} on {self.num_rows:,} held-out examples ({self.held_out}).")
        elif best is own:
            text.append(
                f"Nothing has a better {self.measure} on {self.num_rows:,} held-out examples ({self.held_out})."
            )
        else:
            text.append(
                f"It is the simplest whose {self.measure} on {self.num_rows:,} held-out examples ({self.held_out}) is "
                f"within one standard error of the best, that of {best.name}."
            )
        if own is not compared[0]:
            text.append(f"Against {compared[0].name} it gains {own.gain:.4f} ± {own.error:.4f}.")
        return " ".join(text)

    def __str__(self) -> str:
        width = max(len(each.name) for each in self.candidates)
        rows = [f"{'':2}{'candidate':<{width}}  {'score':>9}  {'gain':>9}  {'± s.e.':>8}"]
        for each in self.candidates:
            mark = "> " if each.name == self.chosen else "  "
            if each.score is None:
                rows.append(f"{mark}{each.name:<{width}}  {each.problem}")
            else:
                numbers = f"{each.score:9.4f}  {each.gain:+9.4f}  {each.error:8.4f}"
                rows.append(f"{mark}{each.name:<{width}}  {numbers}{each.problem and f'  ({each.problem})'}")
        return "\n".join([self.words, "", *rows])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, from which `from_dict` makes the explanation again."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AutoExplanation:
        """Undo `to_dict`."""
        return cls(**{**values, "candidates": tuple(CandidateScore(**each) for each in values["candidates"])})
