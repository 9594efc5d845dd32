"""Build and load a stand-in for an accelerator (`device.cpp`): memory of the CPU under the name of another device.

It refuses what a real device refuses: operations on tensors of two devices (numbers without axes and indices may come
from the CPU, as on CUDA), generators of the CPU, and on request float64. It counts reads back to the host. The device
must be registered before the first backward pass of a process, so all that uses it runs in a process of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import types
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")


def build(folder: Path) -> Path | None:
    """Return the compiled device, built at most once per source and torch version; None if there is no compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    library = folder / f"stand_in-{digest}.so"
    with (folder / "lock").open("w") as lock:  # several test processes may ask at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            home, part = Path(torch.__file__).parent, library.with_suffix(".part")
            includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
            flags = ["-O1", "-w", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(_new_abi())}"]
            libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
            command = [compiler, *flags, *includes, str(SOURCE), "-o", str(part), *libraries]
            subprocess.run(command, check=True, capture_output=True)
            part.rename(library)
    return library


def _new_abi() -> bool:
    return bool(torch.compiled_with_cxx11_abi())


def start(library: Path, *, double: bool = True) -> torch.device:
    """Register the device in this process, with or without float64."""
    torch.ops.load_library(library)
    torch.ops.stand_in.start()
    torch.utils.rename_privateuse1_backend("standin")
    torch._register_device_module("standin", _module())
    torch.ops.stand_in.set_double(double)
    return torch.device("standin:0")


def host_reads() -> int:
    """Return how often values were copied to the host so far, `.item()` and sizes that depend on values included."""
    return int(torch.ops.stand_in.to_host())


def _module() -> types.ModuleType:
    """Return the module `torch.standin`, with what torch asks every device for."""
    module = types.ModuleType("torch.standin")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda device=0: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=0: torch.ops.stand_in.rng_state(),
        "set_rng_state": lambda state, device=0: torch.ops.stand_in.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
        "_is_in_bad_fork": lambda: False,
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module
