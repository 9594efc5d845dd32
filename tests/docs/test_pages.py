"""Every page of the docs shows code that runs, and names and files that exist."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dubito
from dubito.cli.app import app
from test_readme import without_numbers

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

# What the examples of a page must print, as patterns; a page with examples that is not here need only run.
PRINTS: dict[str, tuple[str, ...]] = {
    "compression.md": (r"^by rules.PosteriorDamage\(target=0.7\)", "Plan: "),
    "decisions.md": ("flagged: ", "<Rejector: answers ", "classes a set", "online: "),
    "distillation.md": (r"transfer\.\w+\(\)",),
    "ensembles.md": ("3 samples", "3 networks from one run"),
    "groups.md": (r"1\.inputs \d+ of 64 are needed\n3\.inputs \d+ of 30 are needed",),
    "samplers.md": (r"(?m)^2 chain\(s\) of 60 samples\.", "Subspace of 5 directions"),
    "subnetworks.md": ("^Selection of 300 of 1,210 weights", "recommended size", "There is no sweep over sizes"),
}
# What must hold of the variables of a page's examples when they have run.
HOLDS: dict[str, str] = {
    "compression.md": "Path('digits.dubito').stat().st_size < 10_000",
    "groups.md": "codes['1.weight'].bits == 3",
    "rank1.md": "mixture.components == 4",
    "results/subnetworks.md": "posterior.selection.num_weights == 1000 and point.temperature != 1.0",
    "subnetworks.md": "union.sizes[0] == 170",
}


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def examples(page: Path) -> list[str]:
    """Return the code of a page; blocks that need other packages only where these are installed."""
    blocks = re.findall(
        r'^```python(?: title="needs (.*?)")?\n(.*?)^```$', page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    return [code for needed, code in blocks if all(importlib.util.find_spec(name) for name in packages(needed))]


def packages(needed: str) -> list[str]:
    return needed.split(" and ") if needed else []


def shown(page: Path) -> list[str]:
    """Return the lines that a page says are printed."""
    return "".join(re.findall(r"^```text\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)).splitlines()


# The code of the tutorial needs its commands: they run together, below. That on serving runs in tests/uses/serving.
WITH_COMMANDS = ("tables.md", "serving.md")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if examples(page) and name_of(page) not in WITH_COMMANDS], ids=name_of
)
def test_the_examples_run(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # a page may draw its network from the global generator
        exec("\n".join(examples(page)), names)
    printed = capsys.readouterr().out
    for pattern in PRINTS.get(name_of(page), ()):
        assert re.search(pattern, printed), pattern
    lines = {without_numbers(line) for line in printed.splitlines()}
    assert [line for line in shown(page) if without_numbers(line) not in lines] == []
    assert eval(HOLDS.get(name_of(page), "True"), {**names, "Path": Path})


def test_the_commands_of_the_tutorial_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code and commands of the page on tables, in their order, in one folder."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```$", (DOCS / "tables.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "page"}
    for language, code in blocks:
        if language == "python":
            exec(code, names)
            continue
        for line in code.splitlines():
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # the command line prints them
                result = CliRunner().invoke(app, shlex.split(line)[1:], prog_name="dubito")
            assert result.exit_code == 0, f"{line}: {result.stderr}"
    rows = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert "Rom" in {row["town"] for row in rows}
    assert names["found"]["decision"].tolist() == ["answer", "ask"]


def test_every_command_has_a_line_and_every_line_a_command() -> None:
    page = (DOCS / "command-line.md").read_text()
    shown = set(re.findall(r"`dubito ([a-z]+)", page))
    assert {command.name or command.callback.__name__ for command in app.registered_commands} - {"version"} <= shown
    for command in shown:
        assert CliRunner().invoke(app, [command, "--help"], prog_name="dubito").exit_code == 0


def test_every_expectation_belongs_to_a_page() -> None:
    with_examples = {name_of(page) for page in PAGES if examples(page)}
    assert {*PRINTS, *HOLDS} <= with_examples
    assert len(with_examples) >= 11


def test_files_exist() -> None:
    missing = []
    for page in PAGES:
        files = re.findall(r"\b((?:benchmarks|examples)/[a-z0-9_]+\.py)", page.read_text())
        missing += [(name_of(page), file) for file in files if not (ROOT / file).is_file()]
    assert not missing


def test_names_exist() -> None:
    unknown = []
    public = "|".join(name for name in dubito.__all__ if dubito._PUBLIC[name][1] is None)
    for page in PAGES:
        named = set(re.findall(rf"`((?:dubito|{public})\.[A-Za-z_.0-9]*\w)[`(]", page.read_text()))
        full = {name: name if name.startswith("dubito.") else f"dubito.{name}" for name in named}
        unknown += [(name_of(page), name) for name in named if not exists(full[name])]
    assert not unknown


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one (of a class of one, and so on)."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part) and part not in getattr(found, "__dataclass_fields__", {}):
                return False
            found = getattr(found, part, None)
        return True
    return False


def test_the_rules_of_pruning_exist() -> None:
    page = (DOCS / "compression.md").read_text()
    table = page[page.index("## Which weights go") : page.index("Without a rule")]
    named = re.findall(r"^\| `(\w+)\(", table, flags=re.MULTILINE)
    assert len(named) >= 5
    assert all(issubclass(getattr(dubito.rules, name), dubito.rules.Rule) for name in named)


def test_the_settings_of_mixtures_exist() -> None:
    named = set(re.findall(r"`(\w+)=", (DOCS / "rank1.md").read_text()))
    assert named
    assert named <= {*dubito.Rank1().fields(), *dubito.BatchEnsemble().fields()}


def test_the_walks_of_the_architecture_name_files() -> None:
    page = (DOCS / "architecture.md").read_text()
    walks = page[page.index("## Five walks") : page.index("## One fit loop")]
    assert walks.count("\n**") == 5
    for walk in walks.split("\n**")[1:]:
        files = re.findall(r"^\| `([\w/.]+)` \|", walk, flags=re.MULTILINE)
        assert 5 < len(files) <= 10
        assert all((ROOT / "src" / "dubito" / file).exists() for file in files)
