"""The `MCDropout` recipe and its posterior: dropout that stays on in predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Gaussian, Likelihood
from dubito.beliefs.likelihoods.kinds import RegressionLikelihood
from dubito.core import batches, params
from dubito.core.batches import Batch, Data
from dubito.core.constraints import Count, NonNegative, OpenProbability, Start
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params
from dubito.core.randomness import default_generator, draw_seed
from dubito.core.settings import setting
from dubito.fitting.gradient_training import GradientDescent, prior_decay, validation_score
from dubito.fitting.inference import Inference, Problem, State
from dubito.fitting.output_noise import fit_hyper, noise_share
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.recipe import Recipe
from dubito.methods.ensembles.masks import OWN, bernoulli, concrete, dropping, inner_layers, own_layers
from dubito.networks.layers import require_rule
from dubito.networks.swapping import switch_off_checkpointing
from dubito.networks.twin import light_copy

# Masks add variance to the outputs, about in proportion to the rate and to the variance of targets. A regression with
# little noise of its own cannot bear it: a rate of 0.1 costs 0.7 nats on UCI energy and 0.2 on kin8nm. So the rate is
# 0.1 times the share of noise in the variance of targets (0.0003 on energy, 0.01 on kin8nm and boston, 0.05 on
# diabetes). If the noise is not known before training, it is the second number.
DEFAULT_RATE, REGRESSION_RATE = 0.1, 0.005
# The factor of the learning rate for a dropout rate, a single number with a gradient from all data.
RATE_FACTOR = 10.0

Rate = Annotated[OpenProbability | Mapping[str, OpenProbability], "a probability above 0 and below 1, a dict of them"]


@setting
class MCDropout(Recipe):
    r"""Train with dropout and keep it on in predictions: each set of masks is one posterior sample.

    $$p(y \mid x) = \mathbb E_z\, p(y \mid f(x; w, z)), \qquad z \sim \mathrm{Bernoulli}(1 - p)$$

    (Gal & Ghahramani 2016, https://arxiv.org/abs/1506.02142). A network with dropout layers uses these; any other
    network drops inputs of every layer with weights but the first. With `filterwise` and `repeats` it is
    a strong baseline. ``predict(x, method="mean")`` is the weight-scaling rule: one pass without dropout.

    Args:
        rate: The dropout rate; or a dict of rates by layer name; None keeps the rates of the network's own dropout
            layers; at other layers it is 0.1, times the share of noise in the variance of targets for a regression
            whose noise is known before training, from held-out examples or the user (0.005 if it is not).
        filterwise: Drop whole channels (features of a sequence) instead of single activations.
        learn: Learn the rates, starting from `rate`, by a concrete relaxation and the KL divergence from the prior
            (Gal et al. 2017, https://arxiv.org/abs/1705.07832). Only at the inputs of layers.
        where: ``"dropout"``: at the network's own dropout layers; ``"layers"``: at the inputs of layers, with the
            network's own dropout off; ``"auto"``: the former if the network has dropout layers and `learn` is False.
        repeats: How often each batch is repeated in a step, with different masks: less noisy gradients for more time.
        prior_precision: The precision of a zero-mean normal prior on every weight; 0 is a flat prior.
        train: False keeps the model's weights as they are.
        start: Where training starts, as for `MAP`.
    """

    setting_name = "MCDropout"
    rate: Rate | None = None
    filterwise: bool = True
    learn: bool = False
    where: Literal["auto", "dropout", "layers"] = "auto"
    repeats: Count = 1
    prior_precision: NonNegative = 0.0
    train: bool = True
    start: Start = "model"

    def __post_init__(self) -> None:
        if self.learn and self.where == "dropout":
            raise InputError("Rates are learned at the inputs of layers: use where='layers' with learn=True.")
        if not self.train and (self.redraws or self.learn):
            raise InputError(
                f"MCDropout(train=False) keeps the network as it is: leave out start='{self.start}' (in an ensemble, "
                "say Ensemble(start='model')) and learn=True."
            )

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training."""
        trainer = _Trainer(self, problem)
        descent = trainer.descent
        score = validation_score(problem, descent.load)
        return Inference(descent.init, descent.update, trainer.posterior, epochs=trainer.epochs, score=score)

    def rates(self, problem: Problem) -> dict[str, float]:
        """Return the dropout rates by the name of the layer."""
        own = own_layers(problem.model)
        at_own = self.where == "dropout" or (self.where == "auto" and bool(own) and not self.learn)
        one_row = batches.take(problem.source.first().inputs, slice(0, 1))
        names = list(own) if at_own else inner_layers(problem.model, one_row)
        if not names:
            raise InputError(
                "There is nothing to drop: the network has no dropout layer"
                + (" that drops anything." if at_own else ", and no plain layer whose inputs are not the data.")
            )
        if isinstance(self.rate, Mapping):
            wrong = [name for name in self.rate if name not in names]
            if wrong:
                raise InputError(f"There is no place '{wrong[0]}' to drop at; there are {', '.join(names)}.")
            return {name: float(self.rate[name]) for name in names if name in self.rate}
        if self.rate is not None:
            return dict.fromkeys(names, float(self.rate))
        usual = DEFAULT_RATE if self.learn else _usual_rate(problem)
        found = {name: float(own[name].p) if at_own else usual for name in names}  # type: ignore[arg-type]
        if max(found.values()) >= 1:
            raise InputError("A dropout layer of the network has rate 1 and drops everything: give a rate.")
        return found


class _Trainer:
    def __init__(self, recipe: MCDropout, problem: Problem) -> None:
        self.recipe, self.problem = recipe, problem
        switch_off_checkpointing(problem.model)
        self.rates = recipe.rates(problem)
        self.own = {name: module.p for name, module in problem.model.named_modules() if type(module) in OWN}
        for name in self.own:
            problem.model.get_submodule(name).p = 0.0  # type: ignore[assignment]  # `dropping` drops in their place
        self.epochs = problem.training.epochs if recipe.train else 0
        learned = {_key(name): torch.tensor(rate).logit() for name, rate in self.rates.items()} if recipe.learn else {}
        self.descent = GradientDescent(
            problem, problem.model, self._loss,
            hyper={**problem.likelihood.hyper(), **learned},
            weight_decay=self._decay(),
            rates={f"hyper.{name}": RATE_FACTOR for name in learned},
            epochs=self.epochs,
        )  # fmt: skip

    def _decay(self) -> dict[str, float]:
        """Return the prior's L2 penalty: ``λ/(1-p)`` for weights whose inputs are dropped, for their variance."""
        training = self.problem.training
        weight_decay = training.weight_decay
        precision = prior_decay(training, self.recipe.prior_precision, self.problem.num_data)
        decay = {name: weight_decay + precision for name, _ in self.problem.model.named_parameters()}
        for name, rate in self.rates.items():
            if f"{name}.weight" in decay:
                decay[f"{name}.weight"] = weight_decay + (0.0 if self.recipe.learn else precision / (1 - rate))
        return decay

    def _loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        inputs, targets = batches.concatenate([(batch.inputs, batch.targets)] * self.recipe.repeats)
        learned = {name: hyper[_key(name)] for name in self.rates} if self.recipe.learn else {}
        draw = concrete(learned) if learned else bernoulli(self.rates)
        with dropping(module, list(self.rates), draw, filterwise=self.recipe.filterwise, shared=False):
            outputs = params.call(module, inputs)
        explained = self.problem.likelihood.log_prob(outputs, targets, hyper).sum()
        loss = -explained / (self.recipe.repeats * batch.size)
        if learned:
            loss = loss + self._kl_divergence(module, learned) * (batch.num_rows / batch.size)
        return loss

    def _kl_divergence(self, module: nn.Module, logits: dict[str, Tensor]) -> Tensor:
        r"""Return $\frac1N \sum_l \frac{\lambda \lVert W_l \rVert^2}{2(1-p_l)} - I_l H(p_l)$, with $I_l$ inputs."""
        total = torch.zeros((), dtype=next(iter(logits.values())).dtype, device=self.problem.source.device)
        for name, logit in logits.items():
            layer, rate = module.get_submodule(name), torch.sigmoid(logit)
            entropy = -(rate * nn.functional.logsigmoid(logit) + (1 - rate) * nn.functional.logsigmoid(-logit))
            norm = layer.weight.square().sum()  # type: ignore[operator]
            units = require_rule(layer).num_inputs(layer)
            total = total + self.recipe.prior_precision * norm / (2 * (1 - rate)) - units * entropy
        return total / self.problem.num_data

    @torch.no_grad()
    def posterior(self, state: State) -> DropoutPosterior:
        """Return the network with its rates; the noise of a regression is fitted with dropout on."""
        hyper = {name: value.detach() for name, value in state["hyper"].items()}
        rates = {name: float(hyper[_key(name)].sigmoid()) if self.recipe.learn else r for name, r in self.rates.items()}
        model = self.descent.load(state)
        with dropping(model, list(rates), bernoulli(rates), filterwise=self.recipe.filterwise, shared=False):
            hyper |= fit_hyper(model, self.problem)
        likelihood, private = self.problem.likelihood.resolved(hyper), light_copy(model)
        for name, p in self.own.items():
            private.get_submodule(name).p = p
        return DropoutPosterior(private, likelihood, self.recipe, self.problem.num_data, rates)


def _usual_rate(problem: Problem) -> float:
    """Return the default rate where a network has no dropout of its own."""
    likelihood = problem.likelihood
    if isinstance(likelihood, Gaussian) and not isinstance(likelihood.noise, str):
        return DEFAULT_RATE * noise_share(likelihood.noise, problem.source)
    return REGRESSION_RATE if isinstance(likelihood, RegressionLikelihood) else DEFAULT_RATE


def _key(site: str) -> str:
    """Return the name of the logit of a rate among the hyper-parameters."""
    return f"rate.{site}"


class DropoutPosterior(Posterior):
    """A network with dropout: each set of masks is one posterior sample, the same for all inputs of a call.

    Args:
        model: The network, in evaluation mode, so its own dropout layers are off.
        likelihood, recipe, num_data: As for `Posterior`.
        rates: The dropout rate at each site: a layer's input, or a dropout layer.
    """

    family = "MCDropout"
    saved = ("rates",)
    more_spread = (
        "Give a larger rate; where the noise of a regression is small, masks cost more than they tell: use an Ensemble."
    )

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, rates: dict[str, float]
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.rates = rates

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights: those of dropped inputs of a layer are 0, the others are multiplied by ``1/(1-p)``."""
        generator, mean = default_generator(generator), self.mean()
        names = self._weights()
        drawn = []
        for _ in range(num_samples):
            draw, weights = bernoulli(self.rates, draw_seed(generator)), dict(mean)
            for site, name in names.items():
                layer = self.model.get_submodule(site)
                rule = require_rule(layer, "sampling weights of MCDropout")
                mask = draw(site, (rule.num_inputs(layer),), mean[name])
                weights[name] = mean[name] * rule.weight_factors(layer, mask, "input")
            drawn.append(weights)
        return params.stack(drawn)

    def marginals(self) -> tuple[Params, Params]:
        """Return the weights and the variances ``w² p/(1-p)`` of those whose inputs are dropped."""
        mean, names = self.mean(), self._weights()
        variance = params.zeros_like(mean)
        for site, name in names.items():
            variance[name] = mean[name].square() * (self.rates[site] / (1 - self.rates[site]))
        return mean, variance

    def _weights(self) -> dict[str, str]:
        """Return the parameter that the masks of each site multiply."""
        places = {site: self.model.get_submodule(site) for site in self.rates}
        if not self.recipe.filterwise or any(type(layer) in OWN for layer in places.values()):
            raise UnsupportedError(
                "This posterior drops activations, not weights: use MCDropout(where='layers', filterwise=True) for a "
                "distribution over weights."
            )
        named = {id(value): name for name, value in self.model.named_parameters()}
        found = {site: named[id(layer.weight)] for site, layer in places.items()}
        shared = len(set(found.values())) < len(found)
        if shared:
            raise UnsupportedError(
                "Two layers share a weight but drop different inputs, so there is no weight to draw: use predict."
            )
        return found

    def prior(self) -> tuple[Params, Params]:
        """Return the normal prior of the weights."""
        precision = self.recipe.prior_precision
        if precision == 0:
            raise UnsupportedError(
                "A flat prior has no variance: fit MCDropout(prior_precision=...) to have a normal prior."
            )
        random = set(self._weights().values())
        mean = {name: torch.zeros_like(v) if name in random else v for name, v in self.mean().items()}
        return mean, {name: torch.full_like(v, (name in random) / precision) for name, v in mean.items()}

    def predictor(
        self,
        num_samples: int,
        generator: torch.Generator,
        *,
        method: Literal["masks", "mean"] = "masks",
        **options: Any,
    ) -> Predictor:
        """Return the predictive distribution as a function of inputs.

        Args:
            num_samples: The number of sets of masks.
            generator: The source of randomness.
            method: ``"masks"``: the network under random masks; ``"mean"``: the weight-scaling rule, one pass without
                dropout and without epistemic uncertainty.
            options: No other option is known.
        """
        if method == "mean":
            return lambda inputs: self.likelihood.predict(params.call(self.model, inputs))
        draws = [bernoulli(self.rates, draw_seed(generator)) for _ in range(num_samples)]

        def predict(inputs: Any) -> Any:
            outputs = []
            for draw in draws:
                with dropping(self.model, list(self.rates), draw, filterwise=self.recipe.filterwise, shared=True):
                    outputs.append(params.call(self.model, inputs))
            return self.likelihood.predict_samples(torch.stack(outputs))

        return predict

    def _updated(self, data: Data, **options: Any) -> Posterior:
        """Continue training from these weights at these rates; this is fine-tuning, which can forget earlier data."""
        recipe = self.recipe.replace(start="model", train=True, rate=dict(self.rates))
        posterior = recipe.fit(self.model, data, likelihood=self.likelihood, **options)
        posterior.num_data += self.num_data
        return posterior
