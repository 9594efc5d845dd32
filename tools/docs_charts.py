"""Draw the flow charts of the docs (Mermaid's `graph TD` and `graph BT`) as SVG while the site is built.

Mermaid itself is a script of three megabytes that the theme would fetch from a network. Only the part of its language
that the pages use is understood: `a --> b`, `a -->|label| b`, `a["text"]`, `a{"question?"}`, `click a href "page.md"`.
"""

from __future__ import annotations

import html
import re
import textwrap
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
EDGE = re.compile(r"^(\w+)(.*?)-->(?:\|(.+?)\|)?\s*(\w+)(.*)$")
SHAPE = re.compile(r'^\s*([\[{])"(.*)"[\]}]\s*$')
LINK = re.compile(r'^click (\w+) href "([^"]+)"$')
LINE, LETTER, PAD, GAP, RISE = 18, 7.1, 12, 34, 48  # heights, widths and distances in pixels
COLUMNS = 24  # letters in a line of a box


@dataclass
class Node:
    """A box of the chart, or (without lines) a bend of a long arrow."""

    lines: list[str] = field(default_factory=list)
    is_question: bool = False
    link: str | None = None
    rank: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        """The width of the box, from the number of letters in its longest line."""
        return max((len(line) for line in self.lines), default=0) * LETTER + 2 * PAD if self.lines else 2.0

    @property
    def height(self) -> float:
        """The height of the box."""
        return len(self.lines) * LINE + 2 * PAD if self.lines else 0.0


Edge = tuple[str, str, str]


def read(text: str) -> tuple[str, dict[str, Node], list[Edge]]:
    """Return the direction, the boxes and the arrows (from, to, label) of a chart."""
    first, *rest = [line.strip() for line in text.strip().splitlines()]
    nodes: dict[str, Node] = {}
    edges: list[Edge] = []

    def note(name: str, shape: str) -> None:
        node = nodes.setdefault(name, Node([name]))
        if found := SHAPE.match(shape):
            node.lines, node.is_question = textwrap.wrap(found[2], COLUMNS), found[1] == "{"

    for line in rest:
        if link := LINK.match(line):
            nodes[link[1]].link = link[2]
        elif edge := EDGE.match(line):
            note(edge[1], edge[2])
            note(edge[4], edge[5])
            edges.append((edge[1], edge[4], edge[3] or ""))
        else:
            raise ValueError(f"This line of a chart is not understood: {line}")
    return first.split()[1], nodes, edges


def place(nodes: dict[str, Node], edges: list[Edge], upwards: bool) -> tuple[list[tuple[list[str], str]], float, float]:
    """Place the boxes in ranks; return every arrow as the names it passes and its label, and the size of the chart."""
    for _ in nodes:
        for a, b, _label in edges:
            nodes[b].rank = max(nodes[b].rank, nodes[a].rank + 1)
    ways = []
    for number, (a, b, label) in enumerate(edges):
        bends = [f"{number}.{rank}" for rank in range(nodes[a].rank + 1, nodes[b].rank)]
        nodes.update({name: Node(rank=nodes[a].rank + 1 + i) for i, name in enumerate(bends)})
        ways.append(([a, *bends, b], label))
    ranks: list[list[str]] = [[] for _ in range(max(node.rank for node in nodes.values()) + 1)]
    for name, node in nodes.items():
        ranks[node.rank].append(name)
    near: dict[str, list[str]] = {name: [] for name in nodes}
    for way, _label in ways:
        for a, b in pairwise(way):
            near[a].append(b)
            near[b].append(a)
    for _ in range(6):
        for rank in ranks:
            if len(rank) > 1 and any(not nodes[name].lines for name in rank):
                rank.sort(key=lambda name: sum(nodes[other].x for other in near[name]) / len(near[name]))
            left = -(sum(nodes[name].width for name in rank) + GAP * (len(rank) - 1)) / 2
            for name in rank:
                nodes[name].x = left + nodes[name].width / 2
                left += nodes[name].width + GAP
    top = 0.0
    for rank in reversed(ranks) if upwards else ranks:
        height = max(nodes[name].height for name in rank)
        for name in rank:
            nodes[name].y = top + height / 2
        top += height + RISE
    reach = max(abs(node.x) + node.width / 2 for node in nodes.values()) + 4
    return ways, 2 * reach, top - RISE + 8


def draw(text: str) -> str:
    """Return the SVG of a chart."""
    direction, nodes, edges = read(text)
    upwards = direction == "BT"
    ways, width, height = place(nodes, edges, upwards)
    parts = []
    for way, label in ways:
        start, *_, end = (nodes[name] for name in way)
        side = -1 if upwards else 1
        points = [(start.x, start.y + side * start.height / 2), *((nodes[n].x, nodes[n].y) for n in way[1:-1])]
        points.append((end.x, end.y - side * (end.height / 2 + 3)))
        path = f"M{points[0][0]:.0f},{points[0][1]:.0f}"
        for (x, y), (to_x, to_y) in pairwise(points):
            path += f" C{x:.0f},{(y + to_y) / 2:.0f} {to_x:.0f},{(y + to_y) / 2:.0f} {to_x:.0f},{to_y:.0f}"
        parts.append(f'<path class="arrow" d="{path}" marker-end="url(#head)"/>')
        if label:
            (x, y), (to_x, to_y) = points[:2]
            spot = f'x="{(x + to_x) / 2:.0f}" y="{(y + to_y) / 2 + 5:.0f}"'
            parts.append(f'<text class="label" {spot} text-anchor="middle">{html.escape(label)}</text>')
    parts += [box(node) for node in nodes.values() if node.lines]
    size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    head = f'<defs><marker id="head" {size}><path d="M0,0L8,4L0,8z"/></marker></defs>'
    style = f"max-width:{width:.0f}px;min-width:{min(width, 340):.0f}px"
    size = f'viewBox="{-width / 2:.0f} -4 {width:.0f} {height:.0f}" style="{style}"'
    return f'<div class="chart"><svg {size} role="img" aria-label="flow chart">{head}{"".join(parts)}</svg></div>'


def box(node: Node) -> str:
    """Return one box with its text, as a link if it has one."""
    x, y = node.x - node.width / 2, node.y - node.height / 2
    kind = "question" if node.is_question else "answer"
    lines = "".join(
        f'<tspan x="{node.x:.0f}" y="{y + PAD + LINE * (i + 0.72):.0f}">{html.escape(line)}</tspan>'
        for i, line in enumerate(node.lines)
    )
    shape = (
        f'<g class="{kind}"><rect x="{x:.0f}" y="{y:.0f}" width="{node.width:.0f}" height="{node.height:.0f}" rx="6"/>'
        f'<text text-anchor="middle">{lines}</text></g>'
    )
    if node.link is None:
        return shape
    return f'<a href="{html.escape(node.link.replace(".md", ".html"))}">{shape}</a>'


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the charts of a page by pictures."""
    return BLOCK.sub(lambda found: draw(found[1]), markdown)
