"""Memory for fast transfers: page-aligned, of huge pages where the system has them, locked where wanted."""

from __future__ import annotations

import errno
import mmap
import os
import resource

from ds_nvme.alignment import PAGE
from ds_nvme.errors import BudgetError
from ds_nvme.native import libc

_HUGE = 2 << 20


class Memory:
    """Anonymous memory of its own, zeroed, page-aligned.

    It lives as long as this object or anything that exports it (`memory.buffer`, an array or tensor made from it).

    Args:
        nbytes: size; rounded up to pages. From 2 MiB up huge pages are asked for: direct I/O has fewer pages to pin.
        lock: keep it from being paged out.

    Raises:
        BudgetError: the system doesn't let this process lock so much, or has no memory left.
    """

    __slots__ = ("__weakref__", "address", "buffer", "locked", "nbytes")

    def __init__(self, nbytes: int, *, lock: bool = False) -> None:
        self.nbytes = self.rounded(nbytes)
        try:
            mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BudgetError(
                f"memory must be free: {self.nbytes} bytes were asked for ({os.strerror(error.errno or 0)})"
            ) from error
        self.buffer = memoryview(mapping)
        exported = libc.Exported(mapping)
        self.address = exported.address
        exported.release()
        if self.nbytes >= _HUGE:
            libc.ask_huge_pages(self.address, self.nbytes)
        self.locked = False
        if lock:
            self.lock()

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Bytes that memory of that size takes: whole pages, at least one."""
        return max(-(-nbytes // PAGE), 1) * PAGE

    def lock(self) -> None:
        """Keep it in memory.

        Raises:
            BudgetError: beyond what the process may lock.
        """
        result = libc.lock_memory(self.address, self.nbytes)
        if result < 0:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            raise BudgetError(
                f"locked memory stays within the process's limit: {self.nbytes} more bytes were asked for, the limit "
                f"(ulimit -l) is {limit} bytes ({errno.errorcode.get(-result, -result)}); raise it with ulimit -l, "
                "LimitMEMLOCK= of systemd or --ulimit memlock of the container"
            )
        self.locked = True

    def unlock(self) -> None:
        """Let it be paged out again."""
        if self.locked:
            libc.unlock_memory(self.address, self.nbytes)
            self.locked = False
