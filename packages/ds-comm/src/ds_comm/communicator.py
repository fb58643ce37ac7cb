"""Communicator: the collectives of one group, each by its best route."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ds_comm import peers
from ds_comm.checks import (
    check_all_gather,
    check_average,
    check_one_kind,
    check_pairs,
    check_pieces,
    check_reduce_scatter,
)
from ds_comm.errors import CommError
from ds_comm.process_group import DEFAULT_TIMEOUT
from ds_comm.routes import Route, RoutePolicy
from ds_comm.shared_memory import SharedMemoryTransport, splits_are_even
from ds_comm.work import Deferred, Done, Work

# torch 2.13 renamed both and warns at the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator:
    """The collectives of one process group, with `torch.distributed`'s names and meanings.

    Calls that a better route exists for take it (see `routes`), the rest are torch's own. Without
    `async_op` a call returns None when the result may be used; with it, a handle whose `wait()` does that.
    Tests and loggers stand in front of this class: it is the whole interface ds-zero uses.

    Autograd does not see collectives: they change values, not the graph. A call that can't be is refused before
    anything is sent, so that a caller who catches the error can go on with the group.

    Args:
        group: a process group, or None for a world of one, in which every collective is a copy. It is not kept
            alive: `destroy_process_group` ends the communicator's use too.
        policy: thresholds of the routes. Default: as measured.

    Raises:
        ValueError: (from every collective) the arguments do not fit together.
        CommError: (from every collective, or its handle's `wait()`) another rank ended, gave up, or is in another
            call, as far as the route can tell; or the group was destroyed.
    """

    def __init__(self, group: dist.ProcessGroup | None, policy: RoutePolicy | None = None):
        # Weak: a group's communicator is remembered for as long as there is the group (see `functional`).
        self._group = weakref.ref(group) if group is not None else None
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        self.policy = policy or RoutePolicy()
        self._transport: SharedMemoryTransport | None = None
        self._transport_known = False
        self._backends: dict[str, str] = {}

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, None for a world of one without.

        Raises:
            CommError: the group was destroyed.
        """
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise CommError(
                f"a communicator goes with its process group: this one's, of {self.world} ranks, was destroyed; "
                "make one of the new group"
            )
        return group

    @property
    def transport(self) -> SharedMemoryTransport | None:
        """Memory shared by the group's ranks, or None where they run on several hosts.

        The first call connects the ranks and is collective.
        """
        if not self._transport_known:
            self._transport_known = True
            group = self.group
            if group is not None and self.world > 1 and self.policy.shared_memory:
                self._transport = SharedMemoryTransport.open(group, _timeout_s(group))
        return self._transport

    def route(self, kind: str, tensor: torch.Tensor) -> Route:
        """The route a call takes; `kind` as in `RoutePolicy.choose`. May connect the ranks, as `transport`."""
        if self.world == 1:
            return Route.NATIVE
        backend = self._backend(tensor.device)
        route = self.policy.choose(kind, backend, tensor, self.world, one_host=True)
        if route is Route.SHARED_MEMORY and self.transport is None:
            route = self.policy.choose(kind, backend, tensor, self.world, one_host=False)
        return route

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduces `tensor` over the ranks, in place.

        Args:
            tensor: any shape; the same number of elements and dtype on every rank.
            op: how. AVG on gloo needs floating-point or complex numbers. Default: SUM.
            async_op: return a handle. Default: false.

        Raises:
            ValueError: an average of whole numbers is asked of a backend that has none.
        """
        if self.world == 1:
            return _done(async_op)
        tensor = _values(tensor)
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            scale = 1 / self.world if op == ReduceOp.AVG else None
            if tensor.is_contiguous() and self.route("all_reduce", tensor) is Route.SHARED_MEMORY:
                flat = tensor.view(-1)
                return self._shared(lambda shared: shared.all_reduce(flat, scale), async_op)
            if scale is not None and self._backend(tensor.device) == "gloo":
                check_average(tensor)
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
            output: [splits[rank + 1] - splits[rank]], contiguous: this rank's piece. May be of another dtype than
                `input` (fp32 for bf16): the sum is then made in the wider of both where the route can, and
                converted where it can't. May be `input`'s own piece.
            input: [splits[-1]], contiguous: the pieces of all ranks one after another. May be overwritten.
            op: SUM or AVG. Default: SUM.
            async_op: return a handle. Default: false.
            splits: world + 1 boundaries of the pieces, for unequal ones; the same on every rank. Default: equal
                pieces.

        Raises:
            ValueError: the pieces do not make up the whole, or dtypes, devices or `op` do not fit.
        """
        piece, whole = _values(output), _values(input)
        bounds = check_pieces(whole, piece, splits, self.rank, self.world)
        check_reduce_scatter(whole, piece, op)
        if self.world == 1:
            piece.copy_(whole)
            return _done(async_op)
        scale = 1 / self.world if op == ReduceOp.AVG else None
        route = self.route("reduce_scatter", whole)
        if route is Route.SHARED_MEMORY:
            return self._shared(lambda shared: shared.reduce_scatter(piece, whole, bounds, scale), async_op)
        group = self.group
        assert group is not None
        backend = self._backend(whole.device)
        if scale is not None and backend == "gloo":
            check_average(whole)
        even = splits_are_even(bounds)
        if route is Route.PEERS or (backend == "gloo" and not even):
            return _finish(peers.reduce_scatter(group, piece, whole, bounds, scale), async_op)
        total = piece if piece.dtype == whole.dtype else torch.empty_like(piece, dtype=whole.dtype)
        if backend == "gloo":
            op = ReduceOp.SUM  # gloo has no average: `finish` divides
        else:
            scale = None
        if even:
            works = [_reduce_scatter(total, whole, op, group, async_op=True)]
        else:  # one reduction for each owner, which leaves garbage in other owners' pieces of `input`
            works = [
                dist.reduce(whole[start:stop], group_dst=owner, op=op, group=group, async_op=True)
                for owner, (start, stop) in enumerate(itertools.pairwise(bounds))
                if stop > start
            ]
            total = whole[bounds[self.rank] : bounds[self.rank + 1]]

        def finish() -> None:
            if total is not piece:
                piece.copy_(total)
            if scale is not None:
                piece.mul_(scale)

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
            output: [splits[-1]], contiguous.
            input: [splits[rank + 1] - splits[rank]], contiguous, of `output`'s dtype: this rank's piece; may be
                its place in `output`.
            async_op: return a handle. Default: false.
            splits: world + 1 boundaries of the pieces, for unequal ones; the same on every rank. Default: equal
                pieces.

        Raises:
            ValueError: the pieces do not make up the whole, or dtypes or devices differ.
        """
        whole, piece = _values(output), _values(input)
        bounds = check_pieces(whole, piece, splits, self.rank, self.world)
        check_all_gather(whole, piece)
        if self.world == 1:
            if whole.data_ptr() != piece.data_ptr():
                whole.copy_(piece)
            return _done(async_op)
        route = self.route("all_gather", whole)
        if route is Route.SHARED_MEMORY:
            return self._shared(lambda shared: shared.all_gather(whole, piece, bounds), async_op)
        group = self.group
        assert group is not None
        even = splits_are_even(bounds)
        if route is Route.PEERS or (not even and self._backend(whole.device) == "gloo"):
            return _finish(peers.all_gather(group, whole, piece, bounds), async_op)
        if even:
            return _all_gather(whole, piece, group, async_op)
        own = whole[bounds[self.rank] : bounds[self.rank + 1]]
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece)
        works = [
            dist.broadcast(whole[start:stop], group_src=owner, group=group, async_op=True)
            for owner, (start, stop) in enumerate(itertools.pairwise(bounds))
            if stop > start
        ]
        return _finish(Deferred(works), async_op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, async_op: bool = False) -> Work | None:
        """Copies `tensor` from rank `src` of this group to the others.

        Args:
            tensor: any shape; the same number of elements and dtype on every rank.
            src: a rank of this group. Default: 0.
            async_op: return a handle. Default: false.

        Raises:
            ValueError: the group has no rank `src`.
        """
        if not 0 <= src < self.world:
            raise ValueError(f"src is a rank of the group: src={src}; give 0..{self.world - 1}")
        if self.world == 1:
            return _done(async_op)
        return dist.broadcast(_values(tensor), group_src=src, group=self.group, async_op=async_op)

    def all_reduce_coalesced(
        self, tensors: Sequence[torch.Tensor], op: ReduceOp.RedOpType = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """`all_reduce` of several tensors, as one.

        Args:
            tensors: any shapes, of one dtype and device.
            op: as for `all_reduce`. Default: SUM.
            async_op: return a handle. Default: false.

        Raises:
            ValueError: dtypes or devices differ.
        """
        check_one_kind(tensors)
        if self.world == 1 or not tensors:
            return _done(async_op)
        tensors = [_values(tensor) for tensor in tensors]
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
        """`reduce_scatter_tensor` of several pairs with equal pieces, as one.

        Raises:
            ValueError: there are not as many outputs as inputs, or one of the pairs does not fit.
        """
        check_pairs(outputs, inputs)
        for piece, whole in zip(outputs, inputs):  # all, before the first is sent
            check_pieces(whole, piece, None, self.rank, self.world)
            check_reduce_scatter(whole, piece, op)
        works = [self.reduce_scatter_tensor(o, i, op, async_op=True) for o, i in zip(outputs, inputs)]
        return _finish(Deferred(works), async_op)

    def all_gather_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool = False
    ) -> Work | None:
        """`all_gather_into_tensor` of several pairs with equal pieces, as one.

        Raises:
            ValueError: there are not as many outputs as inputs, or one of the pairs does not fit.
        """
        check_pairs(outputs, inputs)
        for whole, piece in zip(outputs, inputs):  # all, before the first is sent
            check_pieces(whole, piece, None, self.rank, self.world)
            check_all_gather(whole, piece)
        works = [self.all_gather_into_tensor(o, i, async_op=True) for o, i in zip(outputs, inputs)]
        return _finish(Deferred(works), async_op)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.world > 1:
            dist.barrier(self.group)

    def close(self) -> None:
        """Gives the shared memory back, at once: calls under way end with an error, here and on ranks that wait for
        this one. The process group stays, and later calls are its backend's.
        """
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

    def _backend(self, device: torch.device) -> str:
        """The name of the backend that serves `device`, as "gloo"."""
        found = self._backends.get(device.type)
        if found is None:
            found = self._backends[device.type] = _backend(self.group, device)
        return found


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


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without its place in autograd's graph."""
    return tensor.detach() if tensor.requires_grad else tensor


def _scale(tensor: torch.Tensor, scale: float) -> None:
    tensor.mul_(scale)


def _done(async_op: bool) -> Work | None:
    return Done() if async_op else None


def _finish(work: Any, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None
