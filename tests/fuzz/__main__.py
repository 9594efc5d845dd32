"""Long runs: ``python -m fuzz --cases 100000 --target grammar``; started again, a run goes on where it stopped."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fuzz.engine import Run
from fuzz.targets import TARGETS


def main() -> int:
    """Run some targets up to a number of cases each; the exit code is 1 where there are failures."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="the number of cases of each target, in all")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="which; all by default")
    parser.add_argument("--state", type=Path, default=Path(".fuzz"), help="the folder that remembers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.state.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in options.target or TARGETS:
        run = Run(name, TARGETS[name], options.state)
        run.until(options.cases)
        failed |= bool(run.failures)
        print(run.summary(), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
