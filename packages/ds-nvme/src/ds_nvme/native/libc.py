"""Calls of the C library and the kernel, typed.

All release the GIL while they run. Failures come back as the kernel gives them, as a negative errno: an I/O engine
meets errors on many blocks at once and decides later which of them is raised.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from typing import Any

from ds_nvme.native._bindings import ffi

_c: Any = ffi.dlopen(None)

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_FALLOC_FL_KEEP_SIZE = 0x01
_MADV_HUGEPAGE = 14


class Exported:
    """The memory of an object with the buffer protocol, held until `release`.

    Args:
        owner: any object that exports contiguous memory.
        writable: refuse memory that may only be read.

    Raises:
        BufferError, ValueError, TypeError: as the exporting object says.
    """

    __slots__ = ("_cdata", "address", "nbytes")

    def __init__(self, owner: Any, *, writable: bool = False) -> None:
        self._cdata = ffi.from_buffer("char[]", owner, writable)
        self.address = int(ffi.cast("uintptr_t", self._cdata))
        """Of the first byte."""
        self.nbytes = len(self._cdata)

    def release(self) -> None:
        """Let the owner resize or unmap the memory again."""
        ffi.release(self._cdata)


def _call(function: Callable[..., int], *arguments: Any) -> int:
    while True:
        result = function(*arguments)
        if result >= 0:
            return result
        if ffi.errno != errno.EINTR:
            return -ffi.errno


def syscall(number: int, *arguments: int) -> int:
    """A raw system call with up to six arguments: its result, or a negative errno. EINTR is the caller's to handle."""
    result: int = _c.syscall(number, *arguments, *(0,) * (6 - len(arguments)))
    return result if result >= 0 else -ffi.errno


def pread(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Read into memory at `address`: bytes read (0 at the end of the file), or a negative errno."""
    return _call(_c.pread, fd, address, nbytes, offset)


def pwrite(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Write from memory at `address`: bytes written, or a negative errno."""
    return _call(_c.pwrite, fd, address, nbytes, offset)


def move(to: int, origin: int, nbytes: int) -> None:
    """Copy memory."""
    _c.memmove(to, origin, nbytes)


def equal(one: int, other: int, nbytes: int) -> bool:
    """Whether two stretches of memory hold the same bytes."""
    return _c.memcmp(one, other, nbytes) == 0


def allocate_blocks(fd: int, offset: int, nbytes: int, *, keep_size: bool) -> int:
    """Reserve disk blocks for a range; 0, or a negative errno.

    Without `keep_size` a file that ends before the range's end then ends there. It never gets shorter, so that
    several writers of one file can't undo each other, which ftruncate can.
    """
    if not hasattr(_c, "fallocate"):
        return -errno.EOPNOTSUPP
    return _call(_c.fallocate, fd, _FALLOC_FL_KEEP_SIZE if keep_size else 0, offset, nbytes)


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """What O_DIRECT asks of memory addresses and of file offsets, in bytes, as statx knows it.

    (0, 0) where the file can't be used with O_DIRECT, None where the kernel (before 6.1) or the filesystem
    does not say.
    """
    if not hasattr(_c, "statx"):
        return None
    result = bytearray(256)
    with ffi.from_buffer(result) as pointer:
        if _c.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, pointer) < 0:
            return None
    if not struct.unpack_from("I", result, 0)[0] & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("II", result, 0x98)
    return memory, offset


def lock_memory(address: int, nbytes: int) -> int:
    """Keep memory from being paged out; 0, or a negative errno."""
    return _call(_c.mlock, address, nbytes)


def unlock_memory(address: int, nbytes: int) -> int:
    """Undo `lock_memory`; 0, or a negative errno."""
    return _call(_c.munlock, address, nbytes)


def ask_huge_pages(address: int, nbytes: int) -> int:
    """Ask for huge pages under page-aligned memory, before it is first touched; 0, or a negative errno."""
    return _call(_c.madvise, address, nbytes, _MADV_HUGEPAGE)
