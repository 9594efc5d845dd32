"""Nothing can be added without its test: each kind of thing is listed, and each has a case in the table that tests it.

CONTRIBUTING.md names, for every common change, the one place to write and the test here that fails until it is right.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dubito
from dubito import Laplace, Training, data, likelihoods, priors, rules, select
from dubito.core.settings import Setting
from dubito.fitting.recipe import Recipe
from dubito.networks.layers import registry
from dubito.select.rule import SelectionRule
from dubito.uses.compression.rules import Rule
from dubito.uses.metrics.scores import SCORES
from oracles import seeded

TESTS = Path(__file__).parent


def module(path: str) -> Any:
    """Import a file of tests by its path."""
    file = TESTS / path
    name = file.stem
    if name not in sys.modules:
        sys.path.insert(0, str(file.parent))
        importlib.import_module(name)
    return sys.modules[name]


def classes(home: Any, base: type) -> set[type]:
    """Return the classes of a public module that derive from a base, without the abstract ones."""
    found = {getattr(home, name) for name in home.__all__}
    concrete = {one for one in found if isinstance(one, type) and issubclass(one, base)}
    return {one for one in concrete if not getattr(one, "__abstractmethods__", None)}


def test_every_layer_has_drawn_cases() -> None:
    cases = (TESTS / "networks/layers/layer_cases.py").read_text()
    known = [kind.__name__ for kind in registry.registered_types() if kind.__module__.startswith("torch.nn")]
    assert len(known) > 15
    families = {name.rstrip("123d") for name in known if name != "SyncBatchNorm"}  # it runs on accelerators only
    assert [name for name in families if name not in cases] == []


def test_every_prior_is_compared_with_an_oracle() -> None:
    values, groups = module("beliefs/priors/test_priors_values.py"), module("beliefs/priors/test_priors_groups.py")
    tested = {type(prior) for prior, _ in values.CASES} | {type(prior) for prior in groups.GROUP_PRIORS}
    improper = {priors.LogUniform, priors.ARD}  # they have no density to compare: their divergences are tested
    mixed = {priors.Mixture, priors.ByName}  # made of others, with files of tests of their own
    bases = {priors.GroupPrior}
    assert classes(priors, priors.Prior) - tested - improper - mixed - bases == set()


def test_every_likelihood_is_compared_with_autograd_and_quadrature() -> None:
    tested = {type(case[0]) for case in module("beliefs/likelihoods/test_likelihoods_derivatives.py").CASES.values()}
    assert classes(likelihoods, likelihoods.Likelihood) == tested


def test_every_recipe_is_in_the_contract_suite() -> None:
    tested = {type(recipe) for recipe in module("contracts/test_posterior_contract.py").RECIPES}
    assert classes(dubito, Recipe) - tested == {dubito.Auto}  # whose posterior is that of another recipe


SELECTION_RULES: list[SelectionRule] = [
    select.all(),
    select.largest_magnitude(4),
    select.largest_variance(4),
    select.last_layer(),
    select.layers("0"),
    select.mask({"0.weight": torch.eye(3, 2) > 0}),
    select.random(4),
    select.subnetwork(4),
]
SMALL = seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))).float()
PAIR = (torch.linspace(-1, 1, 16).reshape(8, 2), torch.arange(8) % 2)


@pytest.mark.parametrize("rule", SELECTION_RULES, ids=repr)
def test_selection_rules_choose_the_same_weights_again(rule: SelectionRule) -> None:
    tensors: dict[str, torch.Tensor] = {}
    again = Setting.from_json(rule.to_json(tensors), tensors)
    first, second = (one.resolve(SMALL, PAIR) for one in (rule, again))
    assert first == second
    assert 0 < first.num_weights <= first.total
    assert (~rule | rule).resolve(SMALL, PAIR).num_weights == first.total


def test_every_selection_rule_is_in_the_table() -> None:
    elsewhere = {
        select.subspace,  # it chooses no single weights; tests/select/test_select_subspace.py
        select.adapters,  # this network has none; tests/fitting/test_adapters.py
    }
    assert classes(select, SelectionRule) - elsewhere == {type(rule) for rule in SELECTION_RULES}


PRUNING_RULES: list[Rule] = [
    rules.GroupRelevance(0.5),
    rules.LogAlpha(target=0.5),
    rules.Magnitude(0.5),
    rules.ModelReduction(),
    rules.PosteriorDamage(0.5),
    rules.Random(0.5),
    rules.SignalToNoise(target=0.5),
    rules.ZeroDensity(target=0.5),
]


def test_every_pruning_rule_is_in_the_table() -> None:
    assert classes(rules, Rule) == {type(rule) for rule in PRUNING_RULES}


@pytest.mark.parametrize("rule", PRUNING_RULES, ids=repr)
def test_pruning_rules_score_every_weight(rule: Rule) -> None:
    if isinstance(rule, rules.GroupRelevance):
        pytest.skip("GroupRelevance needs a posterior over groups; tests/uses/compression/test_compression_groups.py")
    posterior = Laplace(structure="diag", prior_precision=1.0).fit(SMALL, PAIR)
    found = dubito.compress(posterior, rule, allow_empty=True)  # some would remove all of so small a network
    assert {name for name, _ in found.model.named_parameters()} == set(posterior.mean())
    assert Setting.from_json(rule.to_json()) == rule


def test_every_score_is_measured() -> None:
    classifier = dubito.MAP(train=False).fit(SMALL, PAIR, training=Training(epochs=1))
    numbers = (PAIR[0], PAIR[0].sin())
    regressor = dubito.MAP(train=False).fit(SMALL, numbers, likelihood="gaussian", training=Training(epochs=1))
    results = [dubito.evaluate(classifier, PAIR, ood={"far": 9 * PAIR[0]}), dubito.evaluate(regressor, numbers)]
    measured = str([result.to_json() for result in results])
    assert [name for name in SCORES if f"'{name}'" not in measured and name not in ("seconds", "width")] == []


def test_every_score_has_a_test_of_its_value() -> None:
    """A sum is compared in `test_metrics_accumulator`, which lists them all; any other function has tests by name."""
    text = "".join(file.read_text() for file in sorted((TESTS / "uses/metrics").glob("test_*.py")))
    functions = {score.function.__name__ for score in SCORES.values() if score.function is not None}
    assert len(functions) > 3
    assert [name for name in sorted(functions) if f"metrics.{name}(" not in text] == []


def test_every_corruption_grows_with_its_severity() -> None:
    """`tests/data/test_data_corruptions.py` runs over all kinds; here only that there is no other list."""
    text = (TESTS / "data/test_data_corruptions.py").read_text()
    assert text.count('parametrize("kind", KINDS)') >= 3
    assert len(data.corruptions.KINDS) >= 5


def calls(function: ast.AST) -> set[str]:
    """Return the packages that a test asks for by `needs`, and the helpers that may ask for one."""
    found = [each for each in ast.walk(function) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]
    names = {
        str(each.args[0].value) for each in found if each.func.id == "needs" and isinstance(each.args[0], ast.Constant)
    }
    return names | {"torch_pruning" for each in found if each.func.id == "needs_graph"}


def test_every_test_that_needs_an_extra_is_run_with_it() -> None:
    """`make test` skips them, so what `make test-extras` does not list is never run."""
    listed = re.search(r"^WITH_EXTRAS := ((?:.*\\\n)*.*)", (TESTS.parent / "Makefile").read_text(), re.MULTILINE)
    assert listed
    given = set(re.findall(r"tests/\S+", listed[1]))
    always = {"pandas", "pyarrow.parquet", "openpyxl"}  # of the extra `dev`
    needed = set()
    for file in sorted(TESTS.rglob("test_*.py")):
        path, text = file.relative_to(TESTS.parent).as_posix(), file.read_text()
        for outer in ast.parse(text).body if "needs" in text else ():
            tests = outer.body if isinstance(outer, ast.ClassDef) else [outer]
            prefix = f"{path}::{outer.name}" if isinstance(outer, ast.ClassDef) else path
            needed |= {
                f"{prefix}::{each.name}" for each in tests if isinstance(each, ast.FunctionDef) and calls(each) - always
            }
    assert len(needed) > 10
    homes = tuple(f"{each}{end}" for each in given for end in ("/", "::"))
    assert {test for test in needed if test not in given and not test.startswith(homes)} == set()
