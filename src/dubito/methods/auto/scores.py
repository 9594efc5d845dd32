"""Score a posterior on held-out examples, one number per example, for each goal of `Auto`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.prediction import ClassPrediction
from dubito.core import params
from dubito.core.batches import Source
from dubito.core.errors import InputError
from dubito.fitting.posterior import Posterior

# The share of weights that is set to zero for the goal "small".
DROPPED = 0.8

MEASURES = {
    "calibration": "log score",
    "intervals": "continuous ranked probability score (negative)",
    "ood": "AUROC of scrambled inputs",
    "small": "log score with 80 % of the weights at zero",
}


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
