"""One name for one thing: the glossary defines each term once, and classes and words have one meaning in the code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import dubito

ROOT = Path(dubito.__file__).parent
GLOSSARY = (Path(__file__).parents[1] / "docs" / "glossary.md").read_text()
# Public names that both exist in the field: the method and the distribution, the likelihood and the prior.
SHARED = {"Dirichlet", "Laplace", "StudentT"}
# Words with a single meaning, and the folders that may use them as names.
ONLY_IN = {
    "plan": {"uses/compression"},  # which weights are removed
    "seeds": {"methods", "uses", "cli"},  # of random generators, never the columns of a product
    "belief": set(),
    "slope": set(),
    "doubt": set(),
}
# Spellings that have one form now; the old one is accepted with a warning by `old_fields` and `old_values` only.
OLD = {"lowrank": "low-rank", "healthy": "trustworthy"}


@cache
def trees() -> dict[str, ast.Module]:
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in sorted(ROOT.rglob("*.py"))}


@cache
def names(tree: ast.AST) -> set[str]:
    """Return the variables, arguments and attributes of a file."""
    kinds = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr"}
    return {getattr(node, kinds[type(node)]) for node in ast.walk(tree) if type(node) in kinds}


def test_the_glossary_defines_each_term_once() -> None:
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", GLOSSARY, flags=re.MULTILINE)
    assert len(terms) > 50
    assert [term for term, count in Counter(terms).items() if count > 1] == []


def test_a_class_name_means_one_thing() -> None:
    classes = Counter(
        node.name.lstrip("_") for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in classes.items() if count > 1} == SHARED


def test_words_with_one_meaning_are_used_where_they_belong() -> None:
    for word, folders in ONLY_IN.items():
        used = [file for file, tree in trees().items() if names(tree) & {word, f"{word}s"}]
        outside = [file for file in used if not any(file.startswith(folder) for folder in folders)]
        assert outside == [], f"'{word}' has one meaning, see docs/glossary.md"


def test_one_spelling_for_one_thing() -> None:
    for old, new in OLD.items():
        using = [file for file, tree in trees().items() if old in names(tree)]
        assert using == [], f"write {new}"
