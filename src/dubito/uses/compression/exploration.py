"""Measure twenty smaller networks of one posterior, to choose from: `explore`."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.core import params
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.constraints import Count
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.widest import at_home
from dubito.fitting.posterior import Posterior
from dubito.fitting.progress import progress_bar
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.uses.compression.budget import repeated
from dubito.uses.compression.compress import Taught, example_inputs, measured_rows, retrained
from dubito.uses.compression.csr import seconds
from dubito.uses.compression.pruner import Pruner
from dubito.uses.compression.report import num_macs
from dubito.uses.compression.result import Compression
from dubito.uses.compression.rules import Rule
from dubito.uses.compression.search import point
from dubito.uses.compression.storage import load, save
from dubito.uses.compression.weight_statistics import ranking_rule
from dubito.uses.reporting import Evaluation, evaluate
from dubito.uses.reporting.collect import Scale

Structure = Literal["units", "weights"]
# The shares of units and weights that go. They are fixed, so a number means the same candidate in every call.
TARGETS: tuple[tuple[Structure, float], ...] = (
    *(("units", share) for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)),
    *(("weights", share) for share in (0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.98)),
)
ERROR = {"classification": "accuracy", "regression": "rmse"}
DETECTION = {"classification": "entropy", "regression": "stddev"}
CALIBRATION = {"classification": "ece", "regression": "coverage@0.9"}


@dataclass(frozen=True)
class Explored:
    """One network, measured; number 0 is the network before.

    Attributes:
        number: Its number.
        structure: What was removed: ``"units"`` or ``"weights"``.
        target: The share of them that was removed.
        num_bytes: The size of its entropy-coded file; of the network before, that of the dense file.
        macs: The share of multiply-accumulates that is left.
        seconds: The time of one call.
        scores: The scores of `dubito.evaluate`: for the network as it was read back from its file, or for the posterior
            over what is left if `explore` was given a recipe.
    """

    number: int
    structure: Structure
    target: float
    num_bytes: int
    macs: float
    seconds: float
    scores: dict[str, float]

    @property
    def name(self) -> str:
        """What it is, in words."""
        return "before" if self.number == 0 else _name(self.structure, self.target)


@dataclass(frozen=True, eq=False)
class Exploration:
    """What `explore` returns; ``print`` it.

    Attributes:
        candidates: The smaller networks. Those that cannot be made are missing, such as one with an empty layer.
        before: The network before.
        evaluation: The full evaluation of the network before.
        batch_size: The number of inputs in the calls that were timed.
        notes: What could not be tried, as sentences.
    """

    candidates: tuple[Explored, ...]
    before: Explored
    evaluation: Evaluation
    batch_size: int = 1
    notes: tuple[str, ...] = ()

    @checked_arguments
    def page(
        self,
        path: str | os.PathLike[str] = "explore.html",
        *,
        pick: str = "compression.pick(posterior, {}, data=data)",
        data_name: str | None = None,
        command: str | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> Path:
        """Write one HTML page: size, time, error and calibration of every candidate; a click shows how to make it.

        Args:
            path: The file.
            pick: How a candidate is made, with ``{}`` in place of its number.
            data_name: The name of the data, for the heading.
            command: How to explore again.
            facts: What was run.
        """
        from dubito.uses.compression.page import explore_section
        from dubito.uses.reporting.page import write_page

        return write_page(
            {"before": self.evaluation}, path, title="How small can it be?", data_name=data_name, command=command,
            facts=facts, first=(explore_section(self, pick),),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "before": asdict(self.before), "candidates": [asdict(each) for each in self.candidates],
            "batch_size": self.batch_size, "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        error, calibration = ERROR[self.evaluation.task], CALIBRATION[self.evaluation.task]
        lines = [f"{'':>3} {'':<26}{'bytes':>11}{'MACs':>8}{'ms':>9}{error:>11}{'nll':>9}{calibration:>14}"]
        for each in (self.before, *self.candidates):
            scores = each.scores
            lines.append(
                f"{each.number:>3} {each.name:<26}{each.num_bytes:>11,}{each.macs:>8.1%}{1000 * each.seconds:>9.3f}"
                f"{scores[error]:>11.4f}{scores['nll']:>9.4f}{scores[calibration]:>14.4f}"
            )
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__


@at_home
@checked_arguments
def explore(
    posterior: Posterior,
    rule: Rule | None = None,
    *,
    data: Data,
    train: Data | None = None,
    recipe: Recipe | None = None,
    validation: Data | None = None,
    ood: Mapping[str, Data | Tensor] | None = None,
    target_scale: Scale | None = None,
    batch_size: Count = 1,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> Exploration:
    """Measure the size, time, error and calibration of twenty smaller networks, without fine-tuning.

    Twelve lose units, eight single weights, by the least damage (for units, per multiply-accumulate). `pick` makes one
    of them again by its number.

    Args:
        posterior: As for `compress`.
        rule: The rule that ranks weights or units, without an amount; by default that of a budget.
        data: Held-out data with targets, on which all are scored.
        train: Training data: activations are measured on it, and `recipe` is fitted to it.
        recipe: Finds a posterior over the weights that are left of each candidate, which is then scored; by default the
            network alone is. It needs `train`. Candidates without single weights are always scored alone: a posterior
            over a part of each matrix takes far longer.
        validation: Held-out data for what the recipe tunes.
        ood: Out-of-distribution sets by name, as for `evaluate`: the scores then have the AUROC of their detection.
        target_scale: As for `evaluate`.
        batch_size: The number of inputs in the calls that are timed.
        generator: The source of randomness.
        progress: Whether to show a progress bar on a terminal.
    """
    if recipe is not None and train is None:
        raise InputError("A recipe is fitted to training data: give `train=` too.")
    notes: list[str] = []
    pruners = _pruners(posterior, rule, data, train, generator, notes)
    if recipe is not None:
        notes.append("Networks without single weights are scored without a posterior over what is left.")

    meter = _Measuring(pruners["weights"].center, pruners["weights"].example, batch_size)

    def scored(made: Compression | None) -> Evaluation:
        found = posterior
        if made is not None:
            found = point(meter.reread(made), posterior)
            if recipe is not None and train is not None and made.is_whole:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of candidates that are too small: their scores tell
                    found = made.posterior(recipe, train, validation=validation, generator=generator)
        elif recipe is None:
            found = point(pruners["weights"].center, posterior)
        return evaluate(found, data, ood=ood, target_scale=target_scale, generator=generator)

    whole = scored(None)
    before = meter.measure(0, "weights", 0.0, None, whole)
    candidates, empty = [], list[str]()
    with progress_bar(len(TARGETS), progress, "explore", unit="network") as bar:
        for number, (kind, target) in enumerate(TARGETS, 1):
            try:
                made = _made(pruners[kind], target, data) if kind in pruners else None
            except InputError:
                made = None
                empty.append(str(number))
            if made is not None:
                candidates.append(meter.measure(number, kind, target, made, scored(made)))
            bar.update()
    if empty:
        notes.append(f"Not made, because a layer would be empty: {', '.join(empty)}.")
    return Exploration(tuple(candidates), before, whole, batch_size, tuple(notes))


@at_home
@checked_arguments
def pick(
    posterior: Posterior,
    number: Count,
    rule: Rule | None = None,
    *,
    data: Data,
    train: Data | None = None,
    finetune: Data | None = None,
    training: Training | None = None,
    generator: torch.Generator | None = None,
) -> Compression:
    """Return one candidate of `explore` by its number; only this one is made.

    Args:
        posterior: As for `explore`.
        number: Its number, from 1.
        rule: As for `explore`.
        data: As for `explore`.
        train: As for `explore`.
        finetune: Training data to train the remaining weights on, as for `compress`.
        training: How to fine-tune.
        generator: The source of randomness.
    """
    if number > len(TARGETS):
        raise InputError(f"`number` must be from 1 to {len(TARGETS)}, the candidates of `explore`, got {number}.")
    kind, target = TARGETS[number - 1]
    pruner = _pruner(posterior, rule, kind, data, train, generator)
    try:
        made = _made(pruner, target, data)
    except InputError as error:
        what = _name(kind, target)
        raise InputError(f"With {what} a layer would be empty: pick a smaller number than {number}.") from error
    if finetune is None:
        return made
    taught = Taught(finetune, training, generator=generator)
    return made.changed(*retrained(posterior, made.plan, made.model, pruner.example, taught))


def _name(kind: Structure, target: float) -> str:
    return f"{target:.0%} of the {kind} removed"


def _pruner(
    posterior: Posterior,
    rule: Rule | None,
    kind: Structure,
    data: Data,
    train: Data | None,
    generator: torch.Generator | None,
) -> Pruner:
    ranking = ranking_rule(posterior) if rule is None else rule.require_no_amount("Among candidates of many sizes")
    example = example_inputs(posterior, data, None, kind)
    rows = measured_rows(posterior, data if train is None else train, example) if kind == "units" else ()
    return Pruner.of(posterior, ranking, kind, example, False, generator, "macs", rows)


def _pruners(
    posterior: Posterior,
    rule: Rule | None,
    data: Data,
    train: Data | None,
    generator: torch.Generator | None,
    notes: list[str],
) -> dict[Structure, Pruner]:
    """Return what removes weights, and units where they can be removed; a note says where not."""
    found: dict[Structure, Pruner] = {"weights": _pruner(posterior, rule, "weights", data, train, generator)}
    try:
        found["units"] = _pruner(posterior, rule, "units", data, train, generator)
    except UnsupportedError as error:
        notes.append(f"No units were removed: {error}")
    return found


def _made(pruner: Pruner, target: float, data: Data) -> Compression:
    rule = pruner.rule.replace(target=target)
    return Compression(pruner.posterior, rule, *pruner.at(rule), pruner, data, pruner.example)


class _Measuring:
    """Measures networks: bytes, operations and time.

    Args:
        dense: The network before.
        example: Some inputs.
        batch_size: The number of inputs in the calls that are timed.
    """

    def __init__(self, dense: nn.Module, example: Any, batch_size: int) -> None:
        self.dense, self.example = dense, repeated(example, batch_size)
        self.macs = num_macs(dense, self.example)

    def reread(self, made: Compression) -> nn.Module:
        """Return the network as it is after it was written to its file and read back."""
        with tempfile.TemporaryDirectory() as folder:
            made.save(Path(folder) / "network")
            return load(Path(folder) / "network", self.dense)

    def measure(
        self, number: int, kind: Structure, target: float, made: Compression | None, found: Evaluation
    ) -> Explored:
        """Measure the network of a compression, or the one before."""
        model = self.dense if made is None else made.model
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "network"
            size = save(path, model, "dense") if made is None else made.save(path)
        with torch.no_grad():
            taken = seconds(lambda: params.call(model, self.example))
        share = num_macs(model, self.example) / max(self.macs, 1)
        uncertainty = DETECTION[found.task]
        scores = found.scores | {f"auroc {name}": each[uncertainty]["auroc"] for name, each in found.ood.items()}
        return Explored(number, kind, target, size, share, taken, scores)
