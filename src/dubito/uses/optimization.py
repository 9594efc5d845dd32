"""Bayesian optimization: a posterior as a model of botorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dubito.beliefs.likelihoods.kinds import RegressionLikelihood
from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count, Finite, Positive
from dubito.core.errors import InputError, UnsupportedError
from dubito.fitting.posterior import Posterior

if TYPE_CHECKING:
    from botorch.models.ensemble import EnsembleModel


@checked_arguments
def botorch_model(
    posterior: Posterior,
    num_functions: Count = 64,
    *,
    num_targets: Count = 1,
    loc: Finite = 0.0,
    scale: Positive = 1.0,
    generator: torch.Generator | None = None,
) -> EnsembleModel:
    """Return a model that botorch's acquisition functions take: functions drawn from the posterior.

    Every draw is one function of all inputs (`posterior.functions`), differentiable in them, so joint acquisition
    functions of several points (q > 1) and gradient steps work. Values are those of the function, without noise.

    Args:
        posterior: The posterior of a regression.
        num_functions: How many functions are drawn.
        num_targets: The number of targets of a datum.
        loc: What is added to the functions after they were multiplied by `scale`, to undo a standardization of targets.
        scale: The positive factor.
        generator: The source of randomness.
    """
    try:
        from botorch.models.ensemble import EnsembleModel
    except ImportError as error:
        hint = "install it with `pip install 'dubito[optimization]'`"
        raise UnsupportedError(f"A model of botorch needs botorch: {hint}.") from error
    likelihood = posterior.likelihood
    if not isinstance(likelihood, RegressionLikelihood):
        raise InputError(f"Only the posterior of a regression can be optimized, not one of {likelihood!r}.")
    numbers = likelihood  # its type is known here, and not inside of the class
    functions, dtype = posterior.functions(num_functions, generator=generator), posterior.dtype

    class DubitoModel(EnsembleModel):  # type: ignore[misc,unused-ignore]
        """Functions drawn from a posterior."""

        _num_outputs = num_targets

        def forward(self, X: Tensor) -> Tensor:
            """Return the functions at inputs ``[*batch, n, d]`` as ``[*batch, s, n, m]``."""
            if X.ndim < 2 or not X.numel():
                raise InputError(
                    f"Inputs must have shape [..., n, d] with n and d of at least 1, got {tuple(X.shape)}."
                )
            outputs: Any = functions(X.reshape(-1, X.shape[-1]).to(dtype))
            values = outputs.reshape(len(functions), -1, outputs[0, 0].numel())
            means = numbers.predict_samples(values).means.to(X.dtype) * scale + loc
            if means.shape[-1] != num_targets:
                raise InputError(f"The network predicts {means.shape[-1]} targets, not `num_targets={num_targets}`.")
            return means.unflatten(1, X.shape[:-1]).movedim(0, -3)

    return DubitoModel()
