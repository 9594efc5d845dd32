r"""Online marginal-likelihood training: learn prior precisions and the noise by the evidence, during training.

Every few epochs, a Laplace approximation at the current weights chooses them again; in between, the weights are
trained with them (Immer et al. 2021, https://arxiv.org/abs/2104.04975):

$$w \leftarrow \text{epochs of descent on } -\log p(D \mid w) + \tfrac12 \sum_l \lambda_l \lVert w_l \rVert^2, \qquad
  \lambda, \sigma \leftarrow \arg\max \log p(D \mid \lambda, \sigma)$$

For a linear model the fixed points maximize the exact evidence, because its gradient through the weights vanishes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dubito.core import distributed, io, params
from dubito.core.batches import Batch
from dubito.core.errors import InputError
from dubito.core.params import Buffers, Params
from dubito.curvature.curvature_pass import CurvaturePass
from dubito.curvature.evidence import Evidence, known_noise, maximize
from dubito.curvature.structures import matrix_from_sums
from dubito.fitting.gradient_training import GradientDescent
from dubito.fitting.inference import Info, Problem, State
from dubito.networks.selection import Selection


class EvidenceDescent(GradientDescent):
    """Gradient training of the weights under a prior that is chosen again every `training.evidence_every` epochs.

    Args:
        problem: The data, the model and the training settings.
        prior_precision: The initial precision.
        epochs: The number of epochs of the learning rate schedule.
    """

    def __init__(self, problem: Problem, prior_precision: float, epochs: int) -> None:
        training = problem.training
        if training.evidence_burn_in + (training.evidence_every or 1) > epochs:
            raise InputError(
                f"Training ends after {epochs} epochs, before the evidence is first maximized: train longer, or lower "
                "evidence_every and evidence_burn_in."
            )
        if training.weight_decay:
            raise InputError("weight_decay and evidence_every both set the prior precision: drop one of them.")
        weight = next(problem.model.parameters())
        self.precision: Params = {
            name: torch.full((), prior_precision, dtype=torch.float64, device=weight.device)
            for name in params.trainable(problem.model)
        }
        self.chosen: Params = {
            name: value.detach().to(device=weight.device, dtype=weight.dtype).clone()
            for name, value in problem.likelihood.hyper().items()
        }  # the likelihood's; constant between choices
        super().__init__(problem, problem.model, self._penalized, epochs=epochs)

    def _penalized(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        """Return this process's share of ``−(1/B) Σ log p(y_n | f(x_n)) + ½ Σ_l (λ_l/N) ‖w_l‖²``."""
        outputs = params.call(module, batch.inputs)
        loss = -self.problem.likelihood.log_prob(outputs, batch.targets, self.chosen).sum()
        weights = dict(module.named_parameters())
        penalty = torch.stack([self.precision[name] * weights[name].square().sum() for name in self.precision]).sum()
        share = batch.num_rows / self.problem.num_data
        return (loss + 0.5 * share * penalty.to(loss.dtype)) / batch.size

    def init(self, initial: Params, buffers: Buffers, generator: torch.Generator) -> State:
        """Return the initial state, which includes the prior."""
        state = super().init(initial, buffers, generator)
        return {**state, "hyper": dict(self.chosen), "precision": dict(self.precision)}

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Take one optimizer step; at the end of some epochs choose the prior and the noise."""
        state, info = super().update(state, batch, generator)
        if self._is_due(state["step"]):
            info["log_evidence"] = self._choose()
        return state, info

    def _is_due(self, step: int) -> bool:
        training, per_epoch = self.problem.training, self.problem.source.num_batches or 1
        done = step // per_epoch - training.evidence_burn_in
        return step % per_epoch == 0 and done > 0 and done % (training.evidence_every or 1) == 0

    @torch.no_grad()
    def _choose(self) -> float:
        """Maximize the evidence at the current weights, and write the result into the tensors of the state."""
        likelihood, source = self.problem.likelihood, self.problem.source
        selection = Selection.all_of(self.module, list(self.precision))
        work = CurvaturePass("kron", self.module, selection, likelihood)
        sums, total = work.zeros(source), work.no_fit()
        for batch in source.replay():
            total += work.add(sums, batch)
        distributed.sum_([*io.tensors(sums), total])
        fit, mean = work.data_fit(total), selection.ravel(params.of(self.module)).double()
        matrix = matrix_from_sums("kron", sums, selection, self.module)
        evidence = Evidence(matrix, mean.square(), fit, temperature=1.0)
        noise = fit.residual_noise if self.chosen else known_noise(likelihood)
        prior, noise = maximize(evidence, selection, "layer", noise, bool(self.chosen))
        for name, span in selection.slices.items():
            self.precision[name].copy_(prior[span.start])
        if self.chosen:
            self.chosen["log_noise"].copy_(noise.log())
        return float(evidence.log(prior, noise))
