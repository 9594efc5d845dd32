"""Store weights that share few values, as soft weight sharing leaves them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dubito.beliefs.priors import Mixture
from dubito.beliefs.priors.mixture import MERGED
from dubito.core import params
from dubito.core.arguments import checked_arguments
from dubito.core.errors import UnsupportedError
from dubito.fitting.posterior import Posterior
from dubito.networks.twin import copied


class Codes(NamedTuple):
    """One parameter as a codebook and the position of each weight in it."""

    indices: Tensor  # which value each weight has, ``uint8`` in the shape of the parameter; 0 is the value 0
    codebook: Tensor  # the values ``[K]``

    @property
    def weights(self) -> Tensor:
        """Return the parameter."""
        return self.codebook[self.indices.long()]

    @property
    def bits(self) -> int:
        """The number of bits per weight: 4 for 16 values."""
        return max(1, (len(self.codebook) - 1).bit_length())


@checked_arguments
def share_weights(posterior: Posterior, *, tolerance: float = MERGED) -> dict[str, Codes]:
    """Return each parameter that was trained under a `priors.Mixture` as numbers of its components.

    A weight takes the centre of the component that is most probable for it; components that are nearly the same are
    made one before. Other parameters, such as biases, are left out.

    Args:
        posterior: The result of ``MAP(prior=priors.Mixture())`` or ``Variational(prior=priors.Mixture())``.
        tolerance: The divergence in nats up to which two components are the same.
    """
    mixtures = _mixtures(posterior)
    if not mixtures:
        raise UnsupportedError(f"{posterior!r} was not trained under a mixture: use MAP(prior=priors.Mixture()) first.")
    merged = {id(mixture): mixture.merged(tolerance) for mixture in mixtures.values()}
    mean, codes = posterior.mean(), {}
    for name, mixture in mixtures.items():
        one = merged[id(mixture)]
        codes[name] = Codes(one.assign(mean[name]), one.codebook().to(mean[name]))
    return codes


def shared_network(posterior: Posterior, codes: dict[str, Codes]) -> nn.Module:
    """Return a plain network with the weights that the codes stand for."""
    with torch.no_grad():
        return params.load_(copied(posterior.model), {name: code.weights for name, code in codes.items()})


def _mixtures(posterior: Posterior) -> dict[str, Mixture]:
    """Return the learned mixture of each parameter that has one."""
    return {name: prior for name, prior in posterior.learned_priors().items() if isinstance(prior, Mixture)}
