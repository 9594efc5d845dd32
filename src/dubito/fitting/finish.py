"""Finish a fit: share out the noise of a regression, measure how good the posterior is, and warn if it is not."""

from __future__ import annotations

from dubito.core.batches import Source
from dubito.core.randomness import Stream
from dubito.fitting.automatic import ResolvedTraining
from dubito.fitting.diagnosis import warn_about
from dubito.fitting.fit_record import measure
from dubito.fitting.output_noise import share_noise
from dubito.fitting.posterior import Posterior


def finish(
    posterior: Posterior, source: Source, validation: Source | None, resolved: ResolvedTraining, trains: bool
) -> Posterior:
    """Return the posterior with its record.

    Args:
        posterior: The posterior that the inference gave.
        source: The training data.
        validation: The validation data, or None.
        resolved: The training settings and what held-out examples said.
        trains: Whether the recipe trains for a number of epochs.
    """
    gain = posterior.remaining_gain
    with Stream(0, posterior.device).active():  # for networks that draw random numbers
        if resolved.noise is not None:
            posterior = share_noise(posterior, resolved.noise, source)
        posterior.remaining_gain = gain
        epochs = resolved.training.epochs if trains else None
        if not posterior.likelihood.scores_targets:
            return posterior
        posterior.fit_record = measure(posterior, source, validation, epochs=epochs, found=resolved.found)
    warn_about(posterior)
    return posterior
