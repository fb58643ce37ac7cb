"""ShardGroup: parameters that travel together, their flat storage, and the part of it this rank owns."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from ds_comm import Communicator, ShardSpec, Work
from ds_zero.buffers import BufferPool
from ds_zero.covered import cover, uncover
from ds_zero.errors import ZeroError
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


@dataclass
class Piece:
    """The part of a parameter that this rank updates.

    Attributes:
        spec: which part of which parameter.
        slot: number of the parameter in its group.
        start: first element in this rank's shard of the group.
        tensor: what the optimizer sees: the parameter's own shape where the piece is whole, else flat.
    """

    spec: ShardSpec
    slot: int
    start: int
    tensor: nn.Parameter


# By parameter: the group that lays it out (weak: an optimizer that is dropped must not live on with the model).
_groups: WeakIdKeyDictionary = WeakIdKeyDictionary()


def group_of(parameter: nn.Parameter) -> ShardGroup | None:
    """The living group that a parameter lies in."""
    reference = _groups.get(parameter)
    return reference() if reference is not None else None


class ShardGroup:
    """The storage of one group, on one rank.

    Attributes:
        flat: [layout.numel], the parameters' values; every parameter is a view into it. Of a sharded group its
            storage is empty but while it is gathered; it stays the same storage, so that what autograd has saved
            finds its values again.
        shard: the part of `flat` this rank owns; of a sharded group, a tensor of its own.
        master: [shard], the values that the optimizer updates: fp32 beside a low-precision `shard`, else
            `shard` itself.
        pieces: `master`, parameter by parameter.

    Gradients pass through two places. `_local` [layout.numel] collects what this rank computed and has not
    sent yet. `reduced` [shard] is the sum over ranks of what was sent since the last update.
    """

    def __init__(
        self,
        layout: GroupLayout,
        parameters: list[nn.Parameter],
        comm: Communicator,
        pool: BufferPool,
        options: ReductionOptions,
        master_dtype: torch.dtype | None,
        sharded: bool = False,
    ):
        self.layout, self.parameters = layout, parameters
        self.device = parameters[0].device
        self._comm, self._pool, self._options = comm, pool, options
        start, stop = layout.owned(comm.rank)
        before = list(dict.fromkeys(group for p in parameters if (group := group_of(p)) is not None))
        for group in before:  # zero.Init's
            group.hold()
        # Rank 0's values, in the master's dtype: masters of a model given in fp32 keep all its digits.
        values = self._collect(master_dtype or layout.dtype)
        comm.broadcast(values)
        for group in before:
            group.let_go(parameters)
        self.flat = values if values.dtype == layout.dtype else values.to(layout.dtype)
        self.sharded = sharded and layout.splits is not None and comm.world > 1
        self.shard = self.flat[start:stop].clone() if self.sharded else self.flat[start:stop]
        self.master = self.shard if values is self.flat else values[start:stop].clone()
        for number, parameter in enumerate(parameters):
            self._lay(number)
            _groups[parameter] = weakref.ref(self)
        self._note()
        self.pieces = [self._piece(slot, spec, start) for slot, spec in layout.specs(comm.rank)]
        self.reduced: torch.Tensor | None = None
        self._local: torch.Tensor | None = None
        self._filled = [False] * len(parameters)  # slots of _local that hold a gradient
        self._updated: list[nn.Parameter] = []  # by the step under way
        self._gaps = layout.gaps()
        self._work: Work | None = None
        self._finish: Callable[[], None] | None = None
        self.gathered = True
        self.on_touch: Callable[[ShardGroup], None] = _refuse
        """Called when a parameter is used while it is sharded: gathers it, or raises."""
        self.on_graph: Callable[[ShardGroup], None] = lambda group: None
        """Called when a graph has parameters that were lent: holds them until backward has ended."""
        self.in_graph = False
        """What was lent was used with grad mode on, on this rank."""
        self._holds = self._lent = 0
        self._arriving: Work | None = None
        if self.sharded:
            self._free()

    @property
    def comm(self) -> Communicator:
        """The ranks it is shared out over."""
        return self._comm

    # Sharded parameters

    def begin_gather(self) -> None:
        """Starts to bring the values to every rank, where they are not there. Collective."""
        if self.gathered or self._arriving is not None:
            return
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self._arriving = self._collect_shards(async_op=True)

    def hold(self) -> None:
        """Gathers the values, if they are not there, and keeps them until as many calls of `drop`. Collective."""
        self._holds += 1
        if self.gathered:
            return
        self.begin_gather()
        work, self._arriving = self._arriving, None
        if work is not None:
            work.wait()
        self.gathered = True
        for parameter in self.parameters:
            uncover(parameter)

    def drop(self) -> None:
        """Undoes a `hold`: after the last, only this rank's shard is left."""
        self._holds -= 1
        if self._holds <= 0:
            self.free()

    def lend(self) -> None:
        """A `hold` for use outside forward and backward; ends with `take_back`. Collective."""
        self.hold()
        self._lent += 1
        if self.sharded:
            for parameter in self.parameters:
                cover(parameter, self._note_graph)

    def take_back(self, in_graph: bool = False) -> None:
        """Ends `lend`.

        Args:
            in_graph: on some rank autograd's graph took of the values: they stay until backward has used them.
        """
        if in_graph:
            self.on_graph(self)
        self._lent -= 1
        if self._lent == 0:
            for parameter in self.parameters:
                uncover(parameter)
        self.drop()

    def let_go(self, parameters: list[nn.Parameter]) -> None:
        """These go to another group, once they are gathered; ends the `hold` for it."""
        going = set(map(id, parameters))
        self.parameters = [parameter for parameter in self.parameters if id(parameter) not in going]
        self.drop()

    def _note_graph(self) -> None:
        self.in_graph |= torch.is_grad_enabled()

    def free(self) -> None:
        """Leaves only this rank's shard, whoever holds the values."""
        self._holds = 0
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving, self.gathered = None, True
        if self.sharded and self.gathered:
            self._free()

    def _free(self) -> None:
        for parameter in self.parameters:
            cover(parameter, self._touched)
        self.flat.untyped_storage().resize_(0)
        self.gathered = False

    def _touched(self) -> None:
        self.on_touch(self)

    @torch.no_grad()
    def _collect_shards(self, async_op: bool) -> Work | None:
        """Every rank's shard into `flat`."""
        assert self.layout.splits is not None
        if self._options.all_gather:
            return self._comm.all_gather_into_tensor(
                self.flat, self.shard, async_op=async_op, splits=self.layout.splits
            )
        if self.sharded:
            start, stop = self.layout.owned(self._comm.rank)
            self.flat[start:stop].copy_(self.shard)
        for owner, (start, stop) in enumerate(zip(self.layout.splits, self.layout.splits[1:])):
            if stop > start:
                self._comm.broadcast(self.flat[start:stop], src=owner)
        return None

    @torch.no_grad()
    def adopt_gathered(self, source: int | None = None) -> None:
        """Takes the values that stand in the gathered parameters for this rank's shard.

        Args:
            source: the rank whose values count, on every rank. Collective. Default: each rank's own.
        """
        for number, parameter in enumerate(self.parameters):
            place = self.layout.slots[number]
            own = self.flat[place.offset : place.stop].view(place.info.shape)
            if parameter.data_ptr() != own.data_ptr():  # its `.data` was given other storage
                own.copy_(parameter)
                self._lay(number)
        if source is not None:
            self._comm.broadcast(self.flat, src=source)
        start, stop = self.layout.owned(self._comm.rank)
        if self.sharded:
            self.shard.copy_(self.flat[start:stop])
        self.adopt(0, self.shard.numel())

    # Parameters in their storage

    def _lay(self, number: int) -> None:
        slot = self.layout.slots[number]
        self.parameters[number].data = self.flat[slot.offset : slot.stop].view(slot.info.shape)

    def _note(self) -> None:
        self._seen = [(p.data_ptr(), p._version) for p in self.parameters]  # what `reclaim` knows of them

    @torch.no_grad()
    def reclaim(self) -> None:
        """Takes in what was done to parameters from outside: values written in place, `.data` given other storage.

        Of writing through `.data` in place torch keeps no count: beside masters it is not seen.

        Raises:
            ZeroError: the new storage is of another dtype or device.
        """
        if self.sharded:  # written through GatheredParameters, which takes it in
            return
        for number, parameter in enumerate(self.parameters):
            if (seen := (parameter.data_ptr(), parameter._version)) == self._seen[number]:
                continue
            slot = self.layout.slots[number]
            if seen[0] != self._seen[number][0]:
                if (parameter.dtype, parameter.device) != (self.flat.dtype, self.flat.device):
                    raise ZeroError(
                        f"a parameter stays of the dtype and on the device it was given with: {slot.info.name!r} was "
                        f"{self.flat.dtype} on {self.flat.device} and is {parameter.dtype} on {parameter.device}; "
                        "convert the model before it is given"
                    )
                self.flat[slot.offset : slot.stop].view(slot.info.shape).copy_(parameter)
                self._lay(number)
            self._seen[number] = (parameter.data_ptr(), parameter._version)
            for piece in self.pieces:
                if piece.slot == number:
                    self.adopt(piece.start, piece.start + piece.spec.numel)

    @torch.no_grad()
    def adopt(self, start: int, stop: int) -> None:
        """Takes the values of this part of the shard for its masters, which keep their digits where they agree."""
        if self.master is not self.shard:
            master, value = self.master[start:stop], self.shard[start:stop]
            master.copy_(torch.where(master.to(value.dtype) == value, master, value))

    def _collect(self, dtype: torch.dtype) -> torch.Tensor:
        values = torch.zeros(self.layout.numel, dtype=dtype, device=self.device)
        with torch.no_grad():
            for slot, parameter in zip(self.layout.slots, self.parameters):
                values[slot.offset : slot.stop].view(slot.info.shape).copy_(parameter)
        return values

    def _piece(self, slot: int, spec: ShardSpec, start: int) -> Piece:
        first = self.layout.slots[slot].offset + spec.start - start
        values = self.master[first : first + spec.numel]
        if spec.is_whole:
            values = values.view(spec.shape)
        return Piece(spec, slot, first, nn.Parameter(values, requires_grad=self.layout.trained))

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
        options, comm, layout = self._options, self._comm, self.layout
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

    @torch.no_grad()
    def publish(self, async_op: bool) -> Work | None:
        """Brings the optimizer's values to the parameters, on every rank."""
        # So that autograd refuses a backward through older values, as it does after a plain optimizer's step.
        increment_version(self._updated)
        if not self.sharded:
            self._note()
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        if self.sharded:  # gathered when they are used; what was gathered is of yesterday
            self.free()
            return None
        if self.layout.splits is None or self._comm.world == 1:
            return None
        return self._collect_shards(async_op)

    def release(self) -> None:
        """Gives the parameters storage of their own again and drops everything else."""
        with contextlib.suppress(RuntimeError):  # the result of a reduction under way is not wanted
            self.finish_reduction()
        self._work = self._finish = None
        self.drop_gradients()
        if self.sharded:
            self.hold()
            self.sharded = False
        for parameter in self.parameters:
            _groups.pop(parameter, None)
            parameter.data = parameter.data.clone()


def _refuse(group: ShardGroup) -> None:
    names = ", ".join(repr(slot.info.name) for slot in group.layout.slots[:4])
    raise ZeroError(
        f"a sharded parameter has its values inside forward and backward only: one of {names} was used outside; "
        "use it inside `with ds_zero.GatheredParameters([parameter], modifier_rank=...)`"
    )
