r"""One transition of a stochastic-gradient sampler: fused arithmetic on one flat vector, noise drawn once.

Every kernel has the invariant density $\exp(-U(w)/T)$ as its step goes to zero. With N examples and a step size ℓ,
$\varepsilon = \ell / N$, so that ℓ is the learning rate that gradient descent on the mean loss would have. The
covariance is that of a normal target with precision A under exact gradients, where $A^{-1}$ is right.

| kernel | transition | covariance |
|---|---|---|
| `sgld` | $w \leftarrow w - \varepsilon g + \sqrt{2 \varepsilon T}\, \xi$ | $A^{-1}(I - \varepsilon A / 2)^{-1}$ |
| `psgld` | the same with $\varepsilon_i = \varepsilon G_i$ | $A^{-1}(I - \varepsilon A G / 2)^{-1}$ |
| `sghmc` | kick, half drift, friction and noise, half drift | $A^{-1}$, where $\varepsilon A < 4$ |
| `sgnht` | as `sghmc`, and the friction follows the temperature of the momenta | $A^{-1} + O(\varepsilon)$ |

The noise of mini-batch gradients adds to the covariance in all but `sgnht`, whose friction takes it up on average.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

ChainState = dict[str, Tensor]  # views of one chain's tensors


class Step(NamedTuple):
    """The numbers of one transition.

    Args:
        size: ε, the step size over the number of examples.
        temperature: T; 0 leaves the noise out.
        adapting: Whether the sampler may still adapt itself.
    """

    size: float
    temperature: float
    adapting: bool


class SGLD:
    r"""Stochastic gradient Langevin dynamics (Welling & Teh 2011).

    $$w \leftarrow w - \varepsilon\, g + \sqrt{2 \varepsilon T}\, \xi$$
    """

    most = 0.2  # of the step size times the largest curvature, where the step is chosen by itself
    has_momentum = False

    def init(self, position: Tensor) -> ChainState:
        """Nothing beyond the position."""
        return {}

    def move(self, position: Tensor, state: ChainState, gradient: Tensor, noise: Tensor, step: Step) -> None:
        """Change the position in place; `gradient` and `noise` may be overwritten."""
        position.add_(gradient, alpha=-step.size)
        if step.temperature:
            position.add_(noise, alpha=math.sqrt(2 * step.size * step.temperature))


class PSGLD:
    r"""Langevin dynamics with the preconditioner of RMSprop (Li et al. 2016, https://arxiv.org/abs/1512.07666).

    $$w_i \leftarrow w_i - \varepsilon G_i\, g_i + \sqrt{2 \varepsilon G_i T}\, \xi_i, \qquad
      G_i = \frac{\bar s}{s_i + \lambda \bar s}, \quad s_i^2 = \text{a running mean of } g_i^2$$

    with $\bar s$ the mean of $s$. The preconditioner learns during burn-in and is then held: a fixed one needs no
    correction term, and the invariant density stays exact as the step goes to zero.
    """

    most = 0.2
    has_momentum = False
    decay = 0.99
    damping = 0.05  # λ

    def init(self, position: Tensor) -> ChainState:
        """The running mean of squared gradients, and how many it is of."""
        return {"square": torch.zeros_like(position), "count": position.new_zeros(())}

    def move(self, position: Tensor, state: ChainState, gradient: Tensor, noise: Tensor, step: Step) -> None:
        """Change the position in place."""
        if step.adapting:
            state["count"] += 1
            weight = max(1 - self.decay, 1 / float(state["count"]))
            state["square"].mul_(1 - weight).addcmul_(gradient, gradient, value=weight)
        root = state["square"].sqrt()
        mean = root.mean().clamp_min_(1e-30)
        scale = root.add_(mean, alpha=self.damping).reciprocal_().mul_(mean)
        position.addcmul_(gradient, scale, value=-step.size)
        if step.temperature:
            position.addcmul_(noise, scale.sqrt_(), value=math.sqrt(2 * step.size * step.temperature))


class SGHMC:
    r"""Stochastic gradient Hamiltonian Monte Carlo (Chen et al. 2014, https://arxiv.org/abs/1402.4102).

    $$v \leftarrow v - \sqrt\varepsilon\, g, \quad w \leftarrow w + \tfrac{\sqrt\varepsilon}{2} v, \quad
      v \leftarrow (1-\alpha) v + \sqrt{(1 - (1-\alpha)^2)\, T}\, \xi, \quad
      w \leftarrow w + \tfrac{\sqrt\varepsilon}{2} v$$

    Friction and noise stand in the middle of the drift: for normal targets this splitting has no error in $w$ at any
    stable step (Leimkuhler & Matthews 2013, https://arxiv.org/abs/1203.5428), where the original one has.

    Args:
        friction: α, the share of the momentum that is lost in one step.
    """

    most = 0.5
    has_momentum = True

    def __init__(self, friction: float = 0.1) -> None:
        self.friction = friction

    def init(self, position: Tensor) -> ChainState:
        """Momenta at rest."""
        return {"momentum": torch.zeros_like(position)}

    def move(self, position: Tensor, state: ChainState, gradient: Tensor, noise: Tensor, step: Step) -> None:
        """Change position and momentum in place."""
        root, kept = math.sqrt(step.size), 1 - self.friction
        _kick(position, state["momentum"], gradient, root)
        _refresh(position, state["momentum"], noise, root, kept, (1 - kept**2) * step.temperature)


class SGNHT(SGHMC):
    r"""The Nosé-Hoover thermostat (Ding et al. 2014): the friction a follows the temperature of the momenta.

    As `SGHMC` with $v \leftarrow e^{-a} v + \sqrt{\alpha T (1 - e^{-2a}) / a}\, \xi$ in the middle, and then
    $a \leftarrow a + \kappa\,(v^\top v / (D T) - 1)$. Noise in the gradients heats the momenta; a rises until they have
    the temperature T again (the splitting of Leimkuhler & Shang 2016, https://arxiv.org/abs/1505.06889). It needs no
    estimate of that noise, but one number for all directions can only be right on average.

    Args:
        friction: α, the strength of the injected noise; a starts there.
    """

    rate = 0.01  # κ

    def init(self, position: Tensor) -> ChainState:
        """Momenta at rest, the friction at its start."""
        return {"momentum": torch.zeros_like(position), "friction": position.new_tensor(self.friction)}

    def move(self, position: Tensor, state: ChainState, gradient: Tensor, noise: Tensor, step: Step) -> None:
        """Change position, momentum and friction in place."""
        momentum, friction = state["momentum"], float(state["friction"])
        spread = 2.0 if abs(friction) < 1e-8 else -math.expm1(-2 * friction) / friction
        root, size = math.sqrt(step.size), len(momentum)
        _kick(position, momentum, gradient, root)
        kicked = momentum.dot(momentum)
        _refresh(position, momentum, noise, root, math.exp(-friction), self.friction * spread * step.temperature)
        if step.temperature:
            # of both momenta that drift: gradient noise heats the first, friction cools the second
            heat = float(kicked + momentum.dot(momentum)) / (2 * size * step.temperature)
            state["friction"].fill_(friction + self.rate * (heat - 1))


def _kick(position: Tensor, momentum: Tensor, gradient: Tensor, root: float) -> None:
    """The gradient acts on the momentum, and half of the drift."""
    momentum.add_(gradient, alpha=-root)
    position.add_(momentum, alpha=0.5 * root)


def _refresh(position: Tensor, momentum: Tensor, noise: Tensor, root: float, kept: float, variance: float) -> None:
    """Friction and noise act on the momentum, and the other half of the drift."""
    momentum.mul_(kept)
    if variance:
        momentum.add_(noise, alpha=math.sqrt(variance))
    position.add_(momentum, alpha=0.5 * root)


def make_kernel(name: str, friction: float) -> Any:
    """Return a kernel by name."""
    return {
        "sgld": lambda: SGLD(),
        "psgld": lambda: PSGLD(),
        "sghmc": lambda: SGHMC(friction),
        "sgnht": lambda: SGNHT(friction),
    }[name]()
