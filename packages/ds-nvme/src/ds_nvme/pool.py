"""A pool of aligned buffers within a byte budget."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from ds_nvme.errors import BudgetError, ClosedHandleError
from ds_nvme.locked import shape_like
from ds_nvme.memory import Memory


@dataclass(frozen=True)
class PoolStatistics:
    """A pool's figures, in bytes and counts.

    Args:
        budget_bytes: most that may be held.
        held_bytes: memory the pool holds now, in use or free.
        in_use_bytes: memory that is lent out now.
        high_water_bytes: most that was ever lent out at once.
        allocations: times that memory was taken from the system.
        reuses: times that a free buffer did.
    """

    budget_bytes: int
    held_bytes: int
    in_use_bytes: int
    high_water_bytes: int
    allocations: int
    reuses: int


class PooledBuffer:
    """A buffer lent by a pool. Give it back with `release()`, or use it as a context manager.

    Nothing made from it may be used after that: another borrower may have the memory.
    """

    def __init__(self, pool: BufferPool, memory: Memory, nbytes: int) -> None:
        self._pool = pool
        self._memory: Memory | None = memory
        self.nbytes = nbytes
        """Bytes that were asked for."""

    @property
    def buffer(self) -> memoryview:
        """Its bytes."""
        return self._require().buffer[: self.nbytes]

    def as_array(self, like: Any, num_elements: int | None = None) -> Any:
        """Its memory as a flat tensor, numpy array or memoryview.

        Args:
            like: gives kind and dtype.
            num_elements: how many. Default: as many as fit.
        """
        itemsize = int(like.element_size() if hasattr(like, "element_size") else memoryview(like).itemsize)
        fit = self.nbytes // itemsize
        if num_elements is None:
            num_elements = fit
        if num_elements > fit:
            raise ValueError(f"an array lies inside its buffer: {num_elements} elements were asked for, {fit} fit")
        return shape_like(self._require(), num_elements, like)

    def release(self) -> None:
        """Give it back. Further calls do nothing."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._pool._take_back(memory)

    def _require(self) -> Memory:
        if self._memory is None:
            raise ClosedHandleError("a pooled buffer is used before its release: this one was given back")
        return self._memory

    def __enter__(self) -> PooledBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class BufferPool:
    """Page-aligned buffers that are reused. Safe from any thread.

    Args:
        budget_bytes: most memory to hold, in use and free together.
        lock: keep it from being paged out.
    """

    def __init__(self, budget_bytes: int, *, lock: bool = True) -> None:
        if budget_bytes < 1:
            raise ValueError(f"a pool's budget is 1 byte or more: got {budget_bytes}")
        self._budget = budget_bytes
        self._locks_memory = lock
        self._changed = threading.Condition()
        self._free: list[Memory] = []
        self._held = self._in_use = self._high_water = self._allocations = self._reuses = 0
        self._closed = False

    def acquire(self, nbytes: int, *, timeout: float | None = 0.0) -> PooledBuffer:
        """Borrow a buffer; its contents are undefined.

        Args:
            nbytes: its size.
            timeout: seconds to wait for others to release theirs; None: without end. Default: don't wait.

        Raises:
            BudgetError: it doesn't fit into the budget, or the system doesn't let the process lock so much.
        """
        size = Memory.rounded(nbytes)
        if size > self._budget:
            raise BudgetError(
                f"a buffer fits into its pool's budget: {nbytes} bytes were asked for, the budget is {self._budget}; "
                "raise budget_bytes or move smaller parts"
            )
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._fits(size), timeout):
                raise BudgetError(
                    f"a pool lends within its budget: {nbytes} bytes were asked for, {self._in_use} of "
                    f"{self._budget} are in use; release some, wait with timeout=, or raise budget_bytes"
                )
            if self._closed:
                raise ClosedHandleError("a pool is open: this one was closed")
            memory = self._reuse(size) or self._allocate(size)
            self._in_use += memory.nbytes
            self._high_water = max(self._high_water, self._in_use)
        return PooledBuffer(self, memory, nbytes)

    def statistics(self) -> PoolStatistics:
        """Its figures now."""
        with self._changed:
            return PoolStatistics(
                self._budget, self._held, self._in_use, self._high_water, self._allocations, self._reuses
            )

    def close(self) -> None:
        """Free what isn't in use; the rest when it is released."""
        with self._changed:
            self._closed = True
            self._held = self._in_use
            self._free.clear()
            self._changed.notify_all()

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fits(self, size: int) -> bool:
        return any(size <= memory.nbytes <= 2 * size for memory in self._free) or self._in_use + size <= self._budget

    def _reuse(self, size: int) -> Memory | None:
        # Not one more than twice as large: a small tensor should not hold a large buffer.
        fitting = [memory for memory in self._free if size <= memory.nbytes <= 2 * size]
        if not fitting:
            return None
        best = min(fitting, key=lambda memory: memory.nbytes)
        self._free.remove(best)
        self._reuses += 1
        return best

    def _allocate(self, size: int) -> Memory:
        self._free.sort(key=lambda memory: memory.nbytes)
        while self._free and self._held + size > self._budget:
            self._held -= self._free.pop().nbytes
        memory = Memory(size, lock=self._locks_memory)
        self._held += memory.nbytes
        self._allocations += 1
        return memory

    def _take_back(self, memory: Memory) -> None:
        with self._changed:
            self._in_use -= memory.nbytes
            if self._closed:
                self._held -= memory.nbytes
            else:
                self._free.append(memory)
            self._changed.notify_all()
