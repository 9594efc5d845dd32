"""The page on serving: its code runs against the server that it starts."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from serving_cases import program

from extras import needs

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


def shape(value: Any) -> Any:
    """The names and types of a JSON value, without its numbers."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    return [shape(each) for each in value] if isinstance(value, list) else type(value)


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    needs("starlette")
    needs("uvicorn")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(python|bash|json)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    first, command, *others = blocks
    assert [first[0], command[0]] == ["python", "bash"]
    names: dict[str, Any] = {"__name__": "page"}
    exec(first[1], names)
    words = shlex.split(command[1])[1:]
    assert words[-2:] == ["--port", "8000"]
    shown: list[Any] = []
    with program(*words[:-1], "0") as (_, url):
        capsys.readouterr()
        for language, code in others:
            if language == "json":
                shown.append(json.loads(code))
            else:
                exec(code.replace("http://127.0.0.1:8000", url), names)
    printed = capsys.readouterr().out
    answer, rest = json.JSONDecoder().raw_decode(printed)
    assert shape(answer) == shape(shown[0])
    assert [row["decision"] for row in answer["predictions"]] == ["answer", "ask"]
    assert printed[rest:].strip() in PAGE.read_text()
