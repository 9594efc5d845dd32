"""What every fuzz target shares: cases as JSON, one verdict for each, a corpus of past failures, runs that go on.

A target gives `generate(rng)`, which makes a case of plain JSON values, and `run(case)`, which calls the library and
raises `Violation` where an invariant does not hold. A case must end in a result or in a `DubitoError` with one
sentence; everything else is a failure.
"""

from __future__ import annotations

import json
import random
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from dubito.errors import DubitoError

CORPUS = Path(__file__).with_name("corpus.json")
SECONDS = 30  # of the processor that one case may take
LONGEST = 700  # characters of a sentence

Case = dict[str, Any]


class Violation(AssertionError):
    """An invariant that does not hold."""


class Target(Protocol):
    """One way into the library."""

    def generate(self, rng: random.Random) -> Case: ...

    def run(self, case: Case) -> None: ...


class Verdict(NamedTuple):
    """How a case ended: ``"result"``, ``"refused"`` in a sentence, or ``"failure"`` with its place and text."""

    kind: str
    text: str = ""


def require(holds: Any, what: str) -> None:
    """Raise a `Violation` unless something holds."""
    if not holds:
        raise Violation(what)


def judge(target: Target, case: Case, seconds: int = SECONDS) -> Verdict:
    """Run one case and say how it ended."""
    try:
        with warnings.catch_warnings(), _limit(seconds):
            warnings.simplefilter("ignore")
            target.run(case)
    except DubitoError as error:
        text = str(error)
        one = 0 < len(text) <= LONGEST and "\n" not in text
        return Verdict("refused", text) if one else Verdict("failure", f"not one sentence: {text!r}")
    except Exception as error:  # noqa: BLE001  (to find them is the point)
        return Verdict("failure", f"{type(error).__name__} at {_place(error)}: {str(error)[:300]!r}")
    return Verdict("result")


def _place(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "dubito/" in frame.filename]
    if not frames:
        return "the fuzzer"
    return f"{frames[-1].filename.rsplit('dubito/', 1)[-1]}:{frames[-1].lineno}"


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Stop after so many seconds of the processor, or ten times as many of the clock: a busy machine is no failure."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Violation(f"still running after {seconds} seconds")

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, seconds), signal.SIGALRM: (signal.ITIMER_REAL, 10 * seconds)}
    before = {number: signal.signal(number, stop) for number in timers}
    for timer, limit in timers.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def seeded(name: str, number: int) -> random.Random:
    """The generator of one numbered case, the same on every machine."""
    return random.Random(f"{name} {number}")


class Run:
    """A long run over one target that can be stopped and started again.

    Args:
        name: The target's name.
        target: The target.
        folder: Where `<name>.json` keeps the next number, the counts and the failures.
    """

    def __init__(self, name: str, target: Target, folder: Path) -> None:
        self.name, self.target, self.path = name, target, folder / f"{name}.json"
        self.next, self.counts, self.failures = 0, Counter[str](), []
        if self.path.exists():
            state = json.loads(self.path.read_text())
            self.next, self.counts, self.failures = state["next"], Counter(state["counts"]), state["failures"]

    def until(self, stop: int) -> None:
        """Judge the cases up to number `stop`; state is written now and then, and at the end."""
        try:
            while self.next < stop:
                case = self.target.generate(seeded(self.name, self.next))
                verdict = judge(self.target, case)
                self.counts[verdict.kind] += 1
                if verdict.kind == "failure":
                    self.failures.append({"number": self.next, "case": case, "text": verdict.text})
                    print(f"{self.name} {self.next}: {verdict.text}\n    {json.dumps(case)}", flush=True)
                self.next += 1
                if self.next % 100 == 0:
                    self.write()
        finally:
            self.write()

    def write(self) -> None:
        """Write the state."""
        state = {"next": self.next, "counts": self.counts, "failures": self.failures}
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(state, indent=1))
        draft.replace(self.path)

    def summary(self) -> str:
        """The counts in one line."""
        kinds = ", ".join(f"{self.counts[kind]:,} {kind}" for kind in ("result", "refused", "failure"))
        return f"{self.name}: {self.next:,} cases, {kinds}"


def corpus() -> list[Case]:
    """Past failures: ``{"target": name, "case": case, "was": what it ended in}``."""
    return json.loads(CORPUS.read_text())
