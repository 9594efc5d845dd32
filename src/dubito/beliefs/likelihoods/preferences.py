"""The Bradley–Terry likelihood, for which of several items is preferred."""

from __future__ import annotations

from torch import Tensor

from dubito.beliefs.likelihoods.base import Likelihood
from dubito.beliefs.likelihoods.categorical import Categorical
from dubito.core.errors import InputError
from dubito.core.settings import setting


@setting
class BradleyTerry(Categorical):
    r"""Preferences by scores, $P(\text{item } i \text{ is preferred}) = e^{f_i} / \sum_j e^{f_j}$.

    The network scores each item of a pair (or of more items): inputs ``[B, 2, ...]``, outputs ``[B, 2]`` or
    ``[B, 2, 1]``; the target ``[B]`` is the number of the preferred item. A network whose layers act on the last axis,
    such as an MLP, takes such inputs as it is. For a pair, $P = \sigma(f_i - f_j)$ (Bradley & Terry 1952), as reward
    models are trained; the Hessian is that of `Categorical`, exactly. Only differences of scores matter.

    >>> import torch
    >>> BradleyTerry().predict(torch.tensor([[0.0, 0.0]])).probs.tolist()
    [[0.5, 0.5]]
    """

    setting_name = "likelihoods.BradleyTerry"

    def canonical(self, outputs: Tensor) -> Tensor:
        """Return the scores as ``[B, items]``."""
        scores = outputs.squeeze(-1) if outputs.ndim == 3 and outputs.shape[2] == 1 else outputs
        if scores.ndim != 2 or scores.shape[1] < 2:
            raise InputError(
                "A preference needs the scores [B, 2] of two items or more, but the model gives outputs of shape "
                f"{tuple(outputs.shape)}: give inputs [B, 2, ...]."
            )
        return scores

    def outputs_for(self, num_targets: int) -> int:
        """Return 1: the network scores one item at a time."""
        return 1

    def restore(self, values: Tensor, outputs: Tensor) -> Tensor:
        """Undo `canonical`; leading axes stay."""
        return Likelihood.restore(self, values, outputs)
