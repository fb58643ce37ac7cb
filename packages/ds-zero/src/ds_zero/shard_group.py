"""ShardGroup: parameters that travel together: their storage, and their gradients on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ds_comm import Communicator, Work
from ds_zero.buffers import BufferPool
from ds_zero.group_storage import GroupStorage
from ds_zero.layout import GroupLayout


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are averaged and parameters collected.

    Args:
        reduce_scatter: False: all-reduce, and keep one part.
        all_gather: False: one broadcast a rank.
        dtype: dtype on the wire. Default: the gradients' own.
        accumulate_dtype: dtype in which micro-batches are added up. Default: the parameters' own.
        pre_scale: factor before the sum over ranks, for fp16; the average divides by the rest after it.
    """

    reduce_scatter: bool = True
    all_gather: bool = True
    dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    pre_scale: float = 1.0


class ShardGroup(GroupStorage):
    """One group, on one rank.

    Gradients pass through two places. `_local` [layout.numel] collects what this rank computed and has not
    sent yet. `reduced` [shard] is the sum over ranks of what was sent since the last update.

    Args:
        layout, parameters, comm, master_dtype, sharded: see `GroupStorage`.
        pool: buffers for gradients.
        options: how they are reduced.
    """

    def __init__(
        self,
        layout: GroupLayout,
        parameters: list[nn.Parameter],
        comm: Communicator,
        pool: BufferPool,
        options: ReductionOptions,
        master_dtype: torch.dtype | None = None,
        sharded: bool = False,
    ):
        super().__init__(
            layout, parameters, comm, all_gather=options.all_gather, master_dtype=master_dtype, sharded=sharded
        )
        self._pool, self._options = pool, options
        self.reduced: torch.Tensor | None = None
        self._local: torch.Tensor | None = None
        self._filled = [False] * len(parameters)  # slots of _local that hold a gradient
        self._updated: list[nn.Parameter] = []  # by the step under way
        self._gaps = layout.gaps()
        self._work: Work | None = None
        self._finish: Callable[[], None] | None = None

    @property
    def has_local(self) -> bool:
        """Gradients wait here that no reduction has taken."""
        return self._local is not None

    def local(self, slot: int) -> torch.Tensor | None:
        """This rank's unsent gradient of a parameter, flat, or None where it has none."""
        if self._local is None or not self._filled[slot]:
            return None
        place = self.layout.slots[slot]
        return self._local[place.offset : place.stop]

    @torch.no_grad()
    def accumulate(self, slot: int, gradient: torch.Tensor) -> None:
        """Adds a gradient this rank has just computed. Any layout, dense or sparse."""
        if self._local is None:
            dtype = self._options.accumulate_dtype or self.layout.dtype
            self._local = self._pool.take(self.layout.numel, dtype, self.device)
            for start, stop in self._gaps:
                self._local[start:stop].zero_()
        place = self.layout.slots[slot]
        target = self._local[place.offset : place.stop].view(place.info.shape)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self._filled[slot]:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self._filled[slot] = True

    @torch.no_grad()
    def start_reduction(self, async_op: bool) -> None:
        """Sends what this rank has collected; parameters without a gradient count as zero.

        Args:
            async_op: return before it has arrived.
        """
        self.finish_reduction()
        options, comm, layout = self._options, self.comm, self.layout
        if self._local is None:
            dtype = options.accumulate_dtype or layout.dtype
            local = self._pool.take(layout.numel, dtype, self.device).zero_()
        else:
            local = self._local
            for place, filled in zip(layout.slots, self._filled):
                if not filled:
                    local[place.offset : place.stop].zero_()
        self._local, self._filled = None, [False] * len(self.parameters)
        if options.pre_scale != 1.0:
            local.mul_(options.pre_scale)
        if options.dtype not in (None, local.dtype):
            local, unsent = local.to(options.dtype), local
            self._pool.give(unsent)
        dtype = self.master.dtype
        if layout.splits is None or comm.world == 1:
            self._work = comm.all_reduce(local, async_op=async_op)
            self._finish = lambda: self._add(local if local.dtype == dtype else self._convert(local))
        elif options.reduce_scatter:
            target = self._pool.take(self.shard.numel(), dtype, self.device)
            self._work = comm.reduce_scatter_tensor(target, local, async_op=async_op, splits=layout.splits)
            self._finish = lambda: self._add(target, local)
        else:
            self._work = comm.all_reduce(local, async_op=async_op)
            start, stop = layout.owned(comm.rank)
            self._finish = lambda: self._add(self._convert(local[start:stop]), local)
        if not async_op:
            self.finish_reduction()

    @torch.no_grad()
    def finish_reduction(self) -> None:
        """Waits for the reduction under way, if any, and adds its result to `reduced`."""
        work, finish = self._work, self._finish
        self._work = self._finish = None
        if work is not None:
            work.wait()
        if finish is not None:
            finish()

    def _add(self, result: torch.Tensor, spent: torch.Tensor | None = None) -> None:
        if self.reduced is None:
            self.reduced = result
        else:
            self.reduced.add_(result)
            self._pool.give(result)
        if spent is not None:
            self._pool.give(spent)

    def _convert(self, gradients: torch.Tensor) -> torch.Tensor:
        target = self._pool.take(gradients.numel(), self.master.dtype, self.device)
        target.copy_(gradients)
        if gradients._base is None:
            self._pool.give(gradients)
        return target

    def hand_gradients(self, used: Callable[[int], bool]) -> None:
        """Gives every piece its gradient; None where nobody used the parameter, so that it is left alone."""
        self._updated = [parameter for slot, parameter in enumerate(self.parameters) if used(slot)]
        for piece in self.pieces:
            if self.reduced is None or not used(piece.slot):  # a group that thawed after backward has none yet
                piece.tensor.grad = None
                continue
            values = self.reduced[piece.start : piece.start + piece.spec.numel]
            piece.tensor.grad = values.view(piece.tensor.shape)

    def drop_gradients(self) -> None:
        """Forgets every gradient, sent or not."""
        self.finish_reduction()
        for piece in self.pieces:
            piece.tensor.grad = None
        for buffer in (self.reduced, self._local):
            if buffer is not None:
                self._pool.give(buffer)
        self.reduced = self._local = None
        self._filled = [False] * len(self.parameters)

    def publish(self, async_op: bool) -> Work | None:
        """Brings the optimizer's values to the parameters, on every rank. Collective."""
        # So that autograd refuses a backward through older values, as it does after a plain optimizer's step.
        increment_version(self._updated)
        return super().publish(async_op)

    def release(self) -> None:
        """Gives the parameters storage of their own again and drops everything else."""
        with contextlib.suppress(RuntimeError):  # the result of a reduction under way is not wanted
            self.finish_reduction()
        self._work = self._finish = None
        self.drop_gradients()
        super().release()
