"""A thread that moves bytes between files and one device, one way, through a few slots of host memory.

Note [lanes]
    A part of a read is first filed (a worker reads it into a slot), then copied to the device; a part of a write the
    other way round. While one slot is being copied, the others are with the workers. Copies of one direction run in
    order on the device, so while this thread waits for the oldest, nothing that it could begin would run earlier;
    reads and writes have a lane each, so that a write that waits for a long kernel holds up no read.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack
from queue import Empty, SimpleQueue

from ds_nvme.crew import Crew
from ds_nvme.devices.base import Copy, Device
from ds_nvme.errors import DeviceError, NvmeError
from ds_nvme.operation import Operation
from ds_nvme.slots import Slots
from ds_nvme.staged import Part, Staged


class Lane:
    """Carries out operations between files and a device's memory, in the order they were asked for.

    Args:
        device: the device.
        crew: does the file's part.
        slot_nbytes: size of a slot.
        name: of the thread.
    """

    def __init__(self, device: Device, crew: Crew, slot_nbytes: int, name: str) -> None:
        self.slots = Slots(device, slot_nbytes)
        self._device = device
        self._crew = crew
        self._inbox: SimpleQueue[Staged | Part | None] = SimpleQueue()
        self._waiting: deque[Staged] = deque()  # with parts that weren't begun
        self._copies: deque[tuple[Part, Copy]] = deque()
        self._in_flight = 0  # parts
        # A daemon, as the workers are and for the same reason.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """Carry out an operation, soon."""
        self._inbox.put(Staged(operation, self.slots.nbytes))

    def stop(self) -> None:
        """Finish everything that was put, then end the thread; `join` waits for it."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait until the thread has ended after `stop`."""
        self._thread.join()

    # --- the thread

    def _main(self) -> None:
        broken: NvmeError | None = None
        with ExitStack() as stack:
            try:
                stack.enter_context(self._device.using())
            except Exception as error:
                broken = _typed(error)
            self._work(broken)

    def _work(self, broken: NvmeError | None) -> None:
        """Carry out what comes until the end; where the device can't be used, let it fail."""
        closing = False
        while not closing or self._in_flight or self._waiting:
            try:
                message = self._inbox.get(block=not self._copies)
            except Empty:
                self._copied(*self._copies.popleft())
            else:
                if message is None:
                    closing = True
                elif isinstance(message, Part):
                    self._filed(message)
                else:
                    if broken is not None:
                        message.operation.fail(broken)
                    self._waiting.append(message)
            self._begin()
        self.slots.close()

    def _begin(self) -> None:
        """Begin parts while there are slots."""
        while self._waiting:
            staged = self._waiting[0]
            if staged.operation.failed:
                staged.give_up()
            if not staged.left:
                self._waiting.popleft()
                staged.settle()
                continue
            if staged.held_up:
                return
            try:
                slot = self.slots.take()
            except Exception as error:
                staged.operation.fail(_typed(error))
                continue
            if slot is None:
                return
            part = staged.next_part(slot, self._inbox.put)
            self._in_flight += 1
            if part.plan.write:
                self._copy(part)
            else:
                self._crew.put(part)

    def _copy(self, part: Part) -> None:
        try:
            self._copies.append((part, part.copy()))
        except Exception as error:
            part.fail(_typed(error))
            self._finish(part)

    def _copied(self, part: Part, copy: Copy) -> None:
        """Wait until a copy has ended."""
        try:
            copy.wait()
        except Exception as error:
            part.fail(_typed(error))
        if part.plan.write and not part.staged.operation.failed:
            self._crew.put(part)
        else:
            self._finish(part)

    def _filed(self, part: Part) -> None:
        """The file's part has ended."""
        if part.plan.write or part.staged.operation.failed:
            self._finish(part)
        else:
            self._copy(part)

    def _finish(self, part: Part) -> None:
        self.slots.give(part.slot)
        self._in_flight -= 1
        part.staged.in_flight -= 1
        part.staged.settle()


class Lanes:
    """The lanes of one handle: two for each device that it has met.

    Args:
        crew: does the files' part.
        slot_nbytes: size of a slot.
    """

    def __init__(self, crew: Crew, slot_nbytes: int) -> None:
        self._crew = crew
        self._slot_nbytes = slot_nbytes
        self._lanes: dict[tuple[str, bool], Lane] = {}

    def put(self, operation: Operation) -> None:
        """Carry out an operation whose buffer is on a device."""
        buffer = operation.view.device
        assert buffer is not None
        key = (buffer.device.name, operation.plan.write)
        lane = self._lanes.get(key)
        if lane is None:
            name = f"ds-nvme-{buffer.device.name}-{'write' if operation.plan.write else 'read'}"
            lane = self._lanes[key] = Lane(buffer.device, self._crew, self._slot_nbytes, name)
        lane.put(operation)

    def describe(self) -> list[str]:
        """A line for each lane."""
        return [
            f"{'from' if write else 'to'} {device} through {lane.slots.made} buffers of {lane.slots.nbytes} bytes, "
            + ("page-locked" if lane.slots.unlocked is None else f"not page-locked: {lane.slots.unlocked}")
            for (device, write), lane in self._lanes.items()
        ]

    def close(self) -> None:
        """Wait for everything that was put, then end the threads and free the slots."""
        for lane in self._lanes.values():
            lane.stop()
        for lane in self._lanes.values():
            lane.join()


def _typed(error: Exception) -> NvmeError:
    if isinstance(error, NvmeError):
        return error
    typed = DeviceError(f"a device copies what it is asked to: {error!r}; see the cause")
    typed.__cause__ = error
    return typed
