"""Choose the inputs to label next: active learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from dubito.beliefs.prediction import Prediction
from dubito.core import batches, params
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.constraints import Count, Range, check
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params, differentiable_twice
from dubito.core.randomness import default_generator
from dubito.fitting.decision_rule import DecisionRule
from dubito.fitting.posterior import Posterior
from dubito.uses.decisions.batch_information import greedy_batch
from dubito.uses.decisions.scores import Score, score_prediction
from dubito.uses.decisions.temperature import TemperedPosterior, tempered
from dubito.uses.fixed_draws import FixedDraws, inputs_of

Method = Literal["bald", "batchbald", "variance", "entropy", "random"]

# Methods that measure epistemic uncertainty, which a single network does not have.
EPISTEMIC = ("bald", "variance")

_SCORES: dict[str, Score] = {"bald": "mutual-information", "variance": "variance", "entropy": "entropy"}


@checked_arguments
def acquire(
    posterior: Posterior,
    pool: Data | Tensor,
    num: int,
    method: Method = "bald",
    *,
    num_samples: Count | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Return the rows of `pool` whose labels would inform the posterior most, the best first ``[num]``.

    - ``"bald"``: the mutual information of label and weights (Houlsby et al. 2011, https://arxiv.org/abs/1112.5745);
    - ``"batchbald"``: that of all `num` labels together, chosen greedily, so that shared information counts once
      (Kirsch et al. 2019, https://arxiv.org/abs/1906.08158);
    - ``"variance"``: the variance of the class probabilities, or of the function;
    - ``"entropy"``: the entropy of the prediction, which also prefers inputs with noisy labels;
    - ``"random"``: the baseline.

    Args:
        posterior: Any posterior.
        pool: Inputs without labels, as a tensor or as data in a fixed order whose targets are ignored.
        num: How many.
        method: One of the above.
        num_samples: How many samples a prediction draws; the posterior's own default if not given.
        generator: The source of randomness; by default the same call gives the same numbers.
    """
    inputs = inputs_of(posterior, pool, "pool")
    size = batches.num_rows(inputs)
    allowed = f"a whole number from 1 to {size}, the number of inputs in the pool"
    check("num", Annotated[int, Range(1, size), allowed], num)
    generator = default_generator(generator)
    if method == "random":
        return torch.randperm(size, generator=generator, device=generator.device)[:num].cpu()
    if method == "batchbald":
        prediction = predict_jointly(posterior, inputs, num_samples, generator)
        return greedy_batch(prediction, num, generator=generator).cpu()
    prediction = posterior.predict(inputs, num_samples=num_samples, generator=generator)
    scores = score_prediction(prediction, _SCORES[method])
    if method in EPISTEMIC and not bool(scores.any()):
        raise InputError(
            f"The score '{method}' is 0 for every input of the pool, because this posterior (a single network?) has no "
            "epistemic uncertainty: use 'entropy' or 'random', or another posterior."
        )
    return _best(scores, num, generator)


class Acquirer(DecisionRule):
    """Choose the inputs to label next, always in the same way: `acquire` with its settings, which can be saved.

    Args:
        posterior: Any posterior.
        method: See `acquire`.
        num_samples: How many samples a prediction draws; the posterior's own default if not given.
        generator: The source of randomness, which is read and not advanced; by default a fixed seed.
    """

    saved: ClassVar[Mapping[str, Any]] = {"method": Method}

    @checked_arguments
    def __init__(
        self,
        posterior: Posterior,
        method: Method = "bald",
        *,
        num_samples: Count | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.posterior, self.method = posterior, method
        self.draws = FixedDraws(posterior, num_samples, generator)

    def choose(self, pool: Data | Tensor, num: int) -> Tensor:
        """Return the rows of `pool` whose labels would inform the posterior most, the best first ``[num]``."""
        own, fixed = self.draws.num_samples, self.draws.state.clone_state()
        return acquire(self.posterior, pool, num, self.method, num_samples=own, generator=fixed)

    def state(self) -> dict[str, Any]:
        """Return the method and the state of the generator."""
        return {**self.saved_values(), "draws": self.draws.to_tree()}

    @classmethod
    def from_state(cls, posterior: Posterior, state: Mapping[str, Any]) -> Self:
        """Undo `state`."""
        found = cls.with_saved(posterior, state)
        found.draws = FixedDraws.from_tree(posterior, state["draws"])
        return found

    def __repr__(self) -> str:
        return f"<Acquirer: by {self.method}>"


def _best(scores: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Return the rows with the highest scores; equal ones in random order, not in that of the pool."""
    shuffled = torch.randperm(len(scores), generator=generator, device=generator.device).cpu()
    order = scores.cpu()[shuffled].sort(descending=True, stable=True).indices
    return shuffled[order[:num]]


def predict_jointly(
    posterior: Posterior, inputs: Any, num_samples: int | None, generator: torch.Generator
) -> Prediction:
    """Predict with samples that are functions: sample s of every input comes from the same weights."""
    if isinstance(posterior, TemperedPosterior):
        inside = predict_jointly(posterior.posterior, inputs, num_samples, generator)
        return tempered(inside, posterior.temperature)
    if posterior.draws_functions:
        if not all(member.draws_functions for member in posterior.members):
            raise UnsupportedError("'batchbald' cannot draw functions of an ensemble of Laplaces: use 'bald'.")
        return posterior.predict(inputs, num_samples=num_samples, generator=generator)
    # A linearized predictive draws each output from its own marginal; here whole functions are drawn instead.
    draws = params.unstack(posterior.sample(num_samples or posterior.default_samples, generator=generator))
    parts = []
    for start in range(0, batches.num_rows(inputs), 1024):
        rows = batches.place(batches.take(inputs, slice(start, start + 1024)), posterior.device, posterior.dtype)
        if not batches.is_finite(rows):
            raise InputError("The pool holds NaN or infinite values: clean or impute them first.")
        parts.append(posterior.likelihood.predict_samples(_linear_outputs(posterior, draws, rows)))
    return type(parts[0]).cat(parts)


def _linear_outputs(posterior: Posterior, draws: list[Params], inputs: Any) -> Tensor:
    """Return f(x, ŵ) + J(x) (w − ŵ) for each draw of w, ``[S, *outputs]``.

    J v is the derivative of vᵀ Jᵀ u in u, so one pass and one backward pass serve all draws.
    """
    mean = {name: value.requires_grad_() for name, value in posterior.mean().items()}
    with posterior.working_copy() as own, torch.enable_grad():
        with differentiable_twice():
            outputs = params.functional_call(own.model, mean, inputs)
        u = torch.zeros_like(outputs, requires_grad=True)
        gradients = torch.autograd.grad(outputs, list(mean.values()), u, create_graph=True, allow_unused=True)
    used = {name: grad for name, grad in zip(mean, gradients, strict=True) if grad is not None}
    moved = []
    for draw in draws:
        steps = [draw[name] - mean[name].detach() for name in used]
        (change,) = torch.autograd.grad(list(used.values()), u, steps, retain_graph=True)
        moved.append(outputs.detach() + change)
    return torch.stack(moved)
