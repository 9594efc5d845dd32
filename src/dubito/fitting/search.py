"""Train the plain network at a constant learning rate and watch the score of held-out examples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.core import distributed, params
from dubito.core.batches import Source
from dubito.core.randomness import Stream, derive_seed
from dubito.fitting.gradient_training import GradientDescent, negative_log_likelihood
from dubito.fitting.inference import NonFinite, Problem

# A score must stay without improvement for this many steps, and for as many as led to the best one.
PATIENCE = 300
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
        num_rows: The number of examples.
    """

    epochs: list[int] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    random: list[float] = field(default_factory=list)
    num_rows: int = 0

    def add(self, epochs: int, total: float, num_rows: int, scores: Tensor, random: float = 0.0) -> None:
        """Add what was seen after a number of epochs."""
        self.epochs.append(epochs)
        self.totals.append(total if total == total else -float("inf"))
        self.random.append(random if random == random else -float("inf"))
        self.scores.append(scores[:KEPT_SCORES].cpu())
        self.num_rows = num_rows

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
    """One run of the search.

    Args:
        problem: The network, its data and the training settings, with a fixed number of epochs as the upper limit.
        held_out: The examples to score.
        seed: Determines all random numbers of the run.
    """

    problem: Problem
    held_out: list[Source]
    seed: int

    def curves(self, tick: Callable[[int], None]) -> list[Curve]:
        """Train until patience ends, and return one curve for each part of the held-out examples."""
        problem = self.problem
        descent = GradientDescent(
            problem, problem.model, negative_log_likelihood(problem), hyper=problem.likelihood.hyper()
        )
        state = descent.init({}, {}, problem.generator)
        curves = [Curve() for _ in self.held_out]
        self._look(curves, 0)
        for epoch in range(1, problem.training.epochs + 1):
            try:
                for index, batch in enumerate(problem.source.epoch(self.stream("loader", epoch))):
                    with self.stream("update", epoch, index, distributed.rank()).active():
                        descent.update(state, batch, problem.generator)
                    tick(1)
            except NonFinite:  # the epochs before may still be good; the fit itself reports it
                break
            if self.looks_after(epoch):
                self._look(curves, epoch)
                if self.is_over(curves, epoch):
                    break
        return curves

    def looks_after(self, epoch: int) -> bool:
        """Return whether the held-out examples are scored after this epoch."""
        every = max(1, round(LOOK_EVERY / (self.problem.source.num_batches or 1)))
        return epoch % every == 0 or epoch == self.problem.training.epochs

    def is_over(self, curves: list[Curve], epoch: int) -> bool:
        """Return whether patience ends after this epoch."""
        best = max(curves[0].epochs, key=lambda looked: cautious_total(curves, looked))
        return (epoch - 2 * best) * (self.problem.source.num_batches or 1) > PATIENCE

    def order(self, epoch: int) -> Tensor:
        """Return the order in which `curves` passes over the rows of a pair in this epoch."""
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

    def _look(self, curves: list[Curve], epoch: int) -> None:
        for curve, source in zip(curves, self.held_out, strict=True):
            with self.stream("look", epoch).active():
                found = [(NO_ROWS, NO_ROWS), *scores_of(self.problem, self.problem.model, source)]
            scores, random = (torch.cat([part.cpu() for part in parts]) for parts in zip(*found, strict=True))
            sums = torch.stack([scores.sum(), random.sum(), torch.tensor(len(scores), dtype=torch.float64)])
            distributed.sum_([sums])
            total, of_random, num_rows = sums.tolist()
            curve.add(epoch, total, int(num_rows), scores, of_random / max(num_rows, 1.0))


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
