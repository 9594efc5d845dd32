"""The search of `Auto`: train the plain network, compare the candidates on held-out examples, fit the chosen one."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch
from torch import nn

from dubito.beliefs import likelihoods
from dubito.beliefs.likelihoods import Likelihood
from dubito.core import distributed
from dubito.core.batches import Data, Source
from dubito.core.errors import DubitoError, TrustWarning
from dubito.core.randomness import default_generator, derive_seed, draw_seed
from dubito.fitting.auto_explanation import AutoExplanation
from dubito.fitting.automatic import ResolvedTraining, warn_if_trained
from dubito.fitting.output_noise import share_noise
from dubito.fitting.posterior import Posterior
from dubito.fitting.problems import resolved_training
from dubito.fitting.progress import progress_bar
from dubito.fitting.recipe import FitCall, Recipe
from dubito.methods.auto.recipe import Auto
from dubito.methods.auto.scores import MEASURES, HeldOut, Split, hold_out
from dubito.methods.auto.table import TEMPERATURE, AutoCandidate, ScoreTable, candidates
from dubito.methods.ensembles import Ensemble
from dubito.methods.map import MAP

# With budget="auto", an ensemble is a candidate if its trainings take at most this many steps, each for all members at
# once, and this many floating-point operations.
MOST_STEPS, MOST_FLOPS = 60_000, 1e13


class Search:
    """One call of `Auto.fit`; see `Recipe.fit` for the arguments."""

    def __init__(self, recipe: Auto, call: FitCall) -> None:
        generator = default_generator(call.generator)
        distributed.share_generator(generator)
        self.recipe, self.model, self.data, self.progress = recipe, call.model, call.data, call.progress
        self.likelihood = likelihoods.resolve(call.likelihood)
        self.validation, self.num_data = call.validation, call.num_data
        training = recipe.base().default_training() if call.training is None else call.training
        self.checkpoint = training.checkpoint
        self.seed = draw_seed(generator)
        self.resolved: ResolvedTraining = resolved_training(
            recipe.base(), replace(call, training=training, generator=self._generator("search"))
        )
        for each in (self.data, self.validation):
            if each is not None:
                source = self._source(each)
                source.agree()
                source.refuse_shards("Auto")

    def run(self) -> Posterior:
        """Return the posterior of the chosen candidate, with its explanation."""
        held_out = hold_out(self.data, self.validation, trained=not self.recipe.train, seed=self.seed)
        plain = self._fit(self.recipe.base(), self.model, "plain", self.data, self.validation)
        self._check_fresh(held_out)
        found = self._candidates(plain, held_out)
        table = ScoreTable(self.recipe.goal)
        with progress_bar(len(held_out.splits), self.progress, "comparing methods", unit="split") as bar:
            for split in held_out.splits:
                network = plain if held_out.one_network else self._plain_network(split)
                self._add(table, found, split, network, held_out.one_network)
                bar.update(1)
        with distributed.alone():
            chosen, rows = table.choose(found)
        first = distributed.texts(chosen.name)[0]  # scores may differ in the last bits between processes
        chosen = next(candidate for candidate, _ in found if candidate.name == first)
        posterior = self._final(chosen, plain, table)
        search, record = self.resolved.found, posterior.fit_record
        if search is not None and record is not None:  # what the search saw of examples that no fit has seen
            posterior.fit_record = record.with_held_out(search)
        measure = MEASURES[self.recipe.goal]
        posterior.explanation = AutoExplanation(
            self.recipe.goal, chosen.name, measure, table.num_rows, held_out.words, tuple(rows)
        )
        return posterior

    # The candidates

    def _candidates(self, plain: Posterior, held_out: HeldOut) -> list[tuple[AutoCandidate, str]]:
        """Return the candidates, each with the reason why it is left out, or an empty text."""
        weights = sum(value.numel() for value in plain.model.parameters() if value.requires_grad)
        return [(each, self._left_out(each, plain, held_out)) for each in candidates(weights)]

    def _left_out(self, candidate: AutoCandidate, plain: Posterior, held_out: HeldOut) -> str:
        if self.recipe.goal == "small" and not candidate.ranks_weights:
            return "does not say which weights can be dropped"
        if not candidate.relative_epochs:
            return ""
        if not self.recipe.train:
            return "needs training"
        epochs = math.ceil(candidate.relative_epochs * self.resolved.training.epochs)
        budget = self.recipe.budget
        if budget != "auto":
            return "" if epochs <= budget else f"needs {epochs} epochs, more than the budget"
        if not isinstance(candidate.recipe, Ensemble):
            return "needs a budget of epochs"
        source = Source(self.data, batch_size=self.resolved.training.batch_size, num_data=self.num_data)
        fits = 1 + (1 if held_out.one_network else len(held_out.splits))
        steps = fits * self.resolved.training.epochs * (source.num_batches or 1)
        rows = candidate.relative_epochs * steps * self.resolved.training.batch_size
        flops = 6 * sum(value.numel() for value in plain.model.parameters()) * rows
        return "" if steps <= MOST_STEPS and flops <= MOST_FLOPS else f"needs a budget of {epochs} epochs"

    def _add(
        self, table: ScoreTable, found: list[tuple[AutoCandidate, str]], split: Split, network: Posterior, shared: bool
    ) -> None:
        """Add the scores of all candidates on one split; each process predicts all of its examples."""
        source = self._source(split.held_out)
        with distributed.alone():
            table.add_network(network, source)
        for candidate, problem in found[1:]:
            if problem or candidate.name in table.problems:
                continue
            try:
                with distributed.together(nested=True):
                    posterior = self._on_split(candidate, split, network, table if shared else None)
                with distributed.alone():
                    table.add(candidate.name, posterior, source)
            except DubitoError as error:  # the candidate does not fit this network; the explanation says so
                table.problems[candidate.name] = f"not possible: {error}"

    def _on_split(
        self, candidate: AutoCandidate, split: Split, network: Posterior, kept: ScoreTable | None
    ) -> Posterior:
        if not candidate.relative_epochs:
            return self._fit(candidate.recipe, network.model, f"{candidate.name}.{split.label}", *split[:2])
        if kept is not None and candidate.name in kept.fitted:  # trained on the same data already
            return kept.fitted[candidate.name]
        label = candidate.name if kept is not None else f"{candidate.name}.{split.label}"
        found = self._fit(candidate.recipe, self.model, label, *split[:2])
        if kept is not None:
            kept.fitted[candidate.name] = found
        return found

    def _plain_network(self, split: Split) -> Posterior:
        return self._fit(self.recipe.base(), self.model, f"plain.{split.label}", *split[:2])

    def _final(self, chosen: AutoCandidate, plain: Posterior, table: ScoreTable) -> Posterior:
        """Return the chosen candidate, fitted to all data."""
        if chosen.name == TEMPERATURE:
            with distributed.alone():
                temperature = table.temperature(plain.likelihood)
            recipe = MAP(train=False, temperature=float(distributed.texts(repr(temperature))[0]))
            return self._fit(recipe, plain.model, "final", self.data, self.validation, plain.likelihood)
        if chosen.name in table.fitted:
            return table.fitted[chosen.name]
        start = self.model if chosen.relative_epochs else plain.model
        return self._fit(chosen.recipe, start, "final", self.data, self.validation)

    # Fits

    def _fit(
        self,
        recipe: Recipe,
        model: nn.Module,
        label: str,
        data: Data,
        validation: Data | None,
        likelihood: Likelihood | None = None,
    ) -> Posterior:
        """Fit one recipe with the training that was resolved once for all."""
        trains = recipe.trains
        training = self.resolved.training if trains else recipe.default_training()
        found = self.resolved.found
        if trains and found is not None and not isinstance(recipe, Ensemble):
            per_epoch = Source(data, batch_size=training.batch_size).num_batches or 1
            training = training.replace(epochs=recipe.epochs_after_search(found.epochs, per_epoch))
        if self.checkpoint is not None:
            training = training.replace(checkpoint=f"{self.checkpoint}.{label.replace(' ', '-')}")
        if likelihood is None:
            likelihood = self.resolved.likelihood if trains else self.likelihood
        is_last = label in ("final", "plain")
        with warnings.catch_warnings():
            if not is_last:  # what is wrong with a candidate shows in its score
                warnings.simplefilter("ignore", TrustWarning)
            posterior = recipe.fit(
                model, data, likelihood=likelihood, validation=validation, training=training,
                num_data=self.num_data if data is self.data else None, generator=self._generator(label),
                progress=self.progress,
            )  # fmt: skip
        if trains and self.resolved.noise is not None and posterior.has_spread:
            record = posterior.fit_record
            posterior = share_noise(posterior, self.resolved.noise, self._source(data))
            posterior.fit_record = record
        return posterior

    def _source(self, data: Data) -> Source:
        weight = next(self.model.parameters())
        return Source(data, batch_size=1024, shuffle=False, must_count=False, device=weight.device, dtype=weight.dtype)

    def _generator(self, label: str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, label))

    def _check_fresh(self, held_out: HeldOut) -> None:
        """Warn if the model knows the training data before it is trained, of which some are to be held out."""
        if held_out.one_network or self.recipe.start != "model" or self.resolved.found is not None:
            return  # the search for the number of epochs has looked
        before = self._fit(MAP(train=False), self.model, "before", self.data, None).fit_record
        if before is not None:
            classes = before.training.accuracy is not None
            warn_if_trained(before.training.log_score, before.constant, classes=classes)
