"""What ranks tell one another at the accumulation boundary: one small all-reduce a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_comm import Communicator
from ds_zero.errors import ZeroError
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
        ZeroError: engines took turns differently by rank, or a parameter was not used and must be. On every rank.
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
