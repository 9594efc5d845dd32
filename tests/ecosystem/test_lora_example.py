"""`examples/lora.py` at its smallest, on random tokens."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dubito import Training
from extras import needs

needs("transformers")
needs("peft")
EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.py"


def test_the_methods_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("example_lora", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    lora = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lora)
    sizes = {"LENGTH": 8, "WORDS": 50, "WIDTH": 64, "LABELS": 24, "HELD_OUT": 8, "RANK": 2, "MEMBERS": 2, "EPOCHS": 1}
    brief = {"FINE_TUNING": Training(epochs=1, batch_size=12, lr=1e-3), "REMOVED": (0.0, 0.5)}
    for name, value in {**sizes, **brief}.items():
        monkeypatch.setattr(lora, name, value)
    tokens = torch.randint(2, 50, (40, 8), generator=torch.Generator().manual_seed(0))
    labelled = (tokens, tokens[:, 0] % 2)
    found = lora.run(0, lora.pretrain(tokens), labelled, labelled, tokens.flip(1))
    files = {name: scores["file, kB"] for name, scores in found["scores"].items()}
    assert files["Laplace-LoRA"] < files["Laplace-LoRA, whole factors"] / 2
    assert all(math.isfinite(value) for scores in found["scores"].values() for value in scores.values())
    whole = [by_share[0.0] for by_share in found["pruned"].values()]
    assert max(whole) - min(whole) < 1e-5  # nothing was removed
    assert len(lora.table([found, found]).splitlines()) == 2 + len(files)
    assert "Laplace-LoRA" in capsys.readouterr().out


def test_a_missing_package_is_named() -> None:
    code = f"import sys, runpy; sys.modules['peft'] = None; sys.argv = ['lora.py', '--backbone', 'x']; " \
           f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("pip install 'dubito[ecosystem]'.")
