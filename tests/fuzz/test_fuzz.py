"""Dozens of cases of every target, always the same, and every past failure; `make fuzz N=100000` is for the night."""

from __future__ import annotations

import json

import pytest

from fuzz.engine import corpus, judge, seeded
from fuzz.targets import TARGETS

pytestmark = pytest.mark.slow

CASES = {"grammar": 300, "api": 36, "arguments": 80, "command_line": 24, "files": 40, "tables": 40}


@pytest.mark.parametrize("name", CASES)
def test_cases_end_in_a_result_or_in_one_sentence(name: str) -> None:
    target, failures = TARGETS[name], []
    for number in range(CASES[name]):
        case = target.generate(seeded(name, number))
        verdict = judge(target, case)
        if verdict.kind == "failure":
            failures.append(f"{name} {number}: {verdict.text}\n    {json.dumps(case)}")
    assert not failures, "\n".join(failures)


def test_past_failures_do_not_come_back() -> None:
    failures = []
    for entry in corpus():
        verdict = judge(TARGETS[entry["target"]], entry["case"])
        if verdict.kind == "failure":
            failures.append(f"{entry['target']}: {verdict.text}\n    {json.dumps(entry['case'])}")
    assert not failures, "\n".join(failures)
