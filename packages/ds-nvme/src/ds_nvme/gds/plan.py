"""What goes through cuFile, and what doesn't."""

from __future__ import annotations

from dataclasses import replace

from ds_nvme.alignment import PAGE, Alignment
from ds_nvme.plan import Segment, TransferPlan, plan_transfer


def plan_gds(
    *, write: bool, nbytes: int, file_offset: int, file_size: int, alignment: Alignment, block_size: int
) -> TransferPlan:
    """Decide how a transfer between a file and a device goes. See `plan_transfer`.

    cuFile takes any offset and any device address; blocks that begin at pages of the file just need no detour inside
    it. So a read is direct throughout; of a write, unaligned ends are not: see note [edges] in plan.
    """
    # Where its first byte lies in memory makes no difference to cuFile.
    alignment = replace(alignment, memory=1)
    if write or not alignment.direct:
        return plan_transfer(
            write=write,
            address=0,
            nbytes=nbytes,
            file_offset=file_offset,
            file_size=file_size,
            alignment=alignment,
            block_size=block_size,
        )
    block = -(-block_size // PAGE) * PAGE
    head = min(-file_offset % PAGE, nbytes)
    segments = []
    if head:
        segments.append(Segment(file_offset, head, head, 0, direct=True))
    if nbytes > head:
        segments.append(Segment(file_offset + head, nbytes - head, block, head, direct=True))
    return TransferPlan(write, file_offset, nbytes, tuple(segments))
