"""Communicator: the collectives of one group, each by its best route."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ds_comm import peers
from ds_comm.process_group import DEFAULT_TIMEOUT
from ds_comm.routes import Route, RoutePolicy
from ds_comm.shared_memory import SharedMemoryTransport, even_splits, splits_are_even
from ds_comm.work import Deferred, Done, Work

# torch 2.13 renamed both and warns at the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator:
    """The collectives of one process group, with `torch.distributed`'s names and meanings.

    Calls that a better route exists for take it (see `routes`), the rest are torch's own. Without
    `async_op` a call returns None when the result may be used; with it, a handle whose `wait()` does that.
    Tests and loggers stand in front of this class: it is the whole interface ds-zero uses.

    Args:
        group: a process group, or None for a world of one, in which every collective is a copy.
        policy: thresholds of the routes. Default: as measured.
    """

    def __init__(self, group: dist.ProcessGroup | None, policy: RoutePolicy | None = None):
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        self.policy = policy or RoutePolicy()
        self._transport: SharedMemoryTransport | None = None
        self._transport_known = False

    @property
    def transport(self) -> SharedMemoryTransport | None:
        """Memory shared by the group's ranks, or None where they run on several hosts.

        The first call connects the ranks and is collective.
        """
        if not self._transport_known:
            self._transport_known = True
            if self.group is not None and self.world > 1 and self.policy.shared_memory:
                timeout = _timeout_s(self.group)
                self._transport = SharedMemoryTransport.open(self.group, timeout)
        return self._transport

    def route(self, kind: str, tensor: torch.Tensor) -> Route:
        """The route a call takes; `kind` as in `RoutePolicy.choose`."""
        if self.group is None or self.world == 1:
            return Route.NATIVE
        backend = _backend(self.group, tensor.device)
        route = self.policy.choose(kind, backend, tensor, self.world, one_host=True)
        if route is Route.SHARED_MEMORY and self.transport is None:
            route = self.policy.choose(kind, backend, tensor, self.world, one_host=False)
        return route

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduces `tensor` over the ranks, in place. Any shape."""
        if self.world == 1:
            return _done(async_op)
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            scale = 1 / self.world if op == ReduceOp.AVG else None
            if tensor.is_contiguous() and self.route("all_reduce", tensor) is Route.SHARED_MEMORY:
                flat = tensor.view(-1)
                return self._shared(lambda shared: shared.all_reduce(flat, scale), async_op)
            if scale is not None and _backend(self.group, tensor.device) == "gloo":
                work = dist.all_reduce(tensor, ReduceOp.SUM, self.group, True)
                return _finish(Deferred([work], lambda: _scale(tensor, scale)), async_op)
        return dist.all_reduce(tensor, op, self.group, async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        async_op: bool = False,
        splits: Sequence[int] | None = None,
    ) -> Work | None:
        """Reduces `input` over the ranks and leaves each its piece in `output`.

        Args:
            output: this rank's piece, flat and contiguous. May be wider than `input` (fp32 for bf16): the
                sum is then made in the wider dtype where the route can, and converted where it can't.
            input: flat and contiguous, the pieces of all ranks one after another.
            op: SUM or AVG.
            splits: world + 1 boundaries of the pieces, for unequal ones. Default: equal pieces.
        """
        bounds = self._bounds(input, output, splits)
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(f"a reduce-scatter sums or averages: op={op}; use ReduceOp.SUM or ReduceOp.AVG")
        scale = 1 / self.world if op == ReduceOp.AVG else None
        if self.world == 1:
            output.copy_(input)
            return _done(async_op)
        assert self.group is not None
        route = self.route("reduce_scatter", input)
        if route is Route.SHARED_MEMORY:
            return self._shared(lambda shared: shared.reduce_scatter(output, input, bounds, scale), async_op)
        backend = _backend(self.group, input.device)
        even = splits_are_even(bounds)
        if route is Route.PEERS or (backend == "gloo" and not even):
            return _finish(peers.reduce_scatter(self.group, output, input, bounds, scale), async_op)
        piece = output if output.dtype == input.dtype else torch.empty_like(output, dtype=input.dtype)
        if backend == "gloo":
            op = ReduceOp.SUM  # gloo has no average
        else:
            scale = None
        if even:
            works = [_reduce_scatter(piece, input, op, self.group, async_op=True)]
        else:  # one reduction for each owner, which leaves garbage in other owners' pieces of `input`
            works = [
                dist.reduce(input[start:stop], group_dst=owner, op=op, group=self.group, async_op=True)
                for owner, (start, stop) in enumerate(itertools.pairwise(bounds))
                if stop > start
            ]
            piece = input[bounds[self.rank] : bounds[self.rank + 1]]

        def finish() -> None:
            if piece is not output:
                output.copy_(piece)
            if scale is not None:
                output.mul_(scale)

        return _finish(Deferred(works, finish), async_op)

    def all_gather_into_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool = False,
        splits: Sequence[int] | None = None,
    ) -> Work | None:
        """Collects every rank's `input` in `output`, one after another.

        Args:
            output: flat and contiguous.
            input: this rank's piece, flat and contiguous; may be its place in `output`.
            splits: world + 1 boundaries of the pieces, for unequal ones. Default: equal pieces.
        """
        bounds = self._bounds(output, input, splits)
        if self.world == 1:
            if output.data_ptr() != input.data_ptr():
                output.copy_(input)
            return _done(async_op)
        assert self.group is not None
        route = self.route("all_gather", output)
        if route is Route.SHARED_MEMORY:
            return self._shared(lambda shared: shared.all_gather(output, input, bounds), async_op)
        even = splits_are_even(bounds)
        if route is Route.PEERS or (not even and _backend(self.group, output.device) == "gloo"):
            return _finish(peers.all_gather(self.group, output, input, bounds), async_op)
        if even:
            return _all_gather(output, input, self.group, async_op)
        own = output[bounds[self.rank] : bounds[self.rank + 1]]
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)
        works = [
            dist.broadcast(output[start:stop], group_src=owner, group=self.group, async_op=True)
            for owner, (start, stop) in enumerate(itertools.pairwise(bounds))
            if stop > start
        ]
        return _finish(Deferred(works), async_op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, async_op: bool = False) -> Work | None:
        """Copies `tensor` from rank `src` of this group to the others."""
        if self.world == 1:
            return _done(async_op)
        return dist.broadcast(tensor, group_src=src, group=self.group, async_op=async_op)

    def all_reduce_coalesced(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp.RedOpType = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduces several tensors of one dtype and device as one."""
        if self.world == 1 or not tensors:
            return _done(async_op)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        work = self.all_reduce(flat, op, async_op=True)
        assert work is not None

        def finish() -> None:
            pieces = flat.split([tensor.numel() for tensor in tensors])
            for tensor, piece in zip(tensors, pieces):
                tensor.copy_(piece.view_as(tensor))

        return _finish(Deferred([work], finish), async_op)

    def reduce_scatter_coalesced(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        op: ReduceOp.RedOpType = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """`reduce_scatter_tensor` of several pairs, as one."""
        works = [self.reduce_scatter_tensor(o, i, op, async_op=True) for o, i in zip(outputs, inputs)]
        return _finish(Deferred(works), async_op)

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool = False
    ) -> Work | None:
        """`all_gather_into_tensor` of several pairs, as one."""
        works = [self.all_gather_into_tensor(o, i, async_op=True) for o, i in zip(outputs, inputs)]
        return _finish(Deferred(works), async_op)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.world > 1:
            dist.barrier(self.group)

    def close(self) -> None:
        """Gives the shared memory back. The process group stays."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _shared(self, call: Callable[[SharedMemoryTransport], None], async_op: bool) -> Work | None:
        shared = self.transport
        assert shared is not None
        if async_op:
            return shared.submit(lambda: call(shared))
        shared.run(lambda: call(shared))
        return None

    def _bounds(self, whole: torch.Tensor, piece: torch.Tensor, splits: Sequence[int] | None) -> Sequence[int]:
        bounds = even_splits(whole.numel(), self.world) if splits is None else splits
        expected = bounds[self.rank + 1] - bounds[self.rank]
        uneven = splits is None and whole.numel() % self.world
        if whole.dim() != 1 or piece.dim() != 1 or uneven or piece.numel() != expected or bounds[-1] != whole.numel():
            raise ValueError(
                f"the whole holds one piece of each of {self.world} ranks, both flat: whole {tuple(whole.shape)}, "
                f"piece {tuple(piece.shape)}, expected ({expected},); pad the whole, or pass splits="
            )
        return bounds


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The name of the backend that serves `device` in `group`, as "gloo"."""
    name = dist.get_backend_config(group)
    for part in name.split(","):
        kind, _, backend = part.partition(":")
        if kind == device.type:
            return backend
    return name


def _timeout_s(group: dist.ProcessGroup) -> float:
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout.total_seconds()
        except (RuntimeError, AttributeError):
            continue
    return DEFAULT_TIMEOUT.total_seconds()


def _scale(tensor: torch.Tensor, scale: float) -> None:
    tensor.mul_(scale)


def _done(async_op: bool) -> Work | None:
    return Done() if async_op else None


def _finish(work: Any, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None
