"""Predict by weight sampling: run the network at every posterior sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import params
from dubito.core.params import Params
from dubito.fitting.posterior import Predictor


def weight_predictor(
    model: nn.Module,
    likelihood: Likelihood,
    samples: Params,
    *,
    buffers: Params | None = None,
    temperature: float = 1.0,
) -> Predictor:
    """Return the predictor that averages over networks with weights `samples` and `buffers`, both ``[S, ...]``.

    The model runs in evaluation mode: dropout is off and BatchNorm uses its running statistics.
    """
    members = params.unstack({**samples, **(buffers or {})})

    def predict(inputs: Any) -> Any:
        outputs = torch.stack([params.functional_call(model, member, inputs) for member in members])
        tempered, scaled = likelihood.temper(outputs, temperature) if temperature != 1.0 else (outputs, likelihood)
        return scaled.predict_samples(tempered)

    return predict
