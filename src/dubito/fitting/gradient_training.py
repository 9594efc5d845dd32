"""Gradient-based training as an `Inference`: one update is one optimizer step on a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.objectives import code_divergences
from dubito.core import distributed, params
from dubito.core.batches import Batch, take
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.numeric import sum_scalars
from dubito.core.params import Buffers, Frozen, Params
from dubito.fitting.inference import Info, Problem, State, check_loss
from dubito.fitting.optimizers import Optimizer
from dubito.fitting.training import Training

# Maps the module in training mode, a batch, the hyper-parameters and our generator to this process's share of the mean
# loss.
Loss = Callable[[nn.Module, Batch, Params, torch.Generator], Tensor]
# β of the information bottleneck where a layer has none of its own: the best value of Alemi et al. (2017) for MNIST.
RECIPE_BETA = 1e-3


class GradientDescent:
    """Gradient descent on the weights of one module and on a few hyper-parameters.

    The state refers to the module's own tensors, so a step copies nothing; a checkpoint is restored in place.

    Args:
        problem: The data, the model and the training settings.
        module: The module to train: `problem.model` or a converted copy of it.
        loss: This process's share of the mean loss over the batch; the shares are summed over all processes.
        hyper: Initial values of the likelihood's hyper-parameters.
        weight_decay: L2 coefficients by parameter name; the default is that of the training settings.
        rates: Factors of the learning rate by parameter name.
        epochs: The number of epochs that the learning-rate schedule spans.
        codes: Whether the divergence of random codes (`dubito.variational.Bottleneck`) is added to the loss.
    """

    def __init__(
        self,
        problem: Problem,
        module: nn.Module,
        loss: Loss,
        *,
        hyper: Params | None = None,
        weight_decay: dict[str, float] | None = None,
        rates: dict[str, float] | None = None,
        epochs: int | None = None,
        codes: bool = True,
    ) -> None:
        self.problem, self.module, self.loss, self.epochs, self.codes = problem, module, loss, epochs, codes
        if (how := problem.training.compile) is not False:
            _compile(module, problem, "inductor" if how is True else how)
        weight = next(module.parameters())
        self.hyper: Params = {
            name: value.detach().to(device=weight.device, dtype=weight.dtype).clone().requires_grad_()
            for name, value in (hyper or {}).items()
        }
        self.moving: Params = {name: value for name, value in module.named_parameters() if value.requires_grad}
        decay = {**(weight_decay or {}), **{f"hyper.{name}": 0.0 for name in self.hyper}}
        self.moving |= {f"hyper.{name}": value for name, value in self.hyper.items()}
        if not self.moving and epochs != 0:
            raise InputError("Every parameter of the model is frozen: set requires_grad=True on those to be trained.")
        self.optimizer = Optimizer(problem.training, list(self.moving), weight_decay=decay, rates=rates)

    def init(self, initial: Params, buffers: Buffers, generator: torch.Generator) -> State:
        """Return the state before the first step; `initial` is already in the module."""
        self.module.train()
        return {
            "params": {n: v for n, v in self.module.named_parameters() if not isinstance(v, Frozen)},
            "buffers": dict(self.module.named_buffers()),
            "hyper": dict(self.hyper),
            "optimizer": self.optimizer.init(self.moving),
            "step": 0,
        }

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Take one optimizer step; afterwards weights and buffers are the same in every process."""
        if not self.module.training:
            self.module.train()
        loss, grads = self._gradients(batch, generator)
        distributed.sum_([loss, *grads.values()])
        check_loss(loss)
        lr = self.problem.training.rate(self.problem.progress_at(state["step"], self.epochs))
        self.optimizer.step(self.moving, grads, state["optimizer"], lr)
        if distributed.is_active():
            distributed.agree_(list(self.module.buffers()))
        state["step"] += 1
        return state, {"loss": loss, "lr": lr}

    def _gradients(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Params]:
        """Return this process's share of the loss and of its gradients, which are zero if it has no rows."""
        names, values = zip(*self.moving.items(), strict=True)
        if batch.num_rows == 0:
            return values[0].new_zeros(()), {name: torch.zeros_like(v) for name, v in self.moving.items()}
        return in_parts(
            batch, self.problem.training.accumulate, lambda part: self._of_part(part, generator, names, values)
        )

    def _of_part(
        self, batch: Batch, generator: torch.Generator, names: tuple[str, ...], values: tuple[Tensor, ...]
    ) -> tuple[Tensor, Params]:
        try:
            own = partial(self.loss, self.module, batch, self.hyper, generator)
            loss = with_codes(own, self.module, batch) if self.codes else own()
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise InputError(
                f"A batch of {batch.num_rows} is too small for batch normalization, which needs at least two rows: "
                "choose a batch_size that does not leave such a last batch, or a loader with drop_last=True."
            ) from error
        return with_gradients(loss, names, values)

    def load(self, state: State) -> nn.Module:
        """Return the module with the weights and buffers of `state`, in evaluation mode."""
        params.load_(self.module, state["params"], state["buffers"])
        return self.module.eval()


def with_codes(
    loss: Callable[[], Tensor], module: nn.Module, batch: Batch, beta: float = RECIPE_BETA, temperature: float = 1.0
) -> Tensor:
    """Return a loss that calls the module, plus this process's share of the mean divergence of its random codes.

    Args:
        loss: Computes the loss.
        module: The module that it calls.
        batch: The rows of this process.
        beta: β of layers without one of their own.
        temperature: It multiplies every β.
    """
    with code_divergences(module, beta) as codes:
        found = loss()
    return found + sum_scalars(codes) * (temperature * batch.num_rows / batch.size) if codes else found


def with_gradients(loss: Tensor, names: Iterable[str], values: Sequence[Tensor]) -> tuple[Tensor, Params]:
    """Return a loss and its gradients by name."""
    gradients = torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
    if distributed.is_active():
        gradients = tuple(each.contiguous() for each in gradients)  # not views, because they are summed in place
    return loss.detach(), dict(zip(names, gradients, strict=True))


def in_parts(batch: Batch, count: int, gradients: Callable[[Batch], tuple[Tensor, Params]]) -> tuple[Tensor, Params]:
    """Return the sums of loss and gradients over `count` parts of a batch, one after the other."""
    rows = batch.num_rows
    if count == 1 or rows == 1:
        return gradients(batch)
    step = -(-rows // count)
    parts = [slice(start, start + step) for start in range(0, rows, step)]
    total: tuple[Tensor, Params] | None = None
    for part in parts:
        loss, found = gradients(Batch(take(batch.inputs, part), take(batch.targets, part), batch.size))
        if total is None:
            total = loss, {name: value.clone() for name, value in found.items()}
        else:
            for name, value in found.items():
                total[1][name].add_(value)
            total = total[0] + loss, total[1]
    assert total is not None
    return total


def negative_log_likelihood(problem: Problem) -> Loss:
    """Return the function for this process's share of the loss −(1/B) Σ_n log p(y_n | f(x_n))."""

    def loss(module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        outputs = params.call(module, batch.inputs)
        return -problem.likelihood.log_prob(outputs, batch.targets, hyper).sum() / batch.size

    return loss


def prior_decay(training: Training, prior_precision: float, num_data: int) -> float:
    """Return the L2 coefficient in the mean loss that corresponds to a normal prior."""
    if prior_precision and training.optimizer == "adamw":
        raise InputError("prior_precision needs optimizer 'adam' or 'sgd': the decay of 'adamw' is not a prior.")
    return prior_precision / num_data


def plain_descent(problem: Problem, prior_precision: float, epochs: int | None = None) -> GradientDescent:
    """Return gradient descent on the negative log posterior of the network's weights under a normal prior."""
    decay = problem.training.weight_decay + prior_decay(problem.training, prior_precision, problem.num_data)
    return GradientDescent(
        problem,
        problem.model,
        negative_log_likelihood(problem),
        hyper=problem.likelihood.hyper(),
        weight_decay={name: decay for name, _ in problem.model.named_parameters()},
        epochs=epochs,
    )


def _compile(module: nn.Module, problem: Problem, backend: str) -> None:
    """Let a module be compiled when it is called."""
    if module is not problem.model:
        raise UnsupportedError(
            "Training(compile=...) is for recipes that train the network itself, and this one changes its layers: "
            "leave it out."
        )
    if backend not in torch.compiler.list_backends(()):
        known = ", ".join(torch.compiler.list_backends(()))
        raise InputError(f"Training(compile={backend!r}): torch.compile knows the backends {known}.")
    module.compile(backend=backend)


def validation_score(problem: Problem, load: Callable[[State], nn.Module]) -> Any:
    """Return the function that gives the log-probability of each target of a batch at the weights of a state."""

    @torch.no_grad()
    def score(state: State, batch: Batch) -> Tensor:
        return problem.likelihood.log_prob(params.call(load(state), batch.inputs), batch.targets, state["hyper"])

    return score
