"""What ranks tell one another: their parameters at the start, and one small all-reduce at each boundary."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_comm import Communicator
from ds_zero.errors import ZeroError
from ds_zero.layout import ParameterInfo
from ds_zero.reducer import Reducer


@dataclass(frozen=True)
class Agreement:
    """The same on every rank.

    Attributes:
        square: [], float64: the squared 2-norm of the reduced gradients of all shards, as they are.
        users: [parameters], float64: how many ranks used each, group by group.
    """

    square: torch.Tensor
    users: torch.Tensor


@torch.no_grad()
def agree(reducer: Reducer, comm: Communicator, counted_once: bool, unused_allowed: bool) -> Agreement:
    """Brings the ranks' parts together. Collective, after `reducer.finish()`.

    Args:
        reducer: its groups are reduced.
        comm: the data-parallel ranks.
        counted_once: every rank holds the whole reduced gradient, not a shard: one rank's norm is all.
        unused_allowed: a parameter that a rank did not use counts as zero there.

    Raises:
        ZeroError: a parameter was not used and must be, or (noticed on a CPU only: reading would wait for an
            accelerator) engines took turns differently by rank. On every rank.
    """
    groups = reducer.groups
    device = groups[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    norms = [torch.linalg.vector_norm(g.reduced, dtype=torch.float32) for g in groups if g.reduced is not None]
    square = torch.stack(norms).to(wide).square().sum()
    if counted_once and comm.rank != 0:
        square = square * 0
    flags = [float((i, s) in reducer.used) for i, g in enumerate(groups) for s in range(len(g.parameters))]
    order = float(reducer.order)
    told = torch.tensor([order, order * order, *flags], dtype=wide).to(device, non_blocking=True)
    message = torch.cat([square.reshape(1), told])
    comm.all_reduce(message)
    square, orders, users = message[0], message[1:3], message[3:]
    if message.is_cpu:  # elsewhere reading would wait for the device
        _refuse_disorder(orders.tolist(), comm)
    if not unused_allowed:
        _refuse_unused(reducer, users.tolist(), comm.world)
    return Agreement(square, users)


def _refuse_disorder(orders: list[float], comm: Communicator) -> None:
    """Where engines share a communicator, one's gradients fit another's: they must take turns alike."""
    total, squares = orders
    if squares * comm.world != total * total:  # unless all ranks have the same
        raise ZeroError(
            "engines reduce in the same order on every rank: this one's gradients were sent at other turns on "
            f"rank {comm.rank} than elsewhere, and may have been taken for another engine's; call the "
            "engines, and their backward, in one order"
        )


def _refuse_unused(reducer: Reducer, users: list[float], world: int) -> None:
    slots = [(slot, p) for g in reducer.groups for slot, p in zip(g.layout.slots, g.parameters)]
    unused = [
        f"{slot.info.name!r} (unused on {world - int(n)} of {world} ranks)"
        for (slot, p), n in zip(slots, users)
        if p.requires_grad and n < world
    ]
    if unused:
        raise ZeroError(
            "ignore_unused_parameters=false wants a gradient for every parameter on every rank; missing: "
            f"{', '.join(unused[:8])}{' …' if len(unused) > 8 else ''}; use them in the loss, freeze them, or "
            "set ignore_unused_parameters to true"
        )


def agree_on_parameters(infos: Sequence[ParameterInfo], comm: Communicator, device: torch.device) -> None:
    """Checks that all ranks have the same parameters, in one order. Collective, before anything is laid out.

    Raises:
        ZeroError: they don't. On every rank.
    """
    if comm.world == 1:
        return
    marks = [_mark(repr(info)) for info in infos]
    counts = _collect([len(marks), _mark(repr(marks))], comm, device)
    if len(set(counts)) == 1:
        return
    most = max(count for count, _ in counts)
    by_rank = _collect(marks + [0] * (most - len(marks)), comm, device)
    place = next(place for place, seen in enumerate(zip(*by_rank)) if len(set(seen)) > 1)
    others = [rank for rank in range(comm.world) if by_rank[rank][place] != by_rank[comm.rank][place]]
    info = infos[place] if place < len(infos) else None
    here = f"{info.name!r}, {list(info.shape)} {info.dtype}" if info is not None else "none"
    raise ZeroError(
        f"all ranks train the same parameters in one order: number {place} of rank {comm.rank} is {here}, and "
        f"another on rank {', '.join(map(str, others))}; build the same model, and freeze the same of it, everywhere"
    )


def _mark(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")


def _collect(numbers: list[int], comm: Communicator, device: torch.device) -> list[tuple[int, ...]]:
    own = torch.tensor(numbers, dtype=torch.int64).to(device)
    everyone = own.new_empty(comm.world * len(numbers))
    comm.all_gather_into_tensor(everyone, own)
    return [tuple(row) for row in everyone.view(comm.world, -1).tolist()]
