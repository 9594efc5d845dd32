"""Count what a server does, and write it in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter

from dubito.uses.serving.service import Answer

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


class CountsByBound:
    """How often a value was at most each of some bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[sum(value > bound for bound in self.bounds)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        """Return the histogram as text; the counts are cumulative."""
        found, seen = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            found.append(f'{name}_bucket{{le="{bound}"}} {seen}')
        return [*found, f"{name}_sum {self.total:.6g}", f"{name}_count {seen}"]


class Telemetry:
    """What a server did since it started. It is used by the event loop alone, so it needs no lock."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.decisions: Counter[str] = Counter()
        self.odd: Counter[str] = Counter()
        self.seconds = CountsByBound(SECONDS)
        self.batches = CountsByBound(ROWS)
        self.in_flight = 0

    def count(self, answer: Answer) -> None:
        """Count the rows of an answer."""
        self.decisions.update(str(row["decision"]) for row in answer.predictions)
        for kind in ("unseen", "outside", "missing"):
            self.odd[kind] += getattr(answer.tally, kind).total()

    def text(self) -> str:
        """Return all numbers in the text format of Prometheus.

        >>> telemetry = Telemetry()
        >>> telemetry.requests["/predict", 200] += 1
        >>> print(telemetry.text().splitlines()[2])
        dubito_requests_total{path="/predict",status="200"} 1
        """
        requests = {f'path="{path}",status="{status}"': count for (path, status), count in self.requests.items()}
        decisions = {f'decision="{name}"': count for name, count in self.decisions.items()}
        odd = {f'kind="{name}"': count for name, count in self.odd.items()}
        lines = [
            *_counter("dubito_requests_total", "Requests by path and status.", requests),
            *_counter("dubito_rows_total", "Rows that were predicted, by decision.", decisions),
            *_counter("dubito_odd_cells_total", "Cells that training did not prepare for, by kind.", odd),
            *_head("dubito_in_flight", "Requests that are being answered.", "gauge"),
            f"dubito_in_flight {self.in_flight}",
            *_head("dubito_predict_seconds", "Time from the head of a request to its answer.", "histogram"),
            *self.seconds.lines("dubito_predict_seconds"),
            *_head("dubito_batch_rows", "Rows that were predicted together.", "histogram"),
            *self.batches.lines("dubito_batch_rows"),
        ]
        return "\n".join(lines) + "\n"


def _head(name: str, told: str, kind: str) -> list[str]:
    return [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]


def _counter(name: str, told: str, values: dict[str, int]) -> list[str]:
    return [*_head(name, told, "counter"), *(f"{name}{{{labels}}} {count}" for labels, count in sorted(values.items()))]
