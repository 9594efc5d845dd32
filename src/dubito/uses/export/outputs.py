"""What an exported file returns: functions of a prediction, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dubito.beliefs.prediction import ClassPrediction, DistributionPrediction, Prediction
from dubito.core.errors import InputError
from dubito.uses.decisions import ConformalIntervals, ConformalSets, Detector, Rejector

CLASSES = ("probs", "entropy", "aleatoric", "epistemic", "label", "set", "answer", "unfamiliar")
NUMBERS = ("mean", "stddev", "aleatoric", "epistemic", "lower", "upper", "answer", "unfamiliar")
Decision = Rejector | Detector | ConformalSets | ConformalIntervals


class Context(NamedTuple):
    """What an output is computed from: the prediction, and where a decision asks for it the logits of the centre."""

    prediction: Any
    logits: Tensor | None = None


@dataclass(frozen=True)
class Output:
    """One output.

    Attributes:
        name: Its name in the file.
        value: Computes the numbers that `result` turns into the output.
        kind: ``"number"``: they are the output; ``"above"`` and ``"from"``: they are the margin of a decision, which is
            yes above 0, or from 0 on; ``"class"``: the output is the class with the largest one.
    """

    name: str
    value: Callable[[Context], Tensor]
    kind: Literal["number", "above", "from", "class"] = "number"

    def result(self, values: Tensor) -> Tensor:
        """Return the output of the file, given what `value` computes."""
        match self.kind:
            case "above":
                return values > 0
            case "from":
                return values >= 0
            case "class":
                return values.argmax(dim=-1)
        return values


class Decisions:
    """The decisions in a file, at most one of each kind.

    Args:
        given: Objects of `dubito.decisions`, fitted with the posterior that is exported.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self.found: dict[type[Any], Any] = {}
        for one in given:
            if not isinstance(one, Decision):
                kinds = ", ".join(kind.__name__ for kind in (Rejector, Detector, ConformalSets, ConformalIntervals))
                raise InputError(f"`decisions` must be of {kinds}, got a {type(one).__name__}.")
            if type(one) in self.found:
                raise InputError(f"`decisions` holds two {type(one).__name__}: one file makes one decision of a kind.")
            if isinstance(one, ConformalSets) and one.randomized:
                raise InputError("Randomized sets draw numbers for each input, which a file cannot: randomized=False.")
            self.found[type(one)] = one

    def get(self, kind: type[Any], output: str, how: str) -> Any:
        """Return the decision of one kind; raise an error that names the output if it was not given."""
        if kind not in self.found:
            raise InputError(
                f"The output '{output}' needs decisions=[dubito.decisions.{kind.__name__}(posterior, data)], or "
                f"calibration=data to fit one{how}."
            )
        return self.found[kind]

    @property
    def needs_logits(self) -> bool:
        """Whether a decision looks at the logits of the network at the posterior's centre."""
        return Detector in self.found and self.found[Detector].score == "energy"


def make_outputs(
    names: Sequence[str] | None,
    prediction: Prediction,
    decisions: Decisions,
    level: float,
    target_scale: tuple[Tensor, Tensor] | None,
) -> tuple[Output, ...]:
    """Return the outputs of these names; by default all that need no further decision and that a graph can compute.

    Args:
        names: The names.
        prediction: Says whether it is about classes or numbers.
        decisions: The decisions in the file.
        level: The probability of the interval from ``lower`` to ``upper``, if no conformal one is given.
        target_scale: Mean and standard deviation of the targets before they were standardized.
    """
    classes = isinstance(prediction, ClassPrediction)
    known = CLASSES if classes else NUMBERS
    if classes and target_scale is not None:
        raise InputError("`target_scale` is for regression: leave it out.")
    if not classes and target_scale is not None:
        _check_length(target_scale, int(prediction.mean.shape[-1]))  # type: ignore[attr-defined]
    table = _classes(decisions) if classes else _numbers(decisions, level, target_scale)
    if names is None:
        left_out = ["set", "answer", "unfamiliar"]
        if isinstance(prediction, DistributionPrediction) and ConformalIntervals not in decisions.found:
            left_out += ["lower", "upper"]  # a graph cannot compute their quantiles
        usual = [name for name in known if name not in left_out]
        kinds = {"answer": Rejector, "unfamiliar": Detector, "set": ConformalSets}
        names = [*usual, *(name for name in known if kinds.get(name) in decisions.found)]
    wrong = [name for name in names if name not in known]
    if wrong:
        kind = "classes" if classes else "numbers"
        raise InputError(f"There is no output '{wrong[0]}' for a prediction of {kind}: choose from {', '.join(known)}.")
    return tuple(table[name]() for name in names)


def check_names(names: Any) -> None:
    """Raise an error unless the names are different known ones; whether they fit the task is seen later."""
    if names is None:
        return
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InputError(f"`outputs` must be a tuple of names such as ('probs', 'epistemic'), got {names!r}.")
    known = dict.fromkeys([*CLASSES, *NUMBERS])
    wrong = [name for name in names if name not in known]
    if wrong:
        raise InputError(f"There is no output '{wrong[0]}': choose from {', '.join(known)}.")
    if not names or len(set(names)) < len(names):
        raise InputError(f"`outputs` must name each output once, and at least one, got {tuple(names)!r}.")


def as_scale(target_scale: Any) -> tuple[Tensor, Tensor] | None:
    """Return mean and standard deviation of the targets as tensors; raise an error if they are none."""
    if target_scale is None:
        return None
    try:
        loc, scale = (torch.as_tensor(part, dtype=torch.float64).flatten() for part in target_scale)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"`target_scale` must be a mean and a standard deviation, got {target_scale!r}.") from error
    if not bool((scale > 0).all()) or not bool(loc.isfinite().all()) or not bool(scale.isfinite().all()):
        raise InputError(f"`target_scale` must be a finite mean and a positive deviation, got {target_scale!r}.")
    return loc, scale


def _check_length(target_scale: tuple[Tensor, Tensor], targets: int) -> None:
    """Raise an error unless there is one number for all targets, or one for each."""
    for part in target_scale:
        if len(part) not in (1, targets):
            raise InputError(
                f"`target_scale` holds {len(part)} numbers for a prediction of {targets}: give one, or one for each."
            )


def _classes(decisions: Decisions) -> Mapping[str, Callable[[], Output]]:
    def read(name: str) -> Callable[[], Output]:
        return lambda: Output(name, lambda context: getattr(context.prediction, name))

    def sets() -> Output:
        found = decisions.get(ConformalSets, "set", " with a coverage of 90 %")
        return Output("set", lambda context: found.margin(context.prediction), kind="from")

    plain = {name: read(name) for name in ("probs", "entropy", "aleatoric", "epistemic")}
    label = Output("label", lambda context: context.prediction.probs, kind="class")
    return {**plain, "label": lambda: label, "set": sets, **_either(decisions)}


def _numbers(
    decisions: Decisions, level: float, target_scale: tuple[Tensor, Tensor] | None
) -> Mapping[str, Callable[[], Output]]:
    def shifted(value: Tensor) -> Tensor:
        return value if target_scale is None else target_scale[0].to(value) + target_scale[1].to(value) * value

    def scaled(value: Tensor, power: int) -> Tensor:
        return value if target_scale is None else value * target_scale[1].to(value) ** power

    def end(number: int) -> Callable[[], Output]:
        conformal = decisions.found.get(ConformalIntervals)

        def value(context: Context) -> Tensor:
            prediction = context.prediction
            ends = prediction.interval(level) if conformal is None else conformal.ends(prediction)
            found = ends[number].to(prediction.mean.dtype)
            return shifted(found) if conformal is None or conformal.target_scale is None else found

        return lambda: Output(("lower", "upper")[number], value)

    return {
        "mean": lambda: Output("mean", lambda context: shifted(context.prediction.mean)),
        "stddev": lambda: Output("stddev", lambda context: scaled(context.prediction.stddev, 1)),
        "aleatoric": lambda: Output("aleatoric", lambda context: scaled(context.prediction.aleatoric, 2)),
        "epistemic": lambda: Output("epistemic", lambda context: scaled(context.prediction.epistemic, 2)),
        "lower": end(0),
        "upper": end(1),
        **_either(decisions),
    }


def _either(decisions: Decisions) -> Mapping[str, Callable[[], Output]]:
    """Return the outputs that classes and numbers have in common."""

    def answer() -> Output:
        found = decisions.get(Rejector, "answer", " with a risk of 2 %")
        return Output("answer", lambda context: found.margin(context.prediction), kind="from")

    def unfamiliar() -> Output:
        found = decisions.get(Detector, "unfamiliar", " with 5 % false alarms")
        return Output("unfamiliar", lambda context: found.margin(context.prediction, context.logits), kind="above")

    return {"answer": answer, "unfamiliar": unfamiliar}
