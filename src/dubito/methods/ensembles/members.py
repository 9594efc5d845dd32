"""Fit the members of an ensemble: one after another, divided among processes, or all at once."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dubito.core import distributed
from dubito.core.batches import Source, place
from dubito.core.errors import InputError
from dubito.core.randomness import Stream, default_generator, derive_seed, draw_seed
from dubito.core.settings import digest
from dubito.core.subsets import resampled
from dubito.fitting.initialization import redraw
from dubito.fitting.loading import load
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import FitCall, Recipe
from dubito.fitting.training import Training
from dubito.fitting.working_copies import private_copy, shared_copy
from dubito.methods.ensembles.batched_members import BatchedMembers, obstacle
from dubito.methods.ensembles.posterior import EnsemblePosterior, training_of_member
from dubito.methods.ensembles.recipe import Ensemble


class Members:
    """One fit of an ensemble.

    The first member uses the user's generator as a single fit would, so an ensemble of one equals a single fit.

    Args:
        ensemble: The recipe.
        call: The arguments of `Recipe.fit`, with the training settings of every member.
    """

    def __init__(self, ensemble: Ensemble, call: FitCall) -> None:
        assert call.training is not None
        self.ensemble, self.data, self.training = ensemble, call.data, call.training
        self.model = shared_copy(call.model) if distributed.is_active() else call.model
        self.generator = default_generator(call.generator)
        passed = ("likelihood", "validation", "num_data", "progress")
        self.options: dict[str, Any] = {name: getattr(call, name) for name in passed}
        self.source = Source(call.data, batch_size=call.training.batch_size, num_data=call.num_data)
        device = next((value.device for value in call.model.parameters()), None)
        distributed.share_generator(self.generator, device)
        self.in_shards = _in_shards(self.source, call.validation)
        self.device = device
        self.start = self.generator.get_state()
        self.loader_states = self.source.generator_states()

    def fit(self) -> Posterior:
        """Return the ensemble."""
        reason = self._why_not_together()
        if self.ensemble.together is True and reason is not None:
            raise InputError(f"The members cannot be trained together: {reason}.")
        if self.ensemble.together is not False and reason is None:
            seeds = tuple(draw_seed(self._generator(k)) for k in range(self.ensemble.members))
            recipe, options = BatchedMembers(self.ensemble, seeds), self.options
            return recipe.fit(self.model, self.data, training=self.training, generator=self.generator, **options)
        try:
            divided = distributed.is_active() and not self.in_shards  # with shards no process has all the data
            members = self._divided() if divided else [self._fit(k) for k in self._numbers]
        except KeyboardInterrupt:
            self.generator.set_state(self.start)  # so that the same call resumes from the checkpoints
            self.source.set_generator_states(self.loader_states)
            raise
        draw_seed(self.generator)  # so that another call with this generator gives another ensemble
        return EnsemblePosterior(members, self.ensemble)

    @property
    def _numbers(self) -> range:
        return range(self.ensemble.members)

    def _generator(self, k: int) -> torch.Generator:
        """Return the generator of one member."""
        return _reseeded(self.generator, self.start, k)

    def _fit(self, k: int) -> Posterior:
        """Fit one member."""
        seed = draw_seed(self._generator(k))
        data = resampled(self.data, derive_seed(seed, "bootstrap")) if self.ensemble.bootstrap else self.data
        steps = self.ensemble.steps()
        model = start_of_member(self.ensemble, steps[0], self.model, seed, k, self.source)
        training, posterior = training_of_member(self.training, k), None
        for recipe in steps:
            if posterior is not None:
                model, training = posterior.model, _second(recipe, training)
            for own, state in zip(self.source.generators, self.loader_states, strict=True):
                own.set_state(_reseeded(own, state, k).get_state())
            posterior = recipe.fit(model, data, training=training, generator=self._generator(k), **self.options)
        assert posterior is not None
        return posterior

    def _divided(self) -> list[Posterior]:
        """Fit each process's own members, as if it were alone, and send all members to all processes."""
        rank, world = distributed.rank(), distributed.world_size()
        self.options["progress"] = self.options["progress"] and rank == 0
        with distributed.alone():
            own = {k: self._fit(k) for k in self._numbers if k % world == rank}
        members = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "member"
            for k in self._numbers:
                if k in own:
                    own[k].save(path)
                content = distributed.bytes_from(k % world, path.read_bytes() if k in own else b"", self.device)
                path.write_bytes(content)
                members.append(own[k] if k in own else load(path, self.model))
        return members

    def _why_not_together(self) -> str | None:
        """Return why batched training is impossible or would change the result; None if neither."""
        if distributed.is_active():
            return "several processes share the members"
        if self.source.pair is None:
            return "each member has its own order of the data, which must be in memory as an (inputs, targets) pair"
        return obstacle(self.ensemble, self.training, self.model, self.source)


def _in_shards(source: Source, validation: Any) -> bool:
    """Return whether each process holds only a shard of the data or of the validation data."""
    sources = [source] if validation is None else [source, Source(validation, must_count=False)]
    for each in sources:
        each.agree()
    return any(each.is_shard for each in sources)


def start_of_member(
    ensemble: Ensemble, recipe: Recipe, model: nn.Module, seed: int, k: int, source: Source
) -> nn.Module:
    """Return the network that one member's recipe is given; a recipe with a `start` draws the weights itself."""
    if ensemble.start == "model":
        return model if k == 0 else perturbed(model, ensemble.perturbation, derive_seed(seed, "start"))
    if recipe.redraws:
        return model
    fresh = private_copy(model)
    weight = next(fresh.parameters())
    with Stream(derive_seed(seed, "build"), weight.device).active():
        redraw(fresh, ensemble.start, lambda: place(source.first().inputs, weight.device, weight.dtype))
    return fresh


@torch.no_grad()
def perturbed(model: nn.Module, scale: float, seed: int) -> nn.Module:
    """Return a copy with noise on every trainable parameter, `scale` times the root mean square of its entries."""
    model, generator = private_copy(model), torch.Generator().manual_seed(seed)
    for value in model.parameters():
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)
        if value.requires_grad:
            value.add_(scale * value.square().mean().sqrt() * noise)
    return model


def _reseeded(like: torch.Generator, state: torch.Tensor, k: int) -> torch.Generator:
    """Return a generator that continues from `state` for the first member, and one with its own seed for the others."""
    generator = torch.Generator(like.device)
    if k:
        return generator.manual_seed(derive_seed(int(digest(state), 16), k))
    generator.set_state(state)
    return generator


def _second(recipe: Recipe, training: Training | None) -> Training:
    """Return the training settings of the recipe that follows training: its defaults."""
    own = recipe.default_training()
    if training is None or training.checkpoint is None:
        return own
    return own.replace(checkpoint=f"{training.checkpoint}.posterior", checkpoint_every=training.checkpoint_every)
