"""What O_DIRECT asks of a file: known from the kernel or tried out, never assumed."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from ds_nvme.native import libc

PAGE = mmap.PAGESIZE
"""Bytes of a page of memory, which is what the page cache holds files in."""

_TRIED = (512, 4096, 65536)


@dataclass(frozen=True)
class Alignment:
    """How a file may be read and written around the page cache.

    Args:
        direct: whether O_DIRECT works on it at all.
        memory: multiple that buffer addresses must be of, in bytes.
        offset: multiple that file offsets and sizes must be of, in bytes.
        source: where this is known from, or why O_DIRECT is not used.
    """

    direct: bool
    memory: int
    offset: int
    source: str

    def __str__(self) -> str:
        if not self.direct:
            return f"through the page cache ({self.source})"
        return f"O_DIRECT, buffers aligned to {self.memory} and offsets to {self.offset} bytes ({self.source})"


def without_direct(reason: str) -> Alignment:
    """A file that goes through the page cache."""
    return Alignment(False, 1, 1, reason)


def inspect(fd: int, path: str, size: int, *, readable: bool) -> Alignment:
    """What O_DIRECT needs on an open file.

    The kernel is asked (statx, Linux 6.1 and later, where the filesystem knows). Otherwise O_DIRECT is tried: on a
    file that can be read, which alignment a read takes. An empty or unreadable file can't be tried without changing
    it; then the largest of page, filesystem block and 4096 is used, and a write that is refused all the same goes
    through the page cache.

    Args:
        fd: the file, opened with O_DIRECT.
        path: its name.
        size: its size in bytes.
        readable: it was opened for reading.
    """
    known = libc.direct_alignment(fd)
    if known is not None:
        memory, offset = known
        if memory == 0 or offset == 0:
            return without_direct("its filesystem has no direct I/O")
        return Alignment(True, memory, offset, "statx")
    block = os.fstat(fd).st_blksize
    if readable:
        return _try_reads(fd, size, block)
    try:
        other = reopen(fd, os.O_RDONLY | os.O_DIRECT, path)
    except OSError:
        return _try_reads(-1, size, block)
    try:
        return _try_reads(other, size, block)
    finally:
        os.close(other)


def reopen(fd: int, flags: int, path: str) -> int:
    """The same file, opened once more with other flags: by /proc, so that a renamed file is still the same."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    except FileNotFoundError:  # no /proc here
        return os.open(path, flags | os.O_CLOEXEC)


def _try_reads(fd: int, size: int, block: int) -> Alignment:
    if fd >= 0 and size > 0:
        with mmap.mmap(-1, 4 * _TRIED[-1]) as memory:
            exported = libc.Exported(memory)
            try:
                base = -(-exported.address // _TRIED[-1]) * _TRIED[-1]
                for step in _TRIED:
                    # An address that is a multiple of `step` and of nothing larger.
                    if libc.pread(fd, base + step, step, 0) >= 0:
                        return Alignment(True, step, step, "tried")
            finally:
                exported.release()
        return without_direct("its filesystem refuses direct reads")
    step = max(PAGE, block, 4096)
    return Alignment(True, step, step, "the filesystem's block size, untried")
