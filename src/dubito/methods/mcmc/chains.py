"""Several chains, each with its own process and random generator; large samples are stored on disk.

Every tensor of a state has one row per chain. A process fills the rows of its own chains and leaves the others zero,
so the sum over processes is the whole state. Before the first step, and after a checkpoint was read, the first process
holds all rows.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dubito.core import distributed, io, limits
from dubito.core.atomic import reserve
from dubito.core.errors import FileFormatError
from dubito.core.limits import numbers
from dubito.core.randomness import derive_seed, draw_seed
from dubito.core.settings import bytes_of
from dubito.fitting.inference import State

# The number of updates after which processes exchange whether a chain has diverged.
MEETING = 50
# The length of a digest of samples, in bytes.
DIGEST = 32
FLAGS = os.O_RDWR | os.O_CREAT
# The end of the error about a stopped chain, if there are samples.
KEPT = "; the samples before that are in this error's `.posterior`."


class Stopped(NamedTuple):
    """A chain that stopped.

    Args:
        chain: Its number.
        step: The step at which it stopped.
        by_gradient: Whether the gradient was not finite although the loss was: then a smaller step size does not help.
    """

    chain: int
    step: int
    by_gradient: bool


class Chains:
    """The chains of this process and the storage of their samples.

    Args:
        num: The number of chains.
        num_samples: The number of samples per chain.
        size: The length of one sample.
        memory: Samples up to this many megabytes are held in memory; more are stored in one file per chain.
        checkpoint: The path of the checkpoint; sample files are stored beside it, so that the run can be resumed.
    """

    def __init__(self, num: int, num_samples: int, size: int, memory: float, checkpoint: str | None) -> None:
        self.num, self.num_samples, self.size, self.checkpoint = num, num_samples, size, checkpoint
        self.mine = list(range(distributed.rank(), num, distributed.world_size()))
        self.memory = memory
        self.files: dict[int, Tensor] = {}
        self._generators: dict[int, torch.Generator] = {}
        self._room: Tensor | None = None  # the samples of all chains, allocated before the first step
        self._placed = False
        self._updates = 0

    def init(self, position: Tensor, generator: torch.Generator) -> State:
        """Return the state that all samplers share: random generators, counters, and the samples in memory."""
        seed, num = draw_seed(generator), self.num
        seeded = (torch.Generator(position.device).manual_seed(derive_seed(seed, "chain", k)) for k in range(num))
        states = [one.get_state() for one in seeded]
        state: State = {
            "step": torch.zeros(num, dtype=torch.int64),
            "diverged": torch.zeros(num, dtype=torch.int64),
            "generator": torch.stack(states),
        }
        if self._fits(position):
            state["samples"] = position.new_zeros(num, self.num_samples, self.size)
        else:  # digests, by which a resumed run recognizes its sample files
            state["in_file"] = torch.zeros(num, dtype=torch.int64)
            state["file_digest"] = torch.zeros(num, DIGEST, dtype=torch.uint8)
        return state

    def _fits(self, position: Tensor) -> bool:
        return self.num * self.num_samples * self.size * position.element_size() <= self.memory * 2**20

    def at_first(self, state: State) -> State:
        """Keep the rows in the first process only, because `init` makes the same rows in all of them."""
        if distributed.rank() > 0:
            for tensor in io.tensors(state):
                tensor.zero_()
        return state

    def place(self, state: State) -> None:
        """Receive the rows of this process's chains from the first process."""
        if self._placed:
            return
        if distributed.is_active():
            others = [k for k in range(self.num) if k not in self.mine]
            distributed.sum_(list(io.tensors({name: part for name, part in state.items() if name != "samples"})))
            if "samples" in state and int(state["step"].max()) > 0:  # otherwise no sample exists
                distributed.sum_([state["samples"]])
            for tensor in io.tensors(state):
                tensor[others] = 0
        for k in self.mine:
            self._generators[k] = torch.Generator(state["position"].device)
            self._generators[k].set_state(state["generator"][k].cpu().clone())  # set_state needs its own memory
            if "samples" not in state:
                self.files[k] = self._open(k, state)
        if "samples" not in state:  # find a full disk now, not after hours of sampling
            self._room = _mapped(None, (self.num, self.num_samples, self.size), state["position"].dtype)
        self._placed = True

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a state tensor with the rows of all chains, the same in every process."""
        copy = tensor.clone()
        distributed.sum_([copy])
        return copy

    def meet(self) -> bool:
        """Whether processes synchronize after this update: always if there is one process, else every few updates."""
        self._updates += 1
        return not distributed.is_active() or self._updates % MEETING == 0

    def stop(self, state: State, chain: int, step: int, *, by_gradient: bool) -> None:
        """Mark a chain as stopped; see `Stopped`."""
        state["diverged"][chain] = -step if by_gradient else step

    def first_diverged(self, state: State) -> Stopped | None:
        """Return the first stopped chain, or None; the same in all processes."""
        flags = self.whole(state["diverged"])
        chain = int(flags.abs().argmax())
        flag = int(flags[chain])
        return Stopped(chain, abs(flag), flag < 0) if flag else None

    def generator(self, chain: int) -> torch.Generator:
        """Return the random generator of one chain."""
        return self._generators[chain]

    def remember(self, state: State) -> None:
        """Write the state of every chain's random generator into the state."""
        for k, generator in self._generators.items():
            state["generator"][k] = generator.get_state()

    def keep(self, state: State, chain: int, index: int, position: Tensor) -> None:
        """Store a sample."""
        room = state["samples"][chain] if "samples" in state else self.files[chain]
        room[index] = position
        if "samples" not in state:
            state["file_digest"][chain] = _chained(state["file_digest"][chain], room[index])
            state["in_file"][chain] = index + 1

    def gather(self, state: State, count: int) -> Tensor:
        """Return the first `count` samples of all chains ``[K, count, D]``, the same in every process.

        Samples in files are copied to a separate file, which no later run can change.
        """
        if "samples" in state:
            return self.whole(state["samples"][:, :count])
        whole, self._room = self._room, None
        if whole is None or count < self.num_samples:
            whole = _mapped(None, (self.num, count, self.size), state["position"].dtype)
        rows = max(1, numbers(limits.current().message) // self.size)
        for k in range(self.num):
            for start in range(0, count, rows):
                part = whole[k, start : start + rows]
                if k in self.files:
                    part.copy_(self.files[k][start : start + rows][: len(part)])
                distributed.sum_([part])
        return whole

    def _open(self, chain: int, state: State) -> Tensor:
        """Map the file of one chain's samples into memory; a resumed run must find its own samples there."""
        path = None if self.checkpoint is None else f"{self.checkpoint}.chain{chain}"
        shape, dtype = (self.num_samples, self.size), state["position"].dtype
        if path is None or not int(state["step"][chain]):
            if path is not None and Path(path).is_file():
                os.unlink(path)  # of an earlier run: deleted, not overwritten, because it may still be in use
            return _mapped(path, shape, dtype)
        missing = f"The samples of chain {chain + 1} are missing from '{path}': put the file back beside its checkpoint"
        wanted = self.num_samples * self.size * dtype.itemsize
        if not Path(path).is_file() or Path(path).stat().st_size != wanted:
            raise FileFormatError(f"{missing}, or delete the checkpoint to start again.")
        found, proof = _mapped(path, shape, dtype), torch.zeros(DIGEST, dtype=torch.uint8)
        for sample in found[: int(state["in_file"][chain])]:
            proof = _chained(proof, sample)
        if not torch.equal(proof, state["file_digest"][chain].cpu()):
            raise FileFormatError(f"{missing}, or delete the checkpoint to start again; the file holds other samples.")
        return found


def _chained(proof: Tensor, sample: Tensor) -> Tensor:
    """Return the digest of all samples including this one, given the digest of those before."""
    total = hashlib.sha256(bytes_of(proof.cpu()))
    total.update(bytes_of(sample.cpu()))
    return torch.frombuffer(bytearray(total.digest()), dtype=torch.uint8)


def _mapped(path: str | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor that is stored in a file of allocated space; without a path, in a temporary file.

    Without the allocation, a full disk would kill the process when memory is written back.
    """
    numbers = int(torch.Size(shape).numel())
    folder = tempfile.gettempdir() if path is None else Path(path).parent
    existed = path is not None and Path(path).exists()
    try:
        handle, place = tempfile.mkstemp("", "dubito-samples-") if path is None else (os.open(path, FLAGS, 0o666), path)
        is_reserved = False
        try:
            reserve(handle, numbers * dtype.itemsize)
            is_reserved = True
            return torch.from_file(place, shared=True, size=numbers, dtype=dtype).view(shape)
        finally:
            os.close(handle)
            if path is None or not (is_reserved or existed):
                os.unlink(place)  # the content stays as long as it is mapped
    except OSError as error:
        raise FileFormatError(
            f"The samples need {numbers * dtype.itemsize / 2**20:,.1f} MB in the folder '{folder}' ({error.strerror}): "
            "make room, choose another folder (TMPDIR, or that of the checkpoint), or hold more in memory (memory=)."
        ) from error


def chain_view(tree: Any, chain: int) -> Any:
    """Return the rows of one chain of a tree of tensors, as views."""
    if isinstance(tree, Tensor):
        return tree[chain]
    return {key: chain_view(value, chain) for key, value in tree.items()}
