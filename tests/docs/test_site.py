"""The docs site: its navigation has every page, its links and anchors lead somewhere, its reference has every name."""

from __future__ import annotations

import importlib.util
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

import dubito

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def in_nav(entries: Any) -> list[str]:
    """Return the pages of the navigation."""
    if isinstance(entries, str):
        return [entries]
    parts = entries.values() if isinstance(entries, dict) else entries
    return [page for part in parts for page in in_nav(part)]


def prose(page: Path) -> str:
    """Return the text of a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Python-Markdown names them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE):
        text = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()))
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    beside = set(tool("docs_pages").BESIDE.values())
    shown = in_nav(CONFIG["nav"])
    assert len(shown) == len(set(shown))
    assert {page.relative_to(DOCS).as_posix() for page in PAGES} - set(shown) == set(), "add these to nav in mkdocs.yml"
    assert set(shown) - beside <= {page.relative_to(DOCS).as_posix() for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_to_pages_and_anchors_lead_somewhere(page: Path) -> None:
    lost = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", prose(page)):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        is_found = file.is_file() and (not anchor or file.suffix != ".md" or anchor[1:] in anchors(file))
        lost += [] if is_found else [target + anchor]
    assert lost == []


def test_the_reference_has_every_public_name() -> None:
    shown = {
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: dubito\.(\S+)", page.read_text(), re.M)
    }
    modules = {name.split(".")[0] for name in shown}
    members = {"acquire": "decisions"}  # shown as members of a module
    assert {name for name in [*dubito.__all__, "sklearn"] if members.get(name, name) not in modules} == set()


def test_the_site_fetches_nothing() -> None:
    assert CONFIG["theme"]["font"] is False
    assert "extra_javascript" not in CONFIG
    assert all("http" not in name for name in CONFIG["extra_css"])
    assert "url(" not in (DOCS / "css" / "site.css").read_text()


def test_charts_are_drawn() -> None:
    chart = (
        'graph TD\n a{"Is it <small>?"} -->|yes| b["one"]\n a -->|no| c\n b --> d\n a --> d\n click b href "map.md"\n'
    )
    drawn = tool("docs_charts").draw(chart)
    svg = ElementTree.fromstring(drawn)
    texts = ["".join(text.itertext()) for text in svg.iter("text")]
    assert sorted(texts) == sorted(["yes", "no", "Is it <small>?", "one", "c", "d"])
    assert [link.get("href") for link in svg.iter("a")] == ["map.html"]
    assert len([path for path in svg.iter("path") if path.get("class") == "arrow"]) == 4
    with pytest.raises(ValueError, match="not understood"):
        tool("docs_charts").draw("graph TD\n a ==> b")


def test_every_chart_of_the_docs_is_understood() -> None:
    charts = tool("docs_charts")
    drawn = [charts.on_page_markdown(page.read_text(), None) for page in PAGES]
    assert sum(text.count('<div class="chart">') for text in drawn) >= 1
    assert not any("```mermaid" in text for text in drawn)


@pytest.mark.parametrize("page", in_nav(next(part["Methods"] for part in CONFIG["nav"] if "Methods" in part)))
def test_a_method_has_equation_code_paper_cost_and_when_not_to(page: str) -> None:
    text = (DOCS / page).read_text()
    assert "```python" in text
    assert "$" in text
    assert re.search(r"arxiv\.org|doi\.org|openreview|papers\.nips", text)
    assert re.search(r"^## (Cost|What it costs)$", text, flags=re.MULTILINE)
    assert re.search(r"^## When .*not to$", text, flags=re.MULTILINE)


def test_the_numbers_of_which_method_are_measured() -> None:
    results = " ".join(page.read_text() for page in (DOCS / "results").glob("*.md"))
    measured = re.findall(r"\d+\.\d{3}", (DOCS / "which-method.md").read_text())
    assert len(measured) > 40
    assert [number for number in measured if number not in results] == []


def test_the_gallery_shows_every_example_with_a_small_picture() -> None:
    text = (DOCS / "gallery.md").read_text()
    shown = set(re.findall(r"`python examples/(\w+\.py)", text))
    assert shown == {path.name for path in (ROOT / "examples").glob("*.py")}
    pictures = re.findall(r"\]\((img/[a-z_]+\.png)\)", text)
    assert len(pictures) == len(shown)
    assert all((DOCS / picture).stat().st_size < 130_000 for picture in pictures)
