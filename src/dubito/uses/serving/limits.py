"""What a server accepts at most."""

from __future__ import annotations

from dubito.core.constraints import Count, Positive
from dubito.core.settings import Setting, setting


@setting
class ServingLimits(Setting):
    """Bounds on requests, so that no client can take the memory or the time of the others.

    Attributes:
        rows: The most rows of one request.
        body_bytes: The most bytes of one request.
        body_seconds: How long a client may take to send them.
        cell_characters: The longest text in a cell.
        waiting: How many rows of all requests may wait for their prediction; a further request is refused.
        together: How many rows are predicted in one batch; a request with more rows is a batch of its own.
        connections: The most connections at a time.
    """

    setting_name = "serving.ServingLimits"
    rows: Count = 1000
    body_bytes: Count = 1_000_000
    body_seconds: Positive = 20.0
    cell_characters: Count = 1000
    waiting: Count = 20_000
    together: Count = 1024
    connections: Count = 1000
