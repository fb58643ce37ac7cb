"""Flat buffers that are used again: on a CPU, fresh memory costs a page fault every 4 KiB."""

from __future__ import annotations

from collections import defaultdict

import torch


class BufferPool:
    """Hands out flat buffers and takes them back.

    On accelerators torch's caching allocator does this already, so there the pool keeps nothing.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat buffer with any content."""
        if device.type == "cpu" and (free := self._free[numel, dtype]):
            return free.pop()
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back. Nobody may use it any more, a running collective included."""
        if buffer.device.type == "cpu":
            self._free[buffer.numel(), buffer.dtype].append(buffer)

    def clear(self) -> None:
        """Lets go of what it keeps."""
        self._free.clear()
