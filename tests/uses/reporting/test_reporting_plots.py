"""The figures show the numbers they are given, and leave no trace in matplotlib's global state."""

from __future__ import annotations

import io
import subprocess
import sys

import matplotlib
import numpy as np
import pytest

from dubito.uses.reporting import plots
from dubito.uses.reporting.evaluation import Band, Histogram, Quantiles, Reliability, RiskCoverageCurve

NASTY = "_a $very \\nasty$ <b>name</b> & 100 %"


def lines(figure) -> list[np.ndarray]:
    return [line.get_xydata() for line in figure.axes[0].lines]


def svg(figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_reliability() -> None:
    curve = Reliability((0.0, 0.25, 0.5, 1.0), (0.0, 4.0, 16.0), (0.0, 1.2, 12.8), (0.0, 3.0, 8.0))
    figure = plots.reliability(curve, look=plots.Look("#d55e00"), title=NASTY)
    top, bottom = figure.axes
    assert [(bar.get_x(), bar.get_height(), bar.get_alpha()) for bar in top.patches] == [
        (0.25, 0.75, 0.35), (0.5, 0.5, None)
    ]  # fmt: skip
    heights = [segment[0, 1] for segment in top.collections[0].get_segments()]
    assert heights == pytest.approx([0.3, 0.8])
    assert [bar.get_height() for bar in bottom.patches] == [0.2, 0.8]
    assert "&lt;b&gt;name" in svg(figure)


def test_risk_coverage_over_seeds() -> None:
    one, two = (
        RiskCoverageCurve((0.5, 1.0), (0.1, 0.3)),
        RiskCoverageCurve((0.25, 0.5, 0.75, 1.0), (0.0, 0.2, 0.3, 0.5)),
    )
    figure = plots.risk_coverage({NASTY: [one, two], "b": [one]})
    first, second = lines(figure)
    assert first == pytest.approx(np.array([[0.5, 0.15], [1.0, 0.4]]))  # the second seed is read at the first's places
    assert second == pytest.approx(np.array([[0.5, 0.1], [1.0, 0.3]]))
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(0.4 + np.std([0.3, 0.5], ddof=1))
    assert legend(figure) == [NASTY, "b"]
    svg(figure)


def test_shift() -> None:
    figure = plots.shift({"a": [{0: 0.9, 2: 0.5, 1: 0.7}], "b": [{0: 0.8, 1: 0.6}]}, score="Accuracy", target=0.95)
    level, first, second = lines(figure)
    assert level[:, 1].tolist() == [0.95, 0.95]
    assert first.tolist() == [[0, 0.9], [1, 0.7], [2, 0.5]]
    assert second.tolist() == [[0, 0.8], [1, 0.6]]


def test_infinite_scores_can_be_drawn() -> None:
    figure = plots.shift({"a": [{0: 1.0, 1: float("inf")}, {0: 2.0, 1: float("inf")}]}, score="NLL")
    assert lines(figure)[0][0].tolist() == [0, 1.5]
    svg(figure)


def test_histogram() -> None:
    figure = plots.histogram(Histogram((0.0, 1.0, 2.0), (3.0, 1.0), {"mnist": (0.0, 5.0)}), xlabel="Entropy", right=4.0)
    inside, outside = figure.axes[0].patches
    assert inside.get_data().values.tolist() == [0.75, 0.25]
    assert outside.get_data().values.tolist() == [0.0, 1.0]
    assert figure.axes[0].get_xlim() == (0.0, 4.0)
    assert legend(figure) == ["in distribution", "mnist"]


def test_quantiles_and_band() -> None:
    figure = plots.quantiles({"a": [Quantiles((0.1, 0.9), (0.2, 0.8))]}, legend=False)
    assert lines(figure)[1].tolist() == [[0.1, 0.2], [0.9, 0.8]]
    assert figure.axes[0].get_legend() is None
    figure = plots.band(Band((0.0, 1.0), (1.0, 2.0), (0.5, 1.0), (1.5, 3.0), (1.1, 2.9), 0.95), limits=(-1, 4))
    assert lines(figure)[0].tolist() == [[0, 1], [1, 2]]
    area, dots = figure.axes[0].collections
    assert {tuple(point) for point in area.get_paths()[0].vertices} == {(0, 0.5), (1, 1.0), (1, 3.0), (0, 1.5)}
    assert dots.get_offsets().tolist() == [[0, 1.1], [1, 2.9]]
    assert figure.axes[0].get_ylim() == (-1, 4)


def test_looks_differ_and_stay() -> None:
    names = [str(i) for i in range(28)]
    found = plots.looks(names)
    assert len(set(found.values())) == 28
    assert plots.looks(names[:3]) == {name: found[name] for name in names[:3]}


def settings() -> dict[str, object]:
    """Return all but the backend, whose very reading would choose one."""
    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}


def test_global_settings_stay_and_do_not_matter() -> None:
    curve = {"a": [Quantiles((0.1, 0.9), (0.2, 0.8))]}

    def drawn() -> str:
        with plots.style():
            buffer = io.StringIO()
            plots.quantiles(curve).savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()

    before = settings()
    plain = drawn()
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "red", "font.size": 30}):
        assert drawn() == plain
    assert settings() == before


@pytest.mark.slow
def test_pyplot_is_not_needed() -> None:
    script = (
        "import sys; from dubito.uses.reporting import plots; from dubito.uses.reporting.evaluation import Quantiles; "
        "assert not {'matplotlib', 'jinja2', 'pandas', 'sklearn', 'scipy'} & set(sys.modules), 'heavy import'; "
        "plots.quantiles({'a': [Quantiles((0.1,), (0.2,))]}); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
