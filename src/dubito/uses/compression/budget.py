"""What a smaller network may cost: `Budget`, and the search for a network within it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import torch

from dubito.core import batches, params
from dubito.core.constraints import Count, Probability, Range, check
from dubito.core.errors import InputError
from dubito.uses.compression.csr import seconds
from dubito.uses.compression.pruner import ANY_NUMBER, Multiples
from dubito.uses.compression.quantize import ROUNDING
from dubito.uses.compression.report import num_macs
from dubito.uses.compression.search import Score, growth
from dubito.uses.compression.storage import load
from dubito.uses.export import export_network

if TYPE_CHECKING:
    from dubito.uses.compression.result import Compression
    from dubito.uses.compression.rules import Rule

Runtime = Literal["torch", "onnxruntime"]
# The nats per example that rounding may cost in the files that a limit of size chooses from.
ROUNDINGS = (0.0005, ROUNDING, 0.008, 0.032, 0.128)
# Channels that onnxruntime computes at a time, and pads to, with AVX-512; a multiple of the 8 with AVX2.
BLOCK = 16
# It computes convolutions in such blocks only if their channels are a multiple of this; others take longer.
ALIGNED = 4
# Halvings of the share of weights or units that goes: to 1/256.
HALVINGS = 8
_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Budget:
    """What a smaller network may cost. Give one limit or several; all hold together.

    Args:
        size: The largest file that `Compression.save` writes, in bytes or as text: ``"200 kB"``.
        macs: The share of multiply-accumulates that may stay: 0.25 is a quarter.
        speedup: How many times faster the network must be, as measured in `runtime`. Units go by damage per time then.
        latency: The longest time of one call, in seconds or as text: ``"2 ms"``, as measured in `runtime`.
        error: By how much the error rate may grow on the validation data; for regression, by which fraction of itself
            the root mean squared error may.
        runtime: Where time is measured: ``"torch"`` or ``"onnxruntime"``.
        batch_size: The number of inputs in the calls that are measured.
        multiple: Every layer keeps a multiple of so many units, or fewer than these: runtimes compute channels in
            blocks. By default 16 where time is limited. Where operations are, it is 16, or 4 in layers that keep 8 or
            more, whichever leaves outputs closer to those of the large network.

    >>> Budget(size="200 kB", error=0.005).num_bytes
    200000
    """

    size: str | int | None = None
    macs: Annotated[float, Range(0, 1, above=True)] | None = None
    speedup: Annotated[float, Range(1)] | None = None
    latency: str | float | None = None
    error: Probability | None = None
    runtime: Runtime = "torch"
    batch_size: Count = 1
    multiple: Count | None = None

    def __post_init__(self) -> None:
        if all(each is None for each in (self.size, self.macs, self.speedup, self.latency, self.error)):
            raise InputError("A budget needs a limit: give size, macs, speedup, latency or error.")
        for name, kind in get_type_hints(Budget, include_extras=True).items():
            if name not in ("size", "latency"):  # which may have a unit
                check(name, kind, getattr(self, name))
        _ = self.num_bytes, self.seconds

    def __repr__(self) -> str:
        given = {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }
        return f"Budget({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def num_bytes(self) -> int | None:
        """The largest size in bytes."""
        found = _quantity("size", self.size, _SIZES, "200 kB")
        return None if found is None else int(found)

    @property
    def seconds(self) -> float | None:
        """The longest time in seconds."""
        return _quantity("latency", self.latency, _TIMES, "2 ms")

    @property
    def times(self) -> bool:
        """Whether a limit is one of time."""
        return self.speedup is not None or self.latency is not None

    @property
    def block(self) -> int:
        """How many units of a layer go or stay together."""
        return self.blocks.multiple

    @property
    def blocks(self) -> Multiples:
        """In which multiples layers keep units."""
        if self.multiple is None and not self.times:
            return Multiples(ALIGNED, 2 * ALIGNED) if self.cost == "macs" else ANY_NUMBER
        multiple = BLOCK if self.multiple is None else self.multiple
        return Multiples(multiple, multiple)

    @property
    def choices(self) -> tuple[Multiples, ...]:
        """The multiples of which the best is taken, by how close the outputs are to those of the large network."""
        usual = self.multiple is None and not self.times and self.macs is not None
        return (self.blocks, Multiples(BLOCK, BLOCK)) if usual else (self.blocks,)

    @property
    def cost(self) -> Literal["macs", "bytes"]:
        """What removing a unit should save most of."""
        return "bytes" if self.size is not None and self.macs is None and not self.times else "macs"

    @property
    def limits(self) -> bool:
        """Whether something besides the error is limited."""
        return self.size is not None or self.macs is not None or self.times


def _quantity(name: str, value: str | float | None, units: dict[str, Any], example: str) -> float | None:
    """Return a number with its unit as a number."""
    if value is None:
        return None
    number: float | None = None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµ]+)\s*", value)
        if match and match[2] in units:
            number = float(match[1]) * units[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    if number is None or not 0 < number < float("inf"):
        raise InputError(
            f"`{name}` of a budget must be positive, a number or text such as '{example}' (units: {', '.join(units)}), "
            f"got {value!r}."
        )
    return number


@dataclass(frozen=True)
class Candidate:
    """One network that the search has measured; what the budget does not limit is None.

    Attributes:
        target: The share of weights or units that the rule removed.
        macs: The share of multiply-accumulates that is left.
        num_bytes: The size of the file.
        seconds: The time of one call.
        error: The growth of the error (a fraction of itself for regression).
        rounding: The nats per example that rounding in its file may cost.
    """

    target: float
    macs: float | None = None
    num_bytes: int | None = None
    seconds: float | None = None
    error: float | None = None
    rounding: float = ROUNDING

    def __str__(self) -> str:
        parts = [f"{self.target:.1%} removed"]
        parts += [] if self.macs is None else [f"{self.macs:.1%} of the MACs"]
        parts += [] if self.num_bytes is None else [f"{self.num_bytes / 1000:,.1f} kB"]
        parts += [] if self.seconds is None else [f"{1000 * self.seconds:.3g} ms"]
        parts += [] if self.error is None else [f"error {self.error:+.4f}"]
        return ", ".join(parts)


class Meter:
    """Measures networks by what a budget limits.

    Args:
        budget: The budget.
        dense: The network before.
        example: A batch of inputs.
        score: Gives accuracy or minus the root mean squared error; None if there is no data to judge.
    """

    def __init__(self, budget: Budget, dense: torch.nn.Module, example: Any, score: Score | None) -> None:
        if example is None and (budget.macs is not None or budget.times):
            raise InputError("MACs and times are measured on inputs: give `data=` or `example=`.")
        self.budget, self.score = budget, score
        self.example = None if example is None else repeated(example, budget.batch_size)
        self.whole = None if score is None else score(dense)
        self.dense_macs = None if budget.macs is None else num_macs(dense, self.example)
        self.dense_seconds = time_of_call(budget, example, dense) if budget.times else None

    def measure(self, made: Compression, target: float, rounding: float) -> Candidate:
        """Measure one network; if size is limited, its error is that of the network in a file that is small enough."""
        budget, macs, num_bytes, error = self.budget, None, None, None
        if self.dense_macs is not None:
            macs = num_macs(made.model, self.example) / max(self.dense_macs, 1)
        if budget.num_bytes is None:
            error = self.growth(made.model)
        else:
            with tempfile.TemporaryDirectory() as folder:
                num_bytes = made.save(Path(folder) / "network", rounding=rounding)
                if num_bytes <= budget.num_bytes:
                    error = self.growth(load(Path(folder) / "network", made.dense))
        taken = time_of_call(budget, self.example, made.model) if budget.times else None
        return Candidate(target, macs, num_bytes, taken, error, rounding)

    def growth(self, model: torch.nn.Module) -> float | None:
        """Return by how much the error of a network is above that of the dense one."""
        if self.score is None or self.whole is None:
            return None
        return growth(self.whole, self.score(model))

    def is_small(self, found: Candidate) -> bool:
        """Return whether a network is within the limits of size, operations and time."""
        budget = self.budget
        small = budget.macs is None or (found.macs is not None and found.macs <= budget.macs)
        small &= budget.num_bytes is None or (found.num_bytes is not None and found.num_bytes <= budget.num_bytes)
        if budget.times:
            assert found.seconds is not None
            assert self.dense_seconds is not None
            small &= budget.seconds is None or found.seconds <= budget.seconds
            small &= budget.speedup is None or self.dense_seconds / found.seconds >= budget.speedup
        return small

    def is_good(self, found: Candidate) -> bool:
        """Return whether the error of a network is within the budget."""
        return self.budget.error is None or (found.error is not None and found.error <= self.budget.error + 1e-12)


@torch.no_grad()
def time_of_call(budget: Budget, example: Any, model: torch.nn.Module) -> float:
    """Return the seconds of one call with as many inputs, and in the runtime, that a budget names."""
    inputs = repeated(example, budget.batch_size)
    if budget.runtime == "torch":
        return seconds(lambda: params.call(model, inputs))
    with tempfile.TemporaryDirectory() as folder:
        return _onnx_seconds(model, Path(folder) / "network.onnx", inputs)


def _onnx_seconds(model: torch.nn.Module, path: Path, example: Any) -> float:
    made = export_network(model, path, example)  # says what is missing
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = dict(zip(made.inputs, (leaf.cpu().numpy() for leaf in batches.leaves(example)), strict=True))
    return seconds(lambda: session.run(None, given))


def repeated(example: Any, count: int) -> Any:
    """Return so many rows, from the start again where there are fewer."""
    have = batches.num_rows(example)
    return batches.take(example, [row % have for row in range(count)])


def search(
    rule: Rule, meter: Meter, make: Callable[[Rule], Compression], check_error: bool = True
) -> tuple[Rule, float, tuple[Candidate, ...]]:
    """Return the rule and the rounding whose network is within the budget, and all networks that were measured.

    With a limit of size, operations or time it removes as little as that needs; with a limit of the error alone, as
    much as that allows. Both are searched by halving the share that goes. A limit of size is shared between removing
    and rounding: for each of some roundings, coarser ones leave room for more weights, and the network with the least
    error is taken. Without data to judge them there is one rounding.

    Args:
        rule: The rule, without an amount.
        meter: Measures them.
        make: Returns the compression of a rule with an amount.
        check_error: Whether an error above the budget is refused; not if the network is fine-tuned afterwards.
    """
    found: list[Candidate] = []
    known: dict[float, Compression | None] = {}

    def at(target: float, rounding: float) -> Candidate | None:
        if target not in known:
            try:
                known[target] = make(rule.replace(target=target))
            except InputError:  # a layer would become empty
                known[target] = None
        made = known[target]
        if made is None:
            return None
        found.append(meter.measure(made, target, rounding))
        return found[-1]

    shared = meter.budget.num_bytes is not None and meter.score is not None
    best = [_halved(partial(at, rounding=rounding), meter) for rounding in (ROUNDINGS if shared else (ROUNDING,))]
    within = [each for each in best if each is not None]
    chosen = min(within, key=lambda each: (each.error or 0.0, each.target), default=None)
    accepted = _accepted(chosen, found, meter, check_error)
    return rule.replace(target=accepted.target), accepted.rounding, tuple(found)


def _halved(at: Callable[[float], Candidate | None], meter: Meter) -> Candidate | None:
    """Return the best network for one rounding, by halving the share that goes."""
    grows = not meter.budget.limits
    low, high, best = 0.0, 1.0, None
    first = at(0.0)
    if first is not None and (grows or meter.is_small(first)):
        best = first
    for _ in range(HALVINGS if grows or best is None else 0):
        middle = (low + high) / 2
        one = at(middle)
        if one is None:
            high = middle
        elif grows:
            low, high = (middle, high) if meter.is_good(one) else (low, middle)
            best = one if meter.is_good(one) else best
        elif meter.is_small(one):
            best, high = one, middle
        else:
            low = middle
    return best


def _accepted(best: Candidate | None, found: list[Candidate], meter: Meter, check_error: bool) -> Candidate:
    """Return the best network, or raise an error that says what was reached."""
    if best is None:
        smallest = max(found, key=lambda each: each.target) if found else None
        before = (
            "" if meter.dense_seconds is None else f" The network before takes {1000 * meter.dense_seconds:.3g} ms."
        )
        raise InputError(f"No network is within {meter.budget!r}: the smallest that was found has {smallest}.{before}")
    if check_error and not meter.is_good(best):
        raise InputError(
            f"No network is within {meter.budget!r}: the largest one that is small enough has {best}. Allow more, or "
            "fine-tune it: give the training data as data= and how as training=."
        )
    return best
