"""The predictive distribution as a function that torch can record as a graph, and `Posterior.export`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from dubito.core.settings import load_all

if TYPE_CHECKING:
    from dubito.fitting.posterior import Predictor
    from dubito.uses.export import Exported


class Traceable(NamedTuple):
    """A predictive distribution that draws nothing and does not look at values, so that it can be recorded.

    Attributes:
        predict: The function from one batch of inputs to its prediction. It is called once before it is recorded, and
            draws its random numbers then.
        form: What it computes, in a few words: "32 weight samples".
        approximations: How it differs from `Posterior.predict` with the same draws, one sentence each; none if it
            computes the same numbers up to rounding.
        reference_samples: For an approximation, the number of samples of the prediction that it is compared with.
        makes_weights: Whether it makes the weights of members from shared ones. That is for file formats whose runtimes
            compute such constants once, when they load the file.
    """

    predict: Predictor
    form: str
    approximations: tuple[str, ...] = ()
    reference_samples: int | None = None
    makes_weights: bool = False


class HasTraceable(ABC):
    """Base class of posteriors that can be exported."""

    _exporter: ClassVar[Callable[..., Exported] | None] = None  # `uses/export` sets it

    @abstractmethod
    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the function that predicts for one batch of inputs; its posterior samples are drawn here, once."""

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield ways to compute the predictive that can be recorded as a graph, the cheapest first.

        `export` takes the first one that agrees with `predict`. It calls this on a working copy. By default there is
        one, `predictor` itself. A family overrides this if there is a cheaper way.

        Args:
            example: A batch of inputs.
            num_samples: As for `predictor`.
            generator: As for `predictor`.
            options: As for `predictor`.
        """
        yield Traceable(self.predictor(num_samples, generator, **options), f"{num_samples} posterior samples")

    def export(
        self,
        path: str | os.PathLike[str],
        outputs: tuple[str, ...] | None = None,
        *,
        example: Any = None,
        **options: Any,
    ) -> Exported:
        """Write the network with its uncertainty to one ``.onnx`` or ``.pt2`` file, which runs without Dubito.

        Args:
            path: The file. Its ending decides the format.
            outputs: What the file returns. Classes: ``probs, entropy, aleatoric, epistemic, label, set, answer,
                unfamiliar``; regression: ``mean, stddev, aleatoric, epistemic, lower, upper, answer, unfamiliar``.
            example: A batch of inputs, on which the file is compared with `predict`.
            options: See `dubito.uses.export.export`: decisions, preprocessing, tolerance, and the options of `predict`.
        """
        load_all()  # so that the room with the file formats, which builds on this one, is there
        assert HasTraceable._exporter is not None
        return HasTraceable._exporter(self, path, outputs, example=example, **options)
