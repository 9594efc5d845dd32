"""The shape of the code: which room may use which, who may name what, and how long a file may be."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import dubito

ROOT = Path(dubito.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
INSIDE = [file for file in FILES if file.parent != ROOT]
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
ROOMS = re.findall(r"^\d+\. `(\w+)`:", PAGE.read_text(), flags=re.MULTILINE)

# Arrows against the order of the rooms; each needs a reason, which the page gives.
AGAINST_THE_ORDER: set[tuple[str, str]] = set()

HEAVY = {"sklearn", "pandas", "matplotlib", "scipy", "PIL", "jinja2", "pyarrow", "torchvision", "tqdm", "typer", "rich"}


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def room_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0]


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


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


def looked_up(tree: ast.AST) -> Iterator[str]:
    """Yield the modules of classes that are found by their name: ``find("Laplace")``, ``dubito.Laplace``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("find", "parse", "import_module"):
            text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            value = dubito.__dict__.get("_PUBLIC", {}).get(str(text).split("(")[0])
            if value is not None:
                yield value[0]
        elif isinstance(node, ast.Attribute) and node.attr in dubito._PUBLIC and ast.unparse(node.value) == "dubito":
            yield dubito._PUBLIC[node.attr][0]


def used(file: Path) -> Iterator[str]:
    """Yield the modules of ours that a file uses when it runs: imports, those inside of functions, and look-ups."""
    for name, _, typing in imports(tree_of(file)):
        if not typing and name.startswith("dubito."):
            first = name.split(".")[1]
            yield dubito._PUBLIC[first][0] if first in dubito._PUBLIC and first not in ROOMS else name
    yield from looked_up(tree_of(file))


@cache
def arrows() -> dict[tuple[str, str], list[str]]:
    """Return which room uses which, with the files that do."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in INSIDE:
        for name in used(file):
            pair = (room_of(file), name.split(".")[1])
            if pair[0] != pair[1] and pair[1] in ROOMS:
                found.setdefault(pair, []).append(relative(file))
    return found


def picture() -> str:
    """Return the picture of the rooms: an arrow for every pair that is not implied by others."""
    uses = {pair for pair in arrows() if pair not in AGAINST_THE_ORDER}

    def reaches(start: str, goal: str, without: tuple[str, str]) -> bool:
        following = [b for a, b in uses if a == start and (a, b) != without]
        return goal in following or any(reaches(step, goal, without) for step in following)

    direct = sorted(pair for pair in uses if not reaches(*pair, pair))
    dotted = sorted(pair for pair in arrows() if pair in AGAINST_THE_ORDER)
    lines = [f"    {a} --> {b}" for a, b in direct] + [f"    {a} -.-> {b}" for a, b in dotted]
    return "\n".join(["```mermaid", "graph BT", *lines, "```"])


def test_ten_rooms_and_nothing_else_at_the_top() -> None:
    names = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert names - {"sklearn.py"} == {*ROOMS, "__init__.py", "py.typed"}
    assert len(ROOMS) <= 10


def test_every_room_says_what_it_is_for() -> None:
    for room in ROOMS:
        sentence = (ast.get_docstring(tree_of(ROOT / room / "__init__.py")) or "").splitlines()[0]
        assert sentence.endswith("."), room
        assert len(sentence) > 30, room


def test_arrows_between_rooms_point_one_way() -> None:
    for (own, other), files in arrows().items():
        above = ROOMS.index(other) < ROOMS.index(own)
        assert above or (own, other) in AGAINST_THE_ORDER, f"{own} must not use {other}, but {files} do"
    assert set(arrows()) >= AGAINST_THE_ORDER


def test_the_picture_is_what_the_imports_say() -> None:
    assert picture() in PAGE.read_text(), f"put this into {PAGE.name}:\n{picture()}"


def test_methods_use_map_and_no_other_method() -> None:
    found = set()
    for file in (file for file in INSIDE if room_of(file) == "methods"):
        own = file.relative_to(ROOT).parts[1]
        for name in used(file):
            other = name.split(".")[2] if name.startswith("dubito.methods.") else own
            if other not in (own, "map") and own != "auto":  # which chooses among all of them
                found.add((own, other))
    assert not found


@cache
def names_used(file: Path) -> set[str]:
    """Return all imports and all dotted names of a file's code; texts and comments do not count."""
    tree = tree_of(file)
    dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return dotted | {name for name, _, _ in imports(tree)}


def test_only_one_file_knows_of_other_processes() -> None:
    knowing = [relative(f) for f in FILES if any(name.startswith("torch.distributed") for name in names_used(f))]
    assert knowing == ["core/distributed.py"]


def test_one_way_to_watch_a_network_and_one_to_replace_its_modules() -> None:
    # a hook that stays is that of `overwriting`; modules are replaced by `swapping.put`
    homes = {"register_forward": {"networks/watching.py", "networks/overwriting.py"}, "set_submodule": set()}
    for call, home in homes.items():
        using = {relative(f) for f in FILES if any(f".{call}" in name for name in names_used(f))}
        assert using == home, f"{call} is called elsewhere"


def test_nothing_that_runs_foreign_code() -> None:
    forbidden = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "torch.load", "torch.save", "marshal", "shelve")
    for file in FILES:
        for name in names_used(file):
            assert not any(name == bad or name.startswith(f"{bad}.") for bad in forbidden), (relative(file), name)
        calls = [node.func for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)]
        called = {call.id for call in calls if isinstance(call, ast.Name)}
        assert not called & {"eval", "exec", "compile"}, relative(file)


def test_no_file_is_too_long() -> None:
    lengths = {relative(file): len(file.read_text().splitlines()) for file in FILES}
    assert not {name: length for name, length in lengths.items() if length > 400}


def defined(statement: ast.stmt) -> list[str]:
    """The names that a statement at the top of a file gives a meaning; an overload repeats its function's name."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [] if any("overload" in ast.unparse(each) for each in statement.decorator_list) else [name]
        case ast.Assign(targets=targets):
            nodes = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            return [node.id for node in nodes if isinstance(node.ctx, ast.Store)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [each.asname or each.name for each in names]
    return []


def test_no_name_of_a_file_is_given_two_meanings() -> None:
    """When files are joined, a constant of one must not replace that of the other."""
    for file in FILES:
        names = [name for statement in tree_of(file).body for name in defined(statement) if name != "_"]
        assert not {name for name in names if names.count(name) > 1}, relative(file)


def test_heavy_libraries_are_imported_only_where_they_are_used() -> None:
    for file in (file for file in FILES if room_of(file) not in ("cli", "sklearn.py")):
        found = imports(tree_of(file))
        early = {name.split(".")[0] for name, lazy, typing in found if not (lazy or typing)}
        assert not early & HEAVY, relative(file)


def test_the_package_itself_imports_nothing_of_its_own() -> None:
    """So `import dubito` costs next to nothing; how much is measured by benchmarks/import_time.py."""
    code = "import sys, dubito; print(*sorted(m for m in sys.modules if m.startswith(('dubito', 'torch'))))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["dubito"]


def test_type_checkers_see_every_public_name() -> None:
    """They read `__all__` and the imports below it, and run nothing."""
    body = ast.parse(Path(dubito.__file__).read_text()).body
    assigned = {ast.unparse(each.targets[0]): each.value for each in body if isinstance(each, ast.Assign)}
    (checked,) = [each.body for each in body if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"]
    imported = {alias.name for each in checked if isinstance(each, ast.ImportFrom) for alias in each.names}
    assert {*ast.literal_eval(assigned["__all__"]), "sklearn"} == imported == set(dubito._PUBLIC)


def test_every_public_name_can_be_touched() -> None:
    for name in dubito.__all__:
        assert getattr(dubito, name) is not None
    assert set(dubito.__all__) <= set(dir(dubito))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dubito.nothing


def test_public_modules_can_be_imported_by_their_public_name() -> None:
    for name, (room, attribute) in dubito._PUBLIC.items():
        if attribute is None:
            module = importlib.import_module(f"dubito.{name}")
            assert module is importlib.import_module(room) is getattr(dubito, name)
            assert module.__name__ == module.__spec__.name == room
    inside = importlib.import_module("dubito.ensembles.swag")
    assert inside is importlib.import_module("dubito.methods.ensembles.swag")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dubito.ensembles.nothing")


def test_no_room_shares_its_name_with_a_public_function() -> None:
    functions = {name for name in dubito.__all__ if callable(getattr(dubito, name))}
    assert not functions & set(ROOMS)


def test_the_examples_in_docstrings() -> None:
    for file in (file for file in FILES if ">>>" in file.read_text()):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        assert doctest.testmod(module, raise_on_error=False).failed == 0, relative(file)
