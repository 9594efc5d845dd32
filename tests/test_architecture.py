"""The shape of the code: who may import whom, who may name what, and how long a file may be."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dubito

ROOT = Path(dubito.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
ORDER = re.findall(r"^\d+\. `(\w+)`:", PAGE.read_text(), flags=re.MULTILINE)

# Imports inside of functions that point down the list; each needs a reason, which the page gives.
DOWNWARD = {("recipe", "fitting"), ("point", "laplace"), ("selection", "select")}

HEAVY = {"sklearn", "pandas", "matplotlib", "scipy", "PIL", "jinja2", "pyarrow", "torchvision", "tqdm", "typer", "rich"}


def module_of(file: Path) -> str:
    """Return the name under which the list has a file: that of its folder, or its own."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST, lazy: bool = False, typing: bool = False) -> Iterator[tuple[str, bool, bool]]:
    """Yield what is imported, whether inside of a function, and whether only for the type checker."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((f"{node.module}.{alias.name}", lazy, typing) for alias in node.names)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        checking = typing or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        yield from imports(node, inside, checking)


def internal_imports(file: Path) -> Iterator[tuple[str, bool, bool]]:
    for name, lazy, typing in imports(ast.parse(file.read_text())):
        parts = name.split(".")
        if parts[0] == "dubito" and len(parts) > 1 and (parts[1] in ORDER or (ROOT / parts[1]).exists()):
            yield parts[1], lazy, typing


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_the_list_names_every_module_once() -> None:
    modules = {module_of(file) for file in FILES} - {"__init__"}
    assert sorted(ORDER) == sorted(modules)


@pytest.mark.parametrize("file", [file for file in FILES if file != ROOT / "__init__.py"], ids=relative)
def test_a_module_imports_only_from_modules_above_it(file: Path) -> None:
    own = module_of(file)
    for name, lazy, typing in internal_imports(file):
        if typing or name == own:
            continue
        above = ORDER.index(name) < ORDER.index(own)
        assert above or (lazy and (own, name) in DOWNWARD), f"{relative(file)} imports {name}, which is below it"


def test_every_exception_is_used() -> None:
    found = {(module_of(file), name) for file in FILES for name, lazy, _ in internal_imports(file) if lazy}
    assert found >= DOWNWARD


def names_used(file: Path) -> Iterator[str]:
    """Yield all imports and all dotted names of a file's code; texts and comments do not count."""
    tree = ast.parse(file.read_text())
    yield from (name for name, _, _ in imports(tree))
    yield from (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def test_only_one_file_knows_of_other_processes() -> None:
    knowing = [relative(f) for f in FILES if any(name.startswith("torch.distributed") for name in names_used(f))]
    assert knowing == ["distributed.py"]


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_nothing_that_runs_foreign_code(file: Path) -> None:
    forbidden = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "torch.load", "torch.save", "marshal", "shelve")
    for name in names_used(file):
        assert not any(name == bad or name.startswith(f"{bad}.") for bad in forbidden), name
    calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    assert not [call.id for call in calls if isinstance(call, ast.Name) and call.id in ("eval", "exec", "compile")]


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_no_file_is_too_long(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 400


@pytest.mark.parametrize("file", [file for file in FILES if module_of(file) != "cli"], ids=relative)
def test_heavy_libraries_are_imported_only_where_they_are_used(file: Path) -> None:
    found = imports(ast.parse(file.read_text()))
    assert not {name.split(".")[0] for name, lazy, typing in found if not (lazy or typing)} & HEAVY


def test_the_package_itself_imports_nothing_of_its_own() -> None:
    """So `import dubito` costs next to nothing; how much is measured by benchmarks/import_time.py."""
    code = "import sys, dubito; print(*sorted(m for m in sys.modules if m.startswith(('dubito', 'torch'))))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["dubito"]


def test_every_public_name_can_be_touched() -> None:
    for name in dubito.__all__:
        assert getattr(dubito, name) is not None
    assert set(dubito.__all__) <= set(dir(dubito))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dubito.nothing


def test_no_module_shares_its_name_with_a_public_function() -> None:
    functions = {name for name in dubito.__all__ if callable(getattr(dubito, name))}
    assert not functions & set(ORDER)


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_the_examples_in_docstrings(file: Path) -> None:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    assert doctest.testmod(module, raise_on_error=False).failed == 0
