r"""Two numbers per weight from one pass over the data: its curvature and how much it moves the outputs.

$$h_d = \sum_n J_{nd}^\top H_n J_{nd}, \qquad s_d = \sum_n \lVert \Pi J_{nd} \rVert^2$$

with $J_{nd}$ the derivative of the outputs with respect to weight $d$ and, for a softmax,
$\Pi = I - \mathbf 1\mathbf 1^\top / C$: adding one constant to all logits changes no prediction. Both come from one
vector-Jacobian product if they are quadratic forms of the same few columns (`dubito.select.quadratic_scores`); else
each needs its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Gaussian, Likelihood
from dubito.core import batches, distributed, limits, params
from dubito.core.batches import Source
from dubito.core.errors import InputError, NonFiniteError, first_line
from dubito.core.limits import numbers
from dubito.curvature import Engine, Tape, output_columns
from dubito.curvature.factors import OuterFactor
from dubito.curvature.layer_factors import LayerFactor, layer_factors
from dubito.networks.selection import Selection
from dubito.select.directions import direction_columns, num_directions, random_columns
from dubito.select.quadratic_scores import ScoreForms


class ScoreSums:
    """The squared derivatives and the curvature of all weights, in float64.

    If the gradient of each example is an outer product, so is its elementwise square, and the sum over examples is one
    matrix product. It is computed for many rows at once, because reading and writing the total is slow.
    """

    def __init__(self, weights: Selection) -> None:
        self.weights = weights
        self._total = torch.zeros(2, weights.num_weights, dtype=torch.float64)
        self._rows: dict[tuple[int, int, tuple[str, ...]], list[tuple[Tensor, Tensor]]] = {}
        self._waiting = 0

    @property
    def total(self) -> Tensor:
        """The sums so far, ``[2, D]``."""
        self._multiply()
        return self._total

    def add(self, each: LayerFactor, forms: ScoreForms) -> None:
        """Add the values of both quadratic forms."""
        if isinstance(factor := each.factor, OuterFactor):
            self._wait(0, each.names, forms(factor.grads.transpose(0, 1)), factor.inputs)
        else:
            self._add(0, each.names, factor.form_sum(forms).reshape(2, *factor.shape))

    def add_squares(self, which: int, each: LayerFactor) -> None:
        """Add the squares of gradients to one of the two sums."""
        if isinstance(factor := each.factor, OuterFactor):
            self._wait(which, each.names, factor.grads.square().sum(0).unsqueeze(1), factor.inputs)
        else:
            self._add(which, each.names, factor.square_sum().reshape(1, *factor.shape))

    def _wait(self, first: int, names: tuple[str, ...], rows: Tensor, inputs: Tensor) -> None:
        """Add ``Σ_n rows_n inputs_n²ᵀ`` for rows ``[B, k, O]``, as soon as there are enough of them."""
        # not all batches have both forms, so k may change
        self._rows.setdefault((first, rows.shape[1], names), []).append((rows, inputs.square()))
        self._waiting += rows.numel() + inputs.numel()
        if self._waiting > numbers(limits.current().chunk):
            self._multiply()

    def _multiply(self) -> None:
        for (first, _, names), pairs in self._rows.items():
            rows, squares = (torch.cat(each) for each in zip(*pairs, strict=True))
            self._add(first, names, (rows.flatten(1).mT @ squares).unflatten(0, rows.shape[1:]))
        self._rows.clear()
        self._waiting = 0

    def _add(self, first: int, names: tuple[str, ...], values: Tensor) -> None:
        """Add values ``[k, *shape]`` of a parameter, or of a weight with its bias, to the k sums from `first` on."""
        parts = [values] if len(names) == 1 else [values[..., :-1], values[..., -1]]
        for name, part in zip(names, parts, strict=True):
            self._total[first : first + len(part), self.weights.slices[name]] += part.flatten(1).cpu()


# The most columns of one product; with more outputs, the curvature needs its own product.
MOST_COLUMNS = 32
# The number of context inputs that are processed at a time.
BATCH_SIZE = 256


@dataclass(frozen=True)
class Scores:
    """The curvature and the influence on the outputs of each weight, from one pass over the data.

    Args:
        weights: The weights, in whose order the numbers are.
        curvature: The diagonal of the Gauss-Newton matrix, ``[D]``.
        squared_derivatives: The squared derivatives of the outputs, summed over inputs and outputs, ``[D]``.
        likelihood: The likelihood, its noise a number.
    """

    weights: Selection
    curvature: Tensor
    squared_derivatives: Tensor
    likelihood: Likelihood

    def variance(self, prior_precision: float) -> Tensor:
        """Return the variance of each weight given all others, ``1 / (h_d + λ)``."""
        return 1 / (self.curvature + float(prior_precision))

    def of(self, candidates: Selection) -> Scores:
        """Return the scores of some of the weights."""
        both = self.curvature, self.squared_derivatives
        curvature, squared = (candidates.ravel(self.weights.fill(each)) for each in both)
        return Scores(candidates, curvature, squared, self.likelihood)


def measure(
    model: nn.Module,
    names: list[str],
    source: Source,
    likelihood: Likelihood,
    *,
    derivatives: bool = True,
    context: Any = None,
    samples: int | None = None,
    generator: torch.Generator,
) -> Scores:
    """Score every weight of the named parameters.

    Args:
        model: The network.
        names: The parameters.
        source: The training data.
        likelihood: The likelihood; a noise that is not a number is taken from the residuals.
        derivatives: Whether the squared derivatives are needed; if not, only the curvature is right.
        context: Inputs for the squared derivatives in place of the training inputs.
        samples: The number of random output directions and sampled targets per example that replace all outputs:
            an unbiased estimate, cheaper if there are many outputs.
        generator: The source of randomness of `samples`.
    """
    work = _ScorePass(
        model, names, likelihood, samples, distributed.local_generator(generator) if samples else generator
    )
    check_inputs(work.engine.model, source.first().inputs, "the training")
    if context is not None:
        context = batches.place(context, source.device, source.dtype)
        check_inputs(work.engine.model, context, "the context")
    work.train(source, derivatives=derivatives and context is None)
    likelihood = likelihood if work.noise is None else likelihood.replace(noise=work.noise)
    found, curvature = work.sums.total
    if isinstance(likelihood, Gaussian):  # the root of its Hessian is the identity over the noise
        curvature = found / float(likelihood.noise) ** 2
    if context is not None:
        found = work.look(context)
    if not bool((curvature.sum() + found.sum()).isfinite()):
        raise NonFiniteError("The gradients of the outputs are not finite: look for NaN weights or extreme inputs.")
    return Scores(work.weights, curvature, found, likelihood)


def tapes(engine: Engine, source: Source, likelihood: Likelihood, extra: int = 0) -> Iterator[tuple[Tape, Tensor]]:
    """Run the network over the training data in parts that fit into memory."""
    for batch in source.replay():
        if not isinstance(batch.targets, Tensor):
            raise InputError("The data has inputs but no targets: give (inputs, targets) batches.")
        if batch.num_rows:
            for rows, tape in engine.chunks(batch.inputs, MOST_COLUMNS, extra):
                likelihood.check(tape.outputs, batch.targets[rows])
                yield tape, batch.targets[rows]


def context_tapes(engine: Engine, context: Any, extra: int = 0) -> Iterator[Tape]:
    """Run the network over inputs without targets."""
    for start in range(0, batches.num_rows(context), BATCH_SIZE):
        some = batches.take(context, slice(start, start + BATCH_SIZE))
        yield from (tape for _, tape in engine.chunks(some, MOST_COLUMNS, extra))


def check_inputs(model: nn.Module, inputs: Any, which: str) -> None:
    """Raise an error unless the network can be called on the inputs."""
    if batches.num_rows(inputs) == 0:
        raise InputError(f"There is nothing in {which} inputs: give at least one, or leave them out.")
    if not batches.is_finite(inputs):
        raise InputError(f"{which.capitalize()} inputs hold NaN or infinite values: clean or impute them first.")
    try:
        with torch.no_grad():
            outputs = params.call_on_few(model, inputs)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        shapes = " and ".join(str(tuple(leaf.shape)) for leaf in batches.leaves(inputs))
        told = f"The model cannot be called on {which} inputs of shape {shapes}: {first_line(error)}"
        raise InputError(told) from error
    if bool(outputs.isnan().any()):
        raise NonFiniteError(f"The model's outputs at {which} inputs are NaN: look at its weights.")


class _ScorePass:
    """One pass over the data, which sums the scores over batches."""

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        likelihood: Likelihood,
        samples: int | None,
        generator: torch.Generator,
    ) -> None:
        self.engine, self.likelihood = Engine(model, names), likelihood
        self.samples, self.generator = samples, generator
        self.weights = Selection.all_of(model, names)
        self.sums = ScoreSums(self.weights)
        self.noise: float | None = None

    def train(self, source: Source, derivatives: bool) -> None:
        """Add the training data; with a Gaussian likelihood the squared derivatives are the curvature at noise 1."""
        residuals = torch.zeros(2, dtype=torch.float64)
        gaussian = isinstance(self.likelihood, Gaussian)
        unknown_noise = isinstance(self.likelihood, Gaussian) and isinstance(self.likelihood.noise, str)
        for tape, targets in tapes(self.engine, source, self.likelihood):
            outputs = tape.outputs.detach()
            if unknown_noise:
                errors = Gaussian(noise=1.0).gradient(outputs, targets).double()
                residuals += torch.tensor([float(errors.square().sum()), errors.numel()], dtype=torch.float64)
            if gaussian:
                self._add_derivatives(tape, targets)
            elif derivatives and (forms := self._forms(outputs, targets)) is not None:
                self._add_both(tape, forms)
            else:
                if derivatives:
                    self._add_derivatives(tape, targets)
                self._add_curvature(tape, targets)
        distributed.sum_([self.sums.total, residuals])
        if unknown_noise:
            self.noise = max(math.sqrt(float(residuals[0] / residuals[1])), 1e-6)

    def look(self, context: Any) -> Tensor:
        """Return the squared derivatives at inputs without targets; every process looks at all of them."""
        self.sums = ScoreSums(self.weights)
        for tape in context_tapes(self.engine, context):
            self._add_derivatives(tape, None)
        return self.sums.total[0]

    def _forms(self, outputs: Tensor, targets: Tensor) -> ScoreForms | None:
        """Return both scores as quadratic forms of the same columns, if these exist and are few."""
        if self.samples or num_directions(self.likelihood, outputs) > MOST_COLUMNS:
            return None
        return ScoreForms.of(self.likelihood, outputs, targets)

    def _add_both(self, tape: Tape, forms: ScoreForms) -> None:
        with tape.lend() as memory:
            for each in layer_factors(tape.pull(forms.columns, memory), self.weights):
                self.sums.add(each, forms)

    def _add_derivatives(self, tape: Tape, targets: Tensor | None) -> None:
        about = (self.likelihood, tape.outputs.detach(), targets)
        if self.samples:
            columns = iter(random_columns(*about, self.samples, self.generator).split(MOST_COLUMNS))
        else:
            columns = direction_columns(*about, MOST_COLUMNS)
        for some in columns:
            self._add_squares(0, tape, some)

    def _add_curvature(self, tape: Tape, targets: Tensor) -> None:
        kind = "fisher-mc" if self.samples else "ggn"
        for some in output_columns.columns(
            kind, self.likelihood, tape.outputs.detach(), targets,
            num_samples=self.samples or 1, most=MOST_COLUMNS, generator=self.generator,
        ):  # fmt: skip
            self._add_squares(1, tape, some)

    def _add_squares(self, which: int, tape: Tape, columns: Tensor) -> None:
        with tape.lend() as memory:
            for each in layer_factors(tape.pull(columns, memory), self.weights):
                self.sums.add_squares(which, each)
