"""What `report` shows of samplers: their chains and the words about them, and nothing of other posteriors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.decisions import TemperedPosterior
from dubito.errors import NonFiniteError
from reporting_cases import KnownPosterior, number_data
from torch import nn

import dubito
from dubito import HMC, MAP, SGMCMC, SVGD, Training, likelihoods, select
from dubito.uses.reporting import Evaluation, evaluate
from dubito.uses.reporting.parts import Section
from dubito.uses.reporting.sections import sections

pytestmark = pytest.mark.slow

SHORT = {"burn_in": 10, "thinning": 2, "num_samples": 12}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1)


def fit(recipe: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return recipe.fit(model, data(), training=Training(batch_size=20, epochs=2), progress=False)


@pytest.fixture(scope="module")
def posterior() -> Any:
    return fit(SGMCMC(chains=2, **SHORT))


@pytest.fixture(scope="module")
def result(posterior: Any) -> Evaluation:
    return evaluate(posterior, data())


def chain_sections(results: dict[str, Any]) -> list[Section]:
    methods = {name: value if isinstance(value, list) else [value] for name, value in results.items()}
    return [part for part in sections(methods) if part.key.startswith("chains")]


def test_only_samplers_have_chains(result: Evaluation) -> None:
    results = {"map": evaluate(fit(MAP()), data()), "svgd": evaluate(fit(SVGD(5)), data()), "sghmc": result}
    (part,) = chain_sections(results)
    assert (part.key, part.title) == ("chains-2", "Chains: sghmc")
    assert results["map"].curves.chains is None
    assert chain_sections({"map": results["map"], "svgd": results["svgd"]}) == []


def test_the_words_are_those_of_the_diagnosis(posterior: Any, result: Evaluation) -> None:
    (part,) = chain_sections({"sghmc": [result, result]})
    assert "\n".join(part.words) == str(posterior.diagnose())
    assert "2 chain(s) of 12 samples." in part.words
    assert part.note.endswith("Of several seeds the first is shown.")


def test_lines_are_the_chains_and_their_autocorrelation(posterior: Any, result: Evaluation) -> None:
    (part,) = chain_sections({"sghmc": result})
    assert [name for name, _ in part.sets] == ["chain 1", "chain 2"]
    (first, second, weight), = part.groups  # fmt: skip
    index = int(first.caption.removeprefix("output "))
    assert second.caption.startswith("output ")
    for panel, values in ((first, posterior.trace[..., index]), (weight, named_weight(posterior, weight.caption))):
        top, bottom = panel.figure.axes
        assert len(top.lines) == 2
        for k in range(2):
            assert top.lines[k].get_xdata().tolist() == list(range(1, 13))
            assert top.lines[k].get_ydata().tolist() == pytest.approx(values[k].tolist())
            chain = values[k].double() - values[k].double().mean()
            expected = [float(chain[: 12 - lag] @ chain[lag:] / chain.dot(chain)) for lag in range(12)]
            assert bottom.lines[k].get_ydata().tolist() == pytest.approx(expected, abs=1e-9)
        assert top.lines[0].get_color() != top.lines[1].get_color()


def named_weight(posterior: Any, caption: str) -> torch.Tensor:
    """The chains [K, S] of a weight by its name, such as ``0.weight[3, 2]``."""
    name, where = re.fullmatch(r"(.+)\[(.+)\]", caption).groups()  # type: ignore[union-attr]
    members = [posterior.member(i)[name][tuple(map(int, where.split(", ")))] for i in range(posterior.num_particles)]
    return torch.stack(members).reshape(2, -1)


def test_one_chain_needs_no_legend_and_few_samples_no_figure() -> None:
    (part,) = chain_sections({"hmc": evaluate(fit(HMC(burn_in=5, num_samples=6, chains=1, max_depth=3)), data())})
    assert part.sets == ()
    assert len(part.groups[0]) == 3
    assert all(len(panel.figure.axes[0].lines) == 1 for panel in part.groups[0])
    (part,) = chain_sections({"sghmc": evaluate(fit(SGMCMC(burn_in=1, thinning=1, num_samples=2)), data())})
    assert part.groups == ()
    assert any("too few samples" in words for words in part.words)


def test_long_chains_are_thinned() -> None:
    long = SGMCMC("sgld", burn_in=1, thinning=1, num_samples=450, weights=select.layers("2.bias"))
    (part,) = chain_sections({"sgld": evaluate(fit(long), data())})
    top, bottom = part.groups[0][0].figure.axes
    assert top.lines[0].get_xdata().tolist()[:: len(top.lines[0].get_xdata()) - 1] == [1, 450]
    assert len(top.lines[0].get_xdata()) == 200
    assert len(bottom.lines[0].get_xdata()) == 50


def test_chains_survive_json(result: Evaluation) -> None:
    value = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert Evaluation.from_json(value) == result
    del value["curves"]["chains"]  # as a version without them wrote it
    older = Evaluation.from_json(value)
    assert older.curves.chains is None
    assert older.scores == result.scores


def test_wrapped_samplers_show_the_chains_inside(posterior: Any) -> None:
    own, inside = posterior.history(), TemperedPosterior(posterior, 2.0).history()
    assert inside is not None
    assert inside.words == own.words
    assert inside.traces == own.traces
    lines = fit(SGMCMC(weights=select.subspace(2, epochs=1), **SHORT))
    names = [trace.name for trace in lines.history().traces]
    assert re.fullmatch(r"z\[0, [01]\]", names[-1])


def test_the_page(result: Evaluation, tmp_path: Path) -> None:
    attack = "<script>alert('x')</script>"
    text = dubito.report({attack: result, "other": result}, tmp_path / "report.html").read_text("utf-8")
    assert "<script>alert" not in text
    assert text.count('<h2 id="chains-') == 2
    assert text.count(">2 chain(s) of 12 samples.<") == 2
    part = text[text.index('<section id="chains-0"') : text.index('<section id="chains-1"')]
    assert len(re.findall("<figure data-readings=", part)) == 3
    assert "var(--series-1)" in part  # of the second chain, in the legend and in the drawings
    drawings = "".join(re.findall(r"<svg.*?</svg>", part, re.DOTALL))
    assert not re.search(r"#[0-9a-f]{6}\b", drawings)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    again = dubito.report({attack: result, "other": result}, tmp_path / "again.html")
    assert again.read_text("utf-8") == text


def test_measuring_imports_no_matplotlib() -> None:
    code = """
import sys, torch
from torch import nn
import dubito
x = torch.randn(20, 2)
posterior = dubito.SGMCMC(burn_in=2, thinning=1, num_samples=5).fit(nn.Linear(2, 2), (x, x.argmax(1)), progress=False)
assert dubito.evaluate(posterior, (x, x.argmax(1))).curves.chains.traces
print("matplotlib" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]


def test_a_prediction_that_is_not_finite_is_named() -> None:
    x, y = number_data(num_inputs=1)
    noisy = KnownPosterior(likelihoods.HeteroscedasticGaussian(), lambda x, _: (1000 * x.clamp(min=0)).expand(1, -1, 2))
    with pytest.raises(NonFiniteError, match=r"^The data cannot be scored. The prediction is NaN or infinite"):
        evaluate(noisy, (x, y))
    with pytest.raises(NonFiniteError, match=r"^The ood set 'far' cannot be scored. The prediction"):
        evaluate(noisy, (-x.abs(), y), ood={"far": torch.tensor([[-1.0], [1.0]], dtype=torch.float64)})
