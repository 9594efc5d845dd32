"""Optimizers whose state is a dict of tensors, so that a run can be saved at any step and continued exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from dubito.fitting.training import Training


class Optimizer:
    """An optimizer over named tensors, fused if the device supports it.

    The learning rate is an argument of each step; `rates` multiplies it for some names. `weight_decay` is the
    coefficient of an L2 penalty in the mean loss, by name.
    """

    def __init__(
        self,
        training: Training,
        names: list[str],
        *,
        weight_decay: dict[str, float] | None = None,
        rates: dict[str, float] | None = None,
    ) -> None:
        self.training = training
        decay, factor = weight_decay or {}, rates or {}
        self.groups: dict[tuple[float, float], list[str]] = {}
        for name in names:
            self.groups.setdefault((decay.get(name, training.weight_decay), factor.get(name, 1.0)), []).append(name)

    def init(self, params: dict[str, Tensor]) -> dict[str, Any]:
        """Return the state before the first step."""
        names = [name for group in self.groups.values() for name in group]
        first = {name: torch.zeros_like(params[name], requires_grad=False) for name in names}
        if self.training.optimizer == "sgd":
            return {"momentum": first}
        second = {name: torch.zeros_like(params[name], requires_grad=False) for name in names}
        # torch counts on the CPU, except in its fused kernels: a count on the device would be read in each step
        steps = {n: torch.zeros((), device=params[n].device if _can_fuse([params[n]]) else "cpu") for n in names}
        return {"first": first, "second": second, "steps": steps}

    @torch.no_grad()
    def step(self, params: dict[str, Tensor], grads: dict[str, Tensor], state: dict[str, Any], lr: float) -> None:
        """Take one step with the learning rate `lr`: `params` and `state` change in place, `grads` do not."""
        grads = self._clipped(grads)
        for (weight_decay, factor), names in self.groups.items():
            values = [params[name] for name in names]
            gradients = [_laid_out_as(params[name], grads[name]) for name in names]
            if self.training.optimizer == "sgd":
                self._sgd(values, gradients, [state["momentum"][name] for name in names], lr * factor, weight_decay)
            else:
                moments = [[state[key][name] for name in names] for key in ("first", "second", "steps")]
                self._adam(values, gradients, moments, lr * factor, weight_decay)

    def _adam(self, values: list[Tensor], gradients: list[Tensor], moments: Any, lr: float, decay: float) -> None:
        first, second, steps = moments
        step = adamw if self.training.optimizer == "adamw" else adam
        step(
            values, gradients, first, second, [], steps,
            fused=_can_fuse(values),
            amsgrad=False, beta1=0.9, beta2=0.999, lr=lr, weight_decay=decay, eps=1e-8, maximize=False,
        )  # fmt: skip

    def _sgd(self, values: list[Tensor], gradients: list[Tensor], momenta: Any, lr: float, decay: float) -> None:
        momentum = self.training.momentum
        sgd(
            values, gradients, momenta if momentum else [None] * len(values), fused=_can_fuse(values),
            weight_decay=decay, momentum=momentum, lr=lr, dampening=0.0, nesterov=momentum > 0, maximize=False,
        )  # fmt: skip

    def _clipped(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.training.clip is None:
            return grads
        gradients = list(grads.values())
        norm = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).norm()
        factor = (self.training.clip / norm.clamp_min(1e-12)).clamp_max(1.0)
        # Not in place: autograd may return one tensor, or an expanded view, as the gradient of two parameters. A
        # gradient without axes takes the dtype of the factor, so each is cast back to its own.
        clipped = zip(grads, gradients, torch._foreach_mul(gradients, factor), strict=True)
        return {name: scaled.to(gradient.dtype) for name, gradient, scaled in clipped}


def _can_fuse(values: list[Tensor]) -> bool:
    return all(value.is_floating_point() and value.device.type in ("cpu", "cuda") for value in values)


def _laid_out_as(value: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient in the memory layout of its parameter, which the fused kernels require."""
    return gradient if gradient.stride() == value.stride() else torch.empty_like(value).copy_(gradient)
