"""The constants of a recorded graph, and what a rule that rewrites it looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx


class Constants:
    """The constants of a graph.

    Args:
        graph: The graph.
        values: The values of its constants, to which new ones are added.

    Attributes:
        made: What rules made and may use again, by what it was made of.
    """

    def __init__(self, graph: fx.Graph, values: dict[fx.Node, Any]) -> None:
        self.graph, self.values = graph, values
        self.made: dict[Any, fx.Node] = {}

    def get(self, node: Any) -> Tensor | None:
        """Return the value of a number or a constant of floating type; None for other nodes."""
        if isinstance(node, int | float) and not isinstance(node, bool):
            return torch.tensor(node)
        found = self.values.get(node) if isinstance(node, fx.Node) else None
        return found if isinstance(found, Tensor) and found.is_floating_point() else None

    def makes(self, node: Any) -> bool:
        """Return whether a node is a constant of floating type, or made of constants alone when a file is loaded."""
        if self.get(node) is not None:
            return True
        return isinstance(node, fx.Node) and bool(node.all_input_nodes) and all(map(self.makes, node.all_input_nodes))

    def add(self, value: Tensor) -> fx.Node:
        """Return the node of a new constant, before all others."""
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            node = self.graph.get_attr(f"constant_{len(self.values)}")
        self.values[node] = value.contiguous()
        return node


# Returns what an operation is replaced by, or None.
Rule = Callable[[fx.Graph, fx.Node, Constants], fx.Node | None]
