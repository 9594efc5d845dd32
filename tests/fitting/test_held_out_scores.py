"""What the scores of held-out examples say: against brute force and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dubito import likelihoods
from dubito.core.batches import Source
from dubito.core.subsets import fold_numbers
from dubito.fitting.held_out_scores import DOUBT, best_variance, fewest_epochs, gain_over_constant
from dubito.fitting.search import Curve, cautious_total, random_label_scores


def curve(looks: dict[int, Tensor]) -> Curve:
    found = Curve()
    for epochs, scores in looks.items():
        found.add(epochs, float(scores.sum()), len(scores), scores)
    return found


def normals(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_fewest_epochs_that_are_not_clearly_worse() -> None:
    noise, best = 0.2 * normals(50, 0), normals(50, 1)
    error = float(noise.std(correction=0)) / math.sqrt(50)

    def looks(loss: float) -> list[Curve]:  # two folds; the loss of the second look is `loss` standard errors
        worse = best - (noise - noise.mean()) - loss * error
        whole = {0: best - 9, 5: best - 3 - noise, 10: worse, 20: best, 30: best - 1}
        return [curve({k: v[:20] for k, v in whole.items()}), curve({k: v[20:] for k, v in whole.items()})]

    assert fewest_epochs(looks(DOUBT - 0.01), 20) == 10
    assert fewest_epochs(looks(DOUBT + 0.01), 20) == 20
    wide = normals(50, 2) - normals(50, 2).mean()  # half a standard error is 0.07
    assert fewest_epochs([curve({0: best, 5: best - wide - 0.019, 9: best})], 9) == 5
    assert fewest_epochs([curve({0: best, 5: best - wide - 0.021, 9: best})], 9) == 9
    assert fewest_epochs([curve({0: best, 5: best - 0.0019, 9: best})], 9) == 5
    assert fewest_epochs([curve({0: best, 5: best - 0.0021, 9: best})], 9) == 9
    assert fewest_epochs([curve({0: best, 5: best})], 5) == 5  # never no training at all


def test_a_few_easy_examples_do_not_end_in_certainty() -> None:
    """Half an example has a random label: with n others of logits ±z, the best z is log(4n + 1) / 2."""
    sizes = torch.arange(1.0, 30.0, dtype=torch.float64)
    logits = torch.stack([sizes, -sizes], 1)
    right, random = logits.log_softmax(1)[:, 0], random_label_scores(likelihoods.Categorical(), logits)
    folds = [Curve(), Curve()]
    for epochs in range(len(sizes)):
        for fold, rows in zip(folds, (12, 15), strict=True):
            fold.add(epochs, rows * float(right[epochs]), rows, right[epochs].expand(rows), float(random[epochs]))
    totals = 27 * right + 0.5 * logits.log_softmax(1).mean(1)
    assert [cautious_total(folds, k) for k in range(29)] == pytest.approx(totals.tolist(), rel=1e-12)
    assert int(sizes[int(totals.argmax())]) == 2  # p = 27.25 / 27.5, so z = log(109) / 2
    assert not random_label_scores(likelihoods.Gaussian(noise=1.0), logits).any()


def test_the_gain_over_a_constant() -> None:
    labels = torch.tensor([0] * 30 + [1] * 10)
    scores = normals(40, 0) - 1
    source = Source((torch.zeros(40, 1), labels), batch_size=16, shuffle=False)
    found = gain_over_constant([curve({1: scores})], [source], 1, likelihoods.Categorical(), at_unit_noise=False)
    gains = scores - torch.tensor([0.75, 0.25], dtype=torch.float64).log()[labels]
    assert found == pytest.approx((float(gains.mean()), float(gains.std()) / math.sqrt(40)), rel=1e-12)


def test_the_gain_of_a_regression_is_at_the_best_noise() -> None:
    targets, residuals = normals(4000, 0)[:, None], 0.5 * normals(4000, 1)
    scores = -0.5 * residuals.square() - 0.5 * math.log(2 * math.pi)
    source = Source((torch.zeros(4000, 1), targets), batch_size=999, shuffle=False)
    looked = curve({1: scores})
    assert len(looked.scores[0]) == 2000
    found = gain_over_constant([looked], [source], 1, likelihoods.Gaussian(), at_unit_noise=True)
    assert found is not None
    some = targets[:2000, 0], residuals[:2000]
    assert found[0] == pytest.approx(0.5 * math.log(float(some[0].var(correction=0) / some[1].square().mean())))
    # the standard error of log(s²) is sqrt(2/N), and the two are independent
    assert found[1] == pytest.approx(0.5 * math.sqrt(2 * 2 / 4000), rel=0.1)
    score = -0.5 * (math.log(2 * math.pi * 0.09) + 1)
    assert best_variance(3 * score, 3) == pytest.approx(0.09)


def test_copies_of_a_row_are_held_out_together() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    fold = torch.empty(120, dtype=torch.long)
    fold[order] = fold_numbers((x.repeat(2, 1), torch.zeros(120)), order, 5)
    assert torch.equal(fold[:60], fold[60:])
    assert fold.bincount().tolist() == [24] * 5
    assert torch.equal(fold_numbers((x, torch.zeros(60)), order[order < 60], 5), torch.arange(60) % 5)
    few = (torch.arange(120)[:, None] % 8, torch.zeros(120))  # discrete inputs: no value would be left to learn from
    assert torch.equal(fold_numbers(few, order, 5), torch.arange(120) % 5)
