"""Build the network of a run: one by name, or one that a function in the user's file makes; and load its weights."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import io
from dubito.core.errors import DubitoError, FileFormatError, InputError, MissingDataError, UnsupportedError
from dubito.data import DataSet, Vocabulary
from dubito.networks.models import build
from dubito.networks.models.known_noise import NoiseColumn

# What stands for a network that was given as a module, which a folder cannot build again.
IN_MEMORY = "a network in memory"
_FUNCTION = re.compile(r"(?P<path>.+\.py):(?P<name>\w+)")


@dataclass(frozen=True)
class NetworkSource:
    """How to build a network again.

    Attributes:
        text: A network by name, such as ``"mlp(hidden=[50])"``, or a function in a file, ``"net.py:build"``.
        input_shape: The shape of one input.
        outputs: The number of outputs.
        vocabulary: The number of tokens, where inputs are tokens.
        path: The absolute path of the file with the function.
        sha256: The digest of that file.
        noise: The feature that is the known noise, its centre and its unit; see `NoiseColumn`. None if there is none.
    """

    text: str
    input_shape: tuple[int, ...]
    outputs: int
    vocabulary: int | None = None
    path: str = ""
    sha256: str = ""
    noise: tuple[int, float, float] | None = None

    @classmethod
    def of(
        cls, text: str, dataset: DataSet, likelihood: Likelihood, noise: tuple[int, float, float] | None = None
    ) -> NetworkSource:
        """Return the source of a network that fits a data set and a likelihood."""
        outputs = likelihood.outputs_for(dataset.num_outputs)
        vocabulary = len(dataset.encoder) if isinstance(dataset.encoder, Vocabulary) else None
        return cls(text, dataset.input_shape, outputs, vocabulary, noise=noise).moved(text)

    def build(self) -> nn.Module:
        """Return the network with new weights; the caller seeds the global generators."""
        if self.noise is None:
            return self._build()
        inner = replace(self, input_shape=(self.input_shape[0] - 1,), outputs=self.outputs // 2, noise=None)
        return NoiseColumn(inner._build(), *self.noise)

    def _build(self) -> nn.Module:
        if self.text == IN_MEMORY:
            raise InputError("The network of this run was given as a module: give it again as model=.")
        if not self.path:
            return build(self.text, self.input_shape, self.outputs, vocabulary=self.vocabulary)
        function = _function(Path(self.path), str(_FUNCTION.fullmatch(self.text)["name"]))  # type: ignore[index]
        try:
            network = _called(function, self.input_shape[0], self.outputs)
        except DubitoError:
            raise
        except Exception as error:
            raise InputError(f"{self.text} failed: {type(error).__name__}: {error}") from error
        if not isinstance(network, nn.Module):
            raise InputError(f"{self.text} must return a torch.nn.Module, but it returned a {type(network).__name__}.")
        return network

    def check_unchanged(self, folder: Path) -> None:
        """Raise if the file with the function is gone, was changed, or lies in the folder of the run.

        Building runs the file's code, so a folder from somebody else must not bring its own.
        """
        if not self.path:
            return
        told = f"The network of this run is made by {self.text}"
        if Path(self.path).is_relative_to(folder.resolve()):
            raise FileFormatError(f"{told} inside of the run's own folder, which is not trusted: give model= yourself.")
        try:
            found = _digest(Path(self.path))
        except MissingDataError as error:
            raise MissingDataError(f"{told}, but {self.path} is gone: give its place as model= (--model).") from error
        if found != self.sha256:
            raise FileFormatError(f"{told}, but {self.path} was changed since: give the network as model= (--model).")

    def moved(self, text: str) -> NetworkSource:
        """Return the source with another file or name, for the same inputs and outputs."""
        match = _FUNCTION.fullmatch(text)
        if match is None:
            return replace(self, text=text, path="", sha256="")
        path = Path(match["path"]).resolve()
        return replace(self, text=text, path=str(path), sha256=_digest(path))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> NetworkSource:
        """Undo `to_json`."""
        noise = value.get("noise")
        read = {"input_shape": tuple(value["input_shape"]), "noise": None if noise is None else tuple(noise)}
        return cls(**{**value, **read})


def load_weights(network: nn.Module, path: str | Path) -> None:
    """Load weights from a safetensors file into a network."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if not path.is_file():
        raise MissingDataError(f"There is no file {path}: check the path of the weights.")
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
        raise UnsupportedError(
            f"{path} may run code when it is loaded: save the weights with "
            "safetensors.torch.save_file(model.state_dict(), 'w.safetensors')."
        )
    try:
        found = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise FileFormatError(f"{path} is not a safetensors file ({' '.join(str(error).split())[:200]}).") from error
    try:
        io.check_shapes(path, found, network.state_dict())
    except FileFormatError as error:
        raise FileFormatError(f"{error} Give the network as --model.") from error
    network.load_state_dict(found)


def _called(function: Callable[..., Any], inputs: int, outputs: int) -> Any:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [each for each in inspect.signature(function).parameters.values() if each.kind in kinds]
    needed = sum(each.default is inspect.Parameter.empty for each in taken)
    if needed > 2:
        raise InputError(f"The function of the network takes {needed} arguments: it may take (inputs, outputs).")
    return function(inputs, outputs) if len(taken) >= 2 else function()


def _function(path: Path, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"dubito_network_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise InputError(f"{path} has no function '{name}'; it has {', '.join(known[:10]) or 'none'}.")
    return function


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        raise MissingDataError(f"There is no file {path}: check the path of the network's file.") from error
