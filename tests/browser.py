"""A real browser for tests: headless Chromium, driven over ChromeDriver's own HTTP interface."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name that WebDriver gives to references


class Browser:
    """One window."""

    def __init__(self, driver: str, session: str) -> None:
        self.url = f"{driver}/session/{session}"

    def open(self, url: str) -> None:
        """Load a page."""
        _send(f"{self.url}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page, and return its result."""
        return _send(f"{self.url}/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, expression: str) -> None:
        """Wait until an expression is true. It is asked again from here: a page may forbid to evaluate text."""
        end = time.monotonic() + 30
        while not self.run(f"return {expression}"):
            assert time.monotonic() < end, f"not true after 30 seconds: {expression}; console: {self.log()}"
            time.sleep(0.03)

    def press(self, selector: str, keys: str) -> None:
        """Focus an element, and press keys."""
        self.run("document.querySelector(arguments[0]).focus()", selector)
        element = _send(f"{self.url}/element", {"using": "css selector", "value": selector})[_ELEMENT]
        _send(f"{self.url}/element/{element}/value", {"text": keys})

    def click(self, selector: str) -> None:
        """Click on an element."""
        element = _send(f"{self.url}/element", {"using": "css selector", "value": selector})[_ELEMENT]
        _send(f"{self.url}/element/{element}/click", {})

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def command(self, name: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return _send(f"{self.url}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def log(self) -> list[str]:
        """Return what the page wrote to the console since the last call: errors, and what the policy forbids."""
        return [entry["message"] for entry in _send(f"{self.url}/se/log", {"type": "browser"})]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Provide a browser with an empty profile in a folder; skip where there is none."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or chromium is None or os.environ.get("DUBITO_NO_BROWSER"):
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    process = subprocess.Popen(
        [driver, "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "HOME": str(folder)},
        start_new_session=True,  # so that the browser, which ChromeDriver starts, can be ended with it
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "successfully on port" in line)
        port = line.strip().rstrip(".").rpartition(" ")[2]
        address = f"http://127.0.0.1:{port}"
        options = {"binary": chromium, "args": [*_FLAGS, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = _send(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(address, session)
        finally:
            _send(f"{address}/session/{session}", None, "DELETE")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _send(url: str, value: Any, method: str = "POST") -> Any:
    body = None if value is None else json.dumps(value).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"]) from error
