"""The sharding plan: which parameters travel together, and which rank owns what. Data only, no tensors.

A shard group is a run of parameters of one dtype and one unit of the model, all of them trained or none, laid one
after another in a flat buffer. `splits` cuts that buffer into one interval a rank. How it is cut is the only difference
between a replicated state (not at all), ZeRO's even shards (anywhere), and optimizers that must see whole
parameters (between parameters).
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ds_comm import ShardSpec

ALIGN = 32
"""Every parameter starts at a multiple of this many elements (128 bytes of fp32), as kernels like it."""


class Cut(enum.Enum):
    """Where a group may be cut into the ranks' intervals."""

    NOWHERE = "replicated"
    """Every rank owns everything."""
    ANYWHERE = "even"
    """Equal intervals, through parameters: for optimizers whose update is elementwise."""
    BETWEEN = "whole parameters"
    """Each parameter wholly on the rank with the least of all groups so far: Muon, LAMB, Adafactor need shapes."""
    ROUND_ROBIN = "whole parameters in turn"
    """Each parameter wholly on the next rank."""


@dataclass(frozen=True)
class ParameterInfo:
    """What the plan needs to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    param_group: int = 0
    """Number of the optimizer's parameter group; without meaning where it is not trained."""
    unit: int = 0
    """Number of the part of the model it is gathered with; see `fetch_plan`."""
    trained: bool = True
    """It has gradients and optimizer states."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its group: elements `[offset, offset + info.numel)` of the flat buffer."""

    info: ParameterInfo
    offset: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.offset + self.info.numel


@dataclass(frozen=True)
class GroupLayout:
    """One shard group. `splits` are the boundaries of the ranks' intervals; None where every rank owns all."""

    index: int
    slots: tuple[Slot, ...]
    numel: int
    splits: tuple[int, ...] | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that all its parameters have."""
        return self.slots[0].info.dtype

    @property
    def unit(self) -> int:
        """The part of the model that all its parameters belong to."""
        return self.slots[0].info.unit

    @property
    def trained(self) -> bool:
        """Its parameters have gradients and optimizer states."""
        return self.slots[0].info.trained

    def owned(self, rank: int) -> tuple[int, int]:
        """The interval of the flat buffer whose states `rank` updates."""
        return (0, self.numel) if self.splits is None else (self.splits[rank], self.splits[rank + 1])

    def specs(self, rank: int) -> list[tuple[int, ShardSpec]]:
        """The pieces of parameters that `rank` owns: number of the slot, and what part of it."""
        start, stop = self.owned(rank)
        pieces = []
        for number, slot in enumerate(self.slots):
            first, last = max(start, slot.offset), min(stop, slot.stop)
            if first < last:
                info = slot.info
                spec = ShardSpec(info.name, info.shape, info.dtype, first - slot.offset, last - slot.offset)
                pieces.append((number, spec))
        return pieces

    def gaps(self) -> list[tuple[int, int]]:
        """Intervals of the buffer that belong to no parameter."""
        edges = [(0, 0), *sorted((slot.offset, slot.stop) for slot in self.slots), (self.numel, self.numel)]
        return [(a[1], b[0]) for a, b in itertools.pairwise(edges) if a[1] < b[0]]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        owners = "every rank" if self.splits is None else f"cut at {list(self.splits[1:-1])}"
        frozen = "" if self.trained else "frozen, "
        lines = [f"group {self.index}: {self.numel:,} {dtype}, {frozen}{owners}"]
        lines += [f"  [{s.offset:>10,} {s.stop:>10,})  {s.info.name} {list(s.info.shape)}" for s in self.slots]
        return "\n".join(lines)


def plan_groups(
    parameters: Iterable[ParameterInfo], world: int, max_numel: int, cut: Cut, first_index: int = 0
) -> tuple[GroupLayout, ...]:
    """Lays parameters out in shard groups, in the order in which backward will finish them.

    Backward goes through the model from its end, so groups are filled from the last parameter on; a group
    comes after another when its last gradient arrives later.

    Args:
        parameters: in the order of the model.
        world: ranks to cut for.
        max_numel: most elements in a group; one larger parameter makes a group of its own.
        cut: where groups may be cut.
        first_index: number of the first group.

    Raises:
        ValueError: there is no rank, a group may hold nothing, or two parameters have one name.
    """
    parameters = list(parameters)
    for name, value in (("world", world), ("max_numel", max_numel)):
        if value < 1:
            raise ValueError(f"a plan needs a {name} of 1 at least: got {value}; pass a larger one")
    counts = Counter(info.name for info in parameters)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"parameters are told apart by name: {twice[0]!r} stands twice; name each parameter once")
    filling: dict[tuple[torch.dtype, int, bool], list[tuple[int, ParameterInfo]]] = {}
    done: list[list[tuple[int, ParameterInfo]]] = []
    for order, info in reversed(list(enumerate(parameters))):
        key = (info.dtype, info.unit, info.trained)
        run = filling.setdefault(key, [])
        if run and sum(_aligned(i.numel) for _, i in run) + _aligned(info.numel) > max_numel:
            done.append(run)
            run = filling[key] = []
        run.append((order, info))
    done.extend(filling.values())
    done.sort(key=lambda run: -run[-1][0])
    loads = [0] * world
    return tuple(
        _lay_out(first_index + index, [info for _, info in run], world, cut, loads) for index, run in enumerate(done)
    )


def _lay_out(index: int, infos: Sequence[ParameterInfo], world: int, cut: Cut, loads: list[int]) -> GroupLayout:
    """One group. `loads`: elements that each rank has got of earlier ones, where it gets whole parameters."""
    if cut in (Cut.NOWHERE, Cut.ANYWHERE):
        slots, offset = [], 0
        for info in infos:
            slots.append(Slot(info, offset))
            offset += _aligned(info.numel)
        if cut is Cut.NOWHERE:
            return GroupLayout(index, tuple(slots), max(offset, ALIGN), None)
        share = max(_aligned(-(-offset // world)), ALIGN)
        return GroupLayout(index, tuple(slots), share * world, tuple(share * rank for rank in range(world + 1)))
    shares: list[list[ParameterInfo]] = [[] for _ in range(world)]
    order = enumerate(infos) if cut is Cut.ROUND_ROBIN else enumerate(sorted(infos, key=lambda i: -i.numel))
    for turn, info in order:
        owner = (index + turn) % world if cut is Cut.ROUND_ROBIN else loads.index(min(loads))
        shares[owner].append(info)
        loads[owner] += _aligned(info.numel)
    slots, splits, offset = [], [0], 0
    for share_of_rank in shares:
        for info in share_of_rank:
            slots.append(Slot(info, offset))
            offset += _aligned(info.numel)
        splits.append(offset)
    return GroupLayout(index, tuple(slots), offset, tuple(splits))


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN
