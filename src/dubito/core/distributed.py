"""Exchange data between processes: divide rows, sum tensors in float64, pass on errors.

This is the only file that uses `torch.distributed`. Every process iterates over the same batches (their order comes
from one shared seed) and works on its own rows of each, so the result is that of one process up to rounding, for any
number of processes. No row is padded or counted twice.

Every exchange begins with one small message of fixed size, in which each process says whether it has failed and what it
will send next. So an error in one process is raised in all of them instead of leaving the others waiting, and processes
that do different work raise an error. Small sums are part of that message.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dubito.core import errors, limits
from dubito.core.randomness import derive_seed, draw_seed

# Numbers (float64) of the message with which every exchange begins: three for control, the rest for a small sum.
BLOCK = 64
ROOM = BLOCK - 3
# The announced kind of an exchange is a hash below this number.
KEYS = 2**20
# The most characters of an error that are sent to the other processes.
LONGEST = 4000

_alone: ContextVar[bool] = ContextVar("alone", default=False)
_inside: ContextVar[bool] = ContextVar("inside", default=False)


@dataclass
class Traffic:
    """Counts of what this process has passed to collective operations, for `docs/many-machines.md`.

    A ring all-reduce sends ``2 (P - 1) / P`` times the bytes of a sum; a broadcast sends its bytes to each receiver.
    """

    messages: int = 0
    bytes: int = 0

    def add(self, tensor: Tensor) -> None:
        """Count one message."""
        self.messages += 1
        self.bytes += tensor.numel() * tensor.element_size()


@dataclass
class _ExchangeState:
    """The state of the exchanges between the processes."""

    unfinished: bool = False  # an exchange was interrupted: the process group cannot be used for another
    told: bool = False  # every process knows of an error since the last exchange


traffic = Traffic()
_exchange_state = _ExchangeState()


def is_active() -> bool:
    """Return whether there are several processes."""
    return not _alone.get() and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def alone() -> Iterator[None]:
    """Let this process work alone inside the block: on all rows, without exchanging anything with the others."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@contextmanager
def together(*, nested: bool = False) -> Iterator[None]:
    """Raise an error of one process in all of them, at the latest at the end of the block.

    Every public function that exchanges data is wrapped in it; of nested blocks, only the outermost one acts, and those
    with `nested`, whose errors the caller catches in all processes.
    """
    if not is_active() or (_inside.get() and not nested):
        yield
        return
    token = _inside.set(True)
    _exchange_state.unfinished = _exchange_state.told = False
    try:
        yield
        _announce("end")
    except BaseException as error:
        if not (_exchange_state.told or _exchange_state.unfinished):
            with suppress(RuntimeError):  # the others may be gone
                _tell(error)
        raise
    finally:
        _exchange_state.told = False
        _inside.reset(token)


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether some tensor is a `DTensor`, of which each process holds a part."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; without the import there is no such tensor
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def rank() -> int:
    """Return the number of this process, 0 if there is only one."""
    return dist.get_rank() if is_active() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_active() else 1


def rows(size: int) -> slice:
    """Return the rows of a batch of `size` that belong to this process."""
    return slice(rank(), size, world_size())


def sum_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all processes, added in float64."""
    if not is_active() or not tensors:
        return
    total = sum(tensor.numel() for tensor in tensors)
    with torch.no_grad():
        if total <= ROOM:
            flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
            _give_back(tensors, _announce(f"sum {total}", flat)[:total].to(flat.device))
            return
        _announce(f"sum {total}")
        with _exchange():
            for group in _groups(tensors, limits.current().summed // 8):
                _sum_group(group)


def mean_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over all processes, as for running statistics of different rows."""
    sum_(tensors)
    with torch.no_grad():
        for tensor in tensors if is_active() else ():
            tensor.div_(world_size())


def agree_(buffers: Sequence[Tensor]) -> None:
    """Make the buffers of a module equal after a step: running statistics by their mean, counters by the maximum."""
    if not is_active():
        return
    counters = [buffer for buffer in buffers if buffer.ndim == 0 and not buffer.is_floating_point()]
    counts = [counter.double() for counter in counters]
    mean_([*(buffer for buffer in buffers if buffer.is_floating_point()), *counts])
    for counter, count in zip(counters, counts, strict=True):
        counter.copy_(count.ceil())  # they were equal before the step, and some have grown by one


def share_(tensors: Sequence[Tensor]) -> None:
    """Copy the tensors of the first process to all others, in place."""
    if not is_active() or not tensors:
        return
    check_same(str([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]), "networks or tensors")
    with torch.no_grad(), _exchange():
        for group in _groups(tensors, limits.current().message // 8):
            parts = [view.reshape(-1).contiguous().view(torch.uint8) for view in group]
            message = _on_wire(torch.cat(parts))
            _broadcast(message, 0)
            for view, part in zip(group, message.split([len(part) for part in parts]), strict=True):
                view.copy_(part.clone().to(view.device).view(view.dtype).reshape(view.shape))


def share_generator(generator: torch.Generator, device: torch.device | None = None) -> None:
    """Copy the generator state of the first process to all others, so that all draw the same weights.

    Args:
        generator: Changed in place.
        device: The device on which the process group exchanges messages; by default the CPU.
    """
    if is_active():
        generator.set_state(_bytes_of(0, generator.get_state().to(device)).cpu())


def from_first(value: bool, device: torch.device | None = None) -> bool:
    """Return the first process's value in every process, for decisions that depend on files."""
    answer = torch.tensor([float(value and rank() == 0)], device=device)
    sum_([answer])
    return bool(answer)


def local_generator(generator: torch.Generator) -> torch.Generator:
    """Return a generator for noise per example, seeded from the shared one and different in each process."""
    return torch.Generator(device=generator.device).manual_seed(derive_seed(draw_seed(generator), rank()))


def bytes_from(owner: int, content: bytes, device: torch.device | None = None) -> bytes:
    """Return the bytes of the process `owner` in every process; the `content` of the others is ignored."""
    if not is_active():
        return content
    data = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)].to(device)
    return _bytes_of(owner, data).cpu().numpy().tobytes()


def texts(own: str) -> list[str]:
    """Return the texts of all processes, in the order of their numbers."""
    if not is_active():
        return [own]
    _announce("texts")
    with _exchange():
        return _texts(own)


def one_text(own: str) -> str:
    """Return the common text of all processes, or a digest of their texts if they differ."""
    said = texts(own)
    return own if len(set(said)) == 1 else hashlib.sha256(" ".join(said).encode()).hexdigest()[: len(own)]


def check_same(own: str, what: str) -> None:
    """Raise an error unless `own` is the same in all processes; `what` names it in the error."""
    if len(set(texts(hashlib.sha256(own.encode()).hexdigest()))) > 1:
        raise errors.InputError(
            f"The processes were given different {what}: make the call with the same arguments in every process."
        )


def tensors_from_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of the first process in every process; those of the others may differ in size, not in type."""
    shapes = json.loads(texts(json.dumps([list(tensor.shape) for tensor in tensors]))[0])
    own = rank() == 0
    found = [t.detach().clone() if own else t.new_empty(shape) for t, shape in zip(tensors, shapes, strict=True)]
    share_(found)
    return found


def rows_of_all(rows: Tensor) -> Tensor:
    """Return the rows of all processes, those of the first one first; their number may differ, and their width not."""
    if not is_active():
        return rows
    counts = [int(text) for text in texts(str(len(rows)))]
    joined = rows.new_zeros(sum(counts), *rows.shape[1:])
    start = sum(counts[: rank()])
    joined[start : start + len(rows)] = rows
    sum_([joined])
    return joined


# ---------------------------------------------------------------------- exchanges


def _announce(what: str, head: Tensor | None = None) -> Tensor:
    """Begin an exchange; return the sum of the heads, or raise the error of another process.

    Args:
        what: The kind of exchange; it must be the same in all processes.
        head: At most `ROOM` numbers, which are summed over the processes.
    """
    key = zlib.crc32(what.encode()) % KEYS
    block = torch.zeros(BLOCK, dtype=torch.float64)
    block[1], block[2] = key, key * key
    if head is not None:
        block[3 : 3 + len(head)] = head
    block = _on_wire(block)
    with _exchange():
        _all_reduce(block)
        failed, keys, squares = (int(number) for number in block[:3].tolist())
        said = _texts("") if failed else []
    if failed:
        _exchange_state.told = True
        raise _error_of(said)
    if squares * world_size() != keys * keys:  # by the Cauchy-Schwarz inequality: not all keys are equal
        _exchange_state.told = True
        raise errors.InputError(
            f"The processes do different work (this one: {what[:60]}): call the same functions in the same order, on "
            "networks of the same shape, in every process."
        )
    return block[3:]


def _tell(error: BaseException) -> None:
    """Send an error to the other processes, which wait for this one at their next exchange."""
    code = error.code if isinstance(error, SystemExit) else None
    content = {"type": type(error).__name__, "message": str(error)[:LONGEST], "code": code}
    block = torch.zeros(BLOCK, dtype=torch.float64)
    block[0] = 1.0
    with _exchange():
        _all_reduce(_on_wire(block))
        _texts(json.dumps(content, default=str))
    _exchange_state.told = True


def _error_of(said: list[str]) -> BaseException:
    """Return the error of the first process that failed."""
    number, content = next((k, json.loads(text)) for k, text in enumerate(said) if text)
    name, message, code = content["type"], content["message"], content["code"]
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    found: BaseException = RuntimeError(f"{name}: {message}")
    if name == "SystemExit":
        found = SystemExit(code)
    elif isinstance(kind, type) and issubclass(kind, Exception | KeyboardInterrupt):
        with suppress(TypeError):  # some errors need more arguments than a message
            found = kind(message)
    found.add_note(f"This error was raised by process {number} of {world_size()} (rank {number}).")
    return found


def _texts(own: str) -> list[str]:
    """Return the texts of all processes; call it only inside an exchange."""
    content = torch.tensor(list(own.encode()), dtype=torch.float64)
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    lengths[dist.get_rank()] = len(content)
    lengths = _on_wire(lengths)
    _all_reduce(lengths)
    ends = [int(end) for end in lengths.cumsum(0)]
    message = torch.zeros(ends[-1], dtype=torch.float64)
    start = ends[dist.get_rank()] - len(content)
    message[start : start + len(content)] = content
    message = _on_wire(message)
    if ends[-1]:
        _all_reduce(message)
    whole = bytes(int(letter) for letter in message.tolist())
    return [whole[begin:end].decode() for begin, end in zip([0, *ends], ends, strict=False)]


@contextmanager
def _exchange() -> Iterator[None]:
    """Mark the exchange as unfinished until the block ends without an error."""
    _exchange_state.unfinished, _exchange_state.told = True, False
    yield
    _exchange_state.unfinished = False


# ---------------------------------------------------------------------- messages


def _bytes_of(owner: int, data: Tensor) -> Tensor:
    """Return the bytes of the owner in every process."""
    mine = dist.get_rank() == owner
    size = int(_announce(f"bytes of {owner}", torch.tensor([float(len(data) if mine else 0)]))[0])
    message = _on_wire(data if mine else torch.empty(size, dtype=torch.uint8, device=data.device))
    with _exchange():
        if size:
            _broadcast(message, owner)
    return message


def _groups(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield views of the tensors in groups of at most `most` numbers on one device; large tensors are split."""
    group: list[Tensor] = []
    for tensor in tensors:
        value = tensor.detach()
        cut = value.numel() > most and value.is_contiguous()
        for view in value.view(-1).split(most) if cut else (value,):
            full = sum(part.numel() for part in group) + view.numel() > most
            if group and (full or view.device != group[0].device):
                yield group
                group = []
            group.append(view)
    if group:
        yield group


def _sum_group(group: list[Tensor]) -> None:
    flat = group[0].reshape(-1).double() if len(group) == 1 else torch.cat([v.reshape(-1).double() for v in group])
    message = _on_wire(flat)
    _all_reduce(message)
    if len(group) > 1 or message.data_ptr() != group[0].data_ptr():
        _give_back(group, message)


def _give_back(tensors: Sequence[Tensor], flat: Tensor) -> None:
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.reshape(tensor.shape))


def _on_wire(tensor: Tensor) -> Tensor:
    """Return the tensor on a device that the process group can send from: NCCL cannot send from the CPU."""
    if dist.get_backend() == "nccl" and tensor.device.type == "cpu":
        return tensor.cuda()
    return tensor


def _all_reduce(tensor: Tensor) -> None:
    traffic.add(tensor)
    dist.all_reduce(tensor)


def _broadcast(tensor: Tensor, owner: int) -> None:
    traffic.add(tensor)
    dist.broadcast(tensor, src=owner)
