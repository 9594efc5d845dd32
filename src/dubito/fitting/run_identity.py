"""Whose checkpoint a file is: digests of all that a run must share with it to go on from it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from dubito.core import batches, distributed, io, params
from dubito.core.atomic import check_writable
from dubito.core.batches import Source
from dubito.core.errors import FileFormatError, InputError
from dubito.core.randomness import Stream
from dubito.core.settings import canonical, digest

if TYPE_CHECKING:
    from dubito.fitting.inference import Problem
    from dubito.fitting.recipe import Recipe

# What is said of each part that differs, in the order in which they are looked at.
DIFFERENCES = {
    "recipe": "another recipe",
    "training": "other training settings",
    "likelihood": "another likelihood",
    "generator": "another seed",
    "network": "another network",
    "weights": "the network has other weights at the start: seed torch before you make it",
    "data": "other training data",
    "validation": "other validation data",
}


def check_place(path: str | os.PathLike[str]) -> None:
    """Raise before any work where a checkpoint cannot be written."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise InputError(f"The folder '{folder}' of the checkpoint does not exist.")
    check_writable(path)


def identity(recipe: Recipe, problem: Problem, model: nn.Module, generator: Tensor) -> dict[str, str]:
    """Return a digest of each part of a run.

    Args:
        recipe: The recipe.
        problem: The data, the likelihood and the training settings.
        model: The network at the start, after fresh weights were drawn.
        generator: The state of our randomness before anything was drawn.
    """
    architecture = re.sub(r"0x[0-9a-f]+", "", repr(model))  # without addresses, which change from run to run
    trainable = [name for name, value in model.named_parameters() if value.requires_grad]
    return {
        "recipe": _short(canonical(recipe)),
        "training": _short(canonical(problem.training.identity())),
        "likelihood": _short(canonical(problem.likelihood)),
        "generator": digest(generator),
        "network": _short(architecture),
        "weights": io.digest([params.of(model), params.buffers_of(model), trainable]),
        # each process may hold another part
        "data": distributed.one_text(io.digest([*_described(problem.source), problem.num_data])),
        "validation": distributed.one_text(
            "" if problem.validation is None else io.digest(_described_whole(problem.validation))
        ),
    }


def settings_digest(recipe: Recipe, problem: Problem) -> str:
    """Return a digest of what several processes must have been given alike."""
    return io.digest([canonical(part) for part in (recipe, problem.training.identity(), problem.likelihood)])


def refuse_another(path: str | os.PathLike[str], saved: Any, own: Mapping[str, str]) -> str | None:
    """Return the sentence that refuses a checkpoint of another run, or None."""
    if not isinstance(saved, Mapping):
        return f"The checkpoint '{path}' was written by an earlier version of Dubito: delete it or choose another file."
    different = (why for part, why in DIFFERENCES.items() if saved.get(part) != own[part])
    return next((refusal(path, why) for why in different), None)


def refusal(path: str | os.PathLike[str], why: str) -> str:
    """Return the sentence about a checkpoint of another run."""
    return f"The checkpoint '{path}' belongs to another run ({why}): delete it or choose another file."


def on_disk(path: str | os.PathLike[str]) -> str:
    """Return a sentence about how far the checkpoint is that lies on disk, from the file itself."""
    try:
        saved = io.load(path, "checkpoint")
        place = f"epoch {saved['epoch'] + 1} after {saved['batch']} of its batches"
    except (FileFormatError, LookupError, TypeError):
        return f"There is no checkpoint in '{path}': the same call starts again."
    return f"The checkpoint '{path}' holds {place}: the same call goes on from there."


@dataclass
class Witness:
    """A digest of the batches of a loader's first pass, which tells its data from other data.

    Attributes:
        count: How many batches it has seen.
        first: The digest of the first of them.
        chain: The digest of all of them.
    """

    count: int = 0
    first: str = ""
    chain: str = ""

    def see(self, raw: Any) -> None:
        """Add the next batch."""
        own = io.digest(batches.as_tensors(raw))
        self.first = self.first or own
        self.chain, self.count = _short(self.chain + own), self.count + 1

    def agrees(self, source: Source, stream: Stream, states: list[Tensor]) -> bool:
        """Whether `source` gives these batches again; of data with a digest of its own the first one is enough.

        Args:
            source: The data; its generators are left as they were.
            stream: The timeline of the first pass.
            states: Those of the loader's own generators before the first pass.
        """
        before, again = source.generator_states(), Witness()
        source.set_generator_states(states)
        try:
            known = _known_content(source.dataset) is not None
            for raw in islice(source.pieces(stream), min(self.count, 1) if known else self.count):
                again.see(raw)
        finally:
            source.set_generator_states(before)
        return again.first == self.first if known else again == self


def claims(saved: Mapping[str, Any], source: Source) -> tuple[int, Witness, list[Tensor]]:
    """Return the seed of a saved run, the witness of its data, and its loader's generators before the first pass."""
    plain = io.copy_into({"seed": 0, "witness": asdict(Witness())}, {key: saved[key] for key in ("seed", "witness")})
    states = source.generator_states()
    source.set_generator_states(saved["first_states"])  # raises where they are no states
    source.set_generator_states(states)
    return plain["seed"], Witness(**plain["witness"]), saved["first_states"]


def _described(source: Source) -> list[Any]:
    """What is known of data without a pass over a loader."""
    if source.in_memory is not None:
        return [batches.as_tensors(raw) for raw in source.in_memory]
    return [source.num_batches, type(source.dataset).__qualname__, _known_content(source.dataset)]


def _described_whole(source: Source) -> list[Any]:
    """What is known of data, with a pass over a loader whose dataset has no content of its own."""
    known = _described(source)
    if source.in_memory is None and known[-1] is None:
        states = source.generator_states()
        known += [io.digest(batches.as_tensors(raw)) for raw in source.pieces()]
        source.set_generator_states(states)
    return known


def _known_content(dataset: Any) -> str | None:
    """A digest of all that a dataset holds, where torch says where that is."""
    if isinstance(dataset, TensorDataset):
        return io.digest(list(dataset.tensors))
    if isinstance(dataset, Subset):
        inner = _known_content(dataset.dataset)
        return None if inner is None else io.digest([[int(index) for index in dataset.indices], inner])
    if isinstance(dataset, ConcatDataset):
        parts = [_known_content(part) for part in dataset.datasets]
        return None if None in parts else io.digest(parts)
    return None


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
