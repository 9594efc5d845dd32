r"""Kernels of stochastic-gradient samplers: one transition of one flat vector, computed in place.

Every kernel has the invariant density $\exp(-U(w)/T)$ as its step goes to zero. With N examples and a step size ℓ,
$\varepsilon = \ell / N$, so ℓ is the learning rate of gradient descent on the mean loss. The table shows the covariance
of the samples for a normal target with precision A and exact gradients; the exact covariance is $A^{-1}$.

| kernel | transition | covariance |
|---|---|---|
| `sgld` | $w \leftarrow w - \varepsilon g + \sqrt{2 \varepsilon T}\, \xi$ | $A^{-1}(I - \varepsilon A / 2)^{-1}$ |
| `psgld` | the same with $\varepsilon_i = \varepsilon G_i$ | $A^{-1}(I - \varepsilon A G / 2)^{-1}$ |
| `sghmc` | kick, half drift, friction and noise, half drift | $A^{-1}$, where $\varepsilon A < 4$ |
| `sgnht` | as `sghmc`, and the friction follows the temperature of the momenta | $A^{-1} + O(\varepsilon)$ |

The noise of mini-batch gradients increases the covariance, except for `sgnht`, whose friction absorbs it on average.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

ChainState = dict[str, Tensor]  # views of one chain's tensors


class KernelStep(NamedTuple):
    """The numbers of one transition."""

    size: float  # ε, the step size over the number of examples
    temperature: float  # T; 0 means no noise
    adapting: bool  # whether the kernel may adapt, as it does during burn-in
    number: int = 0  # the number of transitions before this one


class SGLD:
    r"""Stochastic gradient Langevin dynamics (Welling & Teh 2011).

    $$w \leftarrow w - \varepsilon\, g + \sqrt{2 \varepsilon T}\, \xi$$
    """

    most = 0.2  # the largest ε times curvature that step_size="auto" chooses
    cooling = 2.0  # noise of variance V in the gradient heats the chain by the share ε V / (cooling · T)
    has_momentum = False

    def init(self, position: Tensor) -> ChainState:
        """Return an empty state: the position is all there is."""
        return {}

    def move(self, position: Tensor, state: ChainState, gradient: Tensor, noise: Tensor, step: KernelStep) -> None:
        """Change the position in place; `gradient` and `noise` may be overwritten."""
        position.add_(gradient, alpha=-step.size)
        if step.temperature:
            position.add_(noise, alpha=math.sqrt(2 * step.size * step.temperature))


class PSGLD:
    r"""Langevin dynamics with the preconditioner of RMSprop (Li et al. 2016, https://arxiv.org/abs/1512.07666).

    $$w_i \leftarrow w_i - \varepsilon G_i\, g_i + \sqrt{2 \varepsilon G_i T}\, \xi_i, \qquad
      G_i = \frac{\bar s}{s_i + \lambda \bar s}, \quad s_i^2 = \text{a running mean of } g_i^2$$

    with $\bar s$ the mean of $s$. The preconditioner is adapted during burn-in and then fixed: a fixed one needs no
    correction term, and the invariant density is exact as the step size goes to zero.
    """

    most = 0.2
    cooling = 2.0
    has_momentum = False
    decay = 0.99
    damping = 0.05  # λ

    def init(self, position: Tensor) -> ChainState:
        """Return the running mean of squared gradients."""
        return {"square": torch.zeros_like(position)}

    def move(self, position: Tensor, state: ChainState, gradient: Tensor, noise: Tensor, step: KernelStep) -> None:
        """Change the position in place."""
        if step.adapting:
            weight = max(1 - self.decay, 1 / (step.number + 1))
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

    Friction and noise are applied in the middle of the drift: for normal targets this splitting has no error in $w$ at
    any stable step size (Leimkuhler & Matthews 2013, https://arxiv.org/abs/1203.5428), unlike the original one.

    Args:
        friction: α, the fraction of the momentum that one step removes.
    """

    most = 1.0
    has_momentum = True

    def __init__(self, friction: float = 0.1) -> None:
        self.friction = friction

    @property
    def cooling(self) -> float:
        """The share of the momenta's variance that one step removes: ε V / cooling heats as much as it cools."""
        return 1 - (1 - self.friction) ** 2

    def init(self, position: Tensor) -> ChainState:
        """Momenta at rest."""
        return {"momentum": torch.zeros_like(position)}

    def move(self, position: Tensor, state: ChainState, gradient: Tensor, noise: Tensor, step: KernelStep) -> None:
        """Change position and momentum in place."""
        root, kept = math.sqrt(step.size), 1 - self.friction
        _kick(position, state["momentum"], gradient, root)
        _refresh(position, state["momentum"], noise, root, kept, (1 - kept**2) * step.temperature)


class SGNHT(SGHMC):
    r"""The Nosé-Hoover thermostat (Ding et al. 2014): the friction a follows the temperature of the momenta.

    As `SGHMC` with $v \leftarrow e^{-a} v + \sqrt{\alpha T (1 - e^{-2a}) / a}\, \xi$ in the middle, and then
    $a \leftarrow a + \kappa\,(v^\top v / (D T) - 1)$. Noise in the gradients heats the momenta; a rises until they have
    the temperature T again (the splitting of Leimkuhler & Shang 2016, https://arxiv.org/abs/1505.06889). It needs no
    estimate of that noise, but one friction for all directions is correct only on average.

    Args:
        friction: α, the strength of the injected noise and the initial value of a.
    """

    most = 0.5  # unlike that of `SGHMC`, its covariance depends on the step
    rate = 0.01  # κ
    cooling = math.inf  # its friction absorbs the noise of gradients

    def init(self, position: Tensor) -> ChainState:
        """Return zero momenta and the initial friction."""
        return {"momentum": torch.zeros_like(position), "friction": position.new_tensor(self.friction)}

    def move(self, position: Tensor, state: ChainState, gradient: Tensor, noise: Tensor, step: KernelStep) -> None:
        """Change position, momentum and friction in place."""
        momentum, root = state["momentum"], math.sqrt(step.size)
        _kick(position, momentum, gradient, root)
        kicked = momentum.dot(momentum)
        if momentum.device.type == "cpu":
            friction = float(state["friction"])
            spread = 2.0 if abs(friction) < 1e-8 else -math.expm1(-2 * friction) / friction
            _refresh(position, momentum, noise, root, math.exp(-friction), self.friction * spread * step.temperature)
        else:  # the same with tensors, because numbers would be read from the device
            some = torch.where(state["friction"].abs() < 1e-6, 1e-6, state["friction"])
            momentum.mul_(torch.exp(-some))
            if step.temperature:
                momentum.addcmul_(noise, (-self.friction * step.temperature * torch.expm1(-2 * some) / some).sqrt())
            position.add_(momentum, alpha=0.5 * root)
        if step.temperature:
            # the mean over both momenta: gradient noise heats the first, friction cools the second
            heat = (kicked + momentum.dot(momentum)).double() / (2 * len(momentum) * step.temperature)
            state["friction"].copy_(state["friction"].double() + self.rate * (heat - 1))


def _kick(position: Tensor, momentum: Tensor, gradient: Tensor, root: float) -> None:
    """Apply the gradient to the momentum, then half of the drift."""
    momentum.add_(gradient, alpha=-root)
    position.add_(momentum, alpha=0.5 * root)


def _refresh(position: Tensor, momentum: Tensor, noise: Tensor, root: float, kept: float, variance: float) -> None:
    """Apply friction and noise to the momentum, then the other half of the drift."""
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
