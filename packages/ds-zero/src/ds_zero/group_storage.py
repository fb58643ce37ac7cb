"""GroupStorage: where the parameters of one shard group lie, whole or this rank's part of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_comm import Communicator, ShardSpec, Work
from ds_zero.covered import cover, uncover
from ds_zero.errors import ZeroError
from ds_zero.layout import GroupLayout


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


def group_of(parameter: nn.Parameter) -> GroupStorage | None:
    """The living group that a parameter lies in."""
    reference = _groups.get(parameter)
    return reference() if reference is not None else None


class GroupStorage:
    """The values of one group, on one rank.

    Args:
        layout: the plan.
        parameters: in the order of the layout's slots.
        comm: the ranks that share it.
        all_gather: False: values are collected by one broadcast a rank. Default: true.
        master_dtype: dtype of masters beside the parameters; None for none. Default: none.
        sharded: parameters are sharded too. Default: false.

    Attributes:
        flat: [layout.numel], the parameters' values; every parameter is a view into it. Of a sharded group its
            storage is empty but while it is gathered; it stays the same storage, so that what autograd has saved
            finds its values again.
        shard: the part of `flat` this rank owns; of a sharded group, a tensor of its own.
        master: [shard], the values that the optimizer updates: fp32 beside a low-precision `shard`, else
            `shard` itself.
        pieces: `master`, parameter by parameter.
    """

    def __init__(
        self,
        layout: GroupLayout,
        parameters: list[nn.Parameter],
        comm: Communicator,
        *,
        all_gather: bool = True,
        master_dtype: torch.dtype | None = None,
        sharded: bool = False,
    ):
        self.layout, self.parameters, self.comm = layout, parameters, comm
        self.device = parameters[0].device
        self._all_gather = all_gather
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
        self.gathered = True
        self.on_touch: Callable[[GroupStorage, nn.Parameter], None] = refuse
        """Called when a parameter is used while it is sharded: gathers it, or raises."""
        self.on_graph: Callable[[GroupStorage], None] = lambda group: None
        """Called when a graph has parameters that were lent: holds them until backward has ended."""
        self.in_graph = False
        """What was lent was used with grad mode on, on this rank."""
        self._holds = self._lent = 0
        if self.sharded:
            self._free()

    # Sharded parameters

    def hold(self) -> None:
        """Gathers the values, if they are not there, and keeps them until as many calls of `drop`. Collective."""
        self._holds += 1
        if self.gathered:
            return
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self._collect_shards(async_op=False)
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

    def _note_graph(self, parameter: nn.Parameter) -> None:
        self.in_graph |= torch.is_grad_enabled()

    def free(self) -> None:
        """Leaves only this rank's shard, whoever holds the values."""
        self._holds = 0
        if self.sharded and self.gathered:
            self._free()

    def _free(self) -> None:
        for parameter in self.parameters:
            cover(parameter, self._touched)
        self.flat.untyped_storage().resize_(0)
        self.gathered = False

    def _touched(self, parameter: nn.Parameter) -> None:
        self.on_touch(self, parameter)

    def name_of(self, parameter: nn.Parameter) -> str:
        """A parameter's name."""
        number = next(number for number, each in enumerate(self.parameters) if each is parameter)
        return self.layout.slots[number].info.name

    @torch.no_grad()
    def _collect_shards(self, async_op: bool) -> Work | None:
        """Every rank's shard into `flat`."""
        assert self.layout.splits is not None
        if self._all_gather:
            return self.comm.all_gather_into_tensor(self.flat, self.shard, async_op=async_op, splits=self.layout.splits)
        if self.sharded:
            start, stop = self.layout.owned(self.comm.rank)
            self.flat[start:stop].copy_(self.shard)
        for owner, (start, stop) in enumerate(zip(self.layout.splits, self.layout.splits[1:])):
            if stop > start:
                self.comm.broadcast(self.flat[start:stop], src=owner)
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
            self.comm.broadcast(self.flat, src=source)
        start, stop = self.layout.owned(self.comm.rank)
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

    @torch.no_grad()
    def publish(self, async_op: bool) -> Work | None:
        """Brings the optimizer's values to the parameters, on every rank. Collective."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        if self.sharded:  # gathered when they are used; what was gathered is of yesterday
            self.free()
            return None
        self._note()
        if self.layout.splits is None or self.comm.world == 1:
            return None
        return self._collect_shards(async_op)

    def release(self) -> None:
        """Gives the parameters storage of their own again. Collective where they are sharded."""
        if self.sharded:
            self.hold()
            self.sharded = False
        for parameter in self.parameters:
            _groups.pop(parameter, None)
            parameter.data = parameter.data.clone()


def refuse(group: GroupStorage, parameter: nn.Parameter) -> None:
    """Raises: a sharded parameter was used where nothing gathers it."""
    raise ZeroError(
        f"a sharded parameter has its values inside forward and backward only: {group.name_of(parameter)!r} was used "
        "outside; use it inside `with ds_zero.GatheredParameters([parameter]):`, and give modifier_rank=0 to write it"
    )
