"""Train the plain network at a constant learning rate and watch the score of held-out examples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

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


@dataclass
class Curve:
    """The score of held-out examples along one run.

    Attributes:
        epochs: The numbers of finished epochs at which the examples were looked at.
        totals: The summed log-probabilities there.
        scores: The log-probabilities of the first examples of this process there.
        num_rows: The number of examples.
    """

    epochs: list[int] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    num_rows: int = 0

    def add(self, epochs: int, total: float, num_rows: int, scores: Tensor) -> None:
        """Add what was seen after a number of epochs."""
        self.epochs.append(epochs)
        self.totals.append(total if total == total else -float("inf"))
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

    @property
    def best(self) -> int:
        """The number of epochs with the best score."""
        return self.epochs[max(range(len(self.totals)), key=self.totals.__getitem__)]


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
        whole = [sum(curve.totals[i] for curve in curves) for i in range(len(curves[0].totals))]
        best = curves[0].epochs[max(range(len(whole)), key=whole.__getitem__)]
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
                found = list(scores_of(self.problem, self.problem.model, source))
            scores = torch.cat(found).cpu() if found else torch.zeros(0, dtype=torch.float64)
            total = torch.stack([scores.sum(), torch.tensor(len(scores), dtype=torch.float64)])
            distributed.sum_([total])
            curve.add(epoch, float(total[0]), int(total[1]), scores)


@torch.no_grad()
def scores_of(problem: Problem, model: nn.Module, source: Source) -> Iterator[Tensor]:
    """Yield the log-probabilities of the targets, batch by batch."""
    was_training = model.training
    model.eval()
    for batch in source.replay():
        if batch.num_rows:
            outputs = params.call(model, batch.inputs)
            yield problem.likelihood.log_prob(outputs, batch.targets, problem.likelihood.hyper()).double()
    model.train(was_training)
