r"""A rule that makes a low-dimensional affine subspace through the trained weights random.

$$w(z) = \hat w + P z, \qquad P \in \mathbb R^{D \times r},\; P^\top P = I$$

(Izmailov et al. 2019, https://arxiv.org/abs/1907.07504). The posterior and the prior are distributions of the
coordinates z: N(0, s²) on z is N(ŵ, s² I) on the weights, restricted to the subspace.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from dubito.beliefs import likelihoods
from dubito.beliefs.likelihoods import Likelihood
from dubito.core import distributed, params
from dubito.core.batches import Data, Source
from dubito.core.constraints import Count, Positive
from dubito.core.errors import InputError
from dubito.core.randomness import default_generator
from dubito.core.settings import setting
from dubito.fitting import subspace_posterior as subspace_posterior  # registers its family, for `dubito.load`
from dubito.networks.selection import Selection
from dubito.networks.subspace import Subspace
from dubito.select.names import all as all_weights
from dubito.select.rule import SelectionRule


@setting
class subspace(SelectionRule):
    """A subspace of a few directions through the trained weights.

    Args:
        rank: The number of directions.
        directions: ``"trajectory"``: the principal components of a few epochs of SGD from the trained weights;
            ``"random"``: random directions.
        weights: The weights that change along the directions.
        epochs: The number of epochs of SGD for ``"trajectory"``.
        lr: The learning rate of SGD for ``"trajectory"``.
    """

    setting_name = "select.subspace"
    is_set: ClassVar[bool] = False
    rank: Count
    directions: Literal["trajectory", "random"] = "trajectory"
    weights: SelectionRule = all_weights()
    epochs: Count = 10
    lr: Positive = 0.05

    @distributed.together()
    def resolve(
        self,
        model: nn.Module,
        data: Data | Source | None = None,
        likelihood: Likelihood | None = None,
        prior_precision: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Subspace:
        """Find the directions; ``"trajectory"`` needs data."""
        generator = default_generator(generator)
        weights = self.weights.resolve(model, data, likelihood, prior_precision, generator)
        if self.rank > weights.num_weights:
            raise InputError(f"`rank` must be at most the number of weights, {weights.num_weights}, got {self.rank}.")
        offset = weights.ravel(params.of(model))
        if self.directions == "random":
            noise = torch.randn(
                len(offset), self.rank, generator=generator, dtype=torch.float64, device=generator.device
            )
            return Subspace(weights, offset, torch.linalg.qr(noise).Q.to(offset))
        if data is None or likelihood is None:
            raise InputError("directions='trajectory' needs training data and a likelihood: pass both.")
        assert isinstance(data, Source)  # `for_users` makes one
        visited = self._trajectory(model, weights, data, likelihoods.resolve(likelihood))
        if len(visited) <= self.rank:
            raise InputError(
                f"A trajectory of {len(visited)} snapshots has fewer than {self.rank} directions: raise `epochs`, or "
                "use smaller batches."
            )
        away = visited.double() - visited.double().mean(0)
        basis = torch.linalg.svd(away, full_matrices=False).Vh[: self.rank].mT
        return Subspace(weights, offset, basis.to(offset))

    def _trajectory(self, model: nn.Module, weights: Selection, source: Source, likelihood: Likelihood) -> Tensor:
        """Return snapshots ``[M, D]`` of the weights along SGD."""
        base, flat = params.of(model), weights.ravel(params.of(model))
        was_training = model.training
        model.eval()
        every = max(1, (source.num_batches or 1) * self.epochs // (4 * self.rank))
        velocity, kept, step = torch.zeros_like(flat), [], 0
        hyper = {name: value.to(flat) for name, value in likelihood.hyper().items()}
        for _ in range(self.epochs):
            for batch in source.replay():
                gradient = torch.zeros_like(flat)
                if batch.num_rows:
                    leaf = flat.detach().requires_grad_()
                    outputs = params.functional_call(model, weights.merge(base, leaf), batch.inputs)
                    loss = -likelihood.log_prob(outputs, batch.targets, hyper).sum() / batch.size
                    gradient = torch.autograd.grad(loss, leaf)[0]
                distributed.sum_([gradient])
                velocity.mul_(0.9).add_(gradient)
                flat = flat - self.lr * velocity
                step += 1
                if step % every == 0:
                    kept.append(flat)
        model.train(was_training)
        visited = torch.stack(kept) if kept else flat[None]
        if not bool(visited.isfinite().all()):
            raise InputError(f"SGD with lr={self.lr:g} diverges from these weights: lower select.subspace(lr=...).")
        return visited
