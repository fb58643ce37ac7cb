"""A transfer between a file and a device, cut into parts that each fit into a slot of host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ds_nvme.devices.base import Copy, DeviceBuffer
from ds_nvme.operation import Operation
from ds_nvme.plan import Segment, TransferPlan
from ds_nvme.slots import Slot
from ds_nvme.task import Task


def cut(plan: TransferPlan, nbytes: int) -> Iterator[Segment]:
    """The segments of a plan in pieces of whole blocks and at most `nbytes`, those that wait for all others last."""
    for segment in sorted(plan.segments, key=lambda segment: segment.last):
        step = nbytes // segment.block_nbytes * segment.block_nbytes
        for start in range(0, segment.nbytes, step):
            yield replace(
                segment,
                file_offset=segment.file_offset + start,
                nbytes=min(step, segment.nbytes - start),
                buffer_offset=segment.buffer_offset + start,
                bounce=False,  # a slot is as good as a bounce buffer
            )


class Staged:
    """An operation on a device's memory, under way.

    Args:
        operation: its plan has no segment whose blocks are larger than a slot.
        slot_nbytes: size of a slot.
    """

    def __init__(self, operation: Operation, slot_nbytes: int) -> None:
        device = operation.view.device
        assert device is not None
        self.operation = operation
        self.device: DeviceBuffer = device
        self.in_flight = 0
        """Parts begun and not ended."""
        self._pieces = cut(operation.plan, slot_nbytes)
        self._next = next(self._pieces, None)
        self._closed = False

    @property
    def left(self) -> bool:
        """Whether there is a part that wasn't begun."""
        return self._next is not None

    @property
    def held_up(self) -> bool:
        """The next part has to wait for all others: see note [growing files] in plan."""
        return self._next is not None and self._next.last and self.in_flight > 0

    def next_part(self, slot: Slot, filed: Callable[[Part], object]) -> Part:
        """Begin the next part."""
        assert self._next is not None
        part = Part(self, self._next, slot, filed)
        self._next = next(self._pieces, None)
        self.in_flight += 1
        return part

    def give_up(self) -> None:
        """Begin no further part: the operation has failed."""
        self._next = None

    def settle(self) -> None:
        """End the operation if nothing is left of it."""
        if self._next is None and not self.in_flight and not self._closed:
            self._closed = True
            self.operation.end()


class Part(Task):
    """What moves between file and device in one slot.

    Args:
        staged: whose part.
        piece: of its plan.
        slot: the memory.
        filed: called with this when the file has been read or written, by a worker's thread.
    """

    def __init__(self, staged: Staged, piece: Segment, slot: Slot, filed: Callable[[Part], object]) -> None:
        whole = staged.operation.plan
        # The whole range, since what may be missing of a block that reaches beyond it is known by that.
        plan = TransferPlan(
            whole.write, whole.file_offset, whole.nbytes, (replace(piece, buffer_offset=0, last=False),)
        )
        super().__init__(plan, staged.operation.file, slot.address)
        self.staged = staged
        self.slot = slot
        self._filed = filed
        # A direct read may begin before and end after what was asked for.
        self._start = max(piece.buffer_offset, 0)
        self._nbytes = min(piece.buffer_offset + piece.nbytes, whole.nbytes) - self._start
        self._at = slot.at + self._start - piece.buffer_offset

    def copy(self) -> Copy:
        """Begin the copy between slot and device."""
        device = self.staged.device
        move = device.copy_to_host if self.plan.write else device.copy_to_device
        return move(self._start, self._nbytes, self.slot.memory, self._at)

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.staged.operation.fail(error)

    def end(self) -> None:
        self._filed(self)
