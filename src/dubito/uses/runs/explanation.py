r"""Explain which columns of a row made its prediction uncertain, by Shapley values.

The uncertainty u of a row x is compared with that of other rows b, which were held out. In a random order, the columns
of b are replaced by those of x one by one; the contribution of a column is the mean change of u when it is replaced:

$$\sum_j \phi_j = u(x) - \operatorname{mean}_b u(b)$$

exactly, for any number of orders (Shapley 1953; Štrumbelj & Kononenko 2014, https://doi.org/10.1007/s10115-013-0679-x).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.prediction import ClassPrediction, Prediction, RegressionPrediction
from dubito.core.errors import InputError
from dubito.data import Table, Tally
from dubito.data.tables import as_table
from dubito.uses.runs.prediction import TablePrediction
from dubito.uses.runs.run import TableRun

# How many other rows a row is compared with, each with its own order of the columns.
NUM_ORDERS = 64


@dataclass(frozen=True)
class Cause:
    """What one column did to the uncertainty of a row.

    Attributes:
        column: The name of the column.
        value: Its value, as text.
        epistemic: Its part of the epistemic uncertainty: of a variance in original units, or of nats.
        total: Its part of the total uncertainty: of the variance, or of the entropy.
        remark: Whether the training rows had no such value.
    """

    column: str
    value: str
    epistemic: float
    total: float
    remark: str = ""


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why a row is uncertain; ``print`` it.

    Attributes:
        causes: The columns, those that added most epistemic uncertainty first.
        prediction: What the run says about the row.
        usual: The mean epistemic and total uncertainty of the rows that it was compared with.
    """

    causes: tuple[Cause, ...]
    prediction: TablePrediction
    usual: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        own = {name: values.tolist()[0] for name, values in self.prediction.columns.items()}
        return {"prediction": own, "usual": dict(zip(("epistemic", "total"), self.usual, strict=True)),
                "causes": [vars(cause) for cause in self.causes]}  # fmt: skip

    def __str__(self) -> str:
        own = self.prediction
        lines = [
            f"prediction {_text(own['prediction'][0])}, decision {own['decision'][0]}, "
            f"unfamiliar {own['unfamiliar'][0]:.3g}",
            f"epistemic uncertainty {own['epistemic'][0]:.4g}; of other rows {self.usual[0]:.4g} on average",
        ]
        rows = [("column", "value", "epistemic", "total", "")]
        rows += [(c.column, c.value, f"{c.epistemic:+.4g}", f"{c.total:+.4g}", c.remark) for c in self.causes]
        widths = [max(len(row[place]) for row in rows) for place in range(5)]
        for row in rows:
            cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def explain(run: TableRun, table: Any, row: int, *, num_orders: int = NUM_ORDERS, seed: int = 0) -> Explanation:
    """Explain which columns made the prediction of a row uncertain.

    Args:
        run: The run.
        table: The table, or the path of a file.
        row: The number of the row, counted from 1.
        num_orders: How many other rows the row is compared with.
        seed: Draws these rows, and the orders of the columns.
    """
    table = as_table(table)
    if not 1 <= row <= len(table):
        raise InputError(f"The table has {len(table):,} rows, counted from 1; there is no row {row}.")
    chosen, tally = table.take(slice(row - 1, row)), Tally()
    inputs = run.encoder.encode(chosen, tally)
    spans = run.encoder.spans()
    generator = torch.Generator().manual_seed(seed)
    others = run.parts["held_out"][0]
    others = others[torch.randint(len(others), (num_orders,), generator=generator)]
    orders = torch.stack([torch.randperm(len(spans), generator=generator) for _ in range(num_orders)])
    steps = _steps(inputs[0], others, orders, list(spans.values()))
    found = run.predict_inputs(steps.flatten(0, 1)).distribution
    values = torch.stack(_uncertainty(found), dim=-1).reshape(num_orders, len(spans) + 1, 2)
    changes = values.diff(dim=1)
    parts = torch.zeros(len(spans), 2, dtype=torch.float64)
    parts.index_add_(0, orders.flatten(), changes.reshape(-1, 2)).div_(num_orders)
    causes = [
        Cause(name, _cell(chosen, name), float(parts[place, 0]), float(parts[place, 1]), tally.remark(name))
        for place, name in enumerate(spans)
    ]
    causes.sort(key=lambda cause: (-cause.epistemic, -cause.total))
    usual = values[:, 0].mean(0).tolist()
    return Explanation(tuple(causes), run.predict_inputs(inputs), (usual[0], usual[1]))


def _steps(row: Tensor, others: Tensor, orders: Tensor, spans: list[slice]) -> Tensor:
    """Return each other row, then with one column after the other replaced ``[orders, columns + 1, features]``."""
    found = [others]
    for step in range(orders.shape[1]):
        now = found[-1].clone()
        for which, column in enumerate(orders[:, step].tolist()):
            now[which, spans[column]] = row[spans[column]]
        found.append(now)
    return torch.stack(found, dim=1)


def _uncertainty(prediction: Prediction) -> tuple[Tensor, Tensor]:
    if isinstance(prediction, ClassPrediction):
        return prediction.epistemic.double(), prediction.entropy.double()
    assert isinstance(prediction, RegressionPrediction)
    return prediction.epistemic[:, 0].double(), prediction.variance[:, 0].double()


def _cell(table: Table, name: str) -> str:
    return _text(table[name].values[0])


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
