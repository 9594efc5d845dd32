"""Hold out examples, and score a posterior on them: one number per example, for each goal of `Auto`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dubito.beliefs.prediction import ClassPrediction
from dubito.core import params
from dubito.core.batches import Data, Source
from dubito.core.errors import InputError
from dubito.core.randomness import derive_seed
from dubito.core.subsets import fold_numbers, num_examples, subset
from dubito.fitting.automatic import ENOUGH, FOLDS
from dubito.fitting.posterior import Posterior

# The share of weights that is set to zero for the goal "small".
DROPPED = 0.8

MEASURES = {
    "calibration": "log score",
    "intervals": "continuous ranked probability score (negative)",
    "ood": "AUROC of scrambled inputs",
    "small": "log score with 80 % of the weights at zero",
}

# Fewer held-out examples than this cannot tell candidates apart.
FEWEST = 20


def scores(goal: str, posterior: Posterior, source: Source) -> Tensor:
    """Return the score of each example; higher is better."""
    if goal == "small":
        return dropped_scores(posterior, source)
    if goal == "ood":
        return placements(posterior, source)
    return torch.cat([_of_one_batch(goal, posterior, batch) for batch in source.replay()])


def _of_one_batch(goal: str, posterior: Posterior, batch: Any) -> Tensor:
    return row_scores(goal, posterior.likelihood, posterior.predict(batch.inputs), batch.targets)


def row_scores(goal: str, likelihood: Any, prediction: Any, targets: Tensor) -> Tensor:
    """Return the log score, or the negative CRPS, of each example."""
    if goal == "intervals":
        if isinstance(prediction, ClassPrediction):
            raise InputError("goal='intervals' is for regression: use goal='calibration' for classes.")
        found: Tensor = -prediction.crps(targets)
    else:
        found = likelihood.log_scores(prediction, likelihood.aligned(targets))
    return found.double().reshape(len(found), -1).mean(1).cpu()


def placements(posterior: Posterior, source: Source) -> Tensor:
    """Return, for each example, the share of scrambled examples that are more uncertain; the mean is the AUROC.

    An example is scrambled by taking each of its features from another example, so each feature alone looks familiar.
    """
    batches = list(source.replay())
    if not all(isinstance(batch.inputs, Tensor) and batch.inputs.ndim > 1 for batch in batches):
        raise InputError("goal='ood' scrambles the inputs, which must be one tensor: use goal='calibration'.")
    inputs = torch.cat([batch.inputs for batch in batches])
    flat = inputs.flatten(1)
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(flat.shape, generator=generator).argsort(0).to(flat.device)
    near, far = (_uncertainty(posterior, part) for part in (inputs, flat.gather(0, rows).reshape(inputs.shape)))
    far = far.sort().values
    below, upto = (torch.searchsorted(far, near, right=right).double() for right in (False, True))
    return 1 - (below + upto) / (2 * len(far))


def _uncertainty(posterior: Posterior, inputs: Tensor) -> Tensor:
    """Return the epistemic uncertainty of each example, or all of it if the posterior has no epistemic part."""
    prediction: Any = posterior.predict(inputs)
    if posterior.has_spread:
        found = prediction.epistemic
    else:
        found = prediction.entropy if isinstance(prediction, ClassPrediction) else prediction.stddev
    found = found.double().cpu()
    return found.reshape(len(found), -1).mean(1)


@torch.no_grad()
def dropped_scores(posterior: Posterior, source: Source) -> Tensor:
    """Return the log scores of the network without the weights with the smallest |mean| / standard deviation."""
    means, variances = posterior.marginals()
    names = [name for name, value in means.items() if value.ndim > 1]  # biases and the like stay
    largest = max(float(variances[name].max()) for name in names)
    ratios = {
        name: means[name].abs() / (variances[name].sqrt() if largest > 0 else torch.ones_like(means[name]))
        for name in names
    }
    together = torch.cat([ratios[name].flatten() for name in names])
    limit = together.kthvalue(max(int(DROPPED * len(together)), 1)).values
    kept = {name: value * (ratios[name] > limit) if name in ratios else value for name, value in means.items()}
    found = []
    for batch in source.replay():
        outputs = params.functional_call(posterior.model, kept, batch.inputs)
        prediction = posterior.likelihood.predict(outputs)
        found.append(row_scores("small", posterior.likelihood, prediction, batch.targets))
    return torch.cat(found)


class Split(NamedTuple):
    """One way to hold out examples.

    Attributes:
        data: What a candidate is fitted to.
        validation: Its validation data, or None.
        held_out: The examples that it then predicts.
        label: A short name.
    """

    data: Data
    validation: Data | None
    held_out: Data
    label: str


class HeldOut(NamedTuple):
    """All splits, and where their held-out examples come from, in words.

    `one_network` says that all splits have the same training data, so that one network serves them all.
    """

    splits: tuple[Split, ...]
    words: str
    one_network: bool


def hold_out(data: Data, validation: Data | None, *, trained: bool, seed: int) -> HeldOut:
    """Return the splits.

    Args:
        data: The training data.
        validation: The validation data, or None.
        trained: Whether the network was trained on the data already, so that none of it can be held out.
        seed: Determines which examples are held out.
    """
    given, size = 0 if validation is None else _count(validation), num_examples(data)
    if given >= ENOUGH or (given >= FEWEST and (trained or size is None)):
        assert validation is not None
        order = torch.randperm(given, generator=torch.Generator().manual_seed(derive_seed(seed, "halves")))
        halves = [_subset(validation, order[start::2].sort().values) for start in range(2)]
        splits = tuple(Split(data, halves[1 - k], halves[k], f"half-{k}") for k in range(2))
        return HeldOut(splits, "the validation data", True)
    if trained or size is None or size < FEWEST:
        why = (
            "the network is trained already" if trained
            else "its examples cannot be chosen one by one" if size is None
            else f"there {'is' if size == 1 else 'are'} only {size} example{'' if size == 1 else 's'}"
        )  # fmt: skip
        raise InputError(
            f"Auto needs examples that the network was not trained on, and cannot take them from the training data "
            f"({why}): pass at least {FEWEST} examples as validation=, or choose a recipe yourself."
        )
    order = torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(seed, "folds")))
    folds, fold = 1 if size >= FOLDS * ENOUGH else FOLDS, fold_numbers(data, order, FOLDS)
    splits = tuple(
        Split(
            subset(data, order[fold != number].sort().values),
            validation, subset(data, order[fold == number].sort().values, shuffle=False), f"fold-{number}",
        )
        for number in range(folds)
    )  # fmt: skip
    return HeldOut(splits, "a fifth of the training data" if folds == 1 else f"{FOLDS}-fold cross-validation", False)


def _count(validation: Data) -> int:
    size = num_examples(validation)
    return Source(validation).num_data if size is None else size


def _subset(validation: Data, rows: torch.Tensor) -> Data:
    if num_examples(validation) is not None:
        return subset(validation, rows, shuffle=False)
    raise InputError("Auto divides the validation data in two: give them as a pair of tensors or a Dataset.")
