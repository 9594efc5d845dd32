r"""The contract of priors over groups of weights: one scale for all weights of a unit."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from torch import Tensor

from dubito.beliefs.priors.base import Prior
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.settings import setting


@setting
class GroupPrior(Prior):
    r"""A prior of $w_{gi} = z_g\, \tilde w_{gi}$: a scale $z_g$ for each group, and weights that share it.

    The weights of one input (or output) of a layer live and die together, so that what is not needed can be cut out of
    the network: whole neurons, channels, words. Each prior of this kind is one of the scales z; `Variational` learns
    a posterior over both z and $\tilde w$.

    Args:
        groups: ``"inputs"``: a scale for each input of a layer; ``"outputs"``: for each output; ``"auto"``: inputs of
            linear layers, output channels of convolutions, words of embeddings, and inputs, hidden units and gates of
            recurrent layers.
    """

    groups: Literal["auto", "inputs", "outputs"] = field(default="auto", kw_only=True)

    @property
    def random_weights(self) -> bool:
        r"""Whether $\tilde w$ is random too, with a standard normal prior; else it is a point without a prior."""
        return True

    def resolve(self, name: str, weights: Tensor) -> Prior:
        """It cannot be the prior of one parameter by itself."""
        raise InputError(
            f"{self!r} is a prior of groups and holds for all selected weights: use it as Variational(prior=...), with "
            "no other prior beside it."
        )

    def log_prob(self, w: Tensor) -> Tensor:
        """There is none for a weight by itself."""
        raise UnsupportedError(f"{self!r} ties the weights of a group together: a single weight has no density.")
