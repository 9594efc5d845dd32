"""Recognize the checkpoint of a run by digests of its recipe, settings, network and data."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from dubito.core import batches, distributed, io, params
from dubito.core.atomic import check_writable
from dubito.core.batches import Source
from dubito.core.constraints import Natural, check
from dubito.core.errors import FileFormatError, InputError
from dubito.core.randomness import Stream
from dubito.core.settings import canonical, digest
from dubito.fitting.inference import Problem
from dubito.fitting.recipe import Recipe

# How an error names each part that differs, in the order in which they are compared.
DIFFERENCES = {
    "recipe": "another recipe",
    "training": "other training settings",
    "likelihood": "another likelihood",
    "generator": "another seed",
    "network": "another network",
    "weights": "other initial weights of the network; seed torch before you create it",
    "data": "other training data",
    "validation": "other validation data",
}


def check_place(path: str | os.PathLike[str]) -> None:
    """Raise an error if a checkpoint cannot be written to `path`."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise InputError(f"The folder '{folder}' of the checkpoint does not exist: create it first.")
    check_writable(path)


def identity(recipe: Recipe, problem: Problem, model: nn.Module, generator: Tensor) -> dict[str, str]:
    """Return a digest of each part of a run.

    Args:
        recipe: The recipe.
        problem: The data, the likelihood and the training settings.
        model: The network at the start, after fresh weights were drawn.
        generator: The state of the generator before anything was drawn.
    """
    architecture = re.sub(r"0x[0-9a-f]+", "", repr(model))  # without memory addresses, which differ in every run
    trainable = [name for name, value in model.named_parameters() if value.requires_grad]
    return {
        "recipe": _short(canonical(recipe)),
        "training": _short(canonical(problem.training.identity())),
        "likelihood": _short(canonical(problem.likelihood)),
        "generator": digest(generator),
        "network": _short(architecture),
        "weights": io.digest([params.of(model), params.buffers_of(model), trainable]),
        # each process may hold another shard
        "data": distributed.one_text(io.digest([*_described(problem.source), problem.num_data])),
        "validation": distributed.one_text(
            "" if problem.validation is None else io.digest(_described_whole(problem.validation))
        ),
    }


def settings_digest(recipe: Recipe, problem: Problem) -> str:
    """Return a digest of the settings that must be the same in all processes."""
    return io.digest([canonical(part) for part in (recipe, problem.training.identity(), problem.likelihood)])


def refuse_another(path: str | os.PathLike[str], saved: Any, own: Mapping[str, str]) -> str | None:
    """Return an error message if the checkpoint belongs to another run, else None."""
    if not isinstance(saved, Mapping):
        return f"The checkpoint '{path}' was written by an earlier version of Dubito: delete it or choose another file."
    different = (why for part, why in DIFFERENCES.items() if saved.get(part) != own[part])
    return next((refusal(path, why) for why in different), None)


def refusal(path: str | os.PathLike[str], why: str) -> str:
    """Return the error message for a checkpoint of another run."""
    return f"The checkpoint '{path}' belongs to another run ({why}): delete it or choose another file."


def on_disk(path: str | os.PathLike[str]) -> str:
    """Return a sentence that says how far the checkpoint on disk has come, read from the file itself."""
    try:
        saved = io.load(path, "checkpoint")
        place = f"epoch {saved['epoch'] + 1} after {saved['batch']} of its batches"
    except (FileFormatError, LookupError, TypeError):
        return f"There is no checkpoint in '{path}': the same call starts from the beginning."
    return f"The checkpoint '{path}' holds {place}: the same call continues from there."


@dataclass
class LoaderDigest:
    """A digest of the batches of a loader's first pass, by which its data is recognized."""

    count: int = 0  # the number of batches
    first: str = ""  # the digest of the first batch
    chain: str = ""  # the digest of all batches

    def add(self, raw: Any) -> None:
        """Add the next batch."""
        own = io.digest(batches.as_tensors(raw))
        self.first = self.first or own
        self.chain, self.count = _short(self.chain + own), self.count + 1

    def agrees(self, source: Source, stream: Stream, states: list[Tensor]) -> bool:
        """Return whether `source` gives the same batches; only the first is compared if the dataset has a digest.

        Args:
            source: The data; its generators are restored afterwards.
            stream: The random stream of the first pass.
            states: The states of the loader's own generators before the first pass.
        """
        before, again = source.generator_states(), LoaderDigest()
        source.set_generator_states(states)
        try:
            known = _known_content(source.dataset) is not None
            for raw in islice(source.pieces(stream), min(self.count, 1 if known else sys.maxsize)):
                again.add(raw)
        finally:
            source.set_generator_states(before)
        return again.first == self.first if known else again == self


def saved_start(saved: Mapping[str, Any], source: Source) -> tuple[int, LoaderDigest, list[Tensor]]:
    """Return the seed of a saved run, the digest of its loader, and its loader's generator states at the start."""
    empty = {"seed": 0, "witness": asdict(LoaderDigest())}
    plain = io.copy_into(empty, {key: saved[key] for key in empty})
    check("count", Natural, plain["witness"]["count"])
    states = source.generator_states()
    source.set_generator_states(saved["first_states"])  # raises an error if they are not valid states
    source.set_generator_states(states)
    return plain["seed"], LoaderDigest(**plain["witness"]), saved["first_states"]


def _described(source: Source) -> list[Any]:
    """Return what identifies the data without a pass over a loader."""
    if source.in_memory is not None:
        return [batches.as_tensors(raw) for raw in source.in_memory]
    return [source.num_batches, type(source.dataset).__qualname__, _known_content(source.dataset)]


def _described_whole(source: Source) -> list[Any]:
    """Return what identifies the data, with a pass over a loader if its dataset has no digest."""
    known = _described(source)
    if source.in_memory is None and known[-1] is None:
        states = source.generator_states()
        known += [io.digest(batches.as_tensors(raw)) for raw in source.pieces()]
        source.set_generator_states(states)
    return known


def _known_content(dataset: Any) -> str | None:
    """Return a digest of a dataset that consists of tensors, or None for other datasets."""
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
