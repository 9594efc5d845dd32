"""Turn the formulas of the docs into MathML while the site is built: no script, no font and no network is needed."""

from __future__ import annotations

import html
import re
from typing import Any

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
# What the converter does not know, in words that it does.
SPELLED = {
    r"\arg\m": r"\operatorname{arg}\m",
    **{f"{size}\\{side}Vert": r"\Vert" for size in (r"\big", "") for side in "lr"},
}


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Replace every formula of a page; one that cannot be read stops the build."""
    from latex2mathml.converter import convert

    def to_mathml(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        formula = html.unescape(found[2]).strip()
        for command, spelled in SPELLED.items():
            formula = formula.replace(command, spelled)
        mathml = convert(formula, display=display)
        if "\\" in re.sub(r"<[^>]*>", "", mathml):
            raise ValueError(f"{page.file.src_uri}: a command of this formula is not known: {formula}")
        return f'<div class="formula">{mathml}</div>' if display == "block" else mathml

    return FORMULA.sub(to_mathml, content)
