r"""Microcanonical trajectories: motion of unit speed whose direction is bent by the gradient.

$$\dot q = u, \qquad \dot u = -\frac{(I - u u^\top)\,\nabla U(q)}{d - 1}, \qquad \|u\| = 1$$

At a fixed position the second equation is solved exactly, so a step is half a turn, a drift and half a turn (Robnik et
al. 2023, https://arxiv.org/abs/2212.08549). Unlike a Hamiltonian momentum, the direction cannot gain speed in steep
valleys. Microcanonical chains that start at the members of a deep ensemble sample networks well (MILE, Sommer et al.
2025, https://arxiv.org/abs/2502.06335); here the ends of trajectories are accepted or rejected, which removes the error
of the step size (Robnik et al. 2025, https://arxiv.org/abs/2503.01707).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.methods.mcmc.hamiltonian import Point, Rise, Transition, uniform
from dubito.methods.mcmc.numbers import Number, exp, finite_or_infinity, log, number
from dubito.methods.mcmc.target import Potential


def turn(direction: Tensor, gradient: Tensor, step: Number) -> tuple[Tensor, Number]:
    r"""Return the unit direction after a time at a fixed position, and the change of the kinetic energy.

    With $e = -\nabla U / \|\nabla U\|$, $\delta = \epsilon \|\nabla U\| / (d - 1)$ and $c = e^\top u$,

    $$u' = \frac{u + e\,(\sinh \delta + c\,(\cosh \delta - 1))}{\cosh \delta + c \sinh \delta}, \qquad
      \Delta K = (d - 1) \log(\cosh \delta + c \sinh \delta).$$

    Args:
        direction: u.
        gradient: ∇U.
        step: ε.
    """
    size, length = len(direction) - 1, number(gradient.norm())
    if isinstance(length, Tensor):
        length = length.double().clamp_min(torch.finfo(gradient.dtype).tiny)  # a gradient of 0 turns nothing
    elif length == 0:
        return direction, 0.0
    ahead, delta = -gradient / length, step * length / size
    along, shrunk = number(ahead.dot(direction)), exp(-delta)  # in terms of exp(-δ), which cannot overflow
    turned = ahead * ((1 - shrunk) * (1 + shrunk + along * (1 - shrunk))) + 2 * shrunk * direction
    inside = 1 + along + (1 - along) * shrunk**2
    return turned / turned.norm(), size * (delta - math.log(2) + log(inside, 1e-300))


def microcanonical_transition(
    potential: Potential, start: Point, step: Number, inverse_mass: Tensor, num_steps: int, generator: torch.Generator
) -> Transition:
    """Follow a trajectory of `num_steps` steps from a random direction, and accept its end by its energy error.

    The arguments are those of `hmc_transition`. A step moves each weight about as far as a leapfrog step of that size,
    so `step` is multiplied by the root of the number of weights. It is varied by up to a fifth.
    """
    scale = inverse_mass.sqrt()
    noise = torch.empty_like(start.position).normal_(generator=generator)
    direction, point, rise = noise / noise.norm(), start, Rise()
    size = step * (0.8 + 0.4 * uniform(generator)) * math.sqrt(len(direction))
    kinetic: Number = 0.0
    for _ in range(num_steps):
        direction, first = turn(direction, scale * point.gradient, size / 2)
        position = point.position + size * scale * direction
        energy, gradient = potential(position)
        direction, second = turn(direction, scale * gradient, size / 2)
        point, kinetic = Point(position, direction, number(energy), gradient), kinetic + first + second
        if rise.add(finite_or_infinity(point.potential - start.potential + kinetic)):
            break
    return rise.end(start, point, start.potential, generator)
