r"""`GroupPrior`, the base class of priors over groups of weights that share one scale."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from torch import Tensor

from dubito.beliefs.priors.base import Prior
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.settings import setting


@setting
class GroupPrior(Prior):
    r"""A prior of $w_{gi} = z_g\, \tilde w_{gi}$ with a scale $z_g$ for each group of weights.

    The weights of one input (or output) of a layer are removed together, so that whole neurons, channels or words can
    be removed from the network. A prior of this kind is a prior of the scales z; `Variational` learns a posterior over
    both z and $\tilde w$.

    Args:
        groups: ``"inputs"``: one scale per input of a layer; ``"outputs"``: one per output; ``"auto"``: inputs of
            linear layers, output channels of convolutions, words of embeddings, and inputs, hidden units and gates of
            recurrent layers.
    """

    groups: Literal["auto", "inputs", "outputs"] = field(default="auto", kw_only=True)

    @property
    def random_weights(self) -> bool:
        r"""Whether $\tilde w$ is random, with a standard normal prior; otherwise it is a point without a prior."""
        return True

    def resolve(self, name: str, weights: Tensor) -> Prior:
        """Raise an error, because it cannot be the prior of a single parameter."""
        raise InputError(
            f"{self!r} is a prior of groups and applies to all selected weights: use it as Variational(prior=...), "
            "without any other prior."
        )

    def log_prob(self, w: Tensor) -> Tensor:
        """Raise an error, because a single weight has no density."""
        raise UnsupportedError(f"{self!r} is a joint prior of the weights of a group: a single weight has no density.")
