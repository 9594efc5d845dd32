"""A last layer of 1,000 classes on 512 features: time and memory of predicting 10,000 inputs.

    python benchmarks/last_layer.py [--classes 1000] [--features 512] [--inputs 10000] [--train 4096]

Each structure is fitted and used in its own process, on one thread. The peak memory is that of the whole process,
including torch, model and data; the peak right before the fit is printed too. Goal: seconds, and under 1 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import nn

from dubito import Laplace, select


def megabytes() -> float:
    """Return the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(structure: str, classes: int, features: int, inputs: int, train: int) -> dict[str, float]:
    """Fit and predict once."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, classes))
    data = torch.randn(train, features), torch.randint(classes, (train,))
    test = torch.randn(inputs, features)
    before, start = megabytes(), time.perf_counter()
    recipe = Laplace(structure=structure, weights=select.last_layer(), prior_precision=10.0)  # type: ignore[arg-type]
    posterior = recipe.fit(model, data, progress=False)
    fitted = time.perf_counter()
    prediction = posterior.predict(test)
    predicted = time.perf_counter()
    assert prediction.probs.shape == (inputs, classes)
    assert bool(prediction.log_probs.isfinite().all())
    return {"before": before, "fit": fitted - start, "predict": predicted - fitted, "peak": megabytes()}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"classes": 1000, "features": 512, "inputs": 10_000, "train": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--structure", help="measure this one in this process and print JSON")
    options = parser.parse_args()
    sizes = [options.classes, options.features, options.inputs, options.train]
    if options.structure:
        print(json.dumps(measure(options.structure, *sizes)))
        return
    print(f"{options.classes} classes, {options.features} features, {options.inputs} inputs")
    for structure in ("diag", "kron"):
        found = json.loads(subprocess.check_output([sys.executable, *sys.argv, "--structure", structure]))
        print(
            f"  {structure:<5} fit {found['fit']:6.2f} s   predict {found['predict']:6.2f} s   "
            f"peak {found['peak']:6.0f} MB (before {found['before']:.0f} MB)"
        )


if __name__ == "__main__":
    main()
