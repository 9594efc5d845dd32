"""The ASGI application: what it answers, what it refuses, and what it counts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from dubito.errors import FileFormatError
from serving_cases import HOUSE, Reply, ask, call, run_of, within

import dubito
from dubito.uses.serving.application import Endpoints
from dubito.uses.serving.limits import ServingLimits
from dubito.uses.serving.service import Service
from extras import needs

needs("starlette")


def application(target: str = "price", **options: Any) -> Any:
    return dubito.serving.application(run_of(target), **options)


@pytest.mark.parametrize("target", ["price", "cheap"])
def test_predict_gives_the_columns_of_the_command(target: str) -> None:
    app, run = application(target), run_of(target)
    reply = ask(app, "POST", "/predict", {"rows": [HOUSE, {"size": 60, "town": "Rom"}]})
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    expected = run.predict({"size": [120.0, 60.0], "town": ["Ulm", "Rom"]})
    assert [list(row) for row in reply.json["predictions"]] == [list(run.columns)] * 2
    for name in ("prediction", "decision"):
        found = [row[name] for row in reply.json["predictions"]]
        assert found == (
            expected[name].tolist() if isinstance(found[0], str) else pytest.approx(expected[name].tolist())
        )
    assert "Rom" in reply.json["notes"][0]


def test_coverage_and_risk_are_those_of_the_server() -> None:
    def width(**options: Any) -> float:
        row = ask(application(**options), "POST", "/predict", {"rows": [HOUSE]}).json["predictions"][0]
        return row["upper"] - row["lower"]

    assert width(coverage=0.5) < width() < width(coverage=0.95)
    with pytest.warns(UserWarning, match="every row is to be asked about"):
        app = application(risk=1e-9)
    with pytest.warns(UserWarning, match="every row"):
        assert ask(app, "POST", "/predict", {"rows": [HOUSE]}).json["predictions"][0]["decision"] == "ask"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "told"),
    [
        ("GET", "/nothing", None, {}, 404, "There is nothing here"),
        ("GET", "/../../etc/passwd", None, {}, 404, "There is nothing here"),
        ("GET", "/predict", None, {}, 405, "GET is not possible here"),
        ("POST", "/predict", {"rows": [HOUSE]}, {"content-type": "text/plain"}, 415, "must be application/json"),
        ("POST", "/predict", b"{", {}, 422, "not JSON"),
        ("POST", "/predict", {"rows": [{"size": "much", "town": "Ulm"}]}, {}, 422, "row 0 has 'much'"),
        ("POST", "/predict", {"rows": [{"size": "\ud800", "town": "\ud800"}]}, {}, 422, "holds numbers"),
        ("POST", "/predict", b" " * 1_000_001, {}, 413, "larger than 1,000,000 bytes"),
        ("POST", "/predict", {"rows": [HOUSE] * 1001}, {}, 422, "1,001 rows"),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence(
    method: str, path: str, body: Any, headers: dict[str, str], status: int, told: str
) -> None:
    reply = ask(application(), method, path, body, **headers)
    assert reply.status == status
    assert told in reply.json["error"]
    assert "Traceback" not in reply.body.decode()
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_a_body_in_parts_is_read_and_a_slow_one_is_not_waited_for() -> None:
    app = application(limits=ServingLimits(body_seconds=0.05, body_bytes=60))
    whole = json.dumps({"rows": [HOUSE]}).encode()
    reply = within(app, lambda: call(app, "POST", "/predict", [whole[:9], b"", whole[9:]]))
    assert reply.status == 200

    async def slow() -> Reply:
        async def never() -> dict[str, Any]:
            await asyncio.sleep(30)
            return {"type": "http.disconnect"}

        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"",
                 "headers": [(b"host", b"x"), (b"content-type", b"application/json")]}  # fmt: skip
        await app(scope, never, send)
        return Reply(sent[0]["status"], {}, sent[1]["body"])

    reply = within(app, slow)
    assert (reply.status, "did not arrive" in reply.json["error"]) == (408, True)


def test_token_and_host() -> None:
    app = application(token="secret", hosts=("localhost",))
    body = {"rows": [HOUSE]}
    assert ask(app, "POST", "/predict", body).status == 401
    assert ask(app, "POST", "/predict", body, authorization="Bearer wrong").status == 401
    assert ask(app, "POST", "/predict?token=Secret", body).status == 401
    assert ask(app, "GET", "/metrics").status == 401
    assert ask(app, "GET", "/nothing").status == 401
    assert ask(app, "POST", "/predict", body, authorization="Bearer secret").status == 200
    assert ask(app, "POST", "/predict?token=secret", body).status == 200
    assert ask(app, "GET", "/health").status == 200
    assert ask(app, "GET", "/health", host="evil.example").status == 421


def test_concurrent_requests_are_predicted_together_and_counted() -> None:
    service = Service(run_of())
    endpoints = Endpoints(service, ServingLimits(waiting=30))
    app = endpoints.application(token=None, hosts=None)
    sizes = [float(30 + place) for place in range(40)]

    async def work() -> list[Reply]:
        bodies = [json.dumps({"rows": [[size, "Ulm"]]}).encode() for size in sizes]
        return await asyncio.gather(*(call(app, "POST", "/predict", body) for body in bodies))

    replies = within(app, work)
    good = [reply.status == 200 for reply in replies]
    expected = run_of().predict({"size": sizes, "town": ["Ulm"] * 40})["prediction"].tolist()
    for reply, size_prediction in zip(replies, expected, strict=True):
        if reply.status == 200:
            assert reply.json["predictions"][0]["prediction"] == pytest.approx(size_prediction)
        else:
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert 30 <= sum(good) < 40
    assert endpoints.telemetry.batches.counts[0] < 5  # batches of one row
    text = ask(endpoints.application(token=None, hosts=None), "GET", "/metrics").body.decode()
    assert f'dubito_requests_total{{path="/predict",status="200"}} {sum(good)}' in text
    assert f"dubito_predict_seconds_count {sum(good)}" in text
    assert 'dubito_rows_total{decision="answer"}' in text
    for line in text.splitlines():
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0


def test_a_failure_is_logged_and_not_shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    service = Service(run_of())
    app = Endpoints(service, ServingLimits()).application(token=None, hosts=None)

    def broken(inputs: Any) -> Any:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(service, "predict", broken)
    reply = ask(app, "POST", "/predict", {"rows": [HOUSE]})
    assert (reply.status, reply.json) == (500, {"error": "The server failed to answer; its log says why."})
    assert "a secret" in caplog.text


@pytest.mark.parametrize("target", ["price", "cheap"])
def test_the_api_is_described(target: str) -> None:
    app, run = application(target), run_of(target)
    found = ask(app, "GET", "/openapi.json").json
    assert found["openapi"] == "3.1.0"
    assert set(found["paths"]) == {"/predict", "/health", "/metrics", "/openapi.json"}
    schemas = found["components"]["schemas"]
    assert schemas["Row"]["required"] == list(run.encoder.column_names)
    assert list(schemas["Prediction"]["properties"]) == list(run.columns)
    references = json.dumps(found).split('"#/components/schemas/')[1:]
    assert {each.partition('"')[0] for each in references} <= set(schemas)
    assert ask(app, "GET", "/health").json["predicts"] == target


def test_a_folder_that_is_no_run_is_refused_before_anything_listens(tmp_path: Any) -> None:
    with pytest.raises(FileFormatError, match="dubito fit"):
        dubito.serving.application(tmp_path)
