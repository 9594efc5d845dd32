"""The result of `evaluate`: some kilobytes of numbers that can be printed and stored as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from dubito.core.errors import FileFormatError
from dubito.fitting.history import History, Numbers
from dubito.uses.reporting.tables import align, column_texts, describe

Task = Literal["classification", "regression"]
Scores = dict[str, float]

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Reliability:
    """Sums per confidence bin: the data of a reliability diagram, exact, and additive over data sets.

    Attributes:
        edges: The edges of the bins, one more than there are bins.
        counts: How many predictions fell into each bin.
        confidence_sums: The sum of their confidences.
        correct_sums: How many of them were right.
    """

    edges: Numbers
    counts: Numbers
    confidence_sums: Numbers
    correct_sums: Numbers


@dataclass(frozen=True)
class RiskCoverageCurve:
    """The mean loss when only the most certain fraction of inputs is answered."""

    coverage: Numbers  # the fraction answered
    risk: Numbers  # the error rate (classification) or mean squared error (regression) of the answered inputs


@dataclass(frozen=True)
class Histogram:
    """Histograms of one uncertainty in and out of distribution, over shared bins."""

    edges: Numbers  # the edges of the bins; the last bin also holds everything above it
    inside: Numbers  # counts of the evaluated data
    outside: dict[str, Numbers]  # counts of each out-of-distribution set, by name


@dataclass(frozen=True)
class Quantiles:
    """How often the truth fell below each predicted quantile; calibrated where `observed` equals `levels`.

    Attributes:
        levels: The levels of the quantiles.
        observed: The fraction of targets at or below them.
    """

    levels: Numbers
    observed: Numbers


@dataclass(frozen=True)
class Band:
    """The prediction along a single input, ordered by it."""

    x: Numbers  # the input, as the network sees it
    mean: Numbers  # the predicted mean
    low: Numbers  # the lower end of the central interval
    high: Numbers  # its upper end
    targets: Numbers  # the observed values
    level: float  # the probability of the interval


@dataclass(frozen=True)
class GroupScores:
    """What was claimed and what came true in parts of the data."""

    labels: tuple[str, ...]  # the names of the groups
    counts: Numbers  # how many data each has
    claimed: Numbers  # the mean confidence of its answers, or the level of its intervals
    observed: Numbers  # the share of right answers, or of intervals that hold the truth


@dataclass(frozen=True)
class ShiftedConfidence:
    """The confidence of a classifier on shifted data, and what refusing can save.

    Attributes:
        count: How many answers there were.
        claimed: Their mean confidence.
        observed: The share of right ones.
        threshold: Refusing answers of a lower confidence leaves as many right ones as there are on the data itself;
            None if no threshold does.
        answered: The share of answers that are left.
    """

    count: float
    claimed: float
    observed: float
    threshold: float | None
    answered: float

    @property
    def is_overconfident(self) -> bool:
        """Whether fewer answers are right than are claimed, beyond two standard errors."""
        noise = math.sqrt(max(self.claimed * (1 - self.claimed), 1 / self.count) / self.count)
        return self.observed < self.claimed - 2 * noise


@dataclass(frozen=True)
class Example:
    """One datum to look at."""

    kind: str  # ``"uncertain"`` or ``"wrong"``: wrong and certain of it
    index: int  # its place in the data, from 0
    truth: str  # the target
    answer: str  # the prediction
    sure: str  # how certain the prediction was
    cells: dict[str, str] = field(default_factory=dict)  # the input as text, or by column
    shape: tuple[int, ...] = ()  # the height, the width and the channels of a picture; empty for other inputs
    pixels: str = ""  # the picture: one byte a value, in base64


@dataclass(frozen=True)
class Curves:
    """What the figures of a report are drawn from.

    Attributes:
        risk_coverage: The risk against coverage.
        reliability: The reliability diagram of a classifier.
        quantiles: The calibration of a regression's quantiles.
        band: The regression over its input, where there is one input and one output.
        histograms: The uncertainty scores in and out of the distribution, by score.
        chains: How the chains of a sampler went, where the posterior is a sampler's.
        groups: What was claimed and what came true in parts of the data, by kind of group.
        shifted: The confidence on shifted data by kind and severity, of a classifier.
        examples: The least certain data, and those that are wrong and certain of it.
        nll_parts: The mean NLL of each of at most 50 interleaved parts of the data (every 50th datum), from which the
            standard error of the difference between two methods follows.
    """

    risk_coverage: RiskCoverageCurve
    reliability: Reliability | None = None
    quantiles: Quantiles | None = None
    band: Band | None = None
    histograms: dict[str, Histogram] = field(default_factory=dict)
    chains: History | None = None
    groups: dict[str, GroupScores] = field(default_factory=dict)
    shifted: dict[str, ShiftedConfidence] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    nll_parts: Numbers = ()


@dataclass(frozen=True)
class Trust:
    """Whether the evaluated posterior can be trusted, as its own diagnosis and the scores say."""

    verdict: str  # ``"yes"``, ``"with care"`` or ``"no"``
    findings: tuple[str, ...] = ()  # what is wrong and what to do, one entry each

    def __str__(self) -> str:
        return "\n- ".join([f"Can it be trusted? {self.verdict.capitalize()}.", *self.findings])


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What `dubito.evaluate` measured; ``print`` it, or hand several to `dubito.report`.

    Two evaluations are equal if their numbers are; the time they took does not count.

    Attributes:
        name: What was evaluated.
        task: ``"classification"`` or ``"regression"``.
        count: How many targets were scored; positions and outputs count one by one.
        scores: The scores on the evaluated data, by name.
        ood: ``ood[set][uncertainty score]`` holds `auroc`, `aupr` and `fpr95`; 0.5, the share of outliers and 0.95 are
            chance.
        shifts: ``shifts[kind][severity]`` holds scores as above, or ``shifts[name]`` where no severity was given.
        curves: What the figures are drawn from.
        seconds_per_1000: Wall-clock seconds for 1,000 predictions, without loading the data, on the machine at hand.
        trust: What `posterior.diagnose()` and the scores say; None in evaluations that were written before they did.
    """

    name: str
    task: Task
    count: int
    scores: Scores
    ood: dict[str, dict[str, Scores]]
    shifts: dict[str, Scores | dict[float, Scores]]
    curves: Curves
    seconds_per_1000: float = field(compare=False)
    trust: Trust | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a value that strict JSON can hold: infinities are the text ``"inf"`` and ``"-inf"``."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["shifts"] = {
            kind: list(map(list, value.items())) if has_severities(value) else value
            for kind, value in self.shifts.items()
        }
        return {"format": FORMAT_VERSION, **_encode(fields)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation that `to_json` wrote."""
        if not isinstance(value, Mapping) or "format" not in value:
            raise FileFormatError("This JSON does not hold an evaluation: give what Evaluation.to_json() returned.")
        if value["format"] != FORMAT_VERSION:
            raise FileFormatError(
                f"This evaluation has format {value['format']}, but this Dubito reads {FORMAT_VERSION}: please upgrade."
            )
        try:
            return cls(
                name=value["name"],
                task=value["task"],
                count=value["count"],
                scores=_scores(value["scores"]),
                ood={s: {k: _scores(v) for k, v in by_score.items()} for s, by_score in value["ood"].items()},
                shifts={kind: _shift(scores) for kind, scores in value["shifts"].items()},
                curves=_decode(Curves, value["curves"]),
                seconds_per_1000=float(value["seconds_per_1000"]),
                trust=None if value.get("trust") is None else _decode(Trust, value["trust"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FileFormatError("This JSON does not hold an evaluation any more: it was altered or cut.") from error

    def shift_rows(self) -> Iterator[tuple[str, float | None, Scores]]:
        """Yield the kind, the severity (None where there is none) and the scores of every shift."""
        for kind, value in self.shifts.items():
            if has_severities(value):
                yield from ((kind, severity, scores) for severity, scores in cast(dict[float, Scores], value).items())
            else:
                yield kind, None, cast(Scores, value)

    def overconfident_from(self, kind: str) -> tuple[float | None, ShiftedConfidence] | None:
        """Return the mildest severity of a shift at which a classifier is overconfident; None if it never is."""
        for own, severity, _ in self.shift_rows():
            found = self.curves.shifted.get(shift_name(own, severity))
            if own == kind and found is not None and found.is_overconfident:
                return severity, found
        return None

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.task}, {self.count:,} targets", self._score_table()]
        if self.ood:
            parts.append(self._ood_table())
        if self.trust is not None:
            parts.append(str(self.trust))
        parts.append(f"{self.seconds_per_1000:.3g} seconds per 1,000 predictions (wall clock, this machine)")
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        scores = ", ".join(f"{name}={value:.4g}" for name, value in self.scores.items())
        return f"<Evaluation of {self.name}: {scores}>"

    def _score_table(self) -> str:
        rows = [("data", self.scores)]
        for kind, severity, scores in self.shift_rows():
            rows.append((kind if severity is None else f"{kind} {severity:g}", scores))
        numbers = {describe(name): column_texts([[scores[name]] for _, scores in rows]) for name in self.scores}
        return align({"": [label for label, _ in rows]}, numbers)

    def _ood_table(self) -> str:
        rows = [(name, score, values) for name, by_score in self.ood.items() for score, values in by_score.items()]
        numbers = {describe(name): column_texts([[values[name]] for *_, values in rows]) for name in rows[0][2]}
        labels = {"out of distribution": [name for name, *_ in rows], "uncertainty": [score for _, score, _ in rows]}
        return align(labels, numbers)


def shift_name(kind: str, severity: float | None) -> str:
    """Return the name of a shift in words.

    >>> shift_name("rotation", 3), shift_name("other scanner", None)
    ('rotation of severity 3', 'other scanner')
    """
    return kind if severity is None else f"{kind} of severity {severity:g}"


def has_severities(value: Mapping[Any, Any]) -> bool:
    """Return whether the keys are severities (numbers) and not names of scores."""
    return bool(value) and all(isinstance(key, int | float) for key in value)


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _encode(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_encode(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _scores(value: Mapping[str, Any]) -> Scores:
    return {name: float(score) for name, score in value.items()}


def _shift(value: Any) -> Scores | dict[float, Scores]:
    if isinstance(value, list):
        return {severity: _scores(scores) for severity, scores in value}
    return _scores(value)


def _decode(kind: Any, value: Any) -> Any:
    """Undo `_encode` for a value of the annotation `kind`: a dataclass, dict, tuple, number, text or None."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _decode(hints[name], entry) for name, entry in value.items()})  # type: ignore[operator]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is dict:
        return {key: _decode(inner[1], entry) for key, entry in value.items()}
    if origin is tuple:
        return tuple(_decode(inner[0], entry) for entry in value)
    if type(None) in inner:  # optional
        return None if value is None else _decode(inner[0], value)
    return kind(value)
