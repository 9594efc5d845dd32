r"""Train all members at once: their linear layers as one batched product, one fused optimizer over all of them.

$$Y_k = X_k W_k^\top + b_k \quad (k = 1 \dots K) \qquad \text{as one product of } [K, B, I] \text{ and } [K, I, O]$$

The rows of all members form one batch of ``K * B`` rows, so the operations between linear layers need no change. The
loss is the sum of the members' losses, so that their gradients are independent.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.batches import Batch, Source
from dubito.core.params import Params
from dubito.core.randomness import Stream, derive_seed
from dubito.core.settings import setting
from dubito.fitting.gradient_training import GradientDescent
from dubito.fitting.inference import Inference, Info, Problem, State
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.ensembles.points import point
from dubito.methods.ensembles.posterior import EnsemblePosterior
from dubito.methods.ensembles.resample import drawn_rows
from dubito.methods.map.recipe import MAP
from dubito.networks.layers import rule_for
from dubito.networks.twin import light_copy

if TYPE_CHECKING:
    from dubito.methods.ensembles.recipe import Ensemble


class _Products(torch.autograd.Function):
    """``x Wᵀ + b`` for K members; written by hand, so that the gradient of W has the memory layout of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            torch.bmm(grads, weight) if of_x else None,
            torch.bmm(grads.mT, x) if of_weight else None,
            grads.sum(dim=1) if of_bias else None,
        )


class StackedLinear(nn.Module):
    """K linear layers: the k-th of K equal parts of the rows is multiplied by the k-th weight of ``[K, O, I]``."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        for name, first in layers[0].named_parameters():
            values = torch.stack([getattr(layer, name).detach() for layer in layers])
            self.register_parameter(name, nn.Parameter(values, requires_grad=first.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, stacked like the inputs."""
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None
        members, outputs, inputs = weight.shape
        rows = x.reshape(members, -1, inputs)
        if torch.is_autocast_enabled(x.device.type):  # which does not reach into functions of our own
            found = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
        else:
            found = _Products.apply(rows, weight, bias)
        return found.reshape(*x.shape[:-1], outputs)


def stacked(models: list[nn.Module]) -> nn.Module:
    """Return one network with the linear layers of all models; all other parts are those of the first."""
    layers = [dict(model.named_modules()) for model in models]
    if isinstance(models[0], nn.Linear):
        return StackedLinear(models)  # type: ignore[arg-type]
    joint = light_copy(models[0])
    for name, layer in list(joint.named_modules()):
        if isinstance(layer, nn.Linear):
            parent = joint.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], StackedLinear([one[name] for one in layers]))
    return joint


def obstacle(ensemble: Ensemble, training: Training, model: nn.Module, source: Source) -> str | None:
    """Return why the members cannot be trained together, as a clause for an error; None if they can."""
    recipe = ensemble.recipe
    known = {"prior_precision": 0.0, "temperature": 1.0, "start": "model"}
    if type(recipe) is not MAP or recipe.replace(**known) != MAP():
        return "only MAP() with a flat or normal prior can be"
    if training.needs_validation or training.clip is not None or training.evidence_every is not None:
        return "early stopping, clipping and evidence_every need one network at a time"
    if training.accumulate > 1 or training.compile is not False:
        return "accumulate and compile need one network at a time"
    modules = list(model.named_modules(remove_duplicate=False))
    owners = [m for _, m in modules if [*m.parameters(recurse=False), *m.buffers(recurse=False)]]
    if not owners or any(not isinstance(m, nn.Linear) or rule_for(m) is None for m in owners):
        return "all weights must belong to plain linear layers"
    if len(modules) != len(list(model.modules())) or len({id(p) for m in owners for p in m.parameters()}) != sum(
        len(list(m.parameters())) for m in owners
    ):
        return "layers must not share weights"
    try:
        agrees = _agrees(model, source)
    except (RuntimeError, TypeError, ValueError, LookupError):  # the fit of a single member reports it
        return "the network cannot be copied or called on a batch"
    return None if agrees else "the network mixes the rows of a batch"


@torch.no_grad()
def _agrees(model: nn.Module, source: Source) -> bool:
    """Return whether two members together have the outputs of each alone, on a few rows."""
    weight, first = next(model.parameters()), source.first().inputs
    parts = [batches.take(first, rows) for rows in (slice(0, 2), slice(-2, None))]
    placed = [batches.place(part, weight.device, weight.dtype) for part in parts]
    models = [light_copy(model).eval() for _ in range(2)]
    for value in models[1].parameters():
        value.mul_(-0.5)
    with Stream(0, weight.device).active():
        both = params.call(stacked(models), batches.concatenate(placed))
        alone = torch.cat([params.call(one, rows) for one, rows in zip(models, placed, strict=True)])
    return both.shape == alone.shape and torch.allclose(both, alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()))


@setting
class BatchedMembers(Recipe):
    """Fit all members of an ensemble at once.

    Args:
        ensemble: The recipe of the ensemble.
        seeds: One per member, for its initial weights, its order of the data and its bootstrap.
    """

    setting_name = "ensembles.Together"
    ensemble: Any
    seeds: tuple[int, ...]

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training."""
        joint = _Joint(self, problem)
        return Inference(joint.descent.init, joint.update, joint.posterior, epochs=problem.training.epochs)


class _Joint:
    def __init__(self, together: BatchedMembers, problem: Problem) -> None:
        from dubito.methods.ensembles.members import start_of_member

        self.together, self.problem, self.count = together, problem, len(together.seeds)
        self.recipe: MAP = together.ensemble.steps()[0]
        self.recipe.build(problem)  # raises errors that concern every member, before any work is done
        first = self.recipe.replace(start="model")  # the weights are drawn here
        self.models = [
            start_of_member(together.ensemble, first, problem.model, seed, k, problem.source)
            for k, seed in enumerate(together.seeds)
        ]
        self.pair = problem.source.pair
        self.size = batches.num_rows(self.pair)
        self.drawn = [
            drawn_rows(self.size, derive_seed(seed, "bootstrap")) if together.ensemble.bootstrap else None
            for seed in together.seeds
        ]
        self.orders: tuple[int, list[Tensor]] = (-1, [])
        joint = stacked(self.models)
        decay = problem.training.weight_decay + self.recipe.prior_precision / problem.num_data
        self.descent = GradientDescent(
            problem, joint, self._loss,
            hyper={name: torch.stack([value] * self.count) for name, value in problem.likelihood.hyper().items()},
            weight_decay={name: decay for name, _ in joint.named_parameters()},
        )  # fmt: skip

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Take one optimizer step for all members; each takes as many rows as the batch, in its own order."""
        state, info = self.descent.update(state, self._rows(state["step"], batch.size), generator)
        return state, {**info, "loss": info["loss"] / self.count}

    def _rows(self, step: int, size: int) -> Batch:
        training, per_epoch = self.problem.training, self.problem.source.num_batches
        assert per_epoch is not None
        epoch, index = divmod(step, per_epoch)
        if self.orders[0] != epoch:
            self.orders = (epoch, [self._order(k, epoch) for k in range(self.count)])
        start = index * training.batch_size
        chosen = torch.cat([order[start : start + size] for order in self.orders[1]])
        inputs, targets = batches.map_leaves(lambda rows: rows.index_select(0, chosen.to(rows.device)), self.pair)
        return Batch(self.problem.source.place(inputs), self.problem.source.place(targets), size)

    def _order(self, k: int, epoch: int) -> Tensor:
        """Return the order in which the fit loop would pass the data to this member alone."""
        order = torch.arange(self.size)
        if self.problem.training.shuffle:
            generator = torch.Generator().manual_seed(derive_seed(self.together.seeds[k], "loader", epoch))
            order = torch.randperm(self.size, generator=generator)
        drawn = self.drawn[k]
        return order if drawn is None else drawn[order]

    def _loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        outputs, likelihood = params.call(module, batch.inputs), self.problem.likelihood
        if not hyper:
            return -likelihood.log_prob(outputs, batch.targets).sum() / batch.size
        parts = zip(outputs.chunk(self.count), batch.targets.chunk(self.count), strict=True)
        total = sum(
            likelihood.log_prob(f, y, {name: value[k] for name, value in hyper.items()}).sum()
            for k, (f, y) in enumerate(parts)
        )
        return -total / batch.size  # type: ignore[return-value]

    def posterior(self, state: State) -> EnsemblePosterior:
        """Return the members, each with the noise and temperature that `MAP` would choose."""
        joint = self.descent.load(state)
        return EnsemblePosterior([self._member(joint, state, k) for k in range(self.count)], self.together.ensemble)

    def _member(self, joint: nn.Module, state: State, k: int) -> Posterior:
        problem, drawn = self.problem, self.drawn[k]
        model = params.load_(light_copy(self.models[k]), {n: v.detach()[k] for n, v in joint.named_parameters()})
        source = problem.source
        if drawn is not None:
            pair = batches.take(self.pair, drawn)
            source = Source(pair, batch_size=problem.training.batch_size, device=source.device, dtype=source.dtype)
        hyper = {name: value.detach()[k] for name, value in state["hyper"].items()}
        return point(self.recipe, dataclasses.replace(problem, source=source), model, hyper)
