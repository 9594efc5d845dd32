"""Measure how good a posterior's predictions are on its own data, under shift and out of distribution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dubito.core import distributed
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.errors import InputError
from dubito.core.randomness import default_generator, draw_seed
from dubito.fitting.history import History, Numbers, evenly_spaced
from dubito.fitting.posterior import Posterior
from dubito.uses import metrics
from dubito.uses.decisions.rejection import largest_threshold
from dubito.uses.fixed_draws import FixedDraws
from dubito.uses.metrics.scores import UNCERTAINTIES, computed
from dubito.uses.reporting.collect import BAND_LEVEL, EvaluationPass, RescaledDraws, Scale, Vectors, collect
from dubito.uses.reporting.evaluation import (
    Band,
    Curves,
    Evaluation,
    Histogram,
    Quantiles,
    Reliability,
    RiskCoverageCurve,
    Scores,
    ShiftedConfidence,
    Task,
    has_severities,
    shift_name,
)
from dubito.uses.reporting.examples import Decode, ExampleFinder
from dubito.uses.reporting.groups import group_scores
from dubito.uses.reporting.verdict import trust_in

_MAX_POINTS = 200  # of a curve
_NUM_BINS = 40  # of a histogram
_NUM_PARTS = 50  # of the data, from which the standard error of a difference between methods is known
FEWEST = 20  # answers that must be left for a threshold to be worth telling

Shifts = Mapping[str, Data | Mapping[float, Data]]

Shifted = tuple[Scores, ShiftedConfidence | None]


@distributed.together()
@checked_arguments
def evaluate(
    posterior: Posterior,
    data: Data,
    *,
    ood: Mapping[str, Data | Tensor] | None = None,
    shifts: Shifts | None = None,
    num_samples: int | None = None,
    batch_size: int = 1024,
    target_scale: Scale | None = None,
    groups: Mapping[str, Sequence[Any] | Tensor] | None = None,
    decode: Decode | None = None,
    class_names: Sequence[str] = (),
    name: str | None = None,
    generator: torch.Generator | None = None,
) -> Evaluation:
    """Measure the predictions of a posterior, batch by batch; only a few numbers per datum are kept in memory.

    Classification gives accuracy, NLL, Brier score, ECE, MCE and AURC (error rate, ordered by the largest probability);
    regression RMSE, NLL, CRPS, coverage and width of intervals, the calibration error of quantiles and AURC (squared
    error, ordered by the standard deviation). Positions and outputs are scored one by one, each as a datum of its own;
    positions without a target (`ignore_index`) are left out.

    Out-of-distribution sets are detected by each uncertainty: one minus the largest probability, the entropy
    and its epistemic part; for regression the standard deviation and its epistemic part.

    Where `torch.distributed` is active every process predicts its own rows; sums and the numbers per datum are put
    together, so every process returns the same result; it has no examples to look at.

    Args:
        posterior: What `recipe.fit` returned.
        data: A DataLoader, a Dataset, an `(inputs, targets)` pair or a list of batches.
        ood: Out-of-distribution sets by name; targets are ignored, and a tensor of inputs will do.
        shifts: Shifted versions of the data by name, or by kind and then severity, a number that grows with the shift:
            ``{"rotation": {15: ..., 30: ...}, "other scanner": ...}``.
        num_samples: How many samples a prediction draws; the posterior's own default if not given.
        batch_size: How many rows are predicted at a time.
        target_scale: ``(loc, scale)`` if targets were standardised as ``(y - loc) / scale``: regression scores are then
            in original units, for targets that are given standardised.
        groups: For each kind of group one label per example, in the order of the data, such as ``{"sex": labels}``: the
            report then shows in which groups intervals hold the truth, or answers are right, as often as claimed.
        decode: Turns inputs ``[N, ...]`` into what a person recognizes, for the examples in a report: pictures
            ``[N, C, H, W]`` from 0 to 1, a list of texts, or a dict of columns; ``dataset.encoder.decode`` of a data
            set. Without it pictures are found by their shape, and of other inputs the first numbers are shown.
        class_names: The names of the classes, for these examples.
        name: What to call the posterior; its recipe if not given.
        generator: The source of randomness; by default the same call gives the same numbers.
    """
    for argument, sets in {"ood": ood, "shifts": shifts}.items():
        if sets is not None and not isinstance(sets, Mapping):
            raise InputError(f"`{argument}` must be a dict from names to data, got a {type(sets).__name__}.")
    generator = default_generator(generator)
    distributed.share_generator(generator)
    predictor = RescaledDraws(FixedDraws(posterior, num_samples, generator, batch_size), target_scale)
    _check_order(data, groups)
    finder = ExampleFinder()
    main = collect(predictor, data, "The data", watch=finder)
    outside = {
        key: collect(predictor, inputs, f"The ood set '{key}'", main, labelled=False)
        for key, inputs in (ood or {}).items()
    }
    shifted = dict(_shifted(predictor, shifts or {}, main))
    draw_seed(generator)  # advances it, so that a second evaluation draws other samples
    assert main.metrics is not None
    curves = replace(
        _curves(main, outside),
        chains=_chains(posterior.history()),
        groups=group_scores(main.vectors, groups),
        shifted={name: found for name, (_, found) in shifted.items() if found is not None},
        examples=finder.examples(decode, class_names, _task(main) == "classification"),
    )
    return Evaluation(
        name=repr(posterior.recipe) if name is None else name, task=_task(main), curves=curves,
        count=int(main.metrics.compute()["count"]), scores=_scores(main), shifts=_shift_scores(shifts or {}, shifted),
        ood={key: _detection(main, other) for key, other in outside.items()},
        seconds_per_1000=1000 * main.seconds / main.num_rows,
        trust=trust_in(posterior, main.metrics, main.num_classes),
    )  # fmt: skip


def _task(done: EvaluationPass) -> Task:
    return "classification" if isinstance(done.metrics, metrics.ClassificationMetrics) else "regression"


def _check_order(data: Any, groups: Mapping[str, Any] | None) -> None:
    if groups and isinstance(data, DataLoader):
        raise InputError("`groups` needs data in a fixed order: give (inputs, targets) or a Dataset, not a DataLoader.")


def _shifted(predictor: RescaledDraws, shifts: Shifts, main: EvaluationPass) -> Iterator[tuple[str, Shifted]]:
    """Yield the scores and the confidence for each shift and severity, by its name."""

    def measure(rows: Any, what: str) -> Shifted:
        done = collect(predictor, rows, what, main)
        return _scores(done), None if _task(done) == "regression" else _confidence(main, done)

    for kind, value in shifts.items():
        if not isinstance(value, Mapping):
            yield kind, measure(value, f"The shift '{kind}'")
            continue
        if not has_severities(value):
            raise InputError(f"The shift '{kind}' must be data, or a dict from severities, which are numbers, to data.")
        for severity, rows in sorted(value.items()):
            yield shift_name(kind, severity), measure(rows, f"The shift '{kind}' of severity {severity:g}")


def _shift_scores(shifts: Shifts, found: Mapping[str, Shifted]) -> dict[str, Scores | dict[float, Scores]]:
    return {
        kind: {severity: found[shift_name(kind, severity)][0] for severity in sorted(value)}
        if isinstance(value, Mapping)
        else found[kind][0]
        for kind, value in shifts.items()
    }


def _confidence(main: EvaluationPass, done: EvaluationPass) -> ShiftedConfidence:
    """Return how sure a classifier is of shifted data, and from which confidence on it is as right as on the data."""
    unsure, wrong = (done.vectors[name].double() for name in ("max-probability", "loss"))
    limit = largest_threshold(metrics.risk_coverage(unsure, wrong), float(main.vectors["loss"].double().mean()))
    kept = 0.0 if limit is None else float((unsure <= limit).double().mean())
    threshold, answered = (1 - limit, kept) if limit is not None and kept * len(unsure) >= FEWEST else (None, 0.0)
    return ShiftedConfidence(len(wrong), 1 - float(unsure.mean()), 1 - float(wrong.mean()), threshold, answered)


def _scores(done: EvaluationPass) -> Scores:
    assert done.metrics is not None
    scores = done.metrics.compute()
    del scores["count"]
    uncertainty, _ = _risks(done)
    return scores | computed({**done.vectors, "uncertainty": uncertainty})


def _risks(done: EvaluationPass) -> tuple[Tensor, Tensor]:
    return done.vectors[UNCERTAINTIES[_task(done)][0]], done.vectors["loss"]


def _detection(main: EvaluationPass, other: EvaluationPass) -> dict[str, Scores]:
    """Return how well each uncertainty tells the other set (the positives) from the data."""
    found: dict[str, Scores] = {}
    for name in UNCERTAINTIES[_task(main)]:
        inside, outside = main.vectors[name].double(), other.vectors[name].double()
        scores = torch.cat([inside, outside])
        found[name] = computed({"scores": scores, "labels": torch.arange(len(scores)) >= len(inside)})
    return found


def _curves(main: EvaluationPass, outside: Mapping[str, EvaluationPass]) -> Curves:
    curve = metrics.risk_coverage(*_risks(main))
    points = evenly_spaced(len(curve.risk), _MAX_POINTS)
    reliability = quantiles = None
    if isinstance(main.metrics, metrics.ClassificationMetrics):
        bins = main.metrics.reliability()
        reliability = Reliability(*map(_numbers, (bins.edges, bins.counts, bins.confidence_sums, bins.correct_sums)))
    else:
        quantiles = Quantiles(*map(_numbers, metrics.quantile_calibration(main.vectors["pit"])))
    histograms = {}
    if outside:
        histograms = {name: _histogram(name, main, outside) for name in UNCERTAINTIES[_task(main)]}
    return Curves(
        risk_coverage=RiskCoverageCurve(_numbers(curve.coverage[points]), _numbers(curve.risk[points])),
        reliability=reliability,
        quantiles=quantiles,
        band=_band(main.vectors) if "x" in main.vectors else None,
        histograms=histograms,
        nll_parts=_part_means(main.vectors["nll"].double()),
    )


def _part_means(values: Tensor) -> Numbers:
    """Return the means of interleaved parts of the data; the same parts for every method."""
    count = min(_NUM_PARTS, len(values))
    return _numbers(torch.stack([values[start::count].mean() for start in range(count)]))


def _histogram(name: str, main: EvaluationPass, outside: Mapping[str, EvaluationPass]) -> Histogram:
    """Count in equal bins from 0 to the 99.5 % point of all values, so that a few huge ones do not hide the rest."""
    everything = torch.cat([done.vectors[name] for done in (main, *outside.values())]).double()
    rank = max(round(0.995 * len(everything)), 1)
    top = float(everything.kthvalue(rank).values) or float(everything.max()) or 1.0
    edges = torch.linspace(0, top, _NUM_BINS + 1, dtype=torch.float64)

    def count(done: EvaluationPass) -> Numbers:
        index = torch.bucketize(done.vectors[name].double(), edges[1:-1], right=True)
        return _numbers(torch.bincount(index, minlength=_NUM_BINS))

    return Histogram(_numbers(edges), count(main), {key: count(done) for key, done in outside.items()})


def _band(vectors: Vectors) -> Band:
    order = vectors["x"].argsort(stable=True)
    chosen = order[evenly_spaced(len(order), _MAX_POINTS)]
    x, mean, low, high, target = (_numbers(vectors[key][chosen]) for key in ("x", "answer", "low", "high", "truth"))
    return Band(x, mean, low, high, target, BAND_LEVEL)


def _chains(history: History | None) -> History | None:
    return None if history is None else replace(history, traces=tuple(t.thinned(_MAX_POINTS) for t in history.traces))


def _numbers(values: Tensor) -> Numbers:
    return tuple(values.double().tolist())
