"""The only file that names `torch.distributed`: rows are shared out, sums are put together, in float64.

Every process iterates over the same batches (their order comes from one shared seed) and works on its own rows of each,
so the result is that of one process up to rounding, whatever the number of processes. No row is padded or counted
twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

from dubito.core.randomness import derive_seed, draw_seed

_alone: ContextVar[bool] = ContextVar("alone", default=False)


def is_active() -> bool:
    """Whether more than one process takes part."""
    return not _alone.get() and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def alone() -> Iterator[None]:
    """Let this process work by itself for the length of the block: on all rows, and without waiting for the others."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def rank() -> int:
    """The number of this process, 0 when there is only one."""
    return dist.get_rank() if is_active() else 0


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if is_active() else 1


def rows(size: int) -> slice:
    """The rows of a batch of `size` that belong to this process."""
    return slice(rank(), size, world_size())


def sum_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all processes, added in float64, in one message."""
    if not is_active() or not tensors:
        return
    flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
    dist.all_reduce(flat)
    with torch.no_grad():
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.reshape(tensor.shape))


def mean_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over all processes: what running statistics of different rows agree on."""
    sum_(tensors)
    with torch.no_grad():
        for tensor in tensors if is_active() else ():
            tensor.div_(world_size())


def share_generator(generator: torch.Generator, device: torch.device | None = None) -> None:
    """Give every process the generator state of the first one: the source of all weight noise.

    Args:
        generator: Changed in place.
        device: Where the messages of the process group travel; by default the CPU.
    """
    if is_active():
        state = generator.get_state().to(device)
        dist.broadcast(state, src=0)
        generator.set_state(state.cpu())


def from_first(value: bool, device: torch.device | None = None) -> bool:
    """Return the first process's answer in every process: what depends on a file must be decided once."""
    answer = torch.tensor([float(value and rank() == 0)], device=device)
    sum_([answer])
    return bool(answer)


def local_generator(generator: torch.Generator) -> torch.Generator:
    """Return a generator for noise per example: seeded from the shared one, different in each process."""
    return torch.Generator(device=generator.device).manual_seed(derive_seed(draw_seed(generator), rank()))


def bytes_from(owner: int, content: bytes, device: torch.device | None = None) -> bytes:
    """Return in every process the bytes that the process `owner` gives; those of the others are ignored."""
    if not is_active():
        return content
    mine = rank() == owner
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, src=owner)
    message = bytearray(content) if mine else bytearray(int(size))
    data = torch.frombuffer(message, dtype=torch.uint8).to(device)
    dist.broadcast(data, src=owner)
    return data.cpu().numpy().tobytes()
