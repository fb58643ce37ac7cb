"""Reduce-scatter and all-gather as exchanges between pairs of ranks.

For backends whose own forms copy more than they must: gloo's reduce-scatter is an all-reduce for every
rank, so halves exchanged by send and receive arrive in less than half the time (see `routes`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ds_comm.work import Deferred


def reduce_scatter(
    group: dist.ProcessGroup,
    output: torch.Tensor,
    input: torch.Tensor,
    splits: Sequence[int],
    scale: float | None = None,
) -> Deferred:
    """`output` = sum over ranks of `input[splits[rank]:splits[rank + 1]]`, times `scale`.

    Sums run in rank order, in the wider dtype of the two, after the last piece has come (in the handle's `wait`).
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    own = input[splits[rank] : splits[rank + 1]]
    parts = [own if peer == rank else torch.empty_like(own) for peer in range(world)]
    works = []
    for shift in range(1, world):  # everyone sends to a different rank at a time
        to, come = (rank + shift) % world, (rank - shift) % world
        piece = input[splits[to] : splits[to + 1]]
        if piece.numel():
            works.append(dist.isend(piece, group=group, group_dst=to))
        if own.numel():
            works.append(dist.irecv(parts[come], group=group, group_src=come))

    def finish() -> None:
        total = parts[0].to(torch.promote_types(input.dtype, output.dtype), copy=True)
        for part in parts[1:]:
            total.add_(part)
        if scale is not None:
            total.mul_(scale)
        output.copy_(total)

    return Deferred(works, finish)


def all_gather(group: dist.ProcessGroup, output: torch.Tensor, input: torch.Tensor, splits: Sequence[int]) -> Deferred:
    """`output[splits[r]:splits[r + 1]]` = rank r's `input`, on every rank."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    own = output[splits[rank] : splits[rank + 1]]
    if own.data_ptr() != input.data_ptr():
        own.copy_(input)
    works = []
    for shift in range(1, world):
        to, come = (rank + shift) % world, (rank - shift) % world
        target = output[splits[come] : splits[come + 1]]
        if own.numel():
            works.append(dist.isend(own, group=group, group_dst=to))
        if target.numel():
            works.append(dist.irecv(target, group=group, group_src=come))
    return Deferred(works)
