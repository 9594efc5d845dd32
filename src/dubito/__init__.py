"""Dubito: one posterior over the weights, two dividends.

The network knows what it does not know (calibrated predictions, out-of-distribution detection, rejection) and drops
what it does not need (pruning, shrinking, quantization).

    posterior = dubito.MAP().fit(model, train_loader)
    prediction = posterior.predict(x)
    scores = dubito.evaluate(posterior, test_loader)
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The public surface, imported when first touched, so that `import dubito` is quick: names by module, modules by room.
_NAMES = {
    "dubito.beliefs.prediction": ("Prediction",),
    "dubito.core.grammar": ("parse",),
    "dubito.fitting.loading": ("load",),
    "dubito.fitting.posterior": ("Posterior",),
    "dubito.fitting.training": ("Training",),
    "dubito.methods.auto": ("Auto",),
    "dubito.methods.ensembles": ("Ensemble", "MCDropout", "MIMO", "Packed", "SWAG", "Snapshot"),
    "dubito.methods.heads": ("DKL", "SNGP", "VBLL"),
    "dubito.methods.laplace": ("Laplace",),
    "dubito.methods.map": ("MAP",),
    "dubito.methods.mcmc": ("HMC", "SGMCMC", "SVGD"),
    "dubito.methods.rank1": ("BatchEnsemble", "Rank1"),
    "dubito.methods.variational": ("Variational",),
    "dubito.networks.selection": ("Selection",),
    "dubito.uses.comparison": ("compare",),
    "dubito.uses.compression": ("compress",),
    "dubito.uses.compression.sharing": ("share_weights",),
    "dubito.uses.decisions": ("acquire",),
    "dubito.uses.export": ("export",),
    "dubito.uses.reporting": ("evaluate", "report"),
    "dubito.uses.transfer": ("distill",),
}
_MODULES = {
    "dubito": ("data", "select", "sklearn"),
    "dubito.beliefs": ("kernels", "likelihoods", "objectives", "priors"),
    "dubito.core": ("errors",),
    "dubito.fitting": ("loggers",),
    "dubito.methods": ("ensembles", "mcmc", "rank1", "variational"),
    "dubito.networks": ("models",),
    "dubito.uses": ("compression", "decisions", "metrics", "optimization", "runs", "serving", "transfer"),
    "dubito.uses.compression": ("rules",),
}
# name -> (module, attribute, or None for the module itself)
_PUBLIC: dict[str, tuple[str, str | None]] = {
    **{name: (module, name) for module, names in _NAMES.items() for name in names},
    **{name: (f"{room}.{name}", None) for room, names in _MODULES.items() for name in names},
}

# spelled out, because type checkers do not run code; without the estimators, for which scikit-learn would be imported
__all__ = [
    "DKL", "HMC", "MAP", "MIMO", "SGMCMC", "SNGP", "SVGD", "SWAG", "VBLL", "Auto", "BatchEnsemble", "Ensemble",
    "Laplace", "MCDropout", "Packed", "Posterior", "Prediction", "Rank1", "Selection", "Snapshot", "Training",
    "Variational", "acquire", "compare", "compress", "compression", "data", "decisions", "distill", "ensembles",
    "errors", "evaluate", "export", "kernels", "likelihoods", "load", "loggers", "mcmc", "metrics", "models",
    "objectives", "optimization", "parse", "priors", "rank1", "report", "rules", "runs", "select", "serving",
    "share_weights", "transfer", "variational",
]  # fmt: skip

if TYPE_CHECKING:
    from dubito import data, select, sklearn
    from dubito.beliefs import kernels, likelihoods, objectives, priors
    from dubito.beliefs.prediction import Prediction
    from dubito.core import errors
    from dubito.core.grammar import parse
    from dubito.fitting import loggers
    from dubito.fitting.loading import load
    from dubito.fitting.posterior import Posterior
    from dubito.fitting.training import Training
    from dubito.methods import ensembles, mcmc, rank1, variational
    from dubito.methods.auto import Auto
    from dubito.methods.ensembles import MIMO, SWAG, Ensemble, MCDropout, Packed, Snapshot
    from dubito.methods.heads import DKL, SNGP, VBLL
    from dubito.methods.laplace import Laplace
    from dubito.methods.map import MAP
    from dubito.methods.mcmc import HMC, SGMCMC, SVGD
    from dubito.methods.rank1 import BatchEnsemble, Rank1
    from dubito.methods.variational import Variational
    from dubito.networks import models
    from dubito.networks.selection import Selection
    from dubito.uses import compression, decisions, metrics, optimization, runs, serving, transfer
    from dubito.uses.comparison.compare import compare
    from dubito.uses.compression import rules
    from dubito.uses.compression.compress import compress
    from dubito.uses.compression.sharing import share_weights
    from dubito.uses.decisions import acquire
    from dubito.uses.export import export
    from dubito.uses.reporting import evaluate, report
    from dubito.uses.transfer import distill


class _PublicModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Let ``from dubito.priors import Normal`` find a public module in its room, here `dubito.beliefs.priors`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        room = self._in_its_room(fullname)
        return None if room in (None, fullname) else importlib.machinery.ModuleSpec(fullname, self, origin=room)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state  # the import system has put the other name's in its place

    @staticmethod
    def _in_its_room(fullname: str) -> str | None:
        package, _, rest = fullname.partition(".")
        name, dot, below = rest.partition(".")
        module, attribute = _PUBLIC.get(name, (None, None)) if package == __name__ else (None, None)
        return f"{module}{dot}{below}" if module and attribute is None else None


sys.meta_path.insert(0, _PublicModules())


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dubito' has no attribute '{name}'")
    module, attribute = _PUBLIC[name]
    loaded = importlib.import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
