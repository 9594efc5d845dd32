"""`report` writes one page: complete, safe whatever the names are, the same bytes for the same results."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from dubito.errors import FileFormatError, InputError
from reporting_cases import class_data, classifier, number_data, regressor

import dubito
from browser import browser
from dubito.uses.reporting import Evaluation, evaluate
from dubito.uses.reporting import sections as sections_module
from dubito.uses.reporting.evaluation import GroupScores, Histogram, Reliability, RiskCoverageCurve, ShiftedConfidence
from dubito.uses.reporting.parts import Section
from dubito.uses.reporting.readings import percent
from dubito.uses.reporting.sections import sections
from dubito.uses.reporting.verdict import verdict

pytestmark = pytest.mark.slow

SVG = "http://www.w3.org/2000/svg"
ATTACK = "<script>alert('x')</script>"
VOID = {"meta", "br", "img", "input", "link", "hr", "source", "base"}


class Page(HTMLParser):
    """The elements of a page with their attributes and text; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self._open[-1], data.strip()))

    def text_of(self, tag: str) -> list[str]:
        return [text for owner, text in self.texts if owner == tag]

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


VERDICT, TRUST, LOOK = "The verdict", "Can it be trusted?", "Examples to look at"
LAST = ["What the scores mean", "What was run"]


@pytest.fixture(scope="module")
def classes() -> Evaluation:
    x, y = class_data()
    shifts = {"rotation": {1: (0.9 * x, y), 2: (0.5 * x, y)}, "other scanner": (-x, y)}
    return evaluate(classifier(), (x, y), ood={ATTACK: 3 * x, "near": x}, shifts=shifts)


@pytest.fixture(scope="module")
def numbers() -> Evaluation:
    x, y = number_data(num_inputs=1)
    return evaluate(regressor(1), (x, y), ood={"far": 5 * x}, shifts={"offset": {1: (x + 1, y)}})


def better(result: Evaluation, **scores: float) -> Evaluation:
    return dataclasses.replace(result, scores={**result.scores, **scores})


def write(tmp_path: Path, results, **options) -> str:
    path = dubito.report(results, tmp_path / "report.html", **options)
    assert path == tmp_path / "report.html"
    return path.read_text("utf-8")


@pytest.fixture(scope="module")
def text(classes: Evaluation, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of two methods, with everything that a classification can show."""
    return write(tmp_path_factory.mktemp("page"), {"map": classes, "other": classes})


@pytest.fixture(scope="module")
def plain() -> Evaluation:
    return evaluate(classifier(), class_data())


def test_sections_of_a_classification(classes: Evaluation, tmp_path: Path) -> None:
    page = Page(write(tmp_path, {"map": classes, "laplace": better(classes, nll=0.5)}, data_name="digits"))
    headings = [VERDICT, "Scores", TRUST, LOOK, "Calibration", "Rejection", "Under shift", "Out of distribution"]
    assert page.text_of("h2") == [*headings, *LAST]
    assert "digits" in page.text_of("title")[0]
    captions = page.text_of("figcaption")
    assert captions == [
        "laplace", "map", "Risk against coverage",
        "rotation: Accuracy", "rotation: NLL", "rotation: ECE", *["laplace", "map"] * 2,
    ]  # fmt: skip
    assert page.text_of("strong") == ["0.5000"]
    assert "2.2411" in page.text_of("td")


def test_sections_of_a_regression(numbers: Evaluation, tmp_path: Path) -> None:
    page = Page(write(tmp_path, {"map": numbers}, title="Is it calibrated?"))
    assert page.text_of("h1") == ["Is it calibrated?"]
    headings = [
        VERDICT,
        "Scores",
        TRUST,
        LOOK,
        "Predictions",
        "Calibration",
        "By group",
        "Rejection",
        "Under shift",
        "Out of distribution",
    ]
    assert page.text_of("h2") == [*headings, *LAST]
    assert page.text_of("figcaption")[:3] == ["map", "Calibration of quantiles", "Predicted uncertainty"]
    assert page.text_of("strong") == []  # the best of one is no news


def test_only_what_was_measured_is_shown(plain: Evaluation, tmp_path: Path) -> None:
    page = Page(write(tmp_path, {"map": plain}))
    assert page.text_of("h2") == [VERDICT, "Scores", TRUST, LOOK, "Calibration", "Rejection", *LAST]
    found = evaluate(regressor(), number_data())
    bare = dataclasses.replace(found, curves=dataclasses.replace(found.curves, examples=(), groups={}))
    page = Page(write(tmp_path, {"map": bare}))
    assert page.text_of("h2") == [VERDICT, "Scores", TRUST, "Calibration", "Rejection", *LAST]


def test_a_section_is_one_function(plain: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def counts(methods, look_of):
        yield Section("counts", "Counts", "How many targets.", terms=(("map", str(methods["map"][0].count)),))

    monkeypatch.setattr(sections_module, "SECTIONS", (*sections_module.SECTIONS, counts))
    page = Page(write(tmp_path, {"map": plain}))
    assert page.text_of("h2")[-2] == "Counts"
    assert str(plain.count) in page.text_of("dd")


def test_the_page_explains_the_scores_that_it_shows(classes: Evaluation, plain: Evaluation, tmp_path: Path) -> None:
    known = ["Accuracy", "NLL", "Brier", "ECE", "MCE", "AURC"]
    run = ["Methods", "Versions"]
    assert Page(write(tmp_path, {"map": plain})).text_of("dt") == [*known, *run]
    assert Page(write(tmp_path, {"map": classes})).text_of("dt") == [*known, "AUROC", "AUPR", "FPR95", *run]


def test_a_method_without_some_set_has_a_dash(classes: Evaluation, plain: Evaluation, tmp_path: Path) -> None:
    page = Page(write(tmp_path, {"map": classes, "plain": plain}))
    assert page.text_of("td").count("–") == 2 * 9 + 3 * 2
    assert page.text_of("figcaption").count("map") == 1 + 2
    assert page.text_of("figcaption").count("plain") == 1


def test_seeds_are_mean_and_deviation(plain: Evaluation, tmp_path: Path) -> None:
    runs = [better(plain, nll=nll) for nll in (0.1, 0.2, 0.6)]
    text = write(tmp_path, {"map": plain, "many seeds": runs})
    page = Page(text)
    assert "0.3000" in page.text_of("strong")
    assert "± 0.2646" in page.text_of("small")
    assert "over seeds" in text


def test_names_cannot_inject(classes: Evaluation, tmp_path: Path) -> None:
    names = [
        ATTACK,
        '"><img src=x onerror=alert(1)>',
        "{{ 7 * 7 }}",
        "a $b$ _c",
        "中文",
        "</style><style>*{display:none}",
    ]
    text = write(tmp_path, dict.fromkeys(names, classes), title=ATTACK, data_name=ATTACK)
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"img", "iframe", "object", "link"}
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)  # ours, which alone the policy lets run
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [each["content"] for each in page.attributes("meta") if "http-equiv" in each]
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}';" in str(policy)
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert sum(tag == "style" for tag, _ in page.elements) == 1
    assert page.text_of("th").count(names[2]) == text.count('<th scope="col">Method</th>')
    assert page.text_of("h1") == [ATTACK]


def test_nothing_comes_from_elsewhere(text: str, numbers: Evaluation, tmp_path: Path) -> None:
    for page in (text, write(tmp_path, {"map": numbers})):
        assert set(re.findall(r"https?://[^\s\"'<>)]*", page)) == {"http://www.w3.org/1999/xlink", SVG}
        assert not re.search(r"@import|url\((?!#)|srcset|<link", page)
        for _, attributes in Page(page).elements:
            assert "src" not in attributes
            for name in ("href", "xlink:href"):
                assert (attributes.get(name) or "#").startswith("#")


def test_references_resolve_and_ids_are_unique(text: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:href="#|url\(#|aria-labelledby=")([^")]+)', text)
    assert references
    assert set(references) <= set(ids)


def test_it_can_be_read_without_seeing(classes: Evaluation, text: str) -> None:
    page = Page(text)
    pictures = [attributes for attributes in page.attributes("svg") if attributes.get("aria-hidden") != "true"]
    assert len(pictures) == len(page.attributes("figure")) > 0
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    assert f"expected calibration error {classes.scores['ece']:.3g}" in pictures[0]["aria-label"]
    assert all(attributes.get("scope") in ("col", "row", "colgroup") for attributes in page.attributes("th"))
    assert len(page.attributes("caption")) == len(page.attributes("table"))
    assert page.attributes("html") == [{"lang": "en"}]
    assert "prefers-color-scheme: dark" in text
    for drawing in re.findall(r"<svg xmlns:xlink.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)


def test_colours_follow_the_page(text: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) == set()
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", text))
    assert {"--series-0", "--series-1", "--ink", "--grid"} <= used
    light, dark = (
        set(re.findall(r"(--[a-z0-9-]+):", block)) for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    )
    assert used <= light == dark


def test_the_same_results_give_the_same_bytes(classes: Evaluation, tmp_path: Path) -> None:
    results = {"map": classes, "seeds": [classes, better(classes, ece=0.5)]}
    first = dubito.report(results, tmp_path / "a.html").read_bytes()
    copies = {
        name: Evaluation.from_json(classes.to_json()) if name == "map" else runs for name, runs in results.items()
    }
    assert dubito.report(copies, tmp_path / "b.html").read_bytes() == first


def test_files_are_replaced_whole(plain: Evaluation, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    dubito.report({"map": plain}, str(target))
    assert target.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(FileFormatError, match=r"^Cannot write"):
        dubito.report({"map": plain}, tmp_path / "missing" / "report.html")


def test_one_task_per_report(classes: Evaluation, numbers: Evaluation, tmp_path: Path) -> None:
    message = "^One report compares one task, but 'map' is classification and 'gp' is regression: write two reports.$"
    with pytest.raises(InputError, match=message):
        dubito.report({"map": classes, "gp": numbers}, tmp_path / "report.html")
    with pytest.raises(InputError, match="One report compares one task"):
        dubito.report({"map": [classes, numbers]}, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_result(classes: Evaluation, tmp_path: Path) -> None:
    for wrong in ({}, classes, [classes]):
        with pytest.raises(InputError, match=r"`results` (is empty|must be a dict)"):
            dubito.report(wrong, tmp_path / "report.html")
    for wrong in ([], None, 0.5, [classes, None]):
        with pytest.raises(InputError, match=r"`results` must be a dict|'map' must be what"):
            dubito.report({"map": wrong}, tmp_path / "report.html")


def test_figures_draw_the_evaluations(classes: Evaluation) -> None:
    bins = classes.curves.reliability
    doubtful = dataclasses.replace(bins, correct_sums=tuple(0.0 for _ in bins.counts))
    wrong = dataclasses.replace(classes, curves=dataclasses.replace(classes.curves, reliability=doubtful))
    parts = {part.key: part for part in sections({"seeds": [classes, wrong]})}
    bars = parts["calibration"].groups[0][0].figure.axes[0].patches
    pooled = [right / (2 * count) for right, count in zip(bins.correct_sums, bins.counts, strict=True) if count]
    assert [bar.get_height() for bar in bars] == pytest.approx(pooled)
    ((accuracy, nll, ece),) = parts["shift"].groups
    line = nll.figure.axes[0].lines[0].get_xydata().tolist()
    shifted = classes.shifts["rotation"]
    assert line == [[0, classes.scores["nll"]], [1, shifted[1]["nll"]], [2, shifted[2]["nll"]]]
    assert [panel.caption.split(": ")[1] for panel in (accuracy, ece)] == ["Accuracy", "ECE"]


def test_histograms_share_an_axis_except_where_all_is_zero(classes: Evaluation) -> None:
    def cut(result: Evaluation, top: float, beyond: float) -> Evaluation:
        edges = tuple(top * i / 2 for i in range(3))
        histogram = Histogram(edges, (100.0, beyond), {"near": (9.0, 0.0)})
        return dataclasses.replace(
            result, curves=dataclasses.replace(result.curves, histograms={"epistemic": histogram})
        )

    methods = {"short": [cut(classes, 0.3, 1.0)], "long": [cut(classes, 0.8, 1.0)], "zero": [cut(classes, 1.0, 0.0)]}
    (part,) = (part for part in sections(methods) if part.key == "ood")
    (panels,) = filter(None, part.groups)
    assert [panel.figure.axes[0].get_xlim() for panel in panels] == [(0, 0.8), (0, 0.8), (0, 1.0)]


def test_unequal_counts_are_told(plain: Evaluation, tmp_path: Path) -> None:
    assert "Scored on 101 targets." in write(tmp_path, {"map": plain})
    mixed = {"map": plain, "other": dataclasses.replace(plain, count=1234)}
    assert "the number of scored targets differs between methods: 101 to 1,234." in write(tmp_path, mixed).lower()


def test_the_best_comes_first_under_a_readable_name(plain: Evaluation, tmp_path: Path) -> None:
    results = {
        "MAP()": better(plain, nll=0.9),
        "mine": better(plain, nll=0.5),
        "Ensemble(members=2)": better(plain, nll=0.1),
    }
    page = Page(write(tmp_path, results, command="dubito compare --data 'a b.csv'"))
    assert [text for text in page.text_of("th") if text in ("Ensemble", "mine", "Plain network")] == [
        "Ensemble", "mine", "Plain network"
    ]  # fmt: skip
    assert "members=2" in page.text_of("small")
    assert page.text_of("code") == ["dubito compare --data 'a b.csv'"]
    assert "Best by the likelihood of the targets (NLL): Ensemble (members=2)." in page.text_of("li")


def test_error_bars_show_the_seeds(plain: Evaluation) -> None:
    methods = {"a": [better(plain, nll=nll) for nll in (0.1, 0.2, 0.6)], "b": [better(plain, nll=0.4)]}
    (part,) = (part for part in sections(methods) if part.key == "scores")
    panel = part.groups[0][1]
    bars, alone = panel.figure.axes[0].containers
    assert bars.lines[0].get_xydata().tolist() == [[pytest.approx(0.3), 0.0]]
    (segment,) = bars.lines[2][0].get_segments()
    assert segment[:, 0].tolist() == pytest.approx([0.3 - 0.07**0.5, 0.3 + 0.07**0.5])
    assert not alone.lines[2]
    assert not [part for part in sections({"b": methods["b"]}) if part.key == "scores" and part.groups]


def test_the_verdict_says_what_the_numbers_mean(classes: Evaluation, numbers: Evaluation) -> None:
    edges = tuple(place / 10 for place in range(11))
    sure = Reliability(edges, (0.0,) * 9 + (200.0,), (0.0,) * 9 + (190.0,), (0.0,) * 9 + (140.0,))
    risks = RiskCoverageCurve((0.5, 0.9, 1.0), (0.0, 0.1, 0.3))
    lost = ShiftedConfidence(100, 0.9, 0.2, None, 0.0)
    curves = dataclasses.replace(classes.curves, reliability=sure, risk_coverage=risks)
    told = " ".join(verdict({"one": [dataclasses.replace(classes, curves=curves)]}))
    assert "at least 90 % sure of, 70 % are right; it claims 95 %: it is overconfident." in told
    assert "the error rate falls from 30 % to 10 %." in told
    shifted = {
        "rotation of severity 1": ShiftedConfidence(100, 0.7, 0.68, 0.1, 1.0),  # within the noise
        "rotation of severity 2": ShiftedConfidence(100, 0.7, 0.5, 0.8, 0.25), "other scanner": lost,
    }  # fmt: skip
    both = dataclasses.replace(curves, shifted=shifted)
    words = " ".join(verdict({"one": [dataclasses.replace(classes, curves=both)]}))
    start = "Under rotation it is overconfident from severity 2 on: there 50 % are right, and it claims 70 %."
    assert f"{start} Refuse below 0.80, and of the 25 % that are left as many are right" in words
    assert (
        "Under other scanner it is overconfident: there 20 % are right, and it claims 90 %, and no threshold" in words
    )
    fine = dataclasses.replace(both, shifted={"rotation of severity 1": shifted["rotation of severity 1"]})
    words = " ".join(verdict({"one": [dataclasses.replace(classes, curves=fine)]}))
    assert "It is not overconfident under rotation and other scanner" in words
    weak = dataclasses.replace(curves, groups={"town": GroupScores(("A", "B"), (400.0, 19.0), (0.9, 0.9), (0.8, 0.1))})
    words = " ".join(verdict({"one": [dataclasses.replace(classes, curves=weak)]}))
    assert "Beware where town is A: 80 % of its answers are right, and it claims 90 %." in words  # B has too few
    own = {"Predicted uncertainty": GroupScores(("third quarter",), (400.0,), (0.9,), (0.8,))}
    words = " ".join(verdict({"one": [dataclasses.replace(classes, curves=dataclasses.replace(curves, groups=own))]}))
    assert "Beware in the third quarter of the predicted uncertainty: 80 % of its answers" in words
    assert "It tells near from familiar data badly (AUROC 0.50)." in told
    honest = dataclasses.replace(curves, reliability=dataclasses.replace(sure, correct_sums=(0.0,) * 9 + (189.0,)))
    assert "94.5 % are right; it claims 95 %." in " ".join(
        verdict({"one": [dataclasses.replace(classes, curves=honest)]})
    )
    narrow = better(numbers, **{"coverage@0.9": 0.5})
    assert "Its 90 % intervals hold 50 % of the targets: they are too narrow." in list(verdict({"one": [narrow]}))
    seeds = {
        name: [better(classes, nll=n) for n in values]
        for name, values in {"a": (1, 2), "b": (1.1, 2.1), "c": (8, 9)}.items()
    }
    assert next(verdict(seeds)).endswith("a; within the spread over seeds b did as well.")
    once = {name: [with_parts(classes, parts)] for name, parts in PARTS.items()}
    assert next(verdict(once)).endswith("a; within two standard errors on 101 targets b and c did as well.")


# Mean losses of 50 parts of the data: b differs from a by chance, c is better in some and worse in others, d is worse.
PARTS = {
    "a": [0.1 * (k % 3) for k in range(50)], "b": [0.1 * (k % 3) + 0.01 * (-1) ** k + 0.001 for k in range(50)],
    "c": [0.1 * (-k % 3) for k in range(50)], "d": [0.1 * (k % 3) + 0.01 * (-1) ** k + 0.004 for k in range(50)],
}  # fmt: skip


def with_parts(evaluation: Evaluation, parts: list[float]) -> Evaluation:
    found = better(evaluation, nll=sum(parts) / len(parts))
    return dataclasses.replace(found, curves=dataclasses.replace(found.curves, nll_parts=tuple(parts)))


def test_the_page_in_a_browser(classes: Evaluation, plain: Evaluation, tmp_path: Path) -> None:
    results = {
        "good": better(classes, accuracy=0.2, nll=0.1), "middle": better(classes, accuracy=0.9, nll=0.2),
        "bad": dataclasses.replace(plain, scores={**plain.scores, "accuracy": 0.5, "nll": float("inf")}),
    }  # fmt: skip
    write(tmp_path, results, command="dubito compare")
    first = "return [...document.querySelector('#scores tbody').rows].map(row => row.cells[0].textContent)"
    with browser(tmp_path) as window:
        window.open((tmp_path / "report.html").as_uri())
        assert window.run(first) == ["good", "middle", "bad"]
        accuracy = "#scores thead tr:last-child th:nth-child(2)"
        window.press(f"{accuracy} button", "\ue007")  # enter
        assert window.run(first) == ["middle", "bad", "good"]
        assert window.run("return document.querySelector(arguments[0]).ariaSort", accuracy) == "descending"
        window.press(f"{accuracy} button", " ")
        assert window.run(first) == ["good", "bad", "middle"]
        window.click("#scores thead tr:last-child th:nth-child(3) button")  # an infinite NLL
        assert window.run(first) == ["good", "middle", "bad"]
        window.click("#ood thead tr:last-child th:nth-child(2) button")  # not measured for one
        assert window.run(first.replace("#scores", "#ood"))[-1] == "bad"
        dimmed = "return [...document.querySelectorAll('#shift .dim')].map(mark => mark.id.split('-').at(-2)).sort()"
        window.press("#shift .legend li:nth-child(2) button", " ")
        assert set(window.run(dimmed)) == {"0"}  # the other method that was shifted
        assert window.run("return document.querySelectorAll('#shift [aria-pressed=true]').length") == 1
        window.press("#shift .legend li:nth-child(2) button", " ")
        assert window.run(dimmed) == []
        said = "return document.querySelector('#rejection .reading').innerText"
        window.press("#rejection figure svg", "\ue014")  # the first place, by the right arrow
        assert window.run(said).splitlines()[0].startswith("error rate if 1 % are answered")
        window.press("#rejection figure svg", "\ue010")  # and by the end key the last
        curve = classes.curves.risk_coverage
        values = window.run(said).splitlines()
        assert values[:2] == ["error rate if 100 % are answered", f"good {percent(curve.risk[-1])}"]
        place = """const figure = document.querySelector("#calibration figure"), box = figure.querySelector("svg")
            .getBoundingClientRect(); window.scrollBy(0, box.top - 100);
            const now = figure.querySelector("svg").getBoundingClientRect();
            return [now.left + now.width * 0.95, now.top + now.height * 0.3]"""
        x, y = window.run(place)
        window.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        bins = classes.curves.reliability
        told = window.run("return document.querySelector('#calibration .reading').innerText").splitlines()
        last = max(place for place, count in enumerate(bins.counts) if count)
        assert told[0] == f"confidence {bins.edges[last]:.2f} to {bins.edges[last + 1]:.2f}"
        assert told[1] == f"right {percent(bins.correct_sums[last] / bins.counts[last])}"
        assert told[3] == f"answers {bins.counts[last]:.0f}"
        window.command("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
        assert window.run("return document.querySelector('#calibration .reading').innerText") == ""
        shift = "#shift .listing thead th:nth-child(1) button"  # text sorts by the alphabet
        rows = "return [...document.querySelector('#shift .listing tbody').rows].map(row => row.cells[0].textContent)"
        window.click(shift)
        assert window.run(rows) == ["other scanner", "rotation"]
        window.command("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True)
        assert window.run("return document.documentElement.scrollWidth") <= 360
        window.command("Emulation.setEmulatedMedia", media="print")
        assert window.run("return getComputedStyle(document.querySelector('nav')).display") == "none"
        assert window.log() == []
