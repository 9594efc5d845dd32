"""An error in one process ends the work of all with that error, and the script can go on."""

from __future__ import annotations

from typing import Any

import error_cases
import pytest
import torch

from two_processes import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(error_cases.__file__, "everything", tmp_path_factory.mktemp("errors"))


SAID = {
    "at the start": "InputError: ",
    "in a step": "RuntimeError: broken",
    "of a class of its own": "RuntimeError: Own: broken",
    "interrupted": "KeyboardInterrupt: broken",
    "in the loader": "OSError: the disk is gone",
    "in a member": "RuntimeError: broken",
    "in curvature": "OSError: the disk is gone",
    "in the evaluation": "OSError: the disk is gone",
    "in the selection": "InputError: ",
    "in the compression": "InputError: ",
    "in both": "InputError: ",
    "different work": "InputError: The processes do different work",
}


@pytest.mark.parametrize("name", SAID)
def test_an_error_is_that_of_all_processes(results: Any, name: str) -> None:
    first, second = (each["errors"]["said"][name] for each in results)
    assert first.startswith(SAID[name])
    if name == "of a class of its own":
        assert second == "Own: broken | "
    elif name not in ("in both", "different work"):
        assert first.split(" | ")[0] == second.split(" | ")[0]
        assert first.endswith("This error was raised by process 1 of 2 (rank 1).")
    else:
        assert second.startswith(SAID[name])


def test_the_script_goes_on_after_errors(results: Any) -> None:
    first, second = (each["errors"]["after"] for each in results)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_sharded_network_is_refused_in_a_sentence(results: Any) -> None:
    for each in results:
        assert each["refused"].startswith("The parameters of the model are sharded over processes (FSDP, DTensor)")
