"""Make the fixture of outputs: what every recipe of the contract suite predicted when the fixture was made.

    python tests/contracts/outputs_fixture.py [NUMBER ...]

With numbers of recipes, only the predictions of these are made (again), on a machine with the same arithmetic; a new
recipe needs that. Without any it writes
``fixtures/outputs.safetensors`` (predictions of every recipe) and ``fixtures/v1/*.safetensors`` (one saved
posterior per family). `test_outputs_fixture.py` compares: a change of the code that is not meant to change numbers must
leave them all as they are, to the last bit. Run this again only when numbers are meant to change, and say so.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_posterior_contract import RECIPES, TASKS, fitted, quantities
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "fixtures"
FILES = FOLDER / "v1"


def probe() -> str:
    """Return a digest of a small training run by torch alone: equal digests mean that bits can be compared."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))
        x, y = torch.randn(45, 4), torch.arange(45) % 3
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        double = torch.linalg.eigh(x.double().T @ x.double())[1]
    total = hashlib.sha256(torch.__version__.encode())
    for tensor in (*model.parameters(), double):
        total.update(tensor.detach().numpy().tobytes())
    return total.hexdigest()


def outputs(index: int, task: str) -> dict[str, Tensor]:
    """Return what one recipe predicts, under names that are unique to it."""
    case = fitted(RECIPES[index], task)
    x = torch.linspace(-2, 2, 40).reshape(10, 4)
    prediction = quantities(case.posterior.predict(x))
    return {f"{task}/{index:02d}/{name}": value.contiguous().clone() for name, value in prediction.items()}


def renew(numbers: list[int]) -> None:
    """Make the predictions of some recipes again, and files of families without one; leave all others as they are."""
    with safe_open(FOLDER / "outputs.safetensors", "pt") as stored:
        if stored.metadata()["probe"] != probe():
            raise SystemExit(
                "This machine's arithmetic differs from that of the other outputs: run this where they were made."
            )
    found = load_file(FOLDER / "outputs.safetensors")
    for index in numbers:
        for task in TASKS:
            found.update(outputs(index, task))
            posterior = fitted(RECIPES[index], task).posterior
            file = FILES / f"{posterior.family}-{task}.safetensors"
            if not file.exists():  # a new family
                posterior.save(file)
    save_file(found, FOLDER / "outputs.safetensors", metadata={"probe": probe()})


def main() -> None:
    """Write the fixture."""
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        renew([int(number) for number in sys.argv[1:]])
        return
    FILES.mkdir(parents=True, exist_ok=True)
    found: dict[str, Tensor] = {}
    seen: set[tuple[str, str]] = set()
    for index, recipe in enumerate(RECIPES):
        for task in TASKS:
            found.update(outputs(index, task))
            posterior = fitted(recipe, task).posterior
            if (posterior.family, task) not in seen:
                seen.add((posterior.family, task))
                posterior.save(FILES / f"{posterior.family}-{task}.safetensors")
    save_file(found, FOLDER / "outputs.safetensors", metadata={"probe": probe()})


if __name__ == "__main__":
    main()
