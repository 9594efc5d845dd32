"""Format numbers, names of methods and the tables that compare them: direction, best value and digits of a score."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dubito.uses.metrics.scores import SCORES

Runs = Sequence[float]  # the values of one score over seeds

_WORDS = {
    "Auto": "Chosen automatically",
    "BatchEnsemble": "Batch ensemble",
    "DKL": "Deep kernel learning",
    "Ensemble": "Ensemble",
    "HMC": "Hamiltonian Monte Carlo",
    "Laplace": "Laplace",
    "MAP": "Plain network",
    "MCDropout": "MC dropout",
    "MIMO": "Several inputs and outputs (MIMO)",
    "Packed": "Packed ensemble",
    "Rank1": "Rank-1 network",
    "SGMCMC": "Stochastic-gradient MCMC",
    "SNGP": "Gaussian-process head (SNGP)",
    "SVGD": "Stein variational gradient descent",
    "SWAG": "SWAG",
    "Snapshot": "Snapshot ensemble",
    "VBLL": "Variational last layer",
    "Variational": "Variational inference",
}
_RECIPE = re.compile(r"(?P<name>\w+)\((?P<settings>.*)\)(?P<more>(?:, [\w ]+)?)", re.DOTALL)


@dataclass(frozen=True)
class Cell:
    """One number of a comparison, as text, its deviation over seeds if there are any, and whether it is the best."""

    text: str
    spread: str
    best: bool

    @property
    def whole(self) -> str:
        """The number with its deviation."""
        return f"{self.text} ± {self.spread}" if self.spread else self.text


@dataclass(frozen=True)
class Column:
    """One score of all methods."""

    title: str  # what stands over it
    hint: str  # ``"↑"`` if higher is better, ``"↓"`` if lower, or nothing
    cells: tuple[Cell, ...]  # one per method
    group: str = ""  # the title over several neighbouring columns, or nothing


def describe(name: str) -> str:
    """Return the title of a score.

    >>> describe("nll"), describe("coverage@0.95")
    ('NLL', '95 % coverage')
    """
    stem, _, level = name.partition("@")
    return f"{100 * float(level):g} % {stem}" if level else SCORES[name].title


def goal(name: str) -> float | None:
    """Return the best value of a score: inf, -inf or a number; None where no direction is better.

    The coverage of an interval should be its level. Its width is better small only at the same coverage, hence None.
    """
    stem, _, level = name.partition("@")
    if not level:
        return SCORES[name].best
    return float(level) if stem == "coverage" else None


def score_column(name: str, runs: Sequence[Runs | None], *, title: str | None = None, group: str = "") -> Column:
    """Return the column of one score: mean (± standard deviation over seeds) of each method, the best ones marked.

    Two means that read the same are equally good. Where all do, or only one method has a value, none is best.

    Args:
        name: The score.
        runs: For each method its values over seeds, or None where it was not measured.
        title: What stands over the column, if not the score's own title.
        group: The title over several columns.
    """
    best = goal(name)
    heads, spreads = zip(*(text.partition(" ± ")[::2] for text in column_texts(runs)), strict=True)
    hint = {math.inf: "↑", -math.inf: "↓"}.get(best, "") if best is not None else ""
    losses = {
        heads[i]: _loss(statistics.fmean(values), best) for i, values in enumerate(runs) if values and best is not None
    }
    winner = min(losses, key=losses.__getitem__) if len(losses) > 1 else None
    cells = tuple(Cell(head, spread, head == winner) for head, spread in zip(heads, spreads, strict=True))
    return Column(describe(name) if title is None else title, hint, cells, group)


def column_texts(runs: Sequence[Runs | None]) -> list[str]:
    """Return the values of one column with the same number of decimals: four, or four digits of the largest.

    >>> column_texts([[0.5], [0.03125], None, [0.25, 0.75]])
    ['0.5000', '0.0312', '–', '0.5000 ± 0.3536']
    >>> column_texts([[123.456], [7.0]])
    ['123.5', '7.0']
    """
    means = [statistics.fmean(values) for values in runs if values]
    largest = max((abs(mean) for mean in means if math.isfinite(mean) and mean), default=1.0)
    magnitude = math.floor(math.log10(largest))
    decimals = 4 if -2 <= magnitude <= 0 else min(max(3 - magnitude, 0), 8)
    return ["–" if not values else _text(values, decimals) for values in runs]


def align(labels: Mapping[str, Sequence[str]], numbers: Mapping[str, Sequence[str]]) -> str:
    """Return a text table of columns by title: labels to the left, numbers to the right.

    >>> print(align({"": ["data", "rotation"]}, {"NLL": ["0.1", "12.0"]}))
                NLL
    data        0.1
    rotation   12.0
    """
    columns = []
    for title, texts in (*labels.items(), *numbers.items()):
        width = max(map(len, (title, *texts)))
        columns.append([text.ljust(width) if title in labels else text.rjust(width) for text in (title, *texts)])
    return "\n".join("   ".join(row).rstrip() for row in zip(*columns, strict=True))


def spans(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Return the groups over neighbouring columns, and how many columns each spans."""
    return [(group, len(list(members))) for group, members in itertools.groupby(column.group for column in columns)]


def _text(values: Runs, decimals: int) -> str:
    mean = f"{statistics.fmean(values):.{decimals}f}"
    return mean if len(values) == 1 else f"{mean} ± {_deviation(values):.{decimals}f}"


def _deviation(values: Runs) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.inf


def _loss(value: float, best: float) -> float:
    return abs(value - best) if math.isfinite(best) else -math.copysign(1.0, best) * value


def readable(name: str) -> tuple[str, str]:
    """Return a method's name in words and its settings; a name that is no recipe stays as it is.

    >>> readable("Ensemble(members=2)"), readable("Laplace(), compressed"), readable("our network (v2)")
    (('Ensemble', 'members=2'), ('Laplace, compressed', ''), ('our network (v2)', ''))
    """
    found = _RECIPE.fullmatch(name)
    if found is None or found["name"] not in _WORDS:
        return name, ""
    return _WORDS[found["name"]] + found["more"], found["settings"]


def short(names: Iterable[str]) -> list[str]:
    """Return the names in words, with settings only where two would be the same.

    >>> short(["MAP()", "Ensemble(members=2)"]), short(["MAP()", "MAP(temperature=2)"])
    (['Plain network', 'Ensemble'], ['Plain network', 'Plain network (temperature=2)'])
    """
    whole = list(names)
    titles = [readable(name)[0] for name in whole]
    return [title if titles.count(title) == 1 else in_words(name) for name, title in zip(whole, titles, strict=True)]


def in_words(name: str) -> str:
    """Return a method's name in words with its settings behind it.

    >>> in_words("Ensemble(members=2)"), in_words("MAP()")
    ('Ensemble (members=2)', 'Plain network')
    """
    title, settings = readable(name)
    return f"{title} ({settings})" if settings else title
