"""The playground: what its page is told, and the page itself in a real browser."""

from __future__ import annotations

import base64
import json
import re
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_cases import HOUSE, ask, program, reviews, run_of

import dubito
from browser import browser
from dubito.core.errors import InputError
from dubito.data import TableTransform, read_table
from dubito.uses.runs.run import TableRun
from dubito.uses.serving.controls import Control, controls_of, picture_of
from dubito.uses.serving.limits import ServingLimits
from dubito.uses.serving.playground import NEAREST, STEPS, Neighbours, Playground
from dubito.uses.serving.service import Service
from extras import needs


def playground(run: TableRun) -> Playground:
    return Playground(Service(run), ServingLimits())


def answer(play: Playground, row: dict[str, Any], sweep: str | None = None) -> dict[str, Any]:
    found = play.answer([play.question({"row": row, "sweep": sweep})])[0]
    assert isinstance(found, dict), found
    json.dumps(found, allow_nan=False)
    return found


@pytest.mark.parametrize("target", ["price", "cheap"])
def test_both_answers_are_exact(target: str) -> None:
    run = run_of(target)
    found = answer(playground(run), HOUSE, "size")
    expected = run.predict({"size": [120.0], "town": ["Ulm"]})
    with torch.no_grad():
        outputs = run.unguarded.model(run.encoder.encode({"size": [120.0], "town": ["Ulm"]}))[0].double()
    if target == "price":
        plain = outputs[0] * run.encoder.target_scale + run.encoder.target_loc
        assert found["plain"]["prediction"] == pytest.approx(float(plain), rel=1e-5)
        assert found["plain"]["stddev"] <= found["posterior"]["stddev"]
    else:
        names, probs = run.encoder.class_names, outputs.softmax(0).tolist()
        assert [found["plain"][f"p_{name}"] for name in names] == pytest.approx(probs, rel=1e-5)
    for name in run.columns:
        value = expected[name].tolist()[0]
        assert found["posterior"][name] == (
            value if isinstance(value, str) else pytest.approx(value, rel=1e-5, abs=1e-9)
        )
    sweep = found["sweep"]
    assert len(sweep["values"]) == STEPS
    swept = run.predict({"size": sweep["values"], "town": ["Ulm"] * STEPS})
    shown = ["prediction", "lower", "upper"] if target == "price" else ["p_no", "p_yes"]
    assert list(sweep["posterior"]) == list(sweep["plain"]) == shown
    for name, values in sweep["posterior"].items():
        assert values == pytest.approx(swept[name].tolist(), rel=1e-4, abs=1e-7)


def test_the_nearest_rows_are_those_of_brute_force() -> None:
    run = run_of()
    found = answer(playground(run), HOUSE)["nearest"]
    inputs, targets = run.parts["train"]
    distances = (inputs - run.encoder.encode({"size": [120.0], "town": ["Ulm"]})).norm(dim=1)
    order = distances.argsort()[:NEAREST]
    assert [row["distance"] for row in found] == pytest.approx(distances[order].tolist(), rel=1e-5)
    prices = targets[order, 0] * run.encoder.target_scale + run.encoder.target_loc
    assert [row["target"] for row in found] == pytest.approx(prices.tolist(), rel=1e-5)
    assert all(row["cells"]["town"] == "Ulm" for row in found)
    # a run of before has no training rows: held-out rows stand in
    parts = {name: pair for name, pair in run.parts.items() if name != "train"}
    assert playground(replace(run, parts=parts)).nearby == "held-out"


def test_the_search_for_neighbours_is_exact() -> None:
    torch.manual_seed(0)
    known = torch.randn(200, 7).mul(10).round().div(10) + 1e4  # far from zero, where |x|² + |y|² - 2x·y is rounded most
    known[50:80] = known[:30]  # equal rows: the first comes first
    rows = torch.cat([known[[3, 60]], torch.randn(6, 7) + 1e4])
    for num in (1, 5, 300):
        found = Neighbours(known, num).of(rows)
        exact = (rows.double()[:, None] - known.double()).norm(dim=2)
        order = exact.argsort(dim=1, stable=True)[:, :num]
        assert [places for places, _ in found] == order.tolist()
        assert [distances for _, distances in found] == exact.gather(1, order).tolist()


def test_odd_rows_are_remarked_upon_and_bad_ones_refused() -> None:
    play = playground(run_of())
    assert answer(play, {"size": 900.0, "town": "Rom"})["notes"] == [
        "size: outside of the range of the training rows", "town: no training row had it"
    ]  # fmt: skip
    assert answer(play, HOUSE)["notes"] == []
    for value in ([], {}, {"row": 3}, {"row": {"size": 3}}, {"row": {"size": "x", "town": "Ulm"}}):
        with pytest.raises(InputError):
            play.question(value)


def test_decoding_undoes_encoding() -> None:
    table = {
        "size": [30.25, None, 70.0, 55.5] * 5, "town": ["Ulm", "Bern", "Graz", None] * 5,
        "sold": ["31.12.2023", "01.01.2024", "29.02.2024", "15.06.2025"] * 5, "garden": [True, False, True, True] * 5,
        "price": [float(place) for place in range(20)],
    }  # fmt: skip
    encoder = TableTransform.fit(table, "price", dates={"sold": "%d.%m.%Y"})
    found = encoder.decode(encoder.encode(table))
    dates = ["2023-12-31", "2024-01-01", "2024-02-29", "2025-06-15"] * 5
    assert found == {**{name: table[name] for name in ("size", "town", "garden")}, "sold": dates}
    rare = TableTransform.fit(table, "price", ignore=["sold"], max_levels=2)
    assert rare.decode(rare.encode({**table, "town": ["Rom"] * 20}))["town"] == [None] * 20
    assert "other levels" in rare.decode(rare.encode(table))["town"]
    controls = {control.name: control for control in controls_of(encoder, found)}
    assert [controls[name].kind for name in ("size", "town", "sold", "garden")] == [
        "number",
        "category",
        "date",
        "boolean",
    ]
    assert controls["size"].first <= 30.25 < 70 <= controls["size"].last
    assert (controls["sold"].low, controls["sold"].high) == ("2023-12-31", "2025-06-15")


@pytest.mark.filterwarnings("ignore:The predictions for held-out rows are worse")
def test_the_page_writes_dates_as_iso_whatever_the_column_does() -> None:
    table = {
        "day": [f"{place % 28 + 1:02}.{place % 12 + 1:02}.2024" for place in range(60)],
        "y": [0.5 * p for p in range(60)],
    }
    run = dubito.runs.fit(
        table, "y", recipe=dubito.Laplace(), network="mlp(hidden=[3])", training={"epochs": 1}, progress=False
    )
    play = playground(run)
    assert answer(play, {"day": "2024-05-03"})["posterior"] == answer(play, {"day": "03.05.2024"})["posterior"]


def test_pixels_are_recognised_by_their_names() -> None:
    def grid(names: list[str]) -> Any:
        return picture_of([Control(name, "number", 0.0, 0.0, 255.0) for name in names])

    square = grid([f"pixel{place}" for place in range(3, 784)])
    assert (square.height, square.width, square.names[3], square.names[:3]) == (28, 28, "pixel3", (None,) * 3)
    crossed = grid([f"{row}x{column}" for row in range(1, 7) for column in range(1, 6)])
    assert (crossed.height, crossed.width, crossed.names[5]) == (6, 5, "2x1")
    assert grid([f"sensor{place}" for place in (1, 900)]) is None
    assert grid([f"a{place}" for place in range(20)] + ["b3"]) is None
    assert grid(["size"] * 30) is None


def test_the_page_is_locked_up() -> None:
    needs("starlette")
    app = dubito.serving.application(run_of(), token="secret", play=True)
    assert ask(app, "GET", "/").status == 401
    assert ask(app, "POST", "/ask", {"row": HOUSE}).status == 401
    page = ask(app, "GET", "/?token=secret")
    assert page.status == 200
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", page.headers["content-security-policy"])[1]  # type: ignore[index]
    text = page.body.decode()
    assert text.count(f'nonce="{nonce}"') == 2  # one style, one script
    assert nonce not in ask(app, "GET", "/?token=secret").body.decode()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # it fetches nothing
    assert "secret" not in text
    assert ask(app, "POST", "/ask?token=secret", {"row": HOUSE}).json["nearest"]
    assert ask(app, "POST", "/ask?token=secret", {"row": {"size": []}}).status == 422
    assert ask(app, "POST", "/predict?token=secret", {"rows": [HOUSE]}).status == 200


@pytest.mark.filterwarnings("ignore:The predictions for held-out rows are worse")
def test_names_of_columns_cannot_become_code() -> None:
    evil = '</script><script>alert("x")</script>'
    table = {
        evil: [float(place) for place in range(30)],
        "town": ['"><b>', "{{ 7 * 7 }}"] * 15,
        "y": [0.5 * p for p in range(30)],
    }
    run = dubito.runs.fit(
        table,
        "y",
        recipe=dubito.Laplace(),
        network="mlp(hidden=[3])",
        training={"epochs": 1},
        progress=False,
        keep=[evil],
    )
    page = playground(run).page("nonce")
    assert "<script>alert" not in page
    assert "<b>" not in page
    assert "49" not in re.findall(r"<option value=\"([^\"]*)\"", page)


@pytest.mark.filterwarnings("ignore")  # so short a training
def test_pictures_are_told_as_bytes_and_odd_pixels_in_one_note() -> None:
    table = read_table("digits").take(slice(0, 60))
    play = playground(quick(table, "label"))
    row = play.examples()[4]
    found = answer(play, row)
    assert found["notes"] == []
    grey = [0 if name is None else round(255 * row[name] / play.picture.high) for name in play.picture.names]
    assert list(base64.b64decode(found["nearest"][0]["grey"])) == grey
    assert found["nearest"][0]["distance"] == 0
    full = answer(play, dict.fromkeys(row, play.picture.high))
    (note,) = full["notes"]
    assert note.endswith("of the pixels have values that they had in no training picture")


def quick(table: Any, target: str) -> TableRun:
    return dubito.runs.fit(
        table, target, recipe=dubito.Laplace(), network="mlp(hidden=[8])", training={"epochs": 12, "lr": 0.03},
        progress=False,
    )  # fmt: skip


def test_a_text_to_type_and_its_nearest_sentences() -> None:
    play = playground(quick(reviews(100), "label"))
    assert '<textarea id="c0"' in play.page("nonce")
    sentence = play.rows["text"][7]
    found = answer(play, {"text": sentence})
    assert found["nearest"][0]["distance"] == 0
    assert sorted(found["nearest"][0]["cells"]["text"].split()) == sorted(sentence.split())
    assert answer(play, {"text": "xyzzy"})["notes"] == ["text: no training row had any of its words"]
    with pytest.raises(InputError, match="1,000 are allowed"):
        play.question({"row": {"text": "a " * 501}})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # so short a training
def test_a_canvas_and_a_text_box_in_a_browser(tmp_path: Path) -> None:
    needs("uvicorn")
    quick(read_table("digits").take(slice(0, 300)), "label").save(tmp_path / "digits")
    quick(reviews(100), "label").save(tmp_path / "text")
    answered = "/^[0-9]$/.test(document.querySelector('#posterior-answer').textContent)"
    with browser(tmp_path) as window, program("play", tmp_path / "digits") as (_, url):
        window.open(url)
        window.wait("document.querySelectorAll('#nearest canvas').length === 5")
        window.wait(answered)
        window.click("#reset")
        window.press("#draw", "\ue013\ue013 \ue015 \ue015 \ue015 ")  # arrows up, then a line downwards
        window.wait(answered)
        drawn = "document.querySelector('#draw').getContext('2d').getImageData(0, 0, 8, 8).data"
        assert window.run(f"return {drawn}.filter((v, i) => i % 4 === 0 && v > 200).length") >= 3
        assert window.log() == []
    with browser(tmp_path) as window, program("play", tmp_path / "text") as (_, url):
        window.open(url)
        window.wait("document.querySelectorAll('#nearest td.text').length === 5")
        for typed, class_name in (("a superb, lovely film", "good"), ("what a dull and poor story", "bad")):
            window.run("document.querySelector('textarea').value = ''")
            window.press("textarea", typed)
            window.wait(f"document.querySelector('#posterior-answer').textContent === {class_name!r}")
        window.command("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True)
        assert window.run("return document.documentElement.scrollWidth") <= 360
        assert window.log() == []


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    needs("uvicorn")
    run_of().save(tmp_path / "run")
    with browser(tmp_path) as window, program("play", tmp_path / "run") as (_, url):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url.partition("?")[0])
        window.open(url)
        window.wait("document.querySelectorAll('#nearest tbody tr').length === 5")
        before = window.text("#posterior-answer")
        assert re.fullmatch(r"[\d,.]+", before)
        window.press("input[type=range]", "\ue014" * 3)  # arrow right
        window.wait(f"document.querySelector('#posterior-answer').textContent !== {before!r}")
        window.run("const all = document.querySelector('select'); all.value = '(never seen)';"
                   "all.dispatchEvent(new Event('input', {bubbles: true}))")  # fmt: skip
        window.wait("document.querySelector('#decision').textContent === 'ask'")
        assert "no training row had it" in window.text("#notes")
        window.wait("document.querySelector('#spoken').textContent.includes('Decision: ask')")
        window.click("#reset")
        window.wait("document.querySelector('#decision').textContent === 'answer'")
        assert window.run("return document.querySelectorAll('#curve path').length") == 3
        assert window.run(
            "return [...document.querySelectorAll('#controls [id]:not(span)')].every(e => e.labels.length)"
        )
        window.command("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True)
        assert window.run("return document.documentElement.scrollWidth") <= 360
        assert window.log() == []
