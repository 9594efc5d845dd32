"""Measure what compression gained and cost, and print it as a `Report`."""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dubito.core import batches, params
from dubito.core.arguments import checked_arguments
from dubito.core.errors import MissingDataError
from dubito.core.numeric import OperationCounter
from dubito.networks.layers import class_rule
from dubito.uses.compression import storage
from dubito.uses.compression.csr import seconds as shortest
from dubito.uses.compression.units import by_output
from dubito.uses.reporting import Evaluation, evaluate

if TYPE_CHECKING:
    from dubito.core.batches import Data
    from dubito.uses.compression.result import Compression
    from dubito.uses.reporting.collect import Scale

BATCH_SIZES = (1, 128)
SCORES = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "nll", "crps")}


@dataclass(frozen=True)
class Layer:
    """One weight matrix, before and after."""

    name: str
    weights: int
    kept: int
    units: int
    units_kept: int
    bits: int

    @property
    def sparsity(self) -> float:
        """The fraction of weights that were removed."""
        return 1 - self.kept / self.weights


@dataclass(frozen=True, repr=False)
class Report:
    """What compression gained and cost.

    Attributes:
        rule: The rule, as text.
        parameters: Numbers in the network before and after, biases and all.
        nonzeros: Non-zero parameters after.
        ratio: |W| / |W≠0|, over all parameters, biases included.
        weight_ratio: The same over the weight matrices alone, as most papers count.
        layers: One row per weight matrix.
        macs: Multiply-accumulates for one input before and after, without counting zeros as saved; None without an
            example.
        num_bytes: Sizes of real files: the dense network before, then after as dense, CSR and entropy-coded.
        latency: Milliseconds by batch size, before and after.
        scores: Scores by name for the network ``before``, ``after`` and as the ``coded`` file; the latter two were
            written to disk and loaded again.
        removed_inputs: Input features that the network does not use any more.
        evaluations: What `dubito.evaluate` found for the same three networks.
    """

    rule: str
    parameters: tuple[int, int]
    nonzeros: int
    ratio: float
    weight_ratio: float
    layers: tuple[Layer, ...]
    macs: tuple[int, int] | None
    num_bytes: dict[str, int]
    latency: dict[int, tuple[float, float]]
    scores: dict[str, dict[str, float]]
    removed_inputs: tuple[str, ...] = field(default=())
    evaluations: dict[str, Evaluation] = field(default_factory=dict, compare=False)

    @property
    def code_length(self) -> dict[str, tuple[int, float]]:
        """For classes, the bits of the file and those of the labels given it: ``before``, and as the ``coded`` file.

        Their sum is the length of a message that tells the labels to someone who has the inputs (Hinton & van Camp
        1993). Numbers have none, as their bits depend on the precision that is asked for.
        """
        found = {name: each for name, each in self.evaluations.items() if each.task == "classification"}
        return {
            name: (8 * self.num_bytes[name], found[name].count * found[name].scores["nll"] / math.log(2))
            for name in ("before", "coded")
            if name in found
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without the evaluations."""
        content = asdict(replace(self, evaluations={}))
        del content["evaluations"]
        return content | {"code_length": self.code_length}

    @checked_arguments
    def page(
        self,
        path: str | os.PathLike[str] = "report.html",
        *,
        title: str | None = None,
        data_name: str | None = None,
        command: str | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> Path:
        """Write one HTML page: what every layer lost, and the network before and after, as `dubito.report` shows them.

        Args:
            path: The file.
            title: The heading of the page.
            data_name: The name of the data, for the heading.
            command: How to do it again.
            facts: What was run.
        """
        from dubito.uses.compression.page import compression_section
        from dubito.uses.reporting.page import write_page

        if not self.evaluations:
            raise MissingDataError("A page shows scores before and after: give data to `report`.")
        return write_page(
            self.evaluations, path, title=title or "How small can it be?", data_name=data_name, command=command,
            facts=facts, more=(compression_section(self),),
        )  # fmt: skip

    def __str__(self) -> str:
        before, after = self.parameters
        lines = [f"by {self.rule}", f"{'layer':<24}{'weights':>10}{'left':>10}{'gone':>9}{'units':>14}{'bits':>6}"]
        for row in self.layers:
            units = f"{row.units} → {row.units_kept}"
            lines.append(f"{row.name:<24}{row.weights:>10,}{row.kept:>10,}{row.sparsity:>9.1%}{units:>14}{row.bits:>6}")
        lines.append(f"parameters      {before:,} → {after:,}, of which {self.nonzeros:,} are not zero")
        lines.append(f"|W| / |W≠0|     {self.ratio:.1f}, of weight matrices alone {self.weight_ratio:.1f}")
        if self.macs is not None:
            lines.append(f"operations      {self.macs[0]:,} → {self.macs[1]:,} multiply-accumulates per input")
        original = self.num_bytes["before"]
        sizes = ", ".join(f"{n} {b:,} ({original / b:.1f}×)" for n, b in self.num_bytes.items() if n != "before")
        lines.append(f"bytes on disk   {original:,} → {sizes}")
        for size, (slow, fast) in self.latency.items():
            lines.append(f"latency, {size:>3} at a time   {slow:.3f} → {fast:.3f} ms ({slow / fast:.2f}×)")
        for name, scores in self.scores.items():
            lines.append(f"{name:<16}" + "  ".join(f"{key} {value:.4f}" for key, value in scores.items()))
        if self.code_length:
            parts = (f"{network:,} + {labels:,.0f}" for network, labels in self.code_length.values())
            lines.append(f"code length     {' → '.join(parts)} bits of network + labels")
        if self.removed_inputs:
            lines.append(f"inputs that the network does not use any more: {', '.join(self.removed_inputs)}")
        return "\n".join(lines)

    __repr__ = __str__


def make_report(
    made: Compression,
    data: Data | None,
    example: Any,
    names: tuple[str, ...],
    rounding: float,
    seconds: float,
    target_scale: Scale | None = None,
) -> Report:
    """Measure a compression."""
    dense, small = made.dense, made.model
    with tempfile.TemporaryDirectory() as folder:
        num_bytes, reloaded = _files(made, Path(folder), rounding)
    evaluations = {}
    if data is not None:
        for name, model in {"before": dense, "after": reloaded["dense"], "coded": reloaded["coded"]}.items():
            evaluations[name] = _evaluation(made, model, data, target_scale)
    parameters = tuple(params.num_weights(params.of(model)) for model in (dense, small))
    nonzeros = sum(int((value != 0).sum()) for value in params.of(small).values())
    layers = _layers(made, rounding)
    return Report(
        rule=repr(made.rule),
        parameters=(parameters[0], parameters[1]),
        nonzeros=nonzeros,
        ratio=parameters[0] / max(nonzeros, 1),
        weight_ratio=sum(row.weights for row in layers) / max(sum(row.kept for row in layers), 1),
        layers=layers,
        macs=None if example is None else (num_macs(dense, example), num_macs(small, example)),
        num_bytes=num_bytes,
        latency={} if example is None else _latency(dense, reloaded["dense"], example, seconds),
        scores={name: _main_scores(found) for name, found in evaluations.items()},
        evaluations=evaluations,
        removed_inputs=tuple(made.plan.removed_inputs(names)),
    )


def num_macs(model: nn.Module, example: Any) -> int:
    """Return the multiply-accumulates of one input in matrix products and convolutions, recurrent ones included."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about hardware that this machine lacks
        # oneDNN's recurrent layers and fused attention would hide their products
        without = torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH)
        with without[0], without[1], torch.enable_grad(), OperationCounter() as counter:
            params.call(model, batches.take(example, slice(0, 1)))
    return counter.total // 2


def _files(made: Compression, folder: Path, rounding: float) -> tuple[dict[str, int], dict[str, nn.Module]]:
    """Return the sizes of the saved files, and the networks that load from them."""
    num_bytes = {"before": storage.save(folder / "before", made.dense, "dense", {})}
    reloaded = {}
    for format in ("dense", "csr", "coded"):
        num_bytes[format] = made.save(folder / format, format=format, rounding=rounding)
        reloaded[format] = storage.load(folder / format, made.source.model)
    return num_bytes, reloaded


def _evaluation(made: Compression, model: nn.Module, data: Data, target_scale: Scale | None) -> Evaluation:
    from dubito.uses.compression.search import point

    return evaluate(point(model, made.source), data, target_scale=target_scale)


def _main_scores(found: Evaluation) -> dict[str, float]:
    return {name: found.scores[name] for name in SCORES[found.task] if name in found.scores}


def _layers(made: Compression, rounding: float) -> tuple[Layer, ...]:
    weights, bits, rows = params.of(made.model), made.bits(rounding), []
    for name, mask in made.plan.keep.items():
        layer = name.rpartition(".")[0]
        units = made.plan.units.get(layer)
        if units is None:  # a unit (of an embedding: a word) counts as kept while any of its weights is
            rule = class_rule(made.model.get_submodule(layer))
            by_words = rule is not None and rule.takes_indices
            units = (mask if by_words else by_output(made.dense, layer, mask)).flatten(1).any(1)
        kept = int((weights[name] != 0).sum())
        rows.append(Layer(name, mask.numel(), kept, len(units), int(units.sum()), bits[name]))
    return tuple(rows)


@torch.no_grad()
def _latency(dense: nn.Module, small: nn.Module, example: Any, at_least: float) -> dict[int, tuple[float, float]]:
    found = {}
    rows = batches.num_rows(example)
    for size in BATCH_SIZES:
        inputs = batches.take(example, torch.arange(size) % rows)
        found[size] = (_milliseconds(dense, inputs, at_least), _milliseconds(small, inputs, at_least))
    return found


def _milliseconds(model: nn.Module, inputs: Any, at_least: float) -> float:
    return 1000 * shortest(lambda: params.call(model, inputs), at_least)
