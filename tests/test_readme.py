"""What README and CONTRIBUTING show is true: their examples run, their links lead somewhere, their commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dubito
from dubito import models
from dubito.cli.app import app
from dubito.fitting.recipe import Recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING = (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


# The examples of the README go on from each other.
EXAMPLES = [
    (README, "\n".join(blocks(README, "python"))),
    *((CONTRIBUTING, code) for code in blocks(CONTRIBUTING, "python")),
]


def without_numbers(line: str) -> str:
    """Return a line of output without its numbers, which may differ a little on another machine."""
    return re.sub(r"[\d.,]+%?", "#", line)


def execute(code: str, folder: Path) -> str:
    """Run an example as a user would, in a process of its own: what it registers must not reach other tests."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_begins_with_an_example_of_fifteen_lines() -> None:
    example = blocks(README, "python")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize(("page", "code"), EXAMPLES, ids=[f"{p.stem}-{i}" for i, (p, _) in enumerate(EXAMPLES)])
def test_examples_run(page: Path, code: str, tmp_path: Path) -> None:
    printed = execute(code, tmp_path)
    if page == README:
        shown = [line for text in blocks(README, "text") for line in text.splitlines()]
        assert shown
        missing = [line for line in shown if without_numbers(line) not in map(without_numbers, printed.splitlines())]
        assert missing == []
        accuracies = re.findall(r"accuracy (0\.\d+)", printed)
        assert all(float(value) > 0.95 for value in accuracies), printed
        assert {path.name for path in tmp_path.iterdir()} == {"report.html", "posterior.safetensors"}


@pytest.mark.parametrize("page", [README, CONTRIBUTING], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_make_commands_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    shown = set(re.findall(r"\bmake (\w+)\b", "\n".join(blocks(README, "bash") + blocks(CONTRIBUTING, "bash"))))
    assert {"demo", "test"} <= shown <= targets


def test_the_readme_lists_the_recipes_and_networks_that_exist() -> None:
    (recipes,) = re.findall(r"^\| recipes \| (.*) \|$", README.read_text(), flags=re.MULTILINE)
    (networks,) = re.findall(r"^\| networks \| (.*) \|$", README.read_text(), flags=re.MULTILINE)
    public = {name: getattr(dubito, name) for name in dubito.__all__}
    existing = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, Recipe)}
    assert set(re.findall(r"`([A-Z]\w+)`", recipes)) == existing
    assert set(re.findall(r"`(\w+)`", networks)) == set(models.names())


def test_commands_of_dubito_exist() -> None:
    shown = re.findall(r"dubito ((?:data )?[a-z]+)(?= --| shows)", README.read_text())
    assert "compare" in shown
    for command in shown:
        assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0
    options = set(re.findall(r"--[a-z]+", "\n".join(blocks(README, "bash"))))
    help_text = "".join(CliRunner().invoke(app, [command, "--help"]).stdout for command in ("fit", "compare"))
    assert [option for option in options if option not in help_text] == []
