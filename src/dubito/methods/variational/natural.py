r"""Natural gradients for a mean-field normal posterior: improved variational online Newton (IVON).

Each step uses one gradient, at weights $w = \mu + n$ with $n \sim \mathcal N(0, 1/P)$, for means and precisions:

$$\begin{aligned}
g &\leftarrow \beta g + (1 - \beta)\,\hat g, \qquad
  \hat g = \nabla_w \tfrac1B \textstyle\sum_b -\log p(y_b \mid x_b, w) \\
\mu &\leftarrow \mu - \eta \frac{P_0}{P} \Big(\frac{g}{1 - \beta^t} + \frac{p_0}{\lambda} (\mu - m_0)\Big), \qquad
  \lambda = N / T \\
P &\leftarrow \tfrac12 P \big(1 + (1 + x)^2\big), \qquad x = \rho \Big(\lambda\, n\, \hat g + \frac{p_0}{P} - 1\Big)
\end{aligned}$$

under the prior $\mathcal N(m_0, 1/p_0)$. By the reparameterization trick $\mathbb E[n\,\hat g\,P]$ is the expected
diagonal of the Hessian, so no second backward pass is needed; the square, a second-order Riemannian correction, keeps
every precision positive. At convergence $P = \lambda\,\mathbb E[\mathrm{diag}\,H] + p_0$, which maximizes the ELBO
(Lin et al. 2020, https://arxiv.org/abs/2002.10060; Shen et al. 2024, https://arxiv.org/abs/2402.17641).

Two consecutive steps use the antithetic pair $n, -n$, which cancels most of the gradient's mean in the estimate of the
Hessian. Because normal numbers are slow to draw, a large layer uses the same ones in several steps, shifted by a random
offset. They stay independent over the weights of a step, and over the steps of a weight.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dubito.beliefs.priors import Normal, Prior
from dubito.core import distributed, params
from dubito.core.batches import Batch
from dubito.core.errors import InputError
from dubito.core.params import Buffers, Params
from dubito.core.randomness import beside
from dubito.fitting.gradient_training import Loss, in_parts, with_codes, with_gradients
from dubito.fitting.inference import Info, Problem, State, check_loss
from dubito.fitting.optimizers import Optimizer
from dubito.methods.variational.mean_field import MeanField
from dubito.methods.variational.module import VariationalModule

# β, the momentum of the gradient.
MOMENTUM = 0.9
# η = 100 lr, so that one learning rate fits the means (as in plain gradient descent) and points (as in Adam).
RATE = 100.0
# The largest η P₀ / P: a small precision, which may be badly estimated, must not cause a large step of its mean.
LONGEST = 1.0
# The longest step of a mean, in standard deviations of its weight. Precisions start far too small where the noise of a
# regression is small, and without a limit the means diverge before the precisions have grown.
REACH = 3.0
# ρ starts at this number over the number of steps, so that precisions forget their initial values early in training,
# and decays with the learning rate, so that they become averages over many samples.
TURNOVERS, SLOWEST, FASTEST = 20.0, 1e-5, 5e-2

# The smallest number of normal numbers that are reused, and how often they are.
MANY, DEALS = 2**14, 8


class NaturalStep(NamedTuple):
    r"""The quantities of one step that all weights share: η, ρ, λ and $1 - \beta^t$."""

    rate: float
    turnover: float
    num_data: float
    debias: float


class Weights:
    """The optimizer state of one parameter's random entries, and the parameter that holds the current sample.

    Args:
        part: Posterior and prior. Its log-scale, which is written after training, serves as scratch memory until then.
        parameter: The module's parameter.
        state: ``mean`` in the shape of the parameter; ``precision``, ``momentum`` and ``noise`` for the random entries.
        first_precision: P₀.
    """

    def __init__(self, part: MeanField, parameter: Tensor, state: dict[str, Tensor], first_precision: float) -> None:
        self.part, self.parameter, self.state = part, parameter.detach(), state
        self.first_precision = first_precision
        prior: Any = part.prior
        self.prior_precision, self.prior_mean = prior.scale**-2, prior.loc
        self._prior_precision = torch.as_tensor(self.prior_precision, dtype=parameter.dtype, device=parameter.device)
        self.scratch = part.log_scale.detach()  # allocating memory in each step is slow

    def draw(self, number: int, generator: torch.Generator) -> None:
        """Load sample `number` of the weights, counted from 0, into the parameter."""
        mean, noise, sign = self.state["mean"], self.state["noise"], 1.0 - 2.0 * (number % 2)
        if number % 2 == 0:
            self._new_noise(number // 2, generator)
        scale = torch.rsqrt(self.state["precision"], out=self.scratch)
        if self.part.index is None:
            torch.addcmul(mean, noise, scale, value=sign, out=self.parameter)
        else:
            drawn = self.part.chosen(mean).addcmul_(noise, scale, value=sign)
            self.parameter.copy_(self.part.placed(drawn, mean))

    def _new_noise(self, pair: int, generator: torch.Generator) -> None:
        """Draw normal numbers, or shift the present ones to other weights."""
        noise, size = self.state["noise"], self.state["noise"].numel()
        if size < MANY or pair % DEALS == 0:
            _normal_(noise, generator)
            return
        shift = int(torch.randint(1, size, (), generator=generator, device=generator.device))
        dealt, before = self.scratch.view(-1), noise.view(-1)
        dealt[:shift].copy_(before[-shift:])
        dealt[shift:].copy_(before[:-shift])
        before.copy_(dealt)

    def deviation(self) -> Tensor:
        """Return the difference between the last sample and the mean."""
        return torch.sub(self.part.chosen(self.parameter), self.part.chosen(self.state["mean"]), out=self.scratch)

    def move(self, gradient: Tensor, step: NaturalStep, product: Tensor | None = None) -> None:
        r"""Take one step.

        Args:
            gradient: The gradient at the last sample, or the mean over several samples.
            step: The quantities that all weights share.
            product: $n\,\hat g$, averaged over several samples; by default that of the last sample.
        """
        precision, momentum, x = self.state["precision"], self.state["momentum"], self.scratch
        forgotten, push = precision.new_full((), -step.turnover), step.turnover * step.num_data
        if product is None:
            torch.addcmul(forgotten, self.deviation(), gradient, value=push, out=x)
        else:
            torch.add(forgotten, product, alpha=push, out=x)
        x.addcdiv_(self._prior_precision, precision, value=step.turnover)
        precision.addcmul_(precision, x.addcmul_(x, x, value=0.5))  # x + x²/2 = ((1 + x)² - 1) / 2
        momentum.lerp_(gradient, 1 - MOMENTUM)
        self._move_mean(momentum, step)

    def _move_mean(self, momentum: Tensor, step: NaturalStep) -> None:
        """Move the mean by the prior's gradient, then by the data's, at most `REACH` standard deviations."""
        mean = self.part.chosen(self.state["mean"])
        rate = min(step.rate * self.first_precision, step.num_data)  # at most a full Newton step
        precision = torch.clamp_min(self.state["precision"], rate / LONGEST, out=self.scratch)
        if isinstance(self.prior_precision, Tensor) or isinstance(self.prior_mean, Tensor) or self.prior_mean:
            mean.addcdiv_((mean - self.prior_mean).mul_(self._prior_precision), precision, value=-rate / step.num_data)
        else:
            mean.addcdiv_(mean, precision, value=-rate * self.prior_precision / step.num_data)
        move = torch.div(momentum, precision, out=precision).mul_(-rate / step.debias)
        longest = torch.rsqrt(self.state["precision"]).mul_(REACH)
        mean.add_(torch.clamp(move, -longest, longest, out=move))
        if self.part.index is not None:
            self.state["mean"].copy_(self.part.placed(mean, self.state["mean"]))


class NaturalGradientDescent:
    """Natural gradient steps on the random weights, and an ordinary optimizer for points and hyper-parameters.

    `load` writes the precisions into the module's scales. During training its parameters hold the samples.

    Args:
        problem: The data and the training settings.
        module: The converted network, with ``estimator="weight"``.
        loss: This process's share of the mean negative log-likelihood of a batch, without the KL divergence.
        temperature: T.
        num_samples: Weight samples per step.
        hyper: Initial values of the likelihood's hyper-parameters.
        rates: Factors of the learning rate by parameter name.
    """

    def __init__(
        self,
        problem: Problem,
        module: VariationalModule,
        loss: Loss,
        *,
        temperature: float,
        num_samples: int,
        hyper: Params,
        rates: dict[str, float],
    ) -> None:
        if problem.training.clip is not None:
            raise InputError("Natural gradients cannot be clipped: drop `clip`, or use optimizer='gradient'.")
        self.problem, self.module, self.loss, self.num_samples = problem, module, loss, num_samples
        self.num_data, self.temperature = problem.num_data / temperature, temperature
        parameters = dict(module.network.named_parameters())
        self.parts = {name: (part, parameters[name]) for name, part in module.parts()}
        for part, _ in self.parts.values():
            check_prior(part.prior)
        scales = {name: part.log_scale.detach() for name, (part, _) in self.parts.items()}
        self.first_precision = {name: scale.mul(-2).exp().mean().item() for name, scale in scales.items()}
        device = next(module.parameters())
        self.hyper = {name: value.detach().to(device).clone().requires_grad_() for name, value in hyper.items()}
        self.points = {name: value for name, value in parameters.items() if self._is_point(name, value)}
        names = [*self.points, *(f"hyper.{name}" for name in hyper)]
        no_decay = {name: 0.0 for name in names if name.startswith("hyper.") or name in self.parts}
        self.optimizer = Optimizer(problem.training, names, weight_decay=no_decay, rates=rates)
        batches = problem.source.num_batches or 1
        self.turnover = min(max(TURNOVERS / (batches * max(problem.training.epochs, 1)), SLOWEST), FASTEST)

    def _is_point(self, name: str, value: Tensor) -> bool:
        """Return whether the ordinary optimizer moves the parameter, or some of its entries."""
        if name in self.parts:
            part = self.parts[name][0]
            return value.requires_grad and part.index is not None and not part.hold_rest
        return value.requires_grad

    def init(self, initial: Params, buffers: Buffers, generator: torch.Generator) -> State:
        """Return the state before the first step."""
        self.module.train()
        means = {name: value.detach().clone() for name, (_, value) in self.parts.items()}
        own = {name: means.get(name, value) for name, value in self.module.network.named_parameters()}
        precision = {name: part.log_scale.detach().mul(-2).exp() for name, (part, _) in self.parts.items()}
        moved = {**{name: own[name] for name in self.points}, **self._named_hyper()}
        return {
            "params": {f"network.{name}": value for name, value in own.items()},
            "buffers": dict(self.module.named_buffers()),
            "hyper": dict(self.hyper),
            "natural": {
                "precision": precision,
                "momentum": params.zeros_like(precision),
                "noise": params.zeros_like(precision),
            },
            "optimizer": self.optimizer.init(moved),
            "step": 0,
        }

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Take one step; afterwards weights and buffers are the same in every process."""
        if not self.module.training:
            self.module.train()
        weights = self._weights(state)
        loss, gradients, products = self._average(state, weights, batch, generator)
        check_loss(loss)
        lr = self.problem.training.rate(self.problem.progress_at(state["step"]))
        turnover = self.turnover * lr / self.problem.training.lr
        step = NaturalStep(RATE * lr, turnover, self.num_data, 1 - MOMENTUM ** (state["step"] + 1))
        for name, each in weights.items():
            each.move(each.part.chosen(gradients[name]), step, products.get(name))
        self._move_points(state, gradients, lr)
        distributed.agree_(list(self.module.buffers()))
        state["step"] += 1
        return state, {"loss": loss, "lr": lr}

    def _weights(self, state: State) -> dict[str, Weights]:
        """Return the random weights, which use the tensors of the state; made once, as the state changes in place."""
        if getattr(self, "_of", None) is not state["natural"]:
            self._of, found = state["natural"], {}
            for name, (part, parameter) in self.parts.items():
                own = {key: values[name] for key, values in state["natural"].items()}
                own["mean"] = state["params"][f"network.{name}"]
                found[name] = Weights(part, parameter, own, self.first_precision[name])
            self._made = found
        return self._made

    @torch.no_grad()
    def _average(
        self, state: State, weights: dict[str, Weights], batch: Batch, generator: torch.Generator
    ) -> tuple[Tensor, Params, Params]:
        """Return the average loss, gradients by name and, for several samples, products with the deviations."""
        found = []
        for draw in range(state["step"] * self.num_samples, (state["step"] + 1) * self.num_samples):
            for each in weights.values():
                each.draw(draw, generator)
            loss, gradients = self._gradients(batch, generator)
            distributed.sum_([loss, *gradients.values()])
            if self.num_samples == 1:
                return loss, gradients, {}
            products = {n: each.deviation() * each.part.chosen(gradients[n]) for n, each in weights.items()}
            found.append((loss, gradients, products))
        means = [
            {name: value.mean(0) for name, value in params.stack(each).items()}
            for each in ([gradients for _, gradients, _ in found], [products for _, _, products in found])
        ]
        return torch.stack([loss for loss, _, _ in found]).mean(), means[0], means[1]

    def _gradients(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Params]:
        """Return this process's share of the loss and of its gradient at the current sample."""
        moved = {**{name: value for name, (_, value) in self.parts.items()}, **self.points, **self._named_hyper()}
        values = list(moved.values())
        if batch.num_rows == 0:
            return values[0].new_zeros(()), params.zeros_like(moved)

        network = self.module.network

        def of_part(part: Batch) -> tuple[Tensor, Params]:
            with torch.enable_grad():
                own = partial(self.loss, network, part, self.hyper, generator)
                loss = with_codes(own, network, part, beta=1.0, temperature=self.temperature)
            return with_gradients(loss, moved, values)

        return in_parts(batch, self.problem.training.accumulate, of_part)

    def _move_points(self, state: State, gradients: Params, lr: float) -> None:
        moved = {**{name: state["params"][f"network.{name}"] for name in self.points}, **self._named_hyper()}
        if not moved:
            return
        for name in self.points:
            if name in self.parts:  # its random entries have already moved
                part = self.parts[name][0]
                gradients[name] = part.scale_gradient(gradients[name], 0.0)
        self.optimizer.step(moved, gradients, state["optimizer"], lr)

    def _named_hyper(self) -> Params:
        return {f"hyper.{name}": value for name, value in self.hyper.items()}

    def load(self, state: State) -> nn.Module:
        """Return the module holding the means, scales and buffers of `state`, in evaluation mode."""
        params.load_(self.module, state["params"], state["buffers"])
        with torch.no_grad():
            for name, (part, _) in self.parts.items():
                part.log_scale.copy_(state["natural"]["precision"][name].log().mul_(-0.5))
        return self.module.eval()


def check_prior(prior: Prior) -> None:
    """Raise an error unless the prior is normal with a fixed scale, whose precision the step needs."""
    if not isinstance(prior, Normal) or prior.learns_scale:
        raise InputError(
            f"Natural gradients need a normal prior with a fixed scale, such as priors.Normal(0, 1), got {prior!r}."
        )


def _normal_(noise: Tensor, generator: torch.Generator) -> None:
    own = beside(generator, noise.device)
    if own.device == noise.device:
        noise.normal_(generator=own)
    else:
        noise.copy_(torch.empty(noise.shape, dtype=noise.dtype, device=own.device).normal_(generator=own))
