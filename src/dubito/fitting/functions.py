r"""The network at posterior samples of its weights: predictions, and functions that are differentiable in the inputs.

A prediction of one input at a time cannot say how outputs at two inputs vary together. A drawn function can, and it can
be maximized by gradient steps: Thompson sampling takes the maximum of one draw as the next input to try (Thompson 1933;
Russo et al. 2018, https://arxiv.org/abs/1707.02038).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import batches, io, params
from dubito.core.errors import UnsupportedError, first_line
from dubito.core.params import Params, differentiable_twice
from dubito.fitting.checked_predictions import Predictor, check_call, check_finite_inputs
from dubito.networks.twin import twin

Function = Callable[[Any], Tensor]


@dataclass(frozen=True)
class _OfFinite:
    """A function that refuses inputs with NaN, as a prediction does."""

    function: Function

    def __call__(self, x: Any) -> Tensor:
        # where torch.compile or torch.func.vmap hide the values, they cannot be checked
        if not (torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack()):
            check_finite_inputs(x)
        return self.function(x)


class Functions(Sequence[Function]):
    """Functions that were drawn from a posterior; call them all at once, or one of them by its number.

    >>> from dubito import MAP
    >>> model = nn.Linear(2, 1)
    >>> drawn = MAP(train=False).fit(model, (torch.ones(3, 2), torch.ones(3, 1)), likelihood="gaussian").functions(4)
    >>> drawn(torch.ones(5, 2)).shape
    torch.Size([4, 5, 1])
    """

    def __init__(self, functions: Sequence[Function]) -> None:
        self._functions = [each if isinstance(each, _OfFinite) else _OfFinite(each) for each in functions]

    def __call__(self, x: Any) -> Tensor:
        """Return the outputs of all functions ``[S, *outputs]``, without noise and before any link."""
        return torch.stack([function(x) for function in self._functions])

    def __len__(self) -> int:
        return len(self._functions)

    def __getitem__(self, index: Any) -> Any:
        """Return one function, or several for a slice."""
        return Functions(self._functions[index]) if isinstance(index, slice) else self._functions[index]

    def __iter__(self) -> Iterator[Function]:
        return iter(self._functions)


def network_functions(model: nn.Module, draws: Sequence[Params], *, center: Params | None = None) -> Functions:
    r"""Return the network at each draw of its weights; with a center, its first-order expansion there.

    $$f_s(x) = f_{\hat w}(x) + J(x)\,(w_s - \hat w)$$

    Args:
        model: The network; it is not changed.
        draws: Weights, and buffers where they differ, by name.
        center: The weights $\hat w$ of the expansion; None for the network itself.
    """
    private, lock = twin(model).eval(), threading.Lock()  # a call changes the weights of the network for its length

    def call(weights: Params, x: Any) -> Tensor:
        try:
            return params.functional_call(private, weights, x)
        except io.CONTENT_ERRORS:
            check_call(private, x)
            raise  # the network can process the inputs, so the error has another cause

    def function(draw: Params) -> Function:
        if center is None:
            fixed = {name: value.detach() for name, value in draw.items()}

            def at_weights(x: Any) -> Tensor:
                with lock:
                    return call(fixed, x)

            return at_weights
        base = {name: value.detach().requires_grad_() for name, value in center.items()}
        moved = [draw[name].detach() - value.detach() for name, value in base.items()]

        def expanded(x: Any) -> Tensor:
            with lock, torch.enable_grad():
                with differentiable_twice():
                    outputs = call(base, x)
                change = jacobian_product(outputs, list(base.values()))(moved)
            found = outputs + change
            return found if _needs_gradient(x) else found.detach()

        return expanded

    return Functions([function(draw) for draw in draws])


def jacobian_product(outputs: Tensor, weights: list[Tensor]) -> Callable[[list[Tensor]], Tensor]:
    """Return the function that multiplies the Jacobian with directions in the weights; results are differentiable.

    The product of its transpose with v is linear in v, so its derivative there is the Jacobian. Unlike forward mode,
    this works for every layer that can be differentiated twice.
    """
    v = torch.zeros_like(outputs, requires_grad=True)
    options: dict[str, Any] = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    pulled = torch.autograd.grad(outputs, weights, v, **options)

    def along(directions: list[Tensor]) -> Tensor:
        total = torch.stack([(each * d).sum() for each, d in zip(pulled, directions, strict=True)]).sum()
        try:
            (change,) = torch.autograd.grad(total, v, **options)
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            raise UnsupportedError(
                "The network cannot be linearized for this, because torch cannot differentiate one of its layers twice "
                f"({first_line(error)}): make only weights after that layer random, such as "
                "weights=select.last_layer()."
            ) from error
        return change

    return along


def _needs_gradient(x: Any) -> bool:
    return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in batches.leaves(x))


def weight_predictor(
    model: nn.Module,
    likelihood: Likelihood,
    samples: Params,
    *,
    buffers: Params | None = None,
    temperature: float = 1.0,
) -> Predictor:
    """Return the predictor that averages over networks with weights `samples` and `buffers`, both ``[S, ...]``.

    The model runs in evaluation mode: dropout is off and BatchNorm uses its running statistics.
    """
    members = params.unstack({**samples, **(buffers or {})})

    def predict(inputs: Any) -> Any:
        outputs = torch.stack([params.functional_call(model, member, inputs) for member in members])
        tempered, scaled = likelihood.temper(outputs, temperature) if temperature != 1.0 else (outputs, likelihood)
        return scaled.predict_samples(tempered)

    return predict
