"""The page on variational inference shows code that runs, and names and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dubito import priors

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "variational.md").read_text()


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 10
    exec("\n".join(blocks), {"__name__": "page"})
    assert "divergence from the prior" in capsys.readouterr().out


def test_what_is_named_exists() -> None:
    assert all(hasattr(priors, name) for name in re.findall(r"priors\.([A-Z]\w+)", PAGE))
    files = [*re.findall(r"`((?:benchmarks|examples)/[a-z_]+\.py)`", PAGE)]
    files += [f"docs/{path}" for path in re.findall(r"\]\(((?:img/)?[a-z-]+\.(?:png|md))\)", PAGE)]
    assert len(files) > 4
    assert all((ROOT / file).is_file() for file in files), files


def test_the_example_of_continual_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks: fine-tuning has forgotten much of the first, the posterior little."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import continual_digits

    found = continual_digits.main(2)
    assert found["variational"] > found["fine-tuning"] + 0.05
    assert found["variational"] > 0.85


def test_the_optima_of_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """At α = 1 the conditionals of the posterior, at α → 0⁺ its marginals, and narrower as α grows."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import renyi

    _, covariance = renyi.exact(*renyi.data())
    scales = [renyi.optimum(alpha, covariance) for alpha in renyi.ORDERS.values()]
    precision = covariance.inverse()
    assert (scales[1] - precision.diagonal().rsqrt()).abs().max() < 0.01
    assert (scales[3] - covariance.diagonal().sqrt()).abs().max() < 0.02
    means = [float(scale.mean()) for scale in scales]
    assert means == sorted(means)
