"""`export`: one file that predicts with its uncertainty, checked against the posterior before it is handed out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dubito.core.atomic import check_writable, write_atomic
from dubito.core.constraints import OpenProbability, Positive, check
from dubito.core.errors import InputError
from dubito.fitting.posterior import Posterior
from dubito.fitting.traceable import HasTraceable
from dubito.uses.export.building import Job, find_draws, fit_decisions
from dubito.uses.export.formats import check_metadata, find_format
from dubito.uses.export.inputs import as_inputs, as_module
from dubito.uses.export.outputs import Decisions, as_scale, check_names, make_outputs


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: The file.
        num_bytes: Its size.
        inputs: The names of its inputs.
        outputs: The names of its outputs.
        form: What it computes, in a few words.
        approximations: How it differs from `predict` with the same draws; none if only by rounding.
        errors: For every output how far it was from that of `predict` on the example: the largest difference (relative
            to the largest number if that is above 1), or the fraction of decisions that differ.
    """

    path: Path
    num_bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    form: str
    approximations: tuple[str, ...]
    errors: Mapping[str, float]

    @property
    def difference(self) -> float:
        """The largest of the errors."""
        return max(self.errors.values())


def export(
    posterior: Posterior,
    path: str | os.PathLike[str],
    outputs: Sequence[str] | None = None,
    *,
    example: Any = None,
    decisions: Sequence[Any] = (),
    calibration: Any = None,
    preprocess: Any = None,
    level: float = 0.95,
    target_scale: tuple[Any, Any] | None = None,
    tolerance: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    num_samples: int | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Exported:
    """Write a posterior's predictive to one ``.onnx`` or ``.pt2`` file; the batch size stays free.

    The file is run on the example and compared with `predict` before it is written. If it differs by more than the
    tolerance there is an error and no file.

    Args:
        posterior: Any posterior.
        path: The file. Its ending decides the format.
        outputs: What the file returns, in this order. Classes: ``probs, entropy, aleatoric, epistemic, label, set,
            answer, unfamiliar``; regression: ``mean, stddev, aleatoric, epistemic, lower, upper, answer, unfamiliar``.
            By default all that need no decision, and those of the given decisions; counts and other distributions that
            are not Gaussian have no ``lower`` and ``upper`` without ConformalIntervals.
        example: A batch of inputs as the file will get them, before `preprocess`: a tensor, a tuple or dict of tensors,
            or a loader, of which the first batch is used. By default the inputs of `calibration`.
        decisions: Fitted objects of `dubito.decisions`: a Rejector gives ``answer``, a Detector ``unfamiliar``,
            ConformalSets ``set``, ConformalIntervals ``lower`` and ``upper``.
        calibration: Labelled inputs of the network (after `preprocess`), to fit the decisions that `outputs` ask for
            and that are not given, with their default settings.
        preprocess: A module that turns raw inputs into those of the network, or an object with a method `to_module()`
            that returns one. It becomes part of the file.
        level: The probability of the interval from ``lower`` to ``upper``, without ConformalIntervals.
        target_scale: Mean and standard deviation with which regression targets were standardized. The file returns
            numbers in the original units.
        tolerance: The largest allowed difference. By default what rounding explains in the network's precision, and
            0.05 for a form that is an approximation.
        metadata: More entries for the file's description of itself, such as the names of classes; values as in JSON.
        num_samples: The number of posterior samples in the file, where the family needs any.
        generator: Draws them; by default the same draws as `predict`.
        options: Options of `predict`, such as ``method="weights"`` for Laplace.
    """
    if not isinstance(posterior, Posterior):
        raise InputError(f"A {type(posterior).__name__} is not a posterior: fit one, for example with Laplace().")
    target, file_format = find_format(path)
    check_writable(target)
    check_names(outputs)
    check("level", OpenProbability, level)
    if tolerance is not None:
        check("tolerance", Positive, tolerance)
    check_metadata(metadata)
    front, scale = as_module(preprocess), as_scale(target_scale)
    drawing = {"num_samples": num_samples, "generator": generator}
    known = Decisions([*decisions, *fit_decisions(posterior, outputs, decisions, calibration, drawing)])
    if example is None and front is None:
        example = calibration[0] if isinstance(calibration, tuple) else calibration
    inputs = as_inputs(example, front or posterior.model, posterior.device, None if front else posterior.dtype)
    job = Job(posterior, inputs, front, known, find_draws(posterior, known, num_samples, generator), options)
    expected = job.predict()
    if known.found and options:
        job.check_decisions(expected)
    heads = make_outputs(outputs, expected, known, level, scale)
    made = job.build(file_format, heads, expected, tolerance, metadata or {})
    write_atomic(target, made.content)
    names = tuple(head.name for head in heads)
    return Exported(target, len(made.content), inputs.names, names, made.form, made.approximations, made.errors)


HasTraceable._exporter = export
