"""Blocks of no-U-turn transitions: on an accelerator, the host reads once per block how long trajectories were.

There every transition of a block computes the same number of doublings, and keeps those that belong to its trajectory.
If one trajectory of the block has not ended by then, the whole block is repeated with one more doubling and the same
random numbers. So samples do not depend on the number of doublings: they are those of `max_depth`. Only the work does.
"""

from __future__ import annotations

import torch

from dubito.core import io
from dubito.core.randomness import derive_seed
from dubito.fitting.inference import State
from dubito.methods.mcmc.hamiltonian import Transition
from dubito.methods.mcmc.numbers import pick

# The number of transitions between two reads.
LENGTH = 20
# The doublings of the first block.
FIRST = 4
# What a transition changes, apart from samples and their statistics, which a repetition overwrites.
CHANGED = ("step", "generator", "position", "inverse_mass", "steps", "masses", "in_file", "file_digest")


class Blocks:
    """The doublings of every chain and the state at the start of its block, stored in ``state["block"]``.

    Args:
        max_depth: The largest number of doublings.
        length: The number of transitions per block.
        first: The number of doublings of the first block.
    """

    def __init__(self, max_depth: int, length: int = LENGTH, first: int = FIRST) -> None:
        self.max_depth, self.length, self.first = max_depth, length, min(first, max_depth)

    def init(self, state: State) -> State:
        """Return the state with the blocks of all chains; they start here."""
        num, device = len(state["step"]), state["position"].device
        most = torch.zeros(num, dtype=torch.int64, device=device)
        block = {"depth": torch.full((num,), self.first), "most": most, "start": io.clone(_changed(state))}
        return {**state, "block": block}

    def depth(self, state: State, chain: int) -> int:
        """Return the number of doublings of this block."""
        return int(state["block"]["depth"][chain])

    def done(self, state: State, chain: int) -> int:
        """Return the number of transitions of this block so far."""
        return int(state["step"][chain] - state["block"]["start"]["step"][chain])

    def is_full(self, state: State, chain: int) -> bool:
        """Whether the block has all its transitions."""
        return self.done(state, chain) >= self.length

    def note(self, state: State, chain: int, moved: Transition, generator: torch.Generator) -> None:
        """Note the length of a trajectory, and start its generator anew: how much it drew depends on the doublings.

        A trajectory that has not ended counts as one step longer, 2^depth, for which depth + 1 doublings are needed.
        """
        most = state["block"]["most"]
        most[chain] = torch.maximum(most[chain], torch.as_tensor(moved.num_steps + pick(moved.stopped, 0, 1)))
        generator.manual_seed(derive_seed(generator.initial_seed(), "transition"))

    def ended(self, state: State, chain: int) -> bool:
        """Read whether all trajectories of the block have ended; if not, the next one has one more doubling."""
        depth, needed = state["block"]["depth"], int(state["block"]["most"][chain]).bit_length()
        missing = int(depth[chain]) < min(needed, self.max_depth)
        depth[chain] = min(max(needed, 1), self.max_depth)
        return not missing

    def begin(self, state: State, chain: int, generator: torch.Generator) -> None:
        """Start the next block here."""
        state["generator"][chain] = generator.get_state()
        state["block"]["most"][chain] = 0
        _copy_row(_changed(state), state["block"]["start"], chain)

    def go_back(self, state: State, chain: int, generator: torch.Generator) -> None:
        """Return to the start of the block."""
        state["block"]["most"][chain] = 0
        _copy_row(state["block"]["start"], _changed(state), chain)
        generator.set_state(state["generator"][chain].cpu().clone())  # set_state needs its own memory


def make_blocks(max_depth: int, device: torch.device) -> Blocks | None:
    """Return blocks on an accelerator; on the CPU, where a read costs nothing, each trajectory ends by itself."""
    return None if device.type == "cpu" else Blocks(max_depth)


def _changed(state: State) -> State:
    return {name: state[name] for name in CHANGED if name in state}


def _copy_row(source: State, target: State, chain: int) -> None:
    for name, value in source.items():
        if isinstance(value, torch.Tensor):
            target[name][chain] = value[chain]
        else:
            _copy_row(value, target[name], chain)
