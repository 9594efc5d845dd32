"""Add the pages beside docs/ to the site (changes, contributing, security), and fetch nothing from a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Files of the repository that are pages of the site, and their names there.
BESIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    from mkdocs.structure.files import File

    for source, name in BESIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write links between the pages of docs/ and those beside it as the site has them."""
    for source, name in BESIDE.items():
        up = "../" * page.file.src_uri.count("/")
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}", f"]({up}{name}", markdown)
    if page.file.src_uri in BESIDE.values():
        markdown = markdown.replace("](docs/", "](")
    return markdown


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Take the theme's stand-in for workers, which it would fetch from a network, from this site."""
    up = "../" * page.url.count("/")
    return output.replace("https://unpkg.com/iframe-worker/shim", f"{up}js/frame-worker.js")
