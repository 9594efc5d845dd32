"""The result of `compress`: the smaller network, and methods to measure, save, export and refit it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import nn

from dubito import select
from dubito.core import params
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.constraints import Positive, Range, Share
from dubito.core.errors import InputError, MissingDataError, UnsupportedError
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.networks.layers import is_norm
from dubito.uses.compression import quantize, storage
from dubito.uses.compression.plan import Plan
from dubito.uses.compression.quantize import ROUNDING, Quantized
from dubito.uses.compression.report import Report, make_report
from dubito.uses.compression.rules import Masks, Rule
from dubito.uses.compression.search import Sweep, score_of, sweep
from dubito.uses.compression.weight_statistics import precision_diagonal
from dubito.uses.export import Exported, export_few_bits, export_int8, export_network

if TYPE_CHECKING:
    from dubito.uses.compression.budget import Candidate
    from dubito.uses.compression.pruner import Pruner
    from dubito.uses.reporting.collect import Scale

TARGETS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995)


class Compression:
    """What `dubito.compress` returns.

    Attributes:
        model: The smaller network: a plain `nn.Module` of the user's own classes, in evaluation mode.
        plan: What went, by layer.
        rule: The rule that decided; an accuracy budget has become a target.
        source: The posterior that was compressed; it is unchanged.
        dense: The network at its mean, before compression.
        candidates: The networks that the search for a budget has measured.
        rounding: The nats per example that rounding in its entropy-coded file may cost; a budget of size chooses it.
    """

    def __init__(
        self,
        source: Posterior,
        rule: Rule,
        plan: Plan,
        model: nn.Module,
        pruner: Pruner,
        data: Data | None,
        example: Any,
        candidates: tuple[Candidate, ...] = (),
        rounding: float = ROUNDING,
    ) -> None:
        self.candidates, self.rounding = candidates, rounding
        self.source, self.rule, self.plan, self.model, self.dense = source, rule, plan, model, pruner.center
        self._pruner, self._data, self._example = pruner, data, example

    @property
    def is_whole(self) -> bool:
        """Whether no weight must stay at zero, as after removing units."""
        return all(bool(mask.all()) for mask in self._left().values())

    def _left(self) -> Masks:
        """Return masks over the parameters of the smaller network: false where a weight was removed."""
        return {
            name: value != 0 if name in self.plan.keep else torch.ones_like(value, dtype=torch.bool)
            for name, value in params.of(self.model).items()
        }

    def changed(self, plan: Plan, model: nn.Module) -> Compression:
        """Return the same with another network, such as one that was trained further."""
        return Compression(
            self.source, self.rule, plan, model, self._pruner, self._data, self._example, self.candidates,
            self.rounding,
        )  # fmt: skip

    @checked_arguments
    def report(
        self,
        data: Data | None = None,
        *,
        feature_names: tuple[str, ...] = (),
        rounding: Positive | None = None,
        seconds: Positive = 0.2,
        target_scale: Scale | None = None,
    ) -> Report:
        """Measure: sizes, real bytes on disk, operations, latency, and scores before and after.

        All scores of the smaller network are those of a network that was written to a file and loaded again.

        Args:
            data: Held-out data with targets; by default that given to `compress`. Without any there are no scores.
            feature_names: Names of the input features of a table.
            rounding: The nats per example that rounding in the entropy-coded file may cost, instead of `rounding`.
            seconds: How long each latency is measured.
            target_scale: ``(loc, scale)`` of standardised regression targets, as for `evaluate`: scores are then in
                original units.
        """
        data = self._data if data is None else data
        return make_report(self, data, self._example, feature_names, rounding or self.rounding, seconds, target_scale)

    @checked_arguments
    def sweep(self, data: Data | None = None, *, targets: Sequence[Share] = TARGETS) -> Sweep:
        """Measure the score against sparsity: the same rule with more and more removed, without fine-tuning."""
        data = self._data if data is None else data
        if data is None:
            raise MissingDataError("A sweep needs held-out data with targets: give `data=` here or to compress.")
        return sweep(self._pruner, self.rule, score_of(self.source, data), targets)

    @checked_arguments
    def save(
        self, path: str | os.PathLike[str], *, format: storage.Format = "coded", rounding: Positive | None = None
    ) -> int:
        """Write the network to one file and return its size in bytes; `dubito.compression.load(path, model)` reads it.

        Args:
            path: The file.
            format: ``"coded"`` (weights in steps of their posterior standard deviation, entropy-coded), ``"csr"`` or
                ``"dense"`` (both exact).
            rounding: For ``"coded"``, the nats per example that rounding may cost, instead of `rounding`.
        """
        return storage.save(path, self.model, format, self.steps(rounding), self.plan.counts)

    @checked_arguments
    def steps(self, rounding: Positive | None = None) -> dict[str, float]:
        """Return the step in which each parameter is stored; see `dubito.compression.quantize`."""
        weights = params.of(self.model)
        owners = {name: self.model.get_submodule(name.rpartition(".")[0]) for name in weights}
        layers = {name: value for name, value in weights.items() if not is_norm(owners[name])}
        dense = params.of(self.dense)
        precision = precision_diagonal(self.source, list(dense))
        # weights that were zero before, as after an earlier compression, cost no bits
        kept = {name: mask.to(dense[name].device) for name, mask in self.plan.keep.items()}
        left = {name: (value != 0) & kept.get(name, torch.tensor(True)) for name, value in dense.items()}
        return quantize.steps(layers, precision, left, self.source.num_data, rounding or self.rounding)

    @checked_arguments
    def bits(self, rounding: Positive | None = None) -> dict[str, int]:
        """Return the bits of a weight of each parameter, sign included."""
        weights = params.of(self.model)
        return {name: quantize.bits(weights[name], step) for name, step in self.steps(rounding).items()}

    @checked_arguments
    def quantized(
        self,
        bits: Annotated[int, Range(2, 16)] | None = None,
        *,
        choices: tuple[Annotated[int, Range(2, 16)], ...] = (4, 8),
        by_channel: bool = True,
        rounding: Positive | None = None,
    ) -> Quantized:
        """Return the network with its weight matrices rounded to few bits, for runtimes with such integers.

        By default every matrix gets 4 or 8 bits, by its posterior precision: rounding must cost at most `rounding` nats
        per example. If that is impossible, all get the most bits; see `Quantized.nats`.

        Args:
            bits: The bits of every weight, instead.
            choices: The numbers of bits to choose from.
            by_channel: Whether every output channel has a scale of its own, instead of one for each matrix.
            rounding: The nats per example that rounding may cost, instead of `rounding`.
        """
        weights = params.of(self.model)
        names = [name for name in self.plan.keep if name in weights]
        found = precision_diagonal(self.source, names)
        precision = {}
        for name in names:
            kept = self.plan.keep[name].to(found[name].device)
            same = found[name].shape == weights[name].shape
            precision[name] = found[name] * kept if same else found[name][kept].reshape(weights[name].shape)
        return quantize.quantized(
            self.model, precision, self.source.num_data, bits=bits, choices=choices, by_channel=by_channel,
            loss=rounding or self.rounding,
        )  # fmt: skip

    @checked_arguments
    def export(
        self,
        path: str | os.PathLike[str],
        *,
        example: Any = None,
        int8: bool = False,
        bits: Literal["posterior", 4, 8] | None = None,
    ) -> Exported:
        """Write the network for other programs: ``.onnx`` (checked in onnxruntime) or ``.pt2`` (`torch.export`).

        With fewer bits the result says how far the outputs are from the network's; more than a tenth is refused.

        Args:
            path: The file.
            example: A batch of inputs; by default from the data given to `compress`.
            int8: Whether an ``.onnx`` file holds its weights in 8 bits and onnxruntime multiplies in 8 bits.
            bits: The bits in which an ``.onnx`` file holds its weight matrices, which are made floating-point numbers
                again when it runs; ``"posterior"``: 4 or 8 for each matrix, as `quantized` chooses. This makes the file
                small, not fast.
        """
        example = self._example if example is None else example
        if example is None:
            raise InputError("An export needs one batch of inputs: give `example=` here, or `data=` to compress.")
        if bits is not None:
            if int8:
                raise InputError(f"Give int8=True or bits={bits!r}, not both.")
            few = self.quantized(None if bits == "posterior" else bits)
            return export_few_bits(self.model, few.model, few.bits, few.steps, path, example)
        return export_int8(self.model, path, example) if int8 else export_network(self.model, path, example)

    def int8(self) -> nn.Module:
        """Return a copy whose linear layers hold 8-bit weights (torchao)."""
        return quantize.int8(self.model)

    @checked_arguments
    def sparse(self, *, example: Any = None) -> nn.Module:
        """Return a copy whose linear layers are sparse rows wherever that is faster here, as measured."""
        from dubito.uses.compression.csr import faster_layers

        example = self._example if example is None else example
        if example is None:
            raise InputError("Speed is measured on one batch of inputs: give `example=` here, or `data=` to compress.")
        return faster_layers(self.model, example)

    @checked_arguments
    def posterior(
        self,
        recipe: Recipe,
        data: Data,
        *,
        validation: Data | None = None,
        training: Training | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Posterior:
        """Fit a posterior over the weights that were kept; those that were removed stay zero.

        Args:
            recipe: A recipe with a choice of random weights, such as ``Laplace(structure="kron")``; any recipe where
                units went and every weight that is left is whole.
            data: The training data.
            validation: Held-out data for what the recipe tunes.
            training: As for `recipe.fit`.
            generator: As for `recipe.fit`.
            progress: As for `recipe.fit`.
        """
        left = self._left()
        whole = self.is_whole
        weights = recipe.weights
        if not whole and (weights is None or recipe.redraws):
            raise UnsupportedError(
                f"{recipe!r} cannot keep the removed weights at zero: use a recipe with `weights=` that starts at "
                "the model, such as Laplace() or Variational()."
            )
        if not whole:
            assert weights is not None
            both = select.mask(left) if isinstance(weights, select.all) else weights & select.mask(left)
            recipe = recipe.replace(weights=both)
        return recipe.fit(
            self.model, data, likelihood=self.source.likelihood, validation=validation, training=training,
            generator=generator, progress=progress,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Compression of {self.source!r} by {self.rule!r}: {self.plan.sparsity:.2%} of the weights are gone>"
