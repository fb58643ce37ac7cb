"""`torch.distributed`'s names over a group's `Communicator`."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ds_comm.communicator import Communicator
from ds_comm.work import Work

# One communicator a group: connecting shared memory is done once. Weak, as is the communicator's hold on its group:
# it goes when `destroy_process_group` lets the group go.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator of `group` (default: the world; a world of one where no group runs).

    It is the same one for as long as the group lives. Its first call that finds shared memory is collective.
    """
    if group is None:
        if not dist.is_initialized():
            return Communicator(None)
        group = dist.group.WORLD
    assert group is not None
    found = _communicators.get(group)
    if found is None:
        found = _communicators[group] = Communicator(group)
    return found


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """See `Communicator.all_reduce`."""
    return communicator(group).all_reduce(tensor, op, async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """See `Communicator.reduce_scatter_tensor`."""
    return communicator(group).reduce_scatter_tensor(output.view(-1), input.view(-1), op, async_op)


def all_gather_into_tensor(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """See `Communicator.all_gather_into_tensor`."""
    return communicator(group).all_gather_into_tensor(output.view(-1), input.view(-1), async_op)


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """See `Communicator.broadcast`; `src` is a rank of `group`."""
    return communicator(group).broadcast(tensor, src, async_op)


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Returns when every rank has called it."""
    communicator(group).barrier()
