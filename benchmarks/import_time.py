"""Time of `import dubito` beyond `import torch`: medians of five interleaved runs in new processes.

    python benchmarks/import_time.py

It must be at most 0.3 seconds. The second line also uses the names that a first script needs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

RUNS = 5
LIMIT = 0.3
STATEMENTS = {
    "import torch": "import torch",
    "import torch, dubito": "import torch, dubito",
    "... and MAP, Laplace, evaluate": "import torch, dubito; dubito.MAP, dubito.Laplace, dubito.evaluate",
}
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def measure(statement: str) -> float:
    """Return the seconds that one statement takes in a new process."""
    command = [sys.executable, "-c", TIMED.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    for statement in STATEMENTS.values():
        measure(statement)  # once for the disk's cache
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(RUNS):
        for name, statement in STATEMENTS.items():
            seconds[name].append(measure(statement))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base, *others = medians
    print(f"{base:<32} {medians[base]:6.3f} s")
    for name in others:
        print(f"{name:<32} {medians[name]:6.3f} s   {medians[name] - medians[base]:+.3f} s")
    cost = medians[others[0]] - medians[base]
    print(f"import dubito costs {cost:.3f} s over import torch; the limit is {LIMIT} s")
    return 0 if cost <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
