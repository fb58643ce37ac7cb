"""Aligned buffers of one worker for blocks that can't move directly: a bounded number, made when first needed."""

from __future__ import annotations

from ds_nvme.memory import Memory
from ds_nvme.plan import BOUNCE_BLOCK

_MOST_BYTES = 32 << 20


class BounceBuffers:
    """At most 32 MiB of buffers of 1 MiB each (`plan.BOUNCE_BLOCK`), page-aligned, for one thread.

    Args:
        depth: most blocks in flight; more buffers are never needed.
    """

    def __init__(self, depth: int) -> None:
        self._left = min(depth, _MOST_BYTES // BOUNCE_BLOCK)
        self._free: list[Memory] = []

    def take(self) -> Memory | None:
        """A buffer, or None while all are in use."""
        if self._free:
            return self._free.pop()
        if not self._left:
            return None
        self._left -= 1
        return Memory(BOUNCE_BLOCK)

    def give(self, buffer: Memory) -> None:
        """Take one back."""
        self._free.append(buffer)
