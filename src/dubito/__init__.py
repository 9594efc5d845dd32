"""Dubito: one posterior over the weights, two dividends.

The network knows what it does not know (calibrated predictions, out-of-distribution detection, rejection) and drops
what it does not need (pruning, shrinking, quantization).

    posterior = dubito.MAP().fit(model, train_loader)
    prediction = posterior.predict(x)
    scores = dubito.evaluate(posterior, test_loader)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The public surface: name -> (module, attribute); imported when first touched, so that `import dubito` is quick.
_PUBLIC: dict[str, tuple[str, str | None]] = {
    "BatchEnsemble": ("dubito.rank1", "BatchEnsemble"),
    "Ensemble": ("dubito.ensembles", "Ensemble"),
    "HMC": ("dubito.mcmc", "HMC"),
    "Laplace": ("dubito.laplace", "Laplace"),
    "MAP": ("dubito.point", "MAP"),
    "MCDropout": ("dubito.ensembles", "MCDropout"),
    "Rank1": ("dubito.rank1", "Rank1"),
    "SGMCMC": ("dubito.mcmc", "SGMCMC"),
    "SVGD": ("dubito.mcmc", "SVGD"),
    "SWAG": ("dubito.ensembles", "SWAG"),
    "Snapshot": ("dubito.ensembles", "Snapshot"),
    "Training": ("dubito.training", "Training"),
    "Variational": ("dubito.variational", "Variational"),
    "Posterior": ("dubito.posterior", "Posterior"),
    "Prediction": ("dubito.prediction", "Prediction"),
    "Selection": ("dubito.selection", "Selection"),
    "acquire": ("dubito.decisions", "acquire"),
    "compress": ("dubito.compression", "compress"),
    "distill": ("dubito.transfer", "distill"),
    "load": ("dubito.posterior", "load"),
    "parse": ("dubito.grammar", "parse"),
    "evaluate": ("dubito.reporting", "evaluate"),
    "report": ("dubito.reporting", "report"),
    "share_weights": ("dubito.sharing", "share_weights"),
    "compression": ("dubito.compression", None),
    "data": ("dubito.data", None),
    "decisions": ("dubito.decisions", None),
    "ensembles": ("dubito.ensembles", None),
    "errors": ("dubito.errors", None),
    "likelihoods": ("dubito.likelihoods", None),
    "mcmc": ("dubito.mcmc", None),
    "metrics": ("dubito.metrics", None),
    "models": ("dubito.models", None),
    "objectives": ("dubito.objectives", None),
    "priors": ("dubito.priors", None),
    "rank1": ("dubito.rank1", None),
    "rules": ("dubito.rules", None),
    "select": ("dubito.select", None),
    "transfer": ("dubito.transfer", None),
    "variational": ("dubito.variational", None),
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from dubito import (
        compression,
        data,
        decisions,
        ensembles,
        errors,
        likelihoods,
        mcmc,
        metrics,
        models,
        objectives,
        priors,
        rank1,
        rules,
        select,
        transfer,
        variational,
    )
    from dubito.compression import compress
    from dubito.decisions import acquire
    from dubito.ensembles import SWAG, Ensemble, MCDropout, Snapshot
    from dubito.grammar import parse
    from dubito.laplace import Laplace
    from dubito.mcmc import HMC, SGMCMC, SVGD
    from dubito.point import MAP
    from dubito.posterior import Posterior, load
    from dubito.prediction import Prediction
    from dubito.rank1 import BatchEnsemble, Rank1
    from dubito.reporting import evaluate, report
    from dubito.selection import Selection
    from dubito.sharing import share_weights
    from dubito.training import Training
    from dubito.transfer import distill
    from dubito.variational import Variational


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
