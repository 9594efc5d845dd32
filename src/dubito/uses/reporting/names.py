"""Names of methods that a reader understands: a recipe as it is typed becomes words and its settings."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORDS = {
    "Auto": "Chosen automatically",
    "BatchEnsemble": "Batch ensemble",
    "DKL": "Deep kernel learning",
    "Ensemble": "Ensemble",
    "HMC": "Hamiltonian Monte Carlo",
    "Laplace": "Laplace",
    "MAP": "Plain network",
    "MCDropout": "MC dropout",
    "MIMO": "Several inputs and outputs (MIMO)",
    "Packed": "Packed ensemble",
    "Rank1": "Rank-1 network",
    "SGMCMC": "Stochastic-gradient MCMC",
    "SNGP": "Gaussian-process head (SNGP)",
    "SVGD": "Stein variational gradient descent",
    "SWAG": "SWAG",
    "Snapshot": "Snapshot ensemble",
    "VBLL": "Variational last layer",
    "Variational": "Variational inference",
}
_RECIPE = re.compile(r"(?P<name>\w+)\((?P<settings>.*)\)(?P<more>(?:, [\w ]+)?)", re.DOTALL)


def readable(name: str) -> tuple[str, str]:
    """Return a method's name in words and its settings; a name that is no recipe stays as it is.

    >>> readable("Ensemble(members=2)"), readable("Laplace(), compressed"), readable("our network (v2)")
    (('Ensemble', 'members=2'), ('Laplace, compressed', ''), ('our network (v2)', ''))
    """
    found = _RECIPE.fullmatch(name)
    if found is None or found["name"] not in _WORDS:
        return name, ""
    return _WORDS[found["name"]] + found["more"], found["settings"]


def short(names: Iterable[str]) -> list[str]:
    """Return the names in words, with settings only where two would be the same.

    >>> short(["MAP()", "Ensemble(members=2)"]), short(["MAP()", "MAP(temperature=2)"])
    (['Plain network', 'Ensemble'], ['Plain network', 'Plain network (temperature=2)'])
    """
    whole = list(names)
    titles = [readable(name)[0] for name in whole]
    return [title if titles.count(title) == 1 else in_words(name) for name, title in zip(whole, titles, strict=True)]


def in_words(name: str) -> str:
    """Return a method's name in words with its settings behind it.

    >>> in_words("Ensemble(members=2)"), in_words("MAP()")
    ('Ensemble (members=2)', 'Plain network')
    """
    title, settings = readable(name)
    return f"{title} ({settings})" if settings else title
