r"""Two numbers per weight from one pass over the data: its curvature and how much it moves the outputs.

$$h_d = \sum_n J_{nd}^\top H_n J_{nd}, \qquad s_d = \sum_n \lVert \Pi J_{nd} \rVert^2$$

with $J_{nd}$ the derivative of the outputs with respect to weight $d$ and, for a softmax,
$\Pi = I - \mathbf 1\mathbf 1^\top / C$: shifting all logits together changes no prediction. Both come from the same
vector-Jacobian product. It starts from orthonormal directions that span the outputs that matter, so $s_d$ is a sum of
squares; the columns of the Hessian's root are mixtures of these directions, formed layer by layer after the product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dubito import batches, distributed, params
from dubito.batches import Source
from dubito.curvature import Engine, Factor, Tape, seeds
from dubito.curvature.factors import Part
from dubito.curvature.groups import group
from dubito.errors import InputError, NonFiniteError
from dubito.layers.rows import Dense
from dubito.likelihoods import Categorical, Gaussian, Likelihood
from dubito.selection import Selection

# Columns that go through one product; with more outputs than this, curvature takes a product of its own.
MOST_COLUMNS = 32
# Numbers of per-example gradients that are formed at a time: what stays in a processor's cache.
CACHED = 2**19
# Context inputs that are worked on at a time.
BATCH_SIZE = 256


@dataclass(frozen=True)
class Scores:
    """What a pass over the data says about each weight.

    Args:
        weights: The weights, in whose order the numbers are.
        curvature: The diagonal of the Gauss-Newton matrix, ``[D]``.
        slopes: The squared derivatives of the outputs, summed over inputs and outputs, ``[D]``.
        likelihood: The likelihood, its noise a number.
    """

    weights: Selection
    curvature: Tensor
    slopes: Tensor
    likelihood: Likelihood

    def variance(self, prior_precision: float) -> Tensor:
        """The variance of each weight on its own, ``1 / (h_d + λ)``."""
        return 1 / (self.curvature + prior_precision)

    def of(self, candidates: Selection) -> Scores:
        """The numbers of some of the weights."""
        curvature, slopes = (candidates.ravel(self.weights.fill(values)) for values in (self.curvature, self.slopes))
        return Scores(candidates, curvature, slopes, self.likelihood)


def measure(
    model: nn.Module,
    names: list[str],
    source: Source,
    likelihood: Likelihood,
    *,
    slopes: bool = True,
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
        slopes: Whether they are wanted; else only the curvature is right.
        context: Inputs for `slopes` in the place of the training inputs.
        samples: Random output directions and sampled targets per example in the place of all outputs: right in
            expectation, and cheaper where there are many outputs.
        generator: The source of randomness of `samples`.
    """
    work = _Pass(model, names, likelihood, samples, distributed.local_generator(generator) if samples else generator)
    check_inputs(work.engine.model, source.first().inputs, "the training")
    if context is not None:
        context = batches.place(context, source.device, source.dtype)
        check_inputs(work.engine.model, context, "the context")
    work.train(source, slopes=slopes and context is None)
    likelihood = likelihood if work.noise is None else likelihood.replace(noise=work.noise)
    curvature, found = work.curvature, work.slopes
    if isinstance(likelihood, Gaussian):  # the root of its Hessian is the identity over the noise
        curvature = found / float(likelihood.noise) ** 2
    if context is not None:
        found = work.look(context)
    if not bool((curvature.sum() + found.sum()).isfinite()):
        raise NonFiniteError("The gradients of the outputs are not finite: look for NaN weights or extreme inputs.")
    return Scores(work.weights, curvature, found, likelihood)


def directions(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Orthonormal directions ``[V, *positions, C]`` of one example's outputs that can change a prediction.

    All of them, except that the logits of a softmax lose the direction in which they shift together.
    """
    *positions, width = likelihood.canonical(outputs).shape[1:]
    basis = _basis(likelihood, outputs)
    everywhere = torch.kron(torch.eye(math.prod(positions)).to(basis), basis)
    return everywhere.reshape(-1, *positions, width)


def direction_seeds(likelihood: Likelihood, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
    """The directions as seeds ``[V, *outputs]``, zero at positions without a target."""
    each = directions(likelihood, outputs).unsqueeze(1)
    kept = None if targets is None else likelihood.observed(targets)
    if kept is not None and not bool(kept.all()):
        each = each * kept.unsqueeze(-1)
    return likelihood.restore(each.expand(-1, len(outputs), *each.shape[2:]), outputs)


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
    """Raise unless the network can be called on inputs without targets."""
    if batches.num_rows(inputs) == 0:
        raise InputError(f"There is nothing in {which} inputs: give at least one, or leave them out.")
    if not batches.is_finite(inputs):
        raise InputError(f"{which.capitalize()} inputs hold NaN or infinite values: clean or impute them first.")
    try:
        with torch.no_grad():
            outputs = params.call(model, batches.map_leaves(torch.clone, batches.take(inputs, slice(0, 1))))
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        shapes = " and ".join(str(tuple(leaf.shape)) for leaf in batches.leaves(inputs))
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"The model cannot be called on {which} inputs of shape {shapes}: {reason}") from error
    if bool(outputs.isnan().any()):
        raise NonFiniteError(f"The model's outputs at {which} inputs are NaN: look at its weights.")


class _Pass:
    """Sums over batches."""

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
        self.curvature, self.slopes = (torch.zeros(self.weights.num_weights, dtype=torch.float64) for _ in range(2))
        self.noise: float | None = None

    def train(self, source: Source, slopes: bool) -> None:
        """Add the training data; with a Gaussian likelihood `slopes` are the curvature at noise 1."""
        residuals = torch.zeros(2, dtype=torch.float64)
        gaussian = isinstance(self.likelihood, Gaussian)
        unknown_noise = isinstance(self.likelihood, Gaussian) and isinstance(self.likelihood.noise, str)
        for tape, targets in tapes(self.engine, source, self.likelihood):
            outputs = tape.outputs.detach()
            if unknown_noise:
                errors = Gaussian(noise=1.0).gradient(outputs, targets).double()
                residuals += torch.tensor([float(errors.square().sum()), errors.numel()], dtype=torch.float64)
            if gaussian:
                self._add_slopes(tape, targets)
            elif slopes and not self.samples and len(directions(self.likelihood, outputs[:1])) <= MOST_COLUMNS:
                self._add_both(tape, targets)
            else:
                if slopes:
                    self._add_slopes(tape, targets)
                self._add_curvature(tape, targets)
        distributed.sum_([self.curvature, self.slopes, residuals])
        if unknown_noise:
            self.noise = max(math.sqrt(float(residuals[0] / residuals[1])), 1e-6)

    def look(self, context: Any) -> Tensor:
        """Return the slopes at inputs without targets; every process looks at all of them."""
        self.slopes = torch.zeros_like(self.slopes)
        for tape in context_tapes(self.engine, context):
            self._add_slopes(tape, None)
        return self.slopes

    def _add_both(self, tape: Tape, targets: Tensor) -> None:
        outputs = tape.outputs.detach()
        mix = Mix.of(self.likelihood, outputs, targets)
        for each in group(tape.pull(direction_seeds(self.likelihood, outputs, targets)), self.weights):
            slopes, curvature = _squares(each.factor, mix)
            self._spread(self.slopes, each.split(slopes))
            self._spread(self.curvature, each.split(curvature))

    def _add_slopes(self, tape: Tape, targets: Tensor | None) -> None:
        columns = direction_seeds(self.likelihood, tape.outputs.detach(), targets)
        if self.samples:
            shape = (self.samples, *columns.shape[:2])
            signs = torch.randint(2, shape, generator=self.generator, device=self.generator.device)
            signs = (2 * signs.to(columns) - 1) / math.sqrt(self.samples)
            columns = torch.einsum("svb,vb...->sb...", signs, columns)
        for some in columns.split(MOST_COLUMNS):
            self._add_squares(self.slopes, tape, some)

    def _add_curvature(self, tape: Tape, targets: Tensor) -> None:
        kind = "fisher-mc" if self.samples else "ggn"
        for some in seeds.columns(
            kind, self.likelihood, tape.outputs.detach(), targets,
            num_samples=self.samples or 1, most=MOST_COLUMNS, generator=self.generator,
        ):  # fmt: skip
            self._add_squares(self.curvature, tape, some)

    def _add_squares(self, total: Tensor, tape: Tape, columns: Tensor) -> None:
        for each in group(tape.pull(columns), self.weights):
            self._spread(total, each.split(each.factor.square_sum()))

    def _spread(self, total: Tensor, parts: dict[str, Tensor]) -> None:
        for name, values in parts.items():
            total[self.weights.slices[name]] += values.cpu()


@dataclass(frozen=True)
class Mix:
    """The columns of the Hessian's root as mixtures of the directions, ``[B, T, R, K]`` at each of T positions."""

    weights: Tensor

    @classmethod
    def of(cls, likelihood: Likelihood, outputs: Tensor, targets: Tensor | None) -> Mix:
        """Along each direction; the root has no part outside of their span."""
        root = likelihood.hessian_root(outputs, targets)
        apart = root.reshape(*root.shape[:2], -1, root.shape[-1])  # [R, B, T, C]
        return cls((apart @ _basis(likelihood, outputs).mT).permute(1, 2, 0, 3).contiguous())

    def __call__(self, grads: Tensor, examples: Any = slice(None)) -> Tensor:
        """Mix gradients ``[B, V, X]`` of the directions into those of the root, ``[B, T·R, X]``."""
        weights = self.weights[examples]
        apart = grads.unflatten(1, (weights.shape[1], -1))
        return torch.bmm(weights.flatten(0, 1), apart.flatten(0, 1)).reshape(len(grads), -1, grads.shape[-1])


def _squares(factor: Factor, mix: Mix) -> Tensor:
    """The squares of the gradients summed over columns and examples, before and after mixing: ``[2, size]``."""
    if (outer := factor.outer) is not None:
        grads, inputs = outer
        return (_both(grads.transpose(0, 1), mix).mT @ inputs.square()).flatten(1)
    if factor.is_bias:
        return _both(factor.parts[0].bias_grads().transpose(0, 1), mix).sum(1)
    if (tokens := factor.tokens) is not None:
        each = _both(tokens.grads.transpose(0, 1), mix, tokens.example)
        return factor.like.new_zeros(2, *factor.shape).index_add(1, tokens.token, each).flatten(1)
    total = factor.like.new_zeros(2, math.prod(factor.shape))
    step = max(1, CACHED // max(factor.columns * total.shape[1], 1))
    single = factor.explicit is None and len(factor.parts) == 1 and isinstance(factor.parts[0].rows, Dense)
    for start in range(0, factor.size, step):
        rows = slice(start, start + step)
        grads = _products(factor.parts[0], rows) if single else factor.per_sample(rows).flatten(2).transpose(0, 1)
        total += _both(grads, mix, rows).sum(1)
    return torch.stack([factor.parts[0].from_matrix(values, factor.shape) for values in total]) if single else total


def _both(grads: Tensor, mix: Mix, examples: Any = slice(None)) -> Tensor:
    """The squares of gradients ``[B, V, X]`` summed over columns, before and after mixing: ``[2, B, X]``."""
    return torch.stack([grads.square().sum(1), mix(grads, examples).square_().sum(1)])


def _products(part: Part, rows: slice) -> Tensor:
    """The gradients ``[b, V, O·I]`` of some examples, in the order of the matrix that the layer's rows meet."""
    assert isinstance(part.rows, Dense)
    grads = part.grads_as_rows()[:, rows].permute(1, 0, 3, 2)  # [b, V, O, T]
    return torch.bmm(grads.flatten(1, 2), part.rows.a[rows]).reshape(*grads.shape[:2], -1)


def _basis(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """The directions at one position, ``[K, C]``."""
    width = likelihood.num_outputs(outputs)
    basis = _contrasts(width) if isinstance(likelihood, Categorical) else torch.eye(width, dtype=torch.float64)
    return basis.to(outputs)


@functools.lru_cache(maxsize=8)
def _contrasts(size: int) -> Tensor:
    """The orthonormal rows of Helmert's matrix, ``[C − 1, C]``: all directions but (1, …, 1).

    >>> rows = _contrasts(4)
    >>> torch.allclose(rows.mT @ rows, torch.eye(4, dtype=rows.dtype) - 0.25)
    True
    """
    count = torch.arange(1, size, dtype=torch.float64)
    rows = torch.ones(size - 1, size, dtype=torch.float64).tril()
    rows[torch.arange(size - 1), torch.arange(1, size)] = -count
    return rows / (count * (count + 1)).sqrt()[:, None]
