"""From a posterior to the content of a file: record the predictive and its decisions, convert it, run it, compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dubito import __version__
from dubito.beliefs.prediction import ClassPrediction, Prediction
from dubito.core import batches, params
from dubito.core.errors import DubitoError, FileFormatError, InputError, UnsupportedError, first_line
from dubito.core.randomness import default_generator
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.traceable import Traceable
from dubito.uses.decisions import ConformalIntervals, ConformalSets, Detector, Rejector
from dubito.uses.export import check
from dubito.uses.export.formats import Format
from dubito.uses.export.graph import record
from dubito.uses.export.inputs import Inputs
from dubito.uses.export.outputs import Context, Decisions, Output

# An approximation is compared with many samples, on at most this many rows.
REFERENCE_ROWS = 128


class Program(nn.Module):
    """What is recorded: from raw inputs to the outputs of the file.

    Args:
        predict: The predictive.
        outputs: The outputs.
        front: The preprocessing, or None.
        inputs: Says how the arguments of the network are put together.
        centre: The posterior whose network gives logits at the centre, if a decision looks at them.
        dtype: The type of floating inputs of the network.
    """

    def __init__(
        self,
        predict: Predictor,
        outputs: Sequence[Output],
        front: nn.Module | None,
        inputs: Inputs,
        centre: Posterior | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.predict, self.outputs, self.front, self.inputs = predict, tuple(outputs), front, inputs
        self.centre, self.dtype = centre, dtype

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs in their order."""
        given = network_inputs(self.front, self.inputs.rebuilt(tensors), self.dtype)
        context = Context(self.predict(given), centre_logits(self.centre, given))
        return tuple(output.result(output.value(context)) for output in self.outputs)


def network_inputs(front: nn.Module | None, given: Any, dtype: torch.dtype) -> Any:
    """Return raw inputs after the preprocessing, with floating ones in the type of the network."""
    if front is None:
        return given
    made = front(**given) if isinstance(given, Mapping) else front(*given) if isinstance(given, tuple) else front(given)
    return batches.place(made, None, dtype)


def centre_logits(centre: Posterior | None, given: Any) -> Tensor | None:
    """Return the logits of the network at the posterior's centre, class axis last."""
    return None if centre is None else centre.likelihood.canonical(params.call(centre.model, given))


class Built(NamedTuple):
    """The content of a file, what it computes, and how far that is from `predict`."""

    content: bytes
    form: str
    approximations: tuple[str, ...]
    errors: dict[str, float]


@dataclass(frozen=True)
class Job:
    """The export of one posterior with fixed draws."""

    posterior: Posterior  # the posterior
    inputs: Inputs  # the example
    front: nn.Module | None  # the preprocessing, or None
    decisions: Decisions  # the decisions in the file
    draws: Draws  # the posterior samples in the file
    options: Mapping[str, Any]  # options of `predict`

    def given(self, rows: int | None = None) -> Any:
        """Return the first rows of the example as the network takes them; by default all."""
        tensors = self.inputs.copies(rows)
        try:
            with torch.no_grad():
                made = network_inputs(self.front, self.inputs.rebuilt(tensors), self.posterior.dtype)
        except DubitoError:
            raise
        except Exception as error:
            raise InputError(f"`preprocess` cannot take the example: {first_line(error).rstrip('.')}.") from error
        before, after = len(tensors[0]), batches.num_rows(made)
        if before != after:
            raise InputError(f"`preprocess` must return one row per example: of {before} it made {after}.")
        return made

    def predict(self, num_samples: int | None = None) -> Prediction:
        """Return the prediction of the posterior for the example, or for a part of it if there are many samples."""
        given = self.given(None if num_samples is None else REFERENCE_ROWS)
        count = self.draws.num_samples if num_samples is None else num_samples
        found = self.posterior.predict(given, num_samples=count, generator=self.draws.generator(), **self.options)
        if self.posterior._network_draws:
            raise UnsupportedError("The network draws random numbers to predict, which a file cannot: turn that off.")
        return found

    def check_decisions(self, expected: Prediction) -> None:
        """Raise if the options change the prediction: decisions are calibrated on that without options."""
        usual = replace(self, options={}).predict()
        name = "log_probs" if isinstance(expected, ClassPrediction) else "mean"
        if not torch.allclose(getattr(expected, name), getattr(usual, name), rtol=1e-3, atol=1e-4):
            given = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
            raise InputError(
                f"Decisions are calibrated on the usual prediction, and {given} changes it: leave out this option, or "
                "the decisions and the outputs that need them."
            )

    def build(
        self,
        file_format: Format,
        outputs: Sequence[Output],
        expected: Prediction,
        tolerance: float | None,
        metadata: Mapping[str, Any],
    ) -> Built:
        """Return the content of the file by the first form that agrees with `predict`; raise an error if none does."""
        failed = ""
        with self.posterior.working_copy() as own, torch.no_grad():
            for form in own.forms(self.given(), self.draws.num_samples, self.draws.generator(), **self.options):
                if form.makes_weights and not file_format.computes_constants_once:
                    continue
                strict = form.reference_samples is None  # else it is compared with other samples than its own
                allowed = tolerance or check.usual_tolerance(own.dtype, strict)
                reference = expected if form.reference_samples is None else self.predict(form.reference_samples)
                converted, errors = self._converted(own, form, file_format, outputs, reference, allowed)
                failed = check.exceeded(outputs, errors, allowed, strict) or ""
                if not failed:
                    about = {**metadata, **self._description(form, outputs, errors)}
                    return Built(file_format.content(converted, about), form.form, form.approximations, errors)
        raise FileFormatError(
            f"The file's '{failed}' differs by {errors[failed]:.2g} from that of predict, more than {allowed:.2g}, so "
            "it was not written: give a larger `tolerance`, or check that the network treats examples independently."
        )

    def _converted(
        self,
        own: Posterior,
        form: Traceable,
        file_format: Format,
        outputs: Sequence[Output],
        reference: Prediction,
        tolerance: float,
    ) -> tuple[Any, dict[str, float]]:
        """Record one form, convert it, run it and return the largest error of each output."""
        centre = own if self.decisions.needs_logits else None
        program = Program(form.predict, outputs, self.front, self.inputs, centre, own.dtype).eval()
        rows = self.inputs.traced_rows()
        check.can_take_any_number_of_rows(program, rows)  # draws all random numbers too
        half = own.dtype in (torch.float16, torch.bfloat16)
        recorded = record(program, rows, torch.float32 if half else None, share=form.makes_weights)
        converted = file_format.convert(recorded, self.inputs.names, [output.name for output in outputs])
        run = file_format.load(file_format.content(converted, {}))
        context = Context(reference, centre_logits(centre, self.given(len(reference))))
        expected = [output.value(context) for output in outputs]
        wide = tuple(t.float() if half and t.is_floating_point() else t for t in self.inputs.tensors)
        errors: dict[str, float] = {}
        for count in dict.fromkeys((len(reference), 1)):  # all at once, and one alone
            found = run(tuple(tensor[:count] for tensor in wide))
            some = check.differences(outputs, found, [each[:count] for each in expected], tolerance)
            errors = {name: max(errors.get(name, 0.0), value) for name, value in some.items()}
        return converted, errors

    def _description(self, form: Traceable, outputs: Sequence[Output], errors: Mapping[str, float]) -> dict[str, Any]:
        """Return what the file says of itself."""
        return {
            "version": __version__,
            "family": self.posterior.family,
            "recipe": repr(self.posterior.recipe),
            "inputs": list(self.inputs.names),
            "outputs": [output.name for output in outputs],
            "form": form.form,
            "approximations": list(form.approximations),
            "decisions": [repr(one) for one in self.decisions.found.values()],
            "errors": dict(errors),
        }


class Draws(NamedTuple):
    """The posterior samples in a file: how many, and from which state of a generator."""

    num_samples: int
    state: torch.Generator

    def generator(self) -> torch.Generator:
        """Return a new generator in that state."""
        return self.state.clone_state()


def fit_decisions(
    posterior: Posterior, outputs: Sequence[str] | None, given: Sequence[Any], calibration: Any, draws: dict[str, Any]
) -> list[Any]:
    """Fit the decisions that `outputs` ask for and that are not given, with their default settings."""
    if calibration is None:
        return []
    kinds: dict[str, Any] = {"answer": Rejector, "unfamiliar": Detector, "set": ConformalSets}
    kinds |= {"lower": ConformalIntervals, "upper": ConformalIntervals}
    wanted = dict.fromkeys(kinds[name] for name in outputs or () if name in kinds)
    present = {type(one) for one in given}
    return [kind(posterior, calibration, **draws) for kind in wanted if kind not in present]


def find_draws(
    posterior: Posterior, decisions: Decisions, num_samples: int | None, generator: torch.Generator | None
) -> Draws:
    """Return the draws of the file: those that its decisions were fitted with, if there are any."""
    own = Draws(posterior.default_samples if num_samples is None else num_samples, _state(generator))
    first: Draws | None = None
    for one in decisions.found.values():
        name = type(one).__name__
        if one.posterior is not posterior and one.posterior.digest() != posterior.digest():
            raise InputError(f"The {name} was fitted with another posterior: fit it with the one that is exported.")
        fixed = one.draws
        count = posterior.default_samples if fixed.num_samples is None else fixed.num_samples
        found = Draws(count, fixed.state)
        wanted = first or Draws(found.num_samples if num_samples is None else num_samples,
                                found.state if generator is None else own.state)  # fmt: skip
        if count != wanted.num_samples or not torch.equal(found.state.get_state(), wanted.state.get_state()):
            raise InputError(
                f"The {name} was fitted with other posterior samples ({count}) than the file is to hold "
                f"({wanted.num_samples}): give both the same num_samples and generator."
            )
        first = found
    return first or own


def _state(generator: torch.Generator | None) -> torch.Generator:
    return default_generator(generator).clone_state()
