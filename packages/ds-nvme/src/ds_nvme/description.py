"""What a handle does, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Description:
    """Which way a handle's transfers go. `print(handle.describe())`.

    Args:
        engine: its name.
        path: what really carries the blocks.
        why: why this engine.
        refused: engines that can't run here, each with the reason.
        block_size: bytes a request.
        queue_depth: most requests in flight, each thread.
        single_submit: requests are handed over one by one.
        overlap_events: the queue is refilled as requests end.
        intra_op_parallelism: threads that share an operation.
        blocks_at_once: blocking operations of one block so far, done by pread or pwrite in the caller's thread.
        straight_blocks: blocks moved between file and user's memory so far.
        bounced_blocks: blocks moved through a bounce buffer so far, because memory or offsets were not aligned.
        mended_blocks: blocks that the kernel refused or cut short, finished through the page cache.
        notes: more, a line each.
        file: how the file that was asked about can be accessed, or None.
    """

    engine: str
    path: str
    why: str
    refused: Mapping[str, str]
    block_size: int
    queue_depth: int
    single_submit: bool
    overlap_events: bool
    intra_op_parallelism: int
    blocks_at_once: int
    straight_blocks: int
    bounced_blocks: int
    mended_blocks: int
    notes: tuple[str, ...] = ()
    file: str | None = None

    def __str__(self) -> str:
        lines = [
            f"engine {self.engine}: {self.path} ({self.why})",
            f"blocks of {self.block_size} bytes, up to {self.queue_depth} in flight on each of "
            f"{self.intra_op_parallelism} threads"
            + (", submitted one by one" if self.single_submit else "")
            + ("" if self.overlap_events else ", a batch at a time"),
            f"moved so far: {self.straight_blocks} blocks straight, {self.bounced_blocks} through bounce buffers, "
            f"{self.mended_blocks} finished through the page cache, {self.blocks_at_once} in the caller's thread",
        ]
        lines += [f"engine {name} can't run here: {reason}" for name, reason in self.refused.items()]
        lines += self.notes
        if self.file is not None:
            lines.append(self.file)
        return "\n".join(lines)
