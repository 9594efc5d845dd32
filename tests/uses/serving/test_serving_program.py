"""`dubito serve` as a program: what it says, and how it ends."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from serving_cases import HOUSE, program, run_of
from typer.testing import CliRunner

from dubito.cli.app import app
from dubito.core.errors import InputError
from dubito.uses.serving import server
from extras import needs


def test_a_missing_extra_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve", "no-such-run"], prog_name="dubito")
    assert result.exit_code == 2
    assert result.stderr == (
        "dubito: error: Serving needs starlette and uvicorn, which is not installed: run pip install 'dubito[serve]'.\n"
    )


def test_where_nothing_can_listen() -> None:
    with server.listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(InputError, match=f"cannot listen at 127.0.0.1, port {port}"),
            server.listening("127.0.0.1", port),
        ):
            pass
    with pytest.raises(InputError, match="cannot listen"), server.listening("no.such.host.invalid", 0):
        pass
    with pytest.raises(InputError, match="from 0 to 65535"), server.listening("127.0.0.1", 70_000):
        pass


@pytest.mark.slow
def test_sigterm_lets_requests_in_flight_finish(tmp_path: Path) -> None:
    needs("uvicorn")
    run_of().save(tmp_path / "run")
    with program("serve", tmp_path / "run", "--port", 0) as (process, url):
        port = int(url.rpartition(":")[2])
        body = json.dumps({"rows": [HOUSE]}).encode()
        lines = ("POST /predict HTTP/1.1", "host: 127.0.0.1", "content-type: application/json")
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
        with socket.create_connection(("127.0.0.1", port)) as client, socket.create_connection(("127.0.0.1", port)):
            client.sendall(head.encode() + body[:5])  # the request is in flight; the second connection is idle
            urllib.request.urlopen(f"{url}/health").close()
            process.terminate()
            while accepts(port):
                time.sleep(0.01)
            client.sendall(body[5:])
            reply = b""
            while part := client.recv(65536):
                reply += part
        assert reply.startswith(b"HTTP/1.1 200")
        assert b'"prediction":' in reply
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def accepts(port: int) -> bool:
    """Whether the server still accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except OSError:
        return False
    return True
