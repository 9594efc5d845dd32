"""Fill in the training settings that are ``"auto"``: batch size, learning rate and number of epochs.

The number of epochs is found on held-out examples. The plain network is trained at a constant learning rate while the
score of held-out examples is watched, until it has not improved for as many steps as it took to get there (and 1,000
more). What few examples say of long training is chance, and its price is a network that is sure of everything. So of
classes, half an example with a random label counts along, and fewer epochs are taken if they lose less than half a
standard error, within limits. Then the recipe is fitted to all of the data for that number of epochs, with a learning
rate that falls to zero at the end. So the cost of a default fit is bounded: at most `MOST_STEPS` steps per held-out
part.

Held-out examples are validation data of at least `ENOUGH` rows; else a fifth of the training data if that is as many;
else five folds of the training data, each in turn. Which examples lie in one fold is chance: less than `ENOUGH` are
divided `DIVISIONS` times where that costs little, and the median of the numbers of epochs is taken. Validation data
always count along. The same examples give the noise
of a regression, which training data, to which the network was fitted, would make too small.

Nothing is searched where it would cost too much (`MOST_FLOPS`), where 20 epochs are 3,000 steps anyway, and where
single examples cannot be chosen (a stream, a loader with its own sampler) and no validation data are given: the default
is then 20 to 100 epochs, towards 2,000 steps.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from dubito.beliefs.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from dubito.core import batches
from dubito.core.batches import Data, Source
from dubito.core.errors import NotConvergedWarning, TrustWarning
from dubito.core.numeric import OperationCounter
from dubito.core.randomness import derive_seed
from dubito.core.subsets import fold_numbers, num_examples, subset
from dubito.fitting.checks import outputs_of
from dubito.fitting.fit_record import constant_score
from dubito.fitting.held_out_scores import best_epochs, best_variance, gain_of_heavy_tails, gain_over_constant
from dubito.fitting.inference import Problem
from dubito.fitting.joint_search import can_join, joined
from dubito.fitting.progress import progress_bar
from dubito.fitting.recipe import Recipe
from dubito.fitting.search import Curve, SearchRun, SeparateRuns, by_division, watch
from dubito.fitting.training import AUTO, Training
from dubito.networks.twin import copied

# Networks of up to this many weights get the higher learning rate.
SMALL, SMALL_RATE, RATE = 100_000, 3e-3, 1e-3
# Validation data of this many rows decide alone; a held-out part should have as many.
ENOUGH = 500
FOLDS = 5
# Less than `ENOUGH` examples are divided into folds this many times, if that costs little.
DIVISIONS = 3
# Fewer examples than this are not divided.
FEW = 10
# The most steps of one search run, the fewest that tell anything, and the most floating-point operations of all runs.
MOST_STEPS, FEWEST_STEPS, MOST_FLOPS = 6000, 1000, 4e12
# Without a search: towards this many steps, within these numbers of epochs. From `LARGE` steps on, nothing is searched.
STEPS, FEWEST_EPOCHS, MOST_EPOCHS, LARGE = 2000, 20, 100, 3000
# A warning is given if the score still gained this many nats per example over the last fifth of a search run.
FALLING = 0.02


@dataclass(frozen=True)
class Found:
    """What held-out examples said about the plain network.

    Attributes:
        epochs: The best number of epochs at a constant learning rate.
        score: The mean log score of held-out examples at that point; for a regression with learned noise, at the best
            noise.
        noise: The root mean square of held-out residuals, for a regression with learned noise; else None.
        num_rows: The number of held-out examples.
        num_runs: The number of training runs.
        still_gained: The nats per example gained over the last fifth of the longest run, if its end was the best.
        start: The score before training.
        gain: By how much the score exceeds that of the best constant prediction; None if it was not measured.
        gain_error: The standard error of this difference over held-out examples.
        tail_gain: By how many nats per example a Student-t distribution fits the errors better than a normal one; None
            if it was not measured.
    """

    epochs: int
    score: float
    noise: float | None
    num_rows: int
    num_runs: int
    still_gained: float = 0.0
    start: float = -math.inf
    gain: float | None = None
    gain_error: float | None = None
    tail_gain: float | None = None


class ResolvedTraining(NamedTuple):
    """Training settings without ``"auto"``, the likelihood with its noise if that is known, and what was found."""

    training: Training
    likelihood: Likelihood
    found: Found | None = None

    @property
    def noise(self) -> float | None:
        """The root mean square of held-out residuals, if it is known."""
        return None if self.found is None else self.found.noise


def with_sizes(training: Training, model: nn.Module, num_data: int) -> Training:
    """Return the settings with numbers for the batch size and the learning rate.

    >>> with_sizes(Training(epochs=1), nn.Linear(2, 3), 1000)
    Training(epochs=1, lr=0.003, batch_size=64)
    """
    changes: dict[str, Any] = {}
    if training.batch_size == AUTO:
        changes["batch_size"] = chosen_batch_size(training, num_data)
    if training.lr == AUTO:
        small = sum(value.numel() for value in model.parameters() if value.requires_grad) <= SMALL
        changes["lr"] = SMALL_RATE if small else RATE
    return training.replace(**changes) if changes else training


def chosen_batch_size(training: Training, num_data: int) -> int:
    """Return the batch size of the settings; if it is ``"auto"``, a power of two near N/16, from 16 to 128."""
    if training.batch_size != AUTO:
        return int(training.batch_size)
    return min(max(2 ** round(math.log2(max(num_data / 16, 1))), 16), 128)


def resolve_training(recipe: Recipe, problem: Problem, data: Data, seed: int) -> ResolvedTraining:
    """Return the settings of a fit with a number of epochs, found on held-out examples where that is possible.

    Args:
        recipe: The recipe; `recipe.epochs_after_search` says how long it trains.
        problem: Model, data and likelihood; the network is at the weights from which training starts.
        data: The data as the user gave them.
        seed: Determines all random numbers of the search.
    """
    training, per_epoch = problem.training, problem.source.num_batches or 1
    if training.epochs != AUTO:
        return ResolvedTraining(training, problem.likelihood)
    if not recipe.trains:
        return ResolvedTraining(training.replace(epochs=1), problem.likelihood)
    if training.early_stopping is not None:
        epochs = max(math.ceil(MOST_STEPS / per_epoch), FEWEST_EPOCHS)
        return ResolvedTraining(training.replace(epochs=epochs), problem.likelihood)
    _try_to_build(recipe, problem)
    runs = _runs(problem, data, seed)
    if not runs:
        epochs = min(max(math.ceil(STEPS / per_epoch), FEWEST_EPOCHS), MOST_EPOCHS)
        best = training.restore_best or (problem.validation is not None and recipe.has_score)
        return ResolvedTraining(training.replace(epochs=epochs, restore_best=best), problem.likelihood)
    found = _search(runs, problem)
    if any(run.problem.source is not problem.source for run in runs):  # some of the training data were held out
        _check_fresh(found.start, problem)
    likelihood = problem.likelihood if found.noise is None else problem.likelihood.replace(noise=found.noise)
    schedule = "hold" if training.schedule == AUTO else training.schedule
    epochs = recipe.epochs_after_search(found.epochs, per_epoch)
    if found.still_gained > FALLING:
        warnings.warn(
            f"The score of held-out examples still rose by {found.still_gained:.3f} nats per example over the last "
            f"fifth of the longest training that was tried: train longer, as with Training(epochs={2 * epochs}).",
            NotConvergedWarning,
            stacklevel=2,
        )
    return ResolvedTraining(training.replace(epochs=epochs, schedule=schedule), likelihood, found)


def _check_fresh(start: float, problem: Problem) -> None:
    if isinstance(problem.likelihood, Categorical | Bernoulli | Gaussian):
        targets = batches.concatenate([batch.targets for batch in problem.source.spread(256)])
        constant = constant_score(problem.likelihood, targets)
        warn_if_trained(start, constant, classes=not isinstance(problem.likelihood, Gaussian))


def warn_if_trained(start: float, constant: float, *, classes: bool) -> None:
    """Warn if the network knows the training data before it is trained, so that none of them can be held out.

    Args:
        start: Its mean log score on training data before training, for a regression at the best noise.
        constant: That of the best constant prediction.
        classes: Whether targets are labels.
    """
    if start - constant > (abs(constant) / 2 if classes else math.log(2) / 2):
        warnings.warn(
            f"The model predicts its training data well before it is trained here (log score {start:.3f}, the best "
            f"constant has {constant:.3f}). If it was trained on them before, none can be held out: what is found on "
            "held-out examples (the number of epochs, the noise, the best method) is then wrong. Keep its weights "
            "(train=False), start from new ones (start='fresh'), or give validation data of at least 500 examples.",
            TrustWarning,
            stacklevel=2,
        )


def _try_to_build(recipe: Recipe, problem: Problem) -> None:
    """Raise what is wrong with the settings before any work; choosing weights may be work itself."""
    if recipe.weights is None or recipe.weights.selects_all:
        generator = torch.Generator(problem.generator.device).manual_seed(0)
        own = dataclasses.replace(
            problem, model=copied(problem.model), generator=generator,
            training=problem.training.replace(epochs=MOST_EPOCHS), progress=False,
        )  # fmt: skip
        recipe.build(own)


def _runs(problem: Problem, data: Data, seed: int) -> list[SearchRun]:
    """Return the runs of the search, each on one part of the data; none if the search is left out."""
    source, given = problem.source, problem.validation
    if source.num_batches is None or source.num_batches * FEWEST_EPOCHS >= LARGE or source.is_shard:
        return []
    num_given = 0 if given is None else given.num_data
    size, affordable = num_examples(data), _affordable_steps(problem)
    also = [] if given is None else [given]
    if affordable < FEWEST_STEPS:
        return []
    if num_given >= ENOUGH or (size is None and num_given >= FEW):
        return [_run(problem, source, also, affordable, seed)]
    if size is None or size < FEW:
        return []
    folds = 1 if size >= FOLDS * ENOUGH or affordable < FOLDS * FEWEST_STEPS else FOLDS
    runs = _fold_runs(problem, data, also, affordable // folds, seed, folds)
    if size >= ENOUGH or not can_join(runs):
        return runs
    for number in range(1, DIVISIONS):  # which few examples lie in one fold is chance, and more runs cost little
        own = _fold_runs(problem, data, also, affordable // folds, derive_seed(seed, "division", number), folds)
        runs += [dataclasses.replace(run, division=number) for run in own]
    return [dataclasses.replace(run, share=1 / DIVISIONS) for run in runs]


def _fold_runs(problem: Problem, data: Data, also: list[Source], steps: int, seed: int, folds: int) -> list[SearchRun]:
    """Return a run for each of the first folds of one division of the data."""
    order = torch.randperm(
        num_examples(data) or 0, generator=torch.Generator().manual_seed(derive_seed(seed, "held out"))
    )
    runs, fold = [], fold_numbers(data, order, FOLDS)
    for number in range(folds):
        held_out, kept = order[fold == number], order[fold != number]
        parts = (_part(problem, subset(data, kept)), _part(problem, subset(data, held_out, shuffle=False), False))
        runs.append(_run(problem, parts[0], [parts[1], *also], steps, derive_seed(seed, number)))
    return runs


def _part(problem: Problem, data: Data, shuffle: bool | None = None) -> Source:
    """Return a part of the data as batches like those of the whole."""
    whole, training = problem.source, problem.training
    shuffle = training.shuffle if shuffle is None else shuffle
    size = training.batch_size if shuffle else max(training.batch_size, 1024)
    part = Source(data, batch_size=size, shuffle=shuffle, device=whole.device, dtype=whole.dtype)
    if whole.joins_single_rows:
        part.join_single_rows()
    return part


def _run(problem: Problem, source: Source, held_out: list[Source], steps: int, seed: int) -> SearchRun:
    epochs = max(math.ceil(min(MOST_STEPS, steps) / (source.num_batches or 1)), 1)
    constant = problem.training.replace(
        epochs=epochs, schedule="constant", warmup=0.0, evidence_every=None, checkpoint=None, restore_best=False
    )
    own = dataclasses.replace(
        problem, model=copied(problem.model), source=source, validation=None, training=constant,
        likelihood=Gaussian(noise=1.0) if has_learned_noise(problem.likelihood) else problem.likelihood,
    )  # fmt: skip
    return SearchRun(own, held_out, seed)


def has_learned_noise(likelihood: Likelihood) -> bool:
    """Return whether this is a Gaussian likelihood whose noise comes from the data."""
    return isinstance(likelihood, Gaussian) and likelihood.noise == "learn"


def _search(runs: list[SearchRun], problem: Problem) -> Found:
    """Make the runs, and return the number of epochs with the best score over all held-out examples."""
    states = problem.source.generator_states()
    longest = sum(run.problem.training.epochs * (run.problem.source.num_batches or 1) for run in runs)
    with progress_bar(longest, problem.progress, "finding the number of epochs") as bar:
        by_run = watch(joined(runs) or SeparateRuns(runs), bar.update)
    curves = [curve for of_run in by_run for curve in of_run]
    problem.source.set_generator_states(states)
    looked = curves[0].epochs
    num_rows = round(sum(curve.num_rows for curve in curves))
    outputs = problem.source.first().targets[0].numel() if has_learned_noise(problem.likelihood) else None
    scores = {epochs: _mean_score([curve.at(epochs) for curve in curves], num_rows, outputs) for epochs in looked}
    # otherwise the noise pays for long training
    choices = [best_epochs(of_one, few=outputs is None) for of_one in by_division(runs, by_run)]
    best = sorted(choices)[(len(choices) - 1) // 2]
    noise = None if outputs is None else math.sqrt(best_variance(scores[best], outputs))
    before = max(epochs for epochs in looked if epochs <= 0.8 * looked[-1])
    gained = scores[best] - scores[before] if best == looked[-1] else 0.0
    sources = [source for run in runs for source in run.held_out]
    gain = gain_over_constant(curves, sources, best, problem.likelihood, at_unit_noise=outputs is not None)
    distinct = _num_distinct(by_run, problem.validation)
    if gain is not None:
        gain = gain[0], gain[1] * math.sqrt(num_rows / distinct)
    found = Found(best, scores[best], noise, distinct, len(runs), gained, scores[0], *(gain or ()))
    return dataclasses.replace(found, tail_gain=gain_of_heavy_tails(curves, best) if outputs == 1 else None)


def _num_distinct(by_run: list[list[Curve]], validation: Source | None) -> int:
    """Return the number of held-out examples; validation data, which are scored in each run, count once."""
    also = 0 if validation is None or len(by_run[0]) == 1 else validation.num_data
    return round(sum(of_run[0].num_rows for of_run in by_run)) + also


def _mean_score(totals: list[float], num_rows: int, outputs: int | None) -> float:
    """Return the mean log score; with learned noise, totals are at noise 1, and the result is at the best one."""
    mean = sum(totals) / num_rows
    if outputs is None or not math.isfinite(mean):
        return mean
    variance = max(-2 * mean / outputs - math.log(2 * math.pi), 1e-12)
    return -0.5 * outputs * (math.log(2 * math.pi * variance) + 1)


def _affordable_steps(problem: Problem) -> int:
    """Return how many steps the search may take in all, from the floating-point operations of one."""
    first = problem.source.first()
    rows = batches.take(first.inputs, slice(0, 8))
    with OperationCounter() as counter:
        outputs_of(problem.model, rows)
    weights = sum(value.numel() for value in problem.model.parameters())
    forward = max(counter.total / batches.num_rows(rows), 2 * weights)
    return int(MOST_FLOPS / (3 * forward * first.size))
