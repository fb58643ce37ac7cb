"""An operation's part that one worker carries out."""

from __future__ import annotations

from collections import deque
from typing import Any

from ds_nvme.engines.base import Run
from ds_nvme.plan import Segment
from ds_nvme.task import Task


class Job:
    """A run of blocks on its way.

    Args:
        run: the blocks. Of a bounce job, the address is where the first byte belongs in the user's buffer, which may
            begin later and end earlier.
        bounce: each block goes through a bounce buffer.
    """

    __slots__ = ("bounce", "in_flight", "next", "number", "packed", "packed_from", "packed_to", "run", "share", "total")

    def __init__(self, run: Run, share: Share, *, bounce: bool) -> None:
        self.run = run
        self.share = share
        self.bounce = bounce
        self.total = run.blocks
        self.next = 0
        """The first block not submitted yet."""
        self.in_flight = 0
        self.number = 0
        """What the worker knows it by; 0 before its first block is submitted."""
        self.packed: Any = None
        """The engine's requests for blocks `packed_from` to `packed_to` (exclusive)."""
        self.packed_from = self.packed_to = 0


class Share:
    """Jobs of one operation for one worker.

    Args:
        operation: whose.
        final: these are the jobs that wait for all others of the operation.
    """

    __slots__ = ("final", "in_flight", "jobs", "operation")

    def __init__(self, operation: Task, *, final: bool = False) -> None:
        self.operation = operation
        self.final = final
        self.jobs: deque[Job] = deque()
        """Not wholly submitted yet."""
        self.in_flight = 0

    def add(self, segment: Segment, first: int = 0, last: int | None = None) -> None:
        """Blocks `first` to `last` (exclusive; default: all) of a segment."""
        start = first * segment.block_nbytes
        stop = segment.nbytes if last is None else min(last * segment.block_nbytes, segment.nbytes)
        operation = self.operation
        run = Run(
            operation.plan.write,
            operation.file.direct if segment.direct else operation.file.cached,
            operation.address + segment.buffer_offset + start,
            segment.file_offset + start,
            stop - start,
            segment.block_nbytes,
        )
        self.jobs.append(Job(run, self, bounce=segment.bounce))

    @property
    def ended(self) -> bool:
        """Nothing left to submit or to reap."""
        return not self.jobs and not self.in_flight


def divide(operation: Task, parts: int) -> list[Share]:
    """An operation's segments, but those that wait for all others, in up to `parts` shares of whole blocks."""
    segments = [segment for segment in operation.plan.segments if not segment.last]
    blocks = max((segment.blocks for segment in segments), default=0)
    shares = [Share(operation) for _ in range(max(min(parts, blocks), 1))]
    for segment in segments:
        for index, share in enumerate(shares):
            first, last = (segment.blocks * at // len(shares) for at in (index, index + 1))
            if first < last:
                share.add(segment, first, last)
    return shares


def final(operation: Task) -> Share | None:
    """The segment that waits for all others, if the operation has one."""
    share = Share(operation, final=True)
    for segment in operation.plan.segments:
        if segment.last:
            share.add(segment)
    return share if share.jobs else None
