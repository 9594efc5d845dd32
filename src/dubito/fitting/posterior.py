"""`Posterior`: a distribution over the weights given the data, with one contract for all families."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.prediction import Prediction
from dubito.beliefs.priors import Prior
from dubito.core import batches, io, limits, params, precision
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.constraints import Count, LargeCount, check
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.limits import numbers
from dubito.core.params import Params, frozen_names
from dubito.core.randomness import default_generator
from dubito.core.widest import at_home, computing_on
from dubito.fitting.auto_explanation import AutoExplanation
from dubito.fitting.checked_predictions import (
    COMPUTING,
    EXPLAINED,
    ChecksPredictions,
    explained,
    with_a_count,
    with_known_options,
)
from dubito.fitting.checked_predictions import Predictor as Predictor  # families import it from here
from dubito.fitting.diagnosis import Diagnosis, Finding, diagnose
from dubito.fitting.fit_record import FitRecord
from dubito.fitting.functions import Functions, network_functions
from dubito.fitting.history import History
from dubito.fitting.recipe import Recipe
from dubito.fitting.traceable import HasTraceable
from dubito.fitting.training import Training
from dubito.fitting.working_copies import HasWorkingCopies
from dubito.networks.overwriting import keeps_inputs
from dubito.networks.selection import Selection


class Posterior(ChecksPredictions, HasWorkingCopies, HasTraceable, ABC):
    """A posterior over the weights of one network.

    It is immutable: no method changes it, and many threads may use one posterior at once. Predicting works in private
    copies of its network (`working_copy`), so do not change `model` or other attributes either.

    A family defines `sample`, `marginals`, `prior`, `predictor` and what is `saved`; everything else is defined here.
    What a family does not support raises an `UnsupportedError`.

    Args:
        model: A private copy of the network at the posterior's centre, in evaluation mode.
        likelihood: The likelihood, with numbers in place of learned settings.
        recipe: The recipe of this posterior.
        num_data: The number of examples that it was fitted to.
    """

    family: ClassVar[str] = ""
    saved: ClassVar[tuple[str, ...]] = ()
    """The attributes of a family that a file holds; each is an argument of its constructor, by the same name."""
    described: ClassVar[str] = "a posterior such as Laplace().fit(model, data)"
    draws_functions: bool = True
    """Whether sample s of a prediction comes from the same weights at every input."""
    passes_options: ClassVar[bool] = False
    """Whether options of `predict` are passed on to another posterior, which checks them."""
    has_spread: bool = True
    """Whether the weights are uncertain, so that epistemic uncertainty is expected."""
    more_spread: ClassVar[str] = "Use a smaller prior precision (a wider prior), or select more weights."
    """What to do if the epistemic uncertainty is too small."""
    members: Sequence[Posterior] = ()
    """The posteriors of an ensemble; each can be used on its own."""
    noise_shrinks: ClassVar[bool] = True
    """Whether the learned noise of a regression is that of training data, to which the network was fitted."""
    fit_record: FitRecord | None = None
    """What was measured at the end of the fit; None for a posterior that was made in another way."""
    explanation: AutoExplanation | None = None
    """Why `Auto` chose this posterior; None if another recipe was fitted."""
    remaining_gain: float | None = None
    """What one more training step would gain in nats per example, for methods that need a trained network."""
    _families: ClassVar[dict[str, type[Posterior]]] = {}
    _file: str | None = None  # the file from which the posterior was loaded

    def __init__(self, model: nn.Module, likelihood: Likelihood, recipe: Recipe, num_data: int) -> None:
        self.model = model.eval()
        self.likelihood = likelihood
        self.recipe: Any = recipe  # each family knows the fields of its own
        self.num_data = num_data

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, with_checks in (("sample", with_a_count), ("predictor", with_known_options)):
            if name in cls.__dict__:
                setattr(cls, name, with_checks(getattr(cls, name)))
        for name in EXPLAINED & set(cls.__dict__):
            setattr(cls, name, explained(getattr(cls, name)))
        for name in COMPUTING & set(cls.__dict__):
            setattr(cls, name, at_home(getattr(cls, name)))
        if cls.family:
            Posterior._families[cls.family] = cls

    # ------------------------------------------------------------------ defined by each family

    @abstractmethod
    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw posterior samples: one tensor per parameter of the model, with a leading axis ``[S]``."""

    @abstractmethod
    def marginals(self) -> tuple[Params, Params]:
        """Return mean and variance of every weight; the variance is 0 where a weight is not random."""

    @abstractmethod
    def prior(self) -> tuple[Params, Params]:
        """Return the prior mean and variance of every weight; the variance is 0 where a weight is not random."""

    @abstractmethod
    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the function that predicts for one batch of inputs; its posterior samples are drawn here, once.

        The keyword-only arguments of a family are the options of its `predict`; no others are accepted.
        """

    def state(self) -> dict[str, Any]:
        """Return the tensors and plain values from which `from_state` restores the posterior: those of `saved`."""
        own = {name: getattr(self, name) for name in self.saved}
        return {name: value.to_state() if isinstance(value, Selection) else value for name, value in own.items()}

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Restore the posterior from the result of `state`; `model` is a private copy."""
        own = {name: state[name] for name in cls.saved}
        if "selection" in own:
            own["selection"] = Selection.from_state(own["selection"], model)
        return cls(model, likelihood, recipe, num_data, **own)

    @classmethod
    def network_for(cls, model: nn.Module, tree: Mapping[str, Any]) -> nn.Module:
        """Return the network whose weights a file holds, given the user's; a family that changes layers overrides it.

        Args:
            model: The network that the posterior was fitted with, or one of the same architecture; it is not changed.
            tree: What the file holds, with `params` and the result of `state`.
        """
        return model

    def log_evidence(self) -> Tensor:
        """Return the log marginal likelihood of the data, if the family defines one."""
        raise UnsupportedError(f"A {self.family} posterior defines no evidence; Laplace(...) does.")

    def precision_diagonal(self) -> Params:
        """Return the diagonal of the precision matrix, if the family has one; it is 0 where a weight is not random."""
        raise UnsupportedError(f"A {self.family} posterior has no precision matrix; Laplace(...) has one.")

    def conditional_mean(self, keep: Mapping[str, Tensor]) -> Params:
        """Return the mean of the weights where `keep` is true, given that the others are zero.

        Args:
            keep: Boolean masks by parameter name; parameters without a mask are kept whole.
        """
        raise UnsupportedError(f"A {self.family} posterior cannot be conditioned on its weights; Laplace(...) can.")

    def groups(self) -> tuple[Any, ...]:
        """Return the groups of weights that share a scale, each kind with its relevance; none without such a prior."""
        return ()

    def learned_priors(self) -> Mapping[str, Prior]:
        """Return the prior of each parameter, with its learned numbers, if it was trained with all of its weights."""
        return {}

    def diagnose(self) -> Diagnosis:
        """Return what was found about this posterior, whether to trust it, why, and what to do; print it to read it."""
        with computing_on(self.device):
            return diagnose(self)

    def own_findings(self) -> Iterator[Finding]:
        """Yield what this family knows to be wrong with itself, without much work."""
        return iter(())

    def history(self) -> History | None:
        """Return the diagnosis and the traces of the fit for a report, or None if there are none."""
        return None

    @property
    def default_samples(self) -> int:
        """The default number of posterior samples of a prediction."""
        return 32

    def predictors(self, num_samples: int, generator: torch.Generator, **options: Any) -> list[Predictor]:
        """Return one predictor per posterior sample."""
        return [self.predictor(1, generator, **options) for _ in range(num_samples)]

    def functions(self, num_functions: Count, *, generator: torch.Generator | None = None) -> Functions:
        """Draw functions of the inputs that are the same at every input and differentiable in it.

        They return outputs ``[S, *outputs]``: the network at posterior samples of its weights.
        """
        check("num_functions", Count, num_functions)
        return network_functions(self.model, params.unstack(self.sample(num_functions, generator=generator)))

    # ------------------------------------------------------------------ shared by all families

    def predict(
        self,
        x: Any,
        *,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        batch_size: int = 1024,
        keep_samples: bool | None = None,
        top_k: int | None = None,
        **options: Any,
    ) -> Prediction:
        """Predict for a tensor, a tuple or dict of tensors, a Dataset or a DataLoader (whose targets are ignored).

        Args:
            x: The inputs.
            num_samples: The number of weight (or output) samples, if the family draws any.
            generator: The source of randomness; by default the same call gives the same numbers.
            batch_size: The number of rows that are processed at a time.
            keep_samples: Whether the prediction holds all samples or only a summary (`Prediction.summary`). By default
                the samples for tensors are kept, and those for a Dataset or a loader as long as they take little
                memory.
            top_k: Keep only this many classes of each datum or position, the most probable ones; the result is a
                `TopPrediction`. By default all classes are kept.
            options: Further options of the family, such as `link` for Laplace.
        """
        check("keep_samples", bool | None, keep_samples)
        streamed, kept = batches.is_dataset(x), 0
        parts: list[Prediction] = []
        for part in self.predict_batches(
            x, num_samples=num_samples, generator=generator, batch_size=batch_size, top_k=top_k, **options
        ):
            kept += 0 if part.samples is None else part.samples.numel()
            if keep_samples is None and streamed and kept > numbers(limits.current().kept_samples):
                keep_samples, parts = False, [before.summary() for before in parts]
            parts.append(part.summary() if keep_samples is False else part)
        if not parts:
            raise InputError("The input is empty: give at least one row to predict.")
        return parts[0] if len(parts) == 1 else type(parts[0]).cat(parts)

    def predict_batches(
        self,
        x: Any,
        *,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        batch_size: int = 1024,
        top_k: int | None = None,
        **options: Any,
    ) -> Iterator[Prediction]:
        """Return an iterator over the predictions of the batches, with their samples; see `predict`.

        The posterior samples are drawn once for all batches. No prediction is kept in memory.
        """
        count = self.default_samples if num_samples is None else num_samples
        check("num_samples", Count, count)
        check("batch_size", LargeCount, batch_size)
        check("top_k", Count | None, top_k)
        inputs = self._input_batches(x, batch_size)
        return self._predictions(inputs, count, default_generator(generator), options, top_k)

    def _predictions(
        self,
        inputs: Iterator[Any],
        count: int,
        generator: torch.Generator,
        options: dict[str, Any],
        top_k: int | None = None,
    ) -> Iterator[Prediction]:
        with self.working_copy() as own:
            with torch.no_grad(), precision.in_networks_only(), computing_on(self.device):
                predict = own._checked_predictor(count, generator, options, top_k)
            for each in inputs:
                with (
                    torch.no_grad(),
                    precision.in_networks_only(),
                    computing_on(self.device),
                ):  # not around `yield`, where it would hold for the caller
                    found = predict(each)
                yield found

    @at_home
    def update(
        self,
        data: Data,
        *,
        training: Training | None = None,
        generator: torch.Generator | None = None,
        progress: bool = True,
    ) -> Self:
        """Return the posterior after new data, for which this posterior is the prior; this one is not changed.

        A posterior without uncertainty of the weights (`MAP`, `MCDropout`) is fine-tuned, which may forget old data.
        Members of an ensemble learn on in their own way. A family that cannot learn on raises an `UnsupportedError`.

        Args:
            data: The new data.
            training: As for `Recipe.fit`, for families that are trained. Laplace needs none: by default its mean moves
                by Gauss-Newton steps, which is exact for linear models.
            generator: As for `Recipe.fit`.
            progress: As for `Recipe.fit`.
        """
        return self._updated(data, training=training, generator=generator, progress=progress)

    def _updated(self, data: Data, **options: Any) -> Any:
        raise UnsupportedError(f"A {self.family} posterior cannot be updated with new data: fit again on all data.")

    def mean(self) -> Params:
        """Return the weights at the posterior's centre."""
        return params.of(self.model)

    def with_likelihood(self, likelihood: Likelihood) -> Posterior:
        """Return the same posterior over the weights with another likelihood, such as another noise."""
        with computing_on(self.device):
            return type(self).from_state(self.model, likelihood, self.recipe, self.num_data, self.state())

    @checked_arguments
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior to one safetensors file, atomically; `dubito.load(path, model)` reads it."""
        io.save(path, "posterior", self._tree())

    def digest(self) -> str:
        """Return a short digest of the posterior's content; what was measured about the fit is not part of it."""
        return io.digest({name: value for name, value in self._tree().items() if name not in self._notes()})

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return first_tensor(self.model).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the network."""
        return first_tensor(self.model).dtype

    def __repr__(self) -> str:
        total, selection = params.num_weights(self.mean()), getattr(self, "selection", None)
        part = f"{selection.num_weights:,} of " if selection is not None and selection.num_weights < total else ""
        return f"<{self.family} posterior over {part}{total:,} weights by {self.recipe!r}>"

    def _notes(self) -> dict[str, Any]:
        """Return what is known about the fit, which is saved and is no part of the posterior's content."""
        notes = {"fit_record": self.fit_record, "explanation": self.explanation}
        return {name: part for name, part in notes.items() if part is not None}

    def _tree(self) -> dict[str, Any]:
        tensors: dict[str, Tensor] = {}
        own, base = params.of(self.model), frozen_names(self.model)
        settings = {"recipe": self.recipe.to_json(tensors), "likelihood": self.likelihood.to_json(tensors)}
        return {
            "family": self.family,
            "settings": {name: json.dumps(value) for name, value in settings.items()},
            "tensors": tensors,
            "num_data": self.num_data,
            "params": {name: value for name, value in own.items() if name not in base},
            **({"base": io.digest({name: own[name] for name in base})} if base else {}),
            "buffers": params.buffers_of(self.model),
            "state": self.state(),
            **({"overwrites": True} if keeps_inputs(self.model) else {}),
            **{name: json.dumps(part.to_dict()) for name, part in self._notes().items()},
        }

    def _input_batches(self, x: Any, batch_size: int) -> Iterator[Any]:
        if batches.is_dataset(x):
            place: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
            source = batches.Source(x, batch_size=batch_size, must_count=False, shard=False, **place)
            yield from (batch.inputs for batch in source.replay())
            return
        inputs = batches.as_tensors(x)
        for start in range(0, batches.num_rows(inputs), batch_size):
            yield batches.place(batches.take(inputs, slice(start, start + batch_size)), self.device, self.dtype)


def first_tensor(model: nn.Module) -> Tensor:
    """Return the first parameter or buffer of a network, whose device and dtype stand for all; else an empty tensor."""
    for tensor in chain(model.parameters(), model.buffers()):  # the others are not walked through
        return tensor
    return torch.empty(0)
