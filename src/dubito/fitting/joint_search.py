"""Make all runs of a search at once: the folds of small data, trained as one stacked network (`networks.stacked`).

A step of a small network takes far longer to start than to compute, so five folds together take about as long as one.
Each fold sees the batches that it would see alone, so its curve is the same up to rounding. Folds may differ by one
row: the shorter ones repeat a row with weight zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import batches, distributed, params
from dubito.core.batches import Batch, Source
from dubito.core.params import Params
from dubito.fitting.gradient_training import GradientDescent
from dubito.fitting.search import Curve, Runs, SearchRun, random_label_scores
from dubito.networks.stacked import stacked, stacking_obstacle


def joined(runs: list[SearchRun]) -> Runs | None:
    """Return the runs as one stacked network; None if they must be trained one by one."""
    return JointRuns(runs) if can_join(runs) else None


def can_join(runs: list[SearchRun]) -> bool:
    """Return whether the runs can be trained as one stacked network."""
    first = runs[0].problem
    training, sources = first.training, [run.problem.source for run in runs]
    held_out = [source for run in runs for source in run.held_out]
    return (
        len(runs) > 1
        and not distributed.is_active()
        and training.clip is None
        and training.accumulate == 1
        and training.compile is False
        and not first.likelihood.hyper()
        and all(source.pair is not None and not source.joins_single_rows for source in (*sources, *held_out))
        and len({source.num_batches for source in sources}) == 1
        and stacking_obstacle(first.model, sources[0].first().inputs) is None
    )


class _FoldRows:
    """Rows of several sources, an equal number of each, with a weight of zero for those that only fill up."""

    def __init__(self, sources: list[Source]) -> None:
        self.pool = sources[0].place(batches.as_tensors(batches.concatenate([source.pair for source in sources])))
        counts = torch.tensor([batches.num_rows(source.pair) for source in sources])
        self.starts, self.counts, self.width = counts.cumsum(0) - counts, counts, int(counts.max())
        self.is_real = torch.arange(self.width) < counts[:, None]

    def take(self, rows: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of rows ``[K, B]``, which count from the start of each source."""
        chosen = (rows + self.starts[:, None]).flatten()
        inputs, targets = batches.map_leaves(lambda leaf: leaf.index_select(0, chosen.to(leaf.device)), self.pool)
        return inputs, targets


class JointRuns:
    """Runs that are trained as one stacked network."""

    def __init__(self, runs: list[SearchRun]) -> None:
        self.runs, self.problem = runs, runs[0].problem
        self.data = _FoldRows([run.problem.source for run in runs])
        self.held_out = [_FoldRows(list(parts)) for parts in zip(*(run.held_out for run in runs), strict=True)]
        self.all_held_out = [part.take(torch.arange(part.width).where(part.is_real, 0)) for part in self.held_out]
        self.descent = GradientDescent(self.problem, stacked([run.problem.model for run in runs]), self._loss)
        self.state = self.descent.init({}, {}, self.problem.generator)
        size = self.problem.training.batch_size
        # each row counts one over the size of its batch, which is smaller at the end of an epoch
        parts = self.data.is_real.split(size, dim=1)
        like = next(self.descent.module.parameters())
        self.weights = [(part.double() / part.sum(1, keepdim=True)).flatten().to(like) for part in parts]
        self.now = self.weights[0]  # those of the batch that `_loss` is called with

    def train(self, epoch: int, tick: Callable[[int], None]) -> None:
        """Train each run for one epoch."""
        orders, size = self._orders(epoch), self.problem.training.batch_size
        with self.runs[0].stream("update", epoch).active():
            for rows, weights in zip(orders.split(size, dim=1), self.weights, strict=True):
                self.now, (inputs, targets) = weights, self.data.take(rows)
                self.descent.update(self.state, Batch(inputs, targets, rows.shape[1]), self.problem.generator)
                tick(len(self.runs))

    @torch.no_grad()
    def look(self, curves: list[list[Curve]], epoch: int) -> None:
        """Add the scores of the held-out examples of each run to its curves."""
        module = self.descent.module.eval()
        for part, (rows, (inputs, targets)) in enumerate(zip(self.held_out, self.all_held_out, strict=True)):
            with self.runs[0].stream("look", epoch).active():
                outputs = params.call(module, inputs)
            scores = self.problem.likelihood.log_prob(outputs, targets).double().reshape(rows.is_real.shape)
            random = random_label_scores(self.problem.likelihood, outputs).reshape(rows.is_real.shape)
            for k, of_run in enumerate(curves):
                own, other = (values[k][: int(rows.counts[k])] for values in (scores, random))
                of_run[part].add(epoch, float(own.sum()), len(own), own, float(other.mean()))

    def _orders(self, epoch: int) -> Tensor:
        """Return the rows of each run in the order of this epoch, ``[K, N]``."""
        orders = torch.zeros(len(self.runs), self.data.width, dtype=torch.long)
        for order, run, count in zip(orders, self.runs, self.data.counts.tolist(), strict=True):
            order[:count] = run.order(epoch)
        return orders

    def _loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        outputs = params.call(module, batch.inputs)
        return -(self.problem.likelihood.log_prob(outputs, batch.targets) * self.now).sum()
