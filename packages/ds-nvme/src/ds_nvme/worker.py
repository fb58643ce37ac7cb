"""A thread that keeps one engine busy with the shares of many operations."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue

from ds_nvme.blocks import copy_out, mend
from ds_nvme.bounce import BounceBuffers
from ds_nvme.engines.base import Engine, Run
from ds_nvme.errors import EngineError, NvmeError
from ds_nvme.memory import Memory
from ds_nvme.native import libc
from ds_nvme.share import Job, Share, final

_TAG_BITS = 32  # of a block inside its run; the run's own number stands above
_PACKED_AT_ONCE = 512
"""Blocks whose requests are made together: fast enough that the drive does not wait for the first, and a request takes
64 bytes or more, of which a large transfer in small blocks would otherwise need gigabytes."""


@dataclass
class Counts:
    """What a worker has moved since it began, in blocks."""

    straight: int = 0
    """Between file and the user's memory."""
    bounced: int = 0
    """Through a bounce buffer."""
    mended: int = 0
    """Refused or cut short by the kernel, and finished through the page cache."""


class Worker:
    """Carries out shares, first come first served, with up to `depth` blocks in flight over all of them.

    Args:
        engine_type: the engine; made in the thread.
        depth: most blocks in flight.
        single_submit: hand the kernel one block a call.
        overlap: refill as blocks end; otherwise wait until all in flight have ended.
        name: of the thread.

    Raises:
        EngineError: the engine can't run here.
    """

    def __init__(self, engine_type: type[Engine], depth: int, *, single_submit: bool, overlap: bool, name: str) -> None:
        self._engine_type = engine_type
        self._depth = depth
        self._most_a_call = 1 if single_submit else depth
        self._overlap = overlap
        self.counts = Counts()
        self._inbox: SimpleQueue[Share | None] = SimpleQueue()
        self._active: deque[Share] = deque()
        self._in_flight = 0
        self._numbers = 0
        self._jobs: dict[int, Job] = {}  # by number
        self._bounced: dict[int, tuple[Job, int, Memory]] = {}  # by tag: job, block, buffer
        self._buffers = BounceBuffers(depth)
        # A daemon, so that a forgotten handle doesn't keep the interpreter from ending; the handle's finalizer runs
        # at exit and lets the thread finish what is in flight.
        started: SimpleQueue[Exception | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, args=(started,), name=name, daemon=True)
        self._thread.start()
        if (error := started.get()) is not None:
            raise error

    def put(self, share: Share) -> None:
        """Carry out a share, soon."""
        self._inbox.put(share)

    def stop(self) -> None:
        """Finish everything that was put, then end the thread; `join` waits for it."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait until the thread has ended after `stop`."""
        self._thread.join()

    # --- the thread

    def _main(self, started: SimpleQueue[Exception | None]) -> None:
        try:
            engine: Engine | None = self._engine_type(self._depth)
        except Exception as error:
            started.put(error)
            return
        started.put(None)
        while (share := self._inbox.get()) is not None:
            self._active.append(share)
            try:
                engine = engine or self._engine_type(self._depth)
                closing = self._run(engine)
            except Exception as error:
                # Only a defect of ours or a kernel out of resources comes here. Closing the engine waits for what is
                # in flight, so that no memory is let go that the kernel still writes to.
                if engine is not None:
                    engine.close()
                    engine = None
                closing = self._abandon(error)
            if closing:
                break
        if engine is not None:
            engine.close()

    def _run(self, engine: Engine) -> bool:
        """Work until nothing is left; True where the worker was told to close."""
        closing = False
        while self._active:
            while not self._inbox.empty():
                share = self._inbox.get()
                if share is None:
                    closing = True
                else:
                    self._active.append(share)
            if self._overlap or not self._in_flight:
                self._fill(engine)
            if self._in_flight:
                # Reaping some at a time saves calls; the rest keeps the drive busy meanwhile.
                minimum = max(self._in_flight // 4, 1) if self._overlap else self._in_flight
                self._settle(*engine.reap(minimum))
            self._retire()
        return closing

    def _abandon(self, error: Exception) -> bool:
        if not isinstance(error, NvmeError):
            wrapped = EngineError(f"an engine carries on until its handle is closed, this one failed: {error!r}")
            wrapped.__cause__ = error
            error = wrapped
        closing = False
        while not self._inbox.empty():
            share = self._inbox.get()
            if share is None:
                closing = True
            else:
                self._active.append(share)
        self._in_flight = 0
        self._jobs.clear()
        self._bounced.clear()
        self._buffers = BounceBuffers(self._depth)
        for share in self._active:
            share.operation.fail(error)
            share.jobs.clear()
            share.in_flight = 0
        self._retire()
        return closing

    def _fill(self, engine: Engine) -> None:
        for share in self._active:
            while share.jobs and self._in_flight < self._depth:
                if share.operation.failed:
                    self._give_up(share)
                    break
                job = share.jobs[0]
                if not (self._submit_bounced(engine, job) if job.bounce else self._submit(engine, job)):
                    if not self._in_flight:
                        time.sleep(0.001)  # the kernel is short of something that others hold
                    return
                if job.next == job.total:
                    share.jobs.popleft()
            if self._in_flight >= self._depth:
                return

    def _submit(self, engine: Engine, job: Job) -> bool:
        """Submit blocks of a straight job; False where nothing more goes now."""
        if not job.number:
            self._numbers += 1
            job.number = self._numbers
            self._jobs[job.number] = job
        if job.next == job.packed_to:
            job.packed_from, job.packed_to = job.next, min(job.next + max(_PACKED_AT_ONCE, self._depth), job.total)
            tag = (job.number << _TAG_BITS) + job.next
            job.packed = engine.pack(job.run.part(job.packed_from, job.packed_to), tag)
        count = min(self._depth - self._in_flight, job.packed_to - job.next, self._most_a_call)
        accepted = engine.submit(job.packed, job.next - job.packed_from, count)
        if accepted == 0:
            return False
        first = job.next
        self._flown(job, max(accepted, 1))
        if accepted < 0:
            self._ended(job, first, job.run.address + first * job.run.block_nbytes, accepted)
            self._drop(job.number, job)
            return True
        self.counts.straight += accepted
        return accepted == count

    def _submit_bounced(self, engine: Engine, job: Job) -> bool:
        """Submit one block of a job through a bounce buffer; False where nothing more goes now."""
        buffer = self._buffers.take()
        if buffer is None:
            return False
        index, run = job.next, job.run
        position, length = index * run.block_nbytes, run.length(index)
        if run.write:
            libc.move(buffer.address, run.address + position, length)
        self._numbers += 1
        tag = self._numbers << _TAG_BITS
        block = Run(run.write, run.fd, buffer.address, run.file_offset + position, length, length)
        accepted = engine.submit(engine.pack(block, tag), 0, 1)
        if accepted == 0:
            self._buffers.give(buffer)
            return False
        self._flown(job, 1)
        if accepted < 0:
            self._land(job, index, buffer, accepted)
        else:
            self._bounced[tag] = (job, index, buffer)
            self.counts.bounced += 1
        return True

    def _flown(self, job: Job, count: int) -> None:
        job.next += count
        job.in_flight += count
        job.share.in_flight += count
        self._in_flight += count

    def _settle(self, tags: list[int], results: list[int]) -> None:
        """Take note of blocks that have ended."""
        if len(self._jobs) == 1 and not self._bounced:
            # Nearly always: blocks of one large transfer, all whole. Counted without looking at each.
            ((number, job),) = self._jobs.items()
            count = len(results)
            if results.count(job.run.block_nbytes) == count:
                job.in_flight -= count
                job.share.in_flight -= count
                self._in_flight -= count
                self._drop(number, job)
                return
        for tag, result in zip(tags, results):
            if tag in self._bounced:
                self._land(*self._bounced.pop(tag), result)
                continue
            number = tag >> _TAG_BITS
            job = self._jobs[number]
            index = tag & ((1 << _TAG_BITS) - 1)
            self._ended(job, index, job.run.address + index * job.run.block_nbytes, result)
            self._drop(number, job)

    def _land(self, job: Job, index: int, buffer: Memory, result: int) -> None:
        """A bounced block has ended."""
        if self._ended(job, index, buffer.address, result) and not job.run.write:
            copy_out(job.share.operation, job.run, index, buffer.address)
        self._buffers.give(buffer)

    def _ended(self, job: Job, index: int, address: int, result: int) -> bool:
        """Take note of one block, and finish it where the kernel did not; False where it failed."""
        job.in_flight -= 1
        job.share.in_flight -= 1
        self._in_flight -= 1
        if result == job.run.length(index) or job.share.operation.failed:
            return not job.share.operation.failed
        outcome = mend(job.share.operation, job.run, index, address, result)
        self.counts.mended += outcome is True
        return outcome is not False

    def _give_up(self, share: Share) -> None:
        """Submit nothing more of a share whose operation has failed."""
        for number, job in list(self._jobs.items()):
            if job.share is share and not job.in_flight:
                del self._jobs[number]
        share.jobs.clear()

    def _drop(self, number: int, job: Job) -> None:
        if not job.in_flight and (job.next == job.total or job.share.operation.failed):
            self._jobs.pop(number, None)

    def _retire(self) -> None:
        """End the shares that have nothing left, and the operations whose last share that was."""
        for share in self._active:
            if share.jobs and share.operation.failed:  # cancelled, perhaps behind others that keep the queue full
                self._give_up(share)
        ended = [share for share in self._active if share.ended]
        if ended:
            self._active = deque(share for share in self._active if not share.ended)
        for share in ended:
            operation = share.operation
            if not operation.leave():
                continue
            last = None if operation.failed or share.final else final(operation)
            if last is not None:
                operation.begin(1)
                self._active.append(last)
            else:
                operation.end()
