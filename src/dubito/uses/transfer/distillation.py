"""`distill`: train one network to give the predictions of a posterior."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dubito.beliefs.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dubito.beliefs.prediction import ClassPrediction, Prediction
from dubito.core import batches, distributed
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data, Source
from dubito.core.constraints import Count, Positive
from dubito.core.errors import InputError, UnsupportedError
from dubito.fitting.automatic import chosen_batch_size
from dubito.fitting.posterior import Posterior
from dubito.fitting.training import Training
from dubito.methods.map.posterior import PointPosterior
from dubito.methods.map.recipe import MAP
from dubito.uses.fixed_draws import FixedDraws, inputs_of
from dubito.uses.transfer.distillation_losses import (
    Concentration,
    DistillationLoss,
    GaussianWithUncertaintyMoments,
    Means,
    Moments,
    SoftBernoulli,
    SoftLabels,
)
from dubito.uses.transfer.student_likelihoods import Dirichlet, GaussianWithUncertainty

Keep = Literal["mean", "distribution"]

# Rows that the teacher answers at a time, where all of the data is in memory.
ROWS = 1024


@distributed.together()
@checked_arguments
def distill(
    posterior: Posterior,
    student: nn.Module,
    data: Data | Tensor,
    keep: Keep = "mean",
    *,
    validation: Data | Tensor | None = None,
    training: Training | None = None,
    num_samples: Count | None = None,
    temperature: Positive = 1.0,
    concentration_weight: Positive | None = None,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> PointPosterior:
    """Train a plain network to give the predictions of a posterior in one forward pass.

    ``keep="mean"`` keeps the mean predictive: the student is an ordinary network for the teacher's likelihood.
    ``keep="distribution"`` also keeps the epistemic uncertainty: a classifier becomes a Dirichlet
    (`transfer.Dirichlet`, one output per class), a regression has three outputs per target
    (`transfer.GaussianWithUncertainty`).

    The targets of `data` are not used. For data in memory the teacher predicts once, before training; for a loader it
    predicts every batch as it comes, so that augmented inputs get predictions of their own.

    Args:
        posterior: The teacher.
        student: The network to train, from the weights it has; it is not changed.
        data: Inputs to train on: a tensor, or data as for `fit`. More inputs than the teacher was trained on help.
        keep: ``"mean"`` or ``"distribution"``.
        validation: Held-out inputs for early stopping.
        training: Epochs, learning rate, checkpoints and so on.
        num_samples: How many samples the teacher draws; its own default if not given.
        temperature: Above 1, the class probabilities are softened (`transfer.SoftLabels`), which shows how a confident
            teacher ranks the other classes.
        concentration_weight: λ of a Dirichlet student: the weight of its concentration (the epistemic uncertainty)
            relative to its mean, 0.02 if not given. A larger one fits the uncertainty better and the mean worse.
        generator: The source of randomness; by default the same call gives the same result.
        progress: Show a progress bar when on a terminal.

    Returns:
        A posterior like any other, a single point whose ``.model`` is the plain network.
    """
    teacher = _teacher(posterior, num_samples, generator)
    loss, likelihood = _loss(posterior, _first_answer(teacher, data), keep, temperature)
    if concentration_weight is not None:
        if not isinstance(loss, Concentration):
            raise InputError("`concentration_weight` is for classes with keep='distribution': leave it out.")
        loss = Concentration(weight=concentration_weight)

    def answer(inputs: Any) -> Tensor:
        return loss.answers(teacher.predict(inputs))

    training = training or Training()
    taught, num_data = _taught(data, answer, training)
    held_out = None if validation is None else _in_memory(inputs_of(posterior, validation, "validation data"), answer)
    point = MAP().fit(
        student, taught, likelihood=loss, validation=held_out, training=training, num_data=num_data,
        generator=generator, progress=progress,
    )  # fmt: skip
    if isinstance(loss, Means):
        likelihood = Gaussian(noise=_total_noise(point, teacher, data))
    return PointPosterior(point.model, likelihood, MAP(train=False), point.num_data)


def loss_and_data(
    posterior: Posterior,
    data: Data | Tensor,
    training: Training,
    temperature: float,
    generator: torch.Generator | None,
    wanted: Likelihood,
) -> tuple[DistillationLoss, Any, int | None]:
    """Return the likelihood of a teacher's mean predictive, data with its answers, and the number of data if unknown.

    Training a network on these distills the teacher into it. The network has the likelihood `wanted`, which must be for
    the same kind of targets as the teacher's.
    """
    teacher = _teacher(posterior, None, generator)
    loss, likelihood = _loss(posterior, _first_answer(teacher, data), "mean", temperature)
    if not isinstance(wanted, type(likelihood)):
        raise InputError(
            f"The teacher predicts {type(likelihood).__name__} targets, the network {type(wanted).__name__} targets: "
            "use a teacher of the same task."
        )
    return loss, *_taught(data, lambda inputs: loss.answers(teacher.predict(inputs)), training)


def _teacher(posterior: Posterior, num_samples: int | None, generator: torch.Generator | None) -> FixedDraws:
    """Return the teacher, which gives the same answers in every process."""
    if generator is not None:
        distributed.share_generator(generator)
    return FixedDraws(posterior, num_samples, generator)


def _loss(
    posterior: Posterior, prediction: Prediction, keep: Keep, temperature: float
) -> tuple[DistillationLoss, Likelihood]:
    """Return what the student is taught, and the likelihood it has afterwards."""
    own = posterior.likelihood
    classes = isinstance(prediction, ClassPrediction) and not isinstance(own, Bernoulli)
    if temperature != 1 and not (classes and keep == "mean"):
        raise InputError(
            "temperature softens answers that are the mean over classes, which these are not: leave it out."
        )
    if isinstance(prediction, ClassPrediction):
        if keep == "distribution":
            return Concentration(), Dirichlet()
        return (SoftLabels(temperature=temperature), Categorical()) if classes else (SoftBernoulli(), Bernoulli())
    if keep == "distribution":
        return GaussianWithUncertaintyMoments(), GaussianWithUncertainty()
    if isinstance(own, HeteroscedasticGaussian | GaussianWithUncertainty):
        return Moments(), HeteroscedasticGaussian()
    if isinstance(own, Gaussian):
        noise = prediction.aleatoric.mean().sqrt()  # type: ignore[attr-defined]  # a first guess, for the scale
        distributed.share_([noise])
        return Means(noise=float(noise)), Gaussian()
    raise UnsupportedError(f"A teacher with the likelihood {own!r} cannot be distilled.")


def _first_answer(teacher: FixedDraws, data: Any) -> Prediction:
    alone = batches.bare_inputs(data, "The data")
    if alone is not None:
        return teacher.predict(alone[:8])
    place: dict[str, Any] = {"device": teacher.posterior.device, "dtype": teacher.posterior.dtype}
    return teacher.predict(Source(data, batch_size=8, must_count=False, **place).first().inputs)


def _taught(data: Any, answer: Callable[[Any], Tensor], training: Training) -> tuple[Any, int | None]:
    """Return the data with the teacher's answers as targets, and its size where it cannot be counted."""
    alone = batches.bare_inputs(data, "The data")
    if alone is not None:
        return _in_memory(alone, answer), None
    source = Source(data)
    if source.pair is not None:
        return _in_memory(source.pair[0], answer), None
    if isinstance(data, Dataset):
        size = chosen_batch_size(training, source.num_data)
        data = DataLoader(data, batch_size=size, shuffle=training.shuffle)
    return _TaughtBatches(data, answer), source.num_data


def _in_memory(inputs: Any, answer: Callable[[Any], Tensor]) -> tuple[Any, Tensor]:
    starts = range(0, batches.num_rows(inputs), ROWS)
    return inputs, torch.cat([answer(batches.take(inputs, slice(start, start + ROWS))).cpu() for start in starts])


class _TaughtBatches:
    """Batches of a loader, with the teacher's predictions in place of their targets."""

    def __init__(self, loader: Any, answer: Callable[[Any], Tensor]) -> None:
        self.loader, self.answer = loader, answer
        for name in ("generator", "sampler", "batch_sampler"):  # what a loader draws from, to be resumed exactly
            setattr(self, name, getattr(loader, name, None))

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for raw in self.loader:
            inputs = batches.as_tensors(batches.split(raw)[0])
            yield inputs, self.answer(inputs).cpu()


def _total_noise(point: Any, teacher: FixedDraws, data: Any) -> float:
    r"""Return the noise of the Gaussian nearest to the teacher, $\sigma^2 = \mathrm{mean}(v + (\mu - m)^2)$."""
    sums = torch.zeros(2, dtype=torch.float64)
    inputs = inputs_of(teacher.posterior, data, "data")
    for start in range(0, batches.num_rows(inputs), ROWS):
        some = batches.take(inputs, slice(start, start + ROWS))
        mine, theirs = point.predict(some).mean, teacher.predict(some)
        error = theirs.variance + (theirs.mean - mine).square()  # type: ignore[attr-defined]
        sums += torch.tensor([float(error.double().sum()), error.numel()], dtype=torch.float64)
    distributed.sum_([sums])
    return math.sqrt(sums[0] / sums[1])
