"""Twenty candidates to choose from: what is measured is what `pick` makes again, and the page says how."""

from __future__ import annotations

import html
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from compression_cases import table
from dubito.compression import Exploration
from dubito.errors import InputError
from torch import nn

import dubito
from dubito import MAP, Laplace, Posterior, Training, compression, rules
from dubito.uses.compression.exploration import TARGETS
from dubito.uses.compression.report import num_macs

DATA, HELD_OUT = table(), table(1)
FAR = {"far": HELD_OUT[0] + 1}


@cache
def posterior() -> Posterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DATA[0].shape[1], 20), nn.ReLU(), nn.Linear(20, int(DATA[1].max()) + 1))
    trained = MAP().fit(model, DATA, training=Training(epochs=20, lr=0.01), progress=False)
    return Laplace(prior_precision=1.0).fit(trained.model, DATA, progress=False)


@cache
def found() -> Exploration:
    return compression.explore(posterior(), data=HELD_OUT, train=DATA, ood=FAR, progress=False)


@pytest.mark.slow
def test_every_candidate_is_made_again_by_its_number(tmp_path: Path) -> None:
    assert len(found().candidates) > 15
    for each in found().candidates[::5]:
        made = compression.pick(posterior(), each.number, data=HELD_OUT, train=DATA)
        assert (bool(made.plan.units), made.rule.target) == (each.structure == "units", each.target)
        assert made.save(tmp_path / "small") == each.num_bytes
        assert num_macs(made.model, HELD_OUT[0]) / num_macs(made.dense, HELD_OUT[0]) == pytest.approx(each.macs)
        loaded = compression.load(tmp_path / "small", made.dense)
        again = dubito.evaluate(MAP(train=False).fit(loaded, DATA, progress=False), HELD_OUT)
        assert again.scores["nll"] == pytest.approx(each.scores["nll"], rel=1e-5)


def test_sizes_fall_and_the_network_before_is_whole() -> None:
    units = [each for each in found().candidates if each.structure == "units"]
    assert [each.macs for each in units] == sorted((each.macs for each in units), reverse=True)
    assert found().before.macs == 1
    far = dubito.evaluate(MAP(train=False).fit(posterior().model, DATA, progress=False), HELD_OUT, ood=FAR).ood["far"]
    assert found().before.scores["auroc far"] == pytest.approx(far["entropy"]["auroc"])
    assert found().candidates[-1].num_bytes < found().candidates[12].num_bytes < found().before.num_bytes
    assert len(str(found()).splitlines()) == len(found().candidates) + len(found().notes) + 2


@pytest.mark.slow
def test_what_would_leave_a_layer_empty_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DATA[0].shape[1], 20), nn.ReLU(), nn.Linear(20, int(DATA[1].max()) + 1))
    with torch.no_grad():
        model[2].weight.mul_(1e-4)  # its weights go first
    small = MAP(train=False).fit(model, DATA, progress=False)
    other = compression.explore(small, rules.Magnitude(), data=HELD_OUT, progress=False)
    missing = set(range(1, len(TARGETS) + 1)) - {each.number for each in other.candidates}
    assert other.notes[-1] == f"Not made, because a layer would be empty: {', '.join(map(str, sorted(missing)))}."
    assert missing
    with pytest.raises(InputError, match=f"a layer would be empty: pick a smaller number than {max(missing)}"):
        compression.pick(small, max(missing), rules.Magnitude(), data=HELD_OUT)


@pytest.mark.slow
def test_a_posterior_over_what_is_left_is_scored() -> None:
    one = compression.pick(posterior(), 5, data=HELD_OUT, train=DATA)
    recipe = Laplace(prior_precision=1.0)
    other = compression.explore(posterior(), data=HELD_OUT, train=DATA, recipe=recipe, progress=False)
    expected = dubito.evaluate(one.posterior(recipe, DATA), HELD_OUT).scores["nll"]
    assert other.candidates[4].scores["nll"] == pytest.approx(expected)
    assert other.before.scores == pytest.approx(dubito.evaluate(posterior(), HELD_OUT).scores)


@pytest.mark.slow
def test_the_page_says_how_to_make_each(tmp_path: Path) -> None:
    page = found().page(tmp_path / "page.html", pick="dubito compress 'a & b' --pick {} -o small").read_text("utf-8")
    choices = json.loads(html.unescape(re.search(r'data-choices="([^"]*)"', page)[1]))  # type: ignore[index]
    assert choices["7"] == "dubito compress 'a & b' --pick 7 -o small"
    assert set(choices) == set(re.findall(r'<tr data-choice="(\d+)"', page))
    assert len(re.findall(r'id="explore-0-0-candidate-\d+"', page)) == len(choices) + 1  # and the network before


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(InputError, match=f"from 1 to {len(TARGETS)}.*got 21"):
        compression.pick(posterior(), 21, data=HELD_OUT)
    with pytest.raises(InputError, match=r"only ranks: leave its amount out of rules.Magnitude\(target=0.5\)"):
        compression.explore(posterior(), rules.Magnitude(0.5), data=HELD_OUT)
    with pytest.raises(InputError, match="give `train=` too"):
        compression.explore(posterior(), data=HELD_OUT, recipe=Laplace())
