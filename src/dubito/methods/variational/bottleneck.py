"""`Bottleneck`: the variational information bottleneck, a random code of the input between two parts of a network."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count, NonNegative


class Bottleneck(nn.Module):
    r"""A random code between two parts of a network, $z \sim q(z \mid x) = \mathcal N(\mu(x), \sigma^2(x))$.

    Every recipe that trains the network adds the divergence of the codes of a batch to its loss. That of `MAP` is the
    loss of Alemi et al. (2017, https://arxiv.org/abs/1612.00410),

    $$-\mathbb E_q \log p(y \mid z) + \beta\, \mathrm{KL}\big(q(z \mid x) \,\|\, \mathcal N(0, I)\big).$$

    In a loop of your own `objectives.ELBO` does so; there β is multiplied by `temperature`, as for random weights.

    The mean of the second term, the *rate*, bounds the information $I(X; Z)$ that the code keeps from above, and the
    entropy of the targets minus the first term bounds $I(Z; Y)$ from below: a larger β forgets more of the input. The
    code is random while training and the mean afterwards, so every recipe takes the trained network.

    Args:
        inputs: The number of features ``[B, inputs]`` that are encoded.
        size: The length of the code.
        beta: β. The default is 0.001, the best value of the paper for MNIST, and 1 where the ELBO is the objective
            (`objectives.ELBO`, `Variational`).

    Samplers and `Laplace` take the mean codes, without a divergence.

    Attributes:
        divergence: The KL divergence of each code of the last call ``[B]``, in nats.
        pass_divergence: Its mean over the rows of a call, summed over the calls of one pass in training; None outside
            of one, and if the layer was not called.

    >>> layer = Bottleneck(8, 2).eval()
    >>> layer(torch.ones(5, 8)).shape, layer.divergence.shape
    (torch.Size([5, 2]), torch.Size([5]))
    """

    has_codes: ClassVar[bool] = True
    divergence: Tensor
    pass_divergence: Tensor | None = None
    is_counting: bool = False

    @checked_arguments
    def __init__(self, inputs: Count, size: Count, beta: NonNegative | None = None) -> None:
        super().__init__()
        self.encoder, self.beta = nn.Linear(inputs, 2 * size), beta

    def forward(self, features: Tensor) -> Tensor:
        """Return codes ``[B, size]``."""
        mean, raw = self.encoder(features).chunk(2, dim=-1)
        scale = functional.softplus(raw - 5.0) + 1e-6  # narrow at first, as in the paper
        self.divergence = (0.5 * (mean.square() + scale.square() - 1) - scale.log()).sum(dim=-1)
        if self.is_counting:
            own = self.divergence.sum() / len(self.divergence)
            self.pass_divergence = own if self.pass_divergence is None else self.pass_divergence + own
        return mean + scale * torch.randn_like(mean) if self.training else mean

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the last divergences, whose graphs cannot be copied."""
        return {name: value for name, value in self.__dict__.items() if name not in ("divergence", "pass_divergence")}
