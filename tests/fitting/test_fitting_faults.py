"""Full disks, SIGTERM and impatient users: the run goes on or stops with a checkpoint, and says what is on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import FileFormatError, InputError
from fitting_cases import classification, network

from dubito import MAP, Posterior, Training
from dubito.core import io
from interrupting import at_update
from oracles import weights_of

pytestmark = pytest.mark.slow


def fit(checkpoint: Path | None = None, **settings: Any) -> Posterior:
    training = Training(epochs=3, batch_size=16, checkpoint=None if checkpoint is None else str(checkpoint), **settings)
    return MAP().fit(network(0.3), classification(), training=training)


class TestAFullDisk:
    @pytest.mark.parametrize("failing", [range(1, 4), range(2, 3), range(12, 20), range(100)])
    def test_a_failed_checkpoint_does_not_lose_the_run(
        self, failing: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save, calls = io.save, 0

        def fails_now_and_then(*args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls in failing:
                raise FileFormatError("Cannot write 'run': No space left on device.")
            save(*args)

        expected = weights_of(fit())
        monkeypatch.setattr(io, "save", fails_now_and_then)
        with pytest.warns(UserWarning, match=r"No space left on device\. The run continues .* tries again"):
            found = fit(tmp_path / "run", checkpoint_every=0.0)
        assert torch.equal(weights_of(found), expected)
        monkeypatch.undo()
        assert (tmp_path / "run").exists() == (len(failing) < 100)
        assert torch.equal(weights_of(fit(tmp_path / "run")), expected)

    def test_a_real_limit_on_the_size_of_files(self, tmp_path: Path) -> None:
        code = """
            import resource, warnings
            from fitting_cases import *
            from dubito import MAP, Training
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
            training = Training(epochs=2, checkpoint="run", checkpoint_every=0.0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                MAP().fit(network(), classification(), training=training)
            print(len(caught), caught[0].message)
        """
        found = python(code, tmp_path)
        assert found.returncode == 0, found.stderr
        assert "Cannot write 'run': File too large." in found.stdout
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("what", ["folder", "pipe"])
    def test_what_can_never_be_written_is_refused_before_training(self, what: str, tmp_path: Path) -> None:
        (os.mkdir if what == "folder" else os.mkfifo)(tmp_path / "run")
        with pytest.raises(FileFormatError, match=f"Cannot write '.*run': it is a {what}"):
            fit(tmp_path / "run")
        with pytest.raises(InputError, match="does not exist"):
            fit(tmp_path / "missing" / "run")


def python(code: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(code, folder), capture_output=True, text=True, timeout=300, **options)


def command(code: str, folder: Path) -> dict[str, Any]:
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return {"args": [sys.executable, "-c", textwrap.dedent(code)], "cwd": folder, "env": environment}


LONG = """
    import sys, time
    from fitting_cases import *
    from oracles import weights_of
    from torch.utils.data import DataLoader, TensorDataset
    from dubito import MAP, Training
    class Slow(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                time.sleep({pause})
                yield batch
    before = {handler}
    loader = Slow(TensorDataset(*classification()), batch_size=16, shuffle=True, num_workers={workers})
    print("ready", flush=True)
    found = MAP().fit(network(0.3), loader, training=Training(epochs={epochs}, checkpoint="run", checkpoint_every=1e9))
    print("survived", weights_of(found).sum().item(), flush=True)
"""


class TestSigterm:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_terminated_process_leaves_a_checkpoint_and_its_own_exit_code(self, workers: int, tmp_path: Path) -> None:
        slow = LONG.format(pause=0.05, handler=None, epochs=1000, workers=workers)
        with subprocess.Popen(**command(slow, tmp_path), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(3 if workers else 1.5)
            process.terminate()
            assert process.wait(60) == -signal.SIGTERM
        saved = io.load(tmp_path / "run", "checkpoint")
        assert saved["epoch"] * 4 + saved["batch"] > 0
        assert os.listdir(tmp_path) == ["run"]

    def test_a_handler_of_the_user_is_called_and_may_let_the_run_live(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected, calls = weights_of(fit()), []

        def handler(number: int, _: Any) -> None:
            saved = io.load(tmp_path / "run", "checkpoint")
            calls.append((number, saved["epoch"], saved["batch"]))

        before = signal.signal(signal.SIGTERM, handler)
        try:
            at_update(6, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch)
            found = fit(tmp_path / "run", checkpoint_every=1e9)
            assert signal.getsignal(signal.SIGTERM) is handler
        finally:
            signal.signal(signal.SIGTERM, before)
        assert calls == [(signal.SIGTERM, 1, 2)]
        assert torch.equal(weights_of(found), expected)

    def test_one_that_exits_does_so_with_its_code(self, tmp_path: Path) -> None:
        code = """
            import os, signal, sys
            from fitting_cases import *
            from dubito import MAP, Training
            from dubito.fitting.gradient_training import GradientDescent
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            update = GradientDescent.update
            def killed(self, state, *rest):
                if state["step"] == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                return update(self, state, *rest)
            GradientDescent.update = killed
            training = Training(epochs=3, batch_size=16, checkpoint="run", checkpoint_every=1e9)
            MAP().fit(network(0.3), classification(), training=training)
        """
        assert python(code, tmp_path).returncode == 7
        assert torch.equal(weights_of(fit(tmp_path / "run")), weights_of(fit()))

    def test_without_a_checkpoint_it_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []
        before = signal.getsignal(signal.SIGTERM)
        at_update(2, lambda: seen.append(signal.getsignal(signal.SIGTERM)), monkeypatch)
        fit()
        assert seen == [before]

    def test_so_it_is_in_another_thread(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []
        before = signal.getsignal(signal.SIGTERM)
        at_update(2, lambda: seen.append(signal.getsignal(signal.SIGTERM)), monkeypatch)
        thread = threading.Thread(target=fit, args=(tmp_path / "run",))
        thread.start()
        thread.join()
        assert seen == [before]


class TestControlC:
    def press(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def test_the_error_says_what_is_on_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        at_update(6, self.press, monkeypatch)
        with pytest.raises(KeyboardInterrupt) as caught:
            fit(tmp_path / "run", checkpoint_every=1e9)
        path = tmp_path / "run"
        assert caught.value.__notes__ == [
            f"The checkpoint '{path}' holds epoch 2 after 2 of its batches: the same call continues from there."
        ]

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_second_one_tells_the_truth(self, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whether the second Ctrl-C came just before or just after the file was in its place."""
        at_update(6, self.press, monkeypatch)
        replace = os.replace

        def interrupted(*args: Any) -> None:
            if when == "after":
                replace(*args)
            self.press()

        monkeypatch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            fit(tmp_path / "run", checkpoint_every=1e9)
        (note,) = caught.value.__notes__
        assert ("holds epoch 2 after 2" in note) == (tmp_path / "run").exists() == (when == "after")
        assert ("There is no checkpoint" in note) == (when == "before")
        assert len(os.listdir(tmp_path)) == (when == "after")
        monkeypatch.undo()
        assert torch.equal(weights_of(fit(tmp_path / "run")), weights_of(fit()))
