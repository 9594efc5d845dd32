"""Train the plain network at a constant learning rate and watch the score of held-out examples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.core import distributed, params
from dubito.core.batches import Source
from dubito.core.randomness import Stream, derive_seed
from dubito.fitting.gradient_training import GradientDescent, negative_log_likelihood
from dubito.fitting.inference import NonFinite, Problem

# A score must stay without improvement for this many steps, and for as many as led to the best one. Networks often
# learn a straight boundary first, and only hundreds of steps later that it is curved.
PATIENCE = 1000
# Steps between two looks at the held-out examples, in whole epochs.
LOOK_EVERY = 25
# The scores of this many examples are kept, one by one.
KEPT_SCORES = 2000
# How many examples with a random label count along (Jeffreys' half), so that a few easy ones do not end in certainty.
RANDOM_LABELS = 0.5
NO_ROWS = torch.zeros(0, dtype=torch.float64)


@dataclass
class Curve:
    """The score of held-out examples along one run.

    Attributes:
        epochs: The numbers of finished epochs at which the examples were looked at.
        totals: The summed log-probabilities there.
        scores: The log-probabilities of the first examples of this process there.
        random: The mean log-probability of a random label there; 0 for a regression.
        num_rows: The number of examples; one that is held out in several runs counts once in all.
        share: What an example counts in this run.
    """

    epochs: list[int] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    random: list[float] = field(default_factory=list)
    num_rows: float = 0
    share: float = 1.0

    def add(self, epochs: int, total: float, num_rows: int, scores: Tensor, random: float = 0.0) -> None:
        """Add what was seen after a number of epochs."""
        self.epochs.append(epochs)
        self.totals.append(total * self.share if total == total else -float("inf"))
        self.random.append(random if random == random else -float("inf"))
        self.scores.append(scores[:KEPT_SCORES].cpu())
        self.num_rows = num_rows * self.share

    def look(self, epochs: int) -> int:
        """Return the number of the last look by this number of epochs."""
        return bisect_right(self.epochs, epochs) - 1

    def at(self, epochs: int) -> float:
        """Return the score after a number of epochs: the last one known by then."""
        return self.totals[self.look(epochs)]

    def scores_at(self, epochs: int) -> Tensor:
        """Return the scores of the first examples after a number of epochs."""
        return self.scores[self.look(epochs)]


def cautious_total(curves: Sequence[Curve], epochs: int) -> float:
    """Return the summed log-probabilities of all examples, and of `RANDOM_LABELS` more with a random label."""
    num_rows = max(sum(curve.num_rows for curve in curves), 1)
    random = sum(curve.num_rows * curve.random[curve.look(epochs)] for curve in curves) / num_rows
    return sum(curve.at(epochs) for curve in curves) + RANDOM_LABELS * random


@dataclass
class SearchRun:
    """One run of the search: a network that is trained on one part of the data.

    Args:
        problem: The network, its data and the training settings, with a fixed number of epochs as the upper limit.
        held_out: The examples to score.
        seed: Determines all random numbers of the run.
        division: The number of the division of the data into folds to which this one belongs.
        share: What a held-out example counts; less than one if there are several divisions.
    """

    problem: Problem
    held_out: list[Source]
    seed: int
    division: int = 0
    share: float = 1.0

    def order(self, epoch: int) -> Tensor:
        """Return the order in which `SeparateRuns` passes over the rows of a pair in this epoch."""
        rows = torch.arange(self.problem.source.num_data)
        if not self.problem.training.shuffle:
            return rows
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "loader", epoch))
        return torch.randperm(len(rows), generator=generator)

    def stream(self, *place: int | str) -> Stream:
        """Return the random stream of one place in the run."""
        source = self.problem.source
        libraries = source.in_memory is None and place[0] == "loader"
        return Stream(derive_seed(self.seed, *place), source.device, libraries=libraries)


class Runs(Protocol):
    """The runs of a search, which go through the same epochs together."""

    runs: list[SearchRun]

    def train(self, epoch: int, tick: Callable[[int], None]) -> None:
        """Train each run for one epoch."""

    def look(self, curves: list[list[Curve]], epoch: int) -> None:
        """Add the scores of the held-out examples of each run to its curves."""


def watch(together: Runs, tick: Callable[[int], None]) -> list[list[Curve]]:
    """Train all runs until patience ends, and return a curve for each part of the held-out examples of each run.

    Patience is that of the sum over all runs of a division. If each run had its own, the ones that end early, because
    long training makes them worse, would not count against long training.
    """
    runs = together.runs
    most, per_epoch = (min(of_all) for of_all in zip(*map(_length, runs), strict=True))
    every = max(1, round(LOOK_EVERY / per_epoch))
    curves = [[Curve(share=run.share) for _ in run.held_out] for run in runs]
    together.look(curves, 0)
    for epoch in range(1, most + 1):
        try:
            together.train(epoch, tick)
        except NonFinite:  # the epochs before may still be good; the fit itself reports it
            break
        if epoch % every == 0 or epoch == most:
            together.look(curves, epoch)
            if all(_is_over(of_one, epoch, per_epoch) for of_one in by_division(runs, curves)):
                break
    return curves


def by_division(runs: Sequence[SearchRun], curves: Sequence[Sequence[Curve]]) -> list[list[Curve]]:
    """Return the curves of each division of the data."""
    found: dict[int, list[Curve]] = {}
    for run, of_run in zip(runs, curves, strict=True):
        found.setdefault(run.division, []).extend(of_run)
    return list(found.values())


def _length(run: SearchRun) -> tuple[int, int]:
    return run.problem.training.epochs, run.problem.source.num_batches or 1


def _is_over(curves: list[Curve], epoch: int, per_epoch: int) -> bool:
    """Return whether patience ends after this epoch."""
    best = max(curves[0].epochs, key=lambda looked: cautious_total(curves, looked))
    return (epoch - 2 * best) * per_epoch > PATIENCE


class SeparateRuns:
    """Runs of which each has its own network and optimizer."""

    def __init__(self, runs: list[SearchRun]) -> None:
        self.runs = runs
        self.descents = [self._descent(run.problem) for run in runs]
        self.states = [
            descent.init({}, {}, run.problem.generator) for descent, run in zip(self.descents, runs, strict=True)
        ]

    def train(self, epoch: int, tick: Callable[[int], None]) -> None:
        """Train each run for one epoch."""
        for run, descent, state in zip(self.runs, self.descents, self.states, strict=True):
            for index, batch in enumerate(run.problem.source.epoch(run.stream("loader", epoch))):
                with run.stream("update", epoch, index, distributed.rank()).active():
                    descent.update(state, batch, run.problem.generator)
                tick(1)

    def look(self, curves: list[list[Curve]], epoch: int) -> None:
        """Add the scores of the held-out examples of each run to its curves."""
        for run, of_run in zip(self.runs, curves, strict=True):
            for curve, source in zip(of_run, run.held_out, strict=True):
                with run.stream("look", epoch).active():
                    found = [(NO_ROWS, NO_ROWS), *scores_of(run.problem, run.problem.model, source)]
                scores, random = (torch.cat([part.cpu() for part in parts]) for parts in zip(*found, strict=True))
                sums = torch.stack([scores.sum(), random.sum(), torch.tensor(len(scores), dtype=torch.float64)])
                distributed.sum_([sums])
                total, of_random, num_rows = sums.tolist()
                curve.add(epoch, total, int(num_rows), scores, of_random / max(num_rows, 1.0))

    @staticmethod
    def _descent(problem: Problem) -> GradientDescent:
        loss, hyper = negative_log_likelihood(problem), problem.likelihood.hyper()
        return GradientDescent(problem, problem.model, loss, hyper=hyper)


@torch.no_grad()
def scores_of(problem: Problem, model: nn.Module, source: Source) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the log-probabilities of the targets and of random labels, batch by batch."""
    was_training = model.training
    model.eval()
    for batch in source.replay():
        if batch.num_rows:
            outputs = params.call(model, batch.inputs)
            scores = problem.likelihood.log_prob(outputs, batch.targets, problem.likelihood.hyper()).double()
            yield scores, random_label_scores(problem.likelihood, outputs)
    model.train(was_training)


def random_label_scores(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Return the mean log-probability of all labels of each example; zeros if there is not one label per example."""
    if isinstance(likelihood, Categorical) and outputs.ndim == 2:
        return outputs.double().log_softmax(1).mean(1)
    return outputs.new_zeros(len(outputs), dtype=torch.float64)
