"""The recipes `Packed` and `MIMO`: an ensemble in one network of about the cost of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.batches import Batch
from dubito.core.constraints import Count, Positive, Probability, check
from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.core.settings import setting
from dubito.fitting.functions import Function, Functions
from dubito.fitting.gradient_training import GradientDescent, validation_score
from dubito.fitting.inference import Inference, Problem, State
from dubito.fitting.output_noise import fit_log_noise
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.recipe import Recipe
from dubito.fitting.traceable import Traceable
from dubito.networks.packing import packed, repacked, roles_of, widened
from dubito.networks.twin import light_copy, twin


@setting
class Packed(Recipe):
    r"""Train M narrow networks side by side in one (Packed-Ensembles, Laurent et al. 2023, https://arxiv.org/abs/2210.09184).

    Each member has α/M of the channels of every hidden layer, so all together have about α²/M of the weights and
    operations of the network. They share batches and one optimizer, and nothing else: linear layers and convolutions
    become grouped ones. All weights are newly drawn, as their shapes differ from the network's.

    Args:
        members: M.
        alpha: The width of all members together, in units of the network's.
    """

    setting_name = "Packed"
    has_score = True
    members: Count = 4
    alpha: Positive = 2.0

    def build(self, problem: Problem) -> Inference:
        """Return the training steps."""
        network, roles = packed(problem.model, problem.source.first().inputs, self.members, self.alpha)
        first = [name for name, role in roles.items() if role == "first"]
        return _training(self, problem, MemberNetwork(network, self.members, first, joins=False))


@setting
class MIMO(Recipe):
    r"""Train one network to answer for M inputs at once, and ask it M times for one (Havasi et al. 2021, https://arxiv.org/abs/2010.06610).

    The first layer takes M inputs, concatenated along their second axis, and the last one gives M outputs. In training
    the M inputs are different examples, so M nearly independent subnetworks form within one network; in prediction all
    are the same input, and the outputs are an ensemble. First and last layer are newly drawn.

    Args:
        members: M.
        repetition: The probability that an example is shown to all members at once in training; it lets small
            networks share what they learn.
    """

    setting_name = "MIMO"
    has_score = True
    members: Count = 3
    repetition: Probability = 0.0

    def build(self, problem: Problem) -> Inference:
        """Return the training steps."""
        first = problem.source.first().inputs
        if not isinstance(first, Tensor) or first.ndim < 2:
            raise UnsupportedError("MIMO joins inputs along their second axis: give one tensor [B, C, ...] per batch.")
        roles = roles_of(problem.model, first)
        network = widened(problem.model, first, roles, self.members)
        return _training(self, problem, MemberNetwork(network, self.members, [], joins=True))


class MemberNetwork(nn.Module):
    """A network that gives the outputs of all members, ``[..., M·C]``; a call returns their mean ``[..., C]``.

    Args:
        network: The network.
        members: M.
        first: Its first layers, if their inputs are repeated.
        joins: Whether it takes M inputs, joined along their second axis.
    """

    def __init__(self, network: nn.Module, members: int, first: list[str], joins: bool) -> None:
        super().__init__()
        self.network, self.num_members, self.first, self.joins = network, members, first, joins

    def members(self, inputs: Any) -> Tensor:
        """Return the outputs of the members ``[M, *outputs]`` for the same inputs."""
        return self.apart(torch.cat([inputs] * self.num_members, dim=1) if self.joins else inputs)

    def apart(self, inputs: Any) -> Tensor:
        """Return the outputs of the members ``[M, *outputs]`` for inputs that are joined already."""
        outputs = params.call(self.network, inputs)
        return outputs.unflatten(-1, (self.num_members, -1)).movedim(-2, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean of the members' outputs."""
        return self.members(kwargs or (args[0] if len(args) == 1 else args)).mean(0)


def _training(recipe: Packed | MIMO, problem: Problem, module: MemberNetwork) -> Inference:
    """Return the steps: the loss is the mean of the members' losses."""
    likelihood = problem.likelihood

    def loss(_: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        if isinstance(recipe, MIMO):
            orders = [_order(batch.num_rows, recipe.repetition if m else 1.0) for m in range(recipe.members)]
            joined = torch.cat([batch.inputs[order] for order in orders], dim=1)
            outputs, targets = module.apart(joined), [batches.take(batch.targets, order) for order in orders]
        else:
            outputs, targets = module.members(batch.inputs), [batch.targets] * recipe.members
        each = [likelihood.log_prob(own, y, hyper).sum() for own, y in zip(outputs, targets, strict=True)]
        return -torch.stack(each).mean() / batch.size

    descent = GradientDescent(problem, module, loss, hyper=likelihood.hyper())

    def posterior(state: State) -> PackedPosterior:
        network = light_copy(descent.load(state))
        hyper = {name: value.detach() for name, value in state["hyper"].items()}
        if "log_noise" in hyper:
            hyper["log_noise"] = fit_log_noise(network, problem)
        return PackedPosterior(network, likelihood.resolved(hyper), recipe, problem.num_data)

    epochs = problem.training.epochs
    score = validation_score(problem, descent.load)
    return Inference(descent.init, descent.update, posterior, epochs=epochs, score=score)


def _order(rows: int, repetition: float) -> Tensor:
    """Return a random order of rows, in which a share of them, `repetition`, stays in place."""
    order = torch.arange(rows)
    moving = (torch.rand(rows) >= repetition).nonzero().flatten()
    order[moving] = moving[torch.randperm(len(moving))]
    return order


class PackedPosterior(Posterior):
    """An equal mixture of the members of one network; `posterior.model` gives the mean of their outputs."""

    family = "Packed"

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Raise an error: the members are parts of one network, not other weights of it."""
        raise UnsupportedError(f"The members of {self.recipe!r} are parts of one network: it has no weight samples.")

    def functions(self, num_functions: Count, *, generator: torch.Generator | None = None) -> Functions:
        """Return the members as functions of the inputs; more than there are repeat."""
        check("num_functions", Count, num_functions)
        private: Any = twin(self.model).eval().requires_grad_(False)

        def member(number: int) -> Function:
            return lambda x: private.members(x)[number]

        return Functions([member(s % self.default_samples) for s in range(num_functions)])

    def marginals(self) -> tuple[Params, Params]:
        """Raise an error."""
        raise UnsupportedError(f"The members of {self.recipe!r} are parts of one network: it has no marginals.")

    def prior(self) -> tuple[Params, Params]:
        """Raise an error."""
        raise UnsupportedError(f"{self.recipe!r} is trained without a prior.")

    @property
    def default_samples(self) -> int:
        """The number of members."""
        return int(self.recipe.members)

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the mixture of all members, whatever the number of samples."""
        return lambda inputs: self.likelihood.predict_samples(self.model.members(inputs))  # type: ignore[operator]

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield the mixture."""
        yield Traceable(self.predictor(num_samples, generator, **options), f"{self.recipe.members} members in one")

    def state(self) -> dict[str, Any]:
        """Return how the network was rebuilt."""
        model: Any = self.model
        return {"members": model.num_members, "first": list(model.first), "joins": model.joins}

    @classmethod
    def network_for(cls, model: nn.Module, tree: Mapping[str, Any]) -> nn.Module:
        """Return the network that was given with the layers of this posterior."""
        if isinstance(model, MemberNetwork):
            return model
        own = {name.removeprefix("network."): value for name, value in tree["params"].items()}
        state = tree["state"]
        network = repacked(model, own, state["first"], state["members"])
        return MemberNetwork(network, state["members"], state["first"], state["joins"])
