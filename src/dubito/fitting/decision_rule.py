"""`DecisionRule`: what turns the predictions of a posterior into decisions, saved and loaded like a posterior."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from dubito.core import io
from dubito.core.arguments import checked_arguments
from dubito.core.constraints import check
from dubito.core.widest import at_home
from dubito.fitting.posterior import Posterior

# Methods that compute on the device of the network.
COMPUTING = {"detect", "ends", "labelled_scores", "margin", "nonconformity", "observed", "predict", "scores"}


class DecisionRule(ABC):
    """A rule with numbers that were fitted to calibration data: a threshold, a level.

    `save` writes it to one file, with its posterior unless that is stored elsewhere; ``dubito.load(path, model)`` reads
    it. A subclass defines `state` and `from_state`.
    """

    posterior: Posterior
    saved: ClassVar[Mapping[str, Any]] = {}
    """The attributes that are plain values, each with the annotation that a file must satisfy."""
    _kinds: ClassVar[dict[str, type[DecisionRule]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in COMPUTING & set(cls.__dict__):
            setattr(cls, name, at_home(getattr(cls, name)))
        DecisionRule._kinds[cls.__name__] = cls

    def saved_values(self) -> dict[str, Any]:
        """Return the attributes of `saved`."""
        return {name: getattr(self, name) for name in self.saved}

    @classmethod
    def with_saved(cls, posterior: Posterior, state: Mapping[str, Any]) -> Self:
        """Return a rule that has nothing but its posterior and the attributes of `saved`, after a check."""
        found = object.__new__(cls)
        found.posterior = posterior
        for name, kind in cls.saved.items():
            check(name, kind, state[name])
            setattr(found, name, state[name])
        return found

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the tensors and plain values from which `from_state` restores the rule."""

    @classmethod
    @abstractmethod
    def from_state(cls, posterior: Posterior, state: Mapping[str, Any]) -> Self:
        """Restore the rule from the result of `state`."""

    @checked_arguments
    def save(self, path: str | os.PathLike[str], *, with_posterior: bool = True) -> None:
        """Write the rule to one safetensors file, atomically; `dubito.load` reads it.

        Args:
            path: The file.
            with_posterior: Whether the file also holds the posterior: ``dubito.load(path, model)`` then needs only the
                network. Without it the file is small, and ``dubito.load(path, posterior)`` needs the same posterior.
        """
        tree = {"rule": type(self).__name__, "state": self.state(), "of": self.posterior.digest()}
        io.save(path, "decision rule", tree | ({"posterior": self.posterior._tree()} if with_posterior else {}))
