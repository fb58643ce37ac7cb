"""Threads that carry blocks between files and device memory.

Note [two ways]
    What is planned as direct goes through cuFile, a block a call. The rest (the unaligned ends of a write, see note
    [edges] in plan, and files without O_DIRECT) goes through the page cache and a buffer of the thread's own. cuFile
    would take unaligned writes too, but reads and writes back the bytes around them, which belong to others.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from typing import Any

from ds_nvme.errors import DeviceError, NvmeError, TruncatedFileError, file_error
from ds_nvme.files import OpenFile
from ds_nvme.gds.driver import Driver
from ds_nvme.gds.pins import Pin, Pins
from ds_nvme.memory import Memory
from ds_nvme.native import libc
from ds_nvme.operation import Operation
from ds_nvme.plan import BOUNCE_BLOCK, Segment, TransferPlan
from ds_nvme.regions import Region
from ds_nvme.view import View

MOST_THREADS = 32
"""cuFile cuts large blocks up and keeps the drive busy itself; more threads gain nothing."""


class GdsOperation(Operation):
    """A transfer through cuFile. See `Operation`."""

    def __init__(
        self, plan: TransferPlan, file: OpenFile, view: View, region: Region, driver: Driver, pins: Pins, validate: bool
    ) -> None:
        super().__init__(plan, file, view, region, validate=validate)
        assert view.device is not None
        self.device = view.device
        self.handle: Any = None
        """The file as cuFile knows it."""
        self.pin: Pin | None = None
        """The registered memory around the buffer."""
        self.rounds = deque([[each for each in plan.segments if each.last is last] for last in (False, True)])
        """Segments that take place at the same time, one list after the other."""
        self._driver = driver
        self._pins = pins

    def register(self) -> None:
        """Let cuFile know the file. Raises GdsError."""
        if any(segment.direct for segment in self.plan.segments):
            self.handle = self._driver.register_file(self.file.direct, self.path)
        self.pin = self._pins.use(self.address, self.view.nbytes)

    def end(self) -> None:
        if self.handle is not None:
            self._driver.deregister_file(self.handle)
        if self.pin is not None:
            self._pins.leave(self.pin)
        super().end()


class Run:
    """A segment's blocks on their way."""

    __slots__ = ("next", "operation", "segment")

    def __init__(self, operation: GdsOperation, segment: Segment) -> None:
        self.operation = operation
        self.segment = segment
        self.next = 0
        """The first block that no thread has taken."""


class GdsCrew:
    """Threads, started as blocks need them. Safe from any thread.

    Args:
        driver: moves blocks.
        most: most blocks at a time, at most 32.
    """

    def __init__(self, driver: Driver, most: int) -> None:
        self.most = min(most, MOST_THREADS)
        self.direct_blocks = self.cached_blocks = 0
        self._driver = driver
        self._changed = threading.Condition()
        self._runs: deque[Run] = deque()  # with blocks that no thread has taken
        self._queued = 0  # such blocks
        self._free = 0  # threads that will take a block next
        self._operations = 0  # put and not ended
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._own = threading.local()

    def put(self, operation: GdsOperation) -> None:
        """Carry out an operation, soon, and end it."""
        with self._changed:
            self._operations += 1
        self._advance(operation)

    def close(self) -> None:
        """Wait for everything that was put, then end the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # --- the threads

    def _advance(self, operation: GdsOperation) -> None:
        """Begin the next round of an operation, or end it."""
        while operation.rounds and not operation.failed:
            segments = operation.rounds.popleft()
            if blocks := sum(segment.blocks for segment in segments):
                operation.begin(blocks)
                with self._changed:
                    self._runs += [Run(operation, segment) for segment in segments]
                    self._queued += blocks
                    while self._free < self._queued and len(self._threads) < self.most:
                        self._free += 1
                        name = f"ds-nvme-gds-{len(self._threads)}"
                        self._threads.append(threading.Thread(target=self._main, name=name, daemon=True))
                        self._threads[-1].start()
                    self._changed.notify(blocks)
                return
        operation.end()
        with self._changed:
            self._operations -= 1
            self._changed.notify_all()

    def _main(self) -> None:
        while (block := self._take()) is not None:
            operation, segment, index = block
            if not operation.failed:
                self._carry(operation, segment, index)
            if operation.leave():
                self._advance(operation)
            with self._changed:
                self._free += 1

    def _take(self) -> tuple[GdsOperation, Segment, int] | None:
        """Wait for a block; None where the crew is closed and all is done."""
        with self._changed:
            while not self._runs:
                if self._closing and not self._operations:
                    return None
                self._changed.wait()
            run = self._runs[0]
            index = run.next
            run.next += 1
            self._queued -= 1
            self._free -= 1
            if run.next == run.segment.blocks:
                self._runs.popleft()
            self.direct_blocks += run.segment.direct
            self.cached_blocks += not run.segment.direct
            return run.operation, run.segment, index

    def _carry(self, operation: GdsOperation, segment: Segment, index: int) -> None:
        """Move a block, or note why it can't be."""
        start = index * segment.block_nbytes
        nbytes = min(segment.block_nbytes, segment.nbytes - start)
        move = self._direct if segment.direct else self._cached
        try:
            with operation.device.device.using():
                operation.device.wait_ready()
                move(operation, segment.file_offset + start, segment.buffer_offset + start, nbytes)
        except NvmeError as error:
            operation.fail(error)
        except Exception as error:
            typed = DeviceError(f"a device does what it is asked to: {error!r}; see the cause")
            typed.__cause__ = error
            operation.fail(typed)

    def _direct(self, operation: GdsOperation, offset: int, position: int, nbytes: int) -> None:
        """Through cuFile."""
        write = operation.plan.write
        base = operation.address if operation.pin is None else operation.pin.base
        position += operation.address - base
        done = 0
        while done < nbytes:
            moved = self._driver.move(
                operation.handle,
                base,
                nbytes - done,
                offset + done,
                position + done,
                write=write,
                path=operation.path,
            )
            if not moved:
                raise _ended(operation, offset + done)
            done += moved

    def _cached(self, operation: GdsOperation, offset: int, position: int, nbytes: int) -> None:
        """Through the page cache and this thread's buffer."""
        memory: Memory | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = Memory(BOUNCE_BLOCK)
        for start in range(0, nbytes, memory.nbytes):
            step = min(memory.nbytes, nbytes - start)
            if operation.plan.write:
                operation.device.copy_to_host(position + start, step, memory, 0).wait()
            self._host(operation, memory.address, offset + start, step)
            if not operation.plan.write:
                operation.device.copy_to_device(position + start, step, memory, 0).wait()

    def _host(self, operation: GdsOperation, address: int, offset: int, nbytes: int) -> None:
        move = libc.pwrite if operation.plan.write else libc.pread
        done = 0
        while done < nbytes:
            moved = move(operation.file.cached, address + done, nbytes - done, offset + done)
            if moved < 0:
                raise file_error(-moved, operation.path, offset + done)
            if moved == 0:
                raise _ended(operation, offset + done)
            done += moved


def _ended(operation: GdsOperation, offset: int) -> NvmeError:
    """No byte was moved at an offset of the file."""
    plan = operation.plan
    if plan.write:
        return file_error(errno.EIO, operation.path, offset)
    size = os.stat(operation.path).st_size
    return TruncatedFileError(operation.path, plan.file_offset, plan.nbytes, min(offset, size or offset))
