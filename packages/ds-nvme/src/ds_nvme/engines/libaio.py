"""Linux's asynchronous I/O (what libaio wraps), by its system calls: needs no library."""

from __future__ import annotations

import errno
import platform
import struct
import sys
from array import array
from typing import ClassVar

from ds_nvme.engines.base import Engine, Run
from ds_nvme.errors import EngineError
from ds_nvme.native import libc

# Source: linux/include/uapi/asm-generic/unistd.h and arch/x86/entry/syscalls/syscall_64.tbl.
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4), "riscv64": (0, 1, 2, 4)}

# struct iocb of linux/aio_abi.h as eight 64-bit words, little-endian:
# data, key | rw_flags, opcode | priority | descriptor, address, bytes, offset, reserved, flags | eventfd.
_IOCB_WORDS = 8
_IOCB_BYTES = 64
_PREAD, _PWRITE = 0, 1
_EVENT_WORDS = 4  # struct io_event: data, iocb, result, second result


class Packed:
    """iocbs of a run, and the array of pointers to them that io_submit takes."""

    __slots__ = ("_iocbs", "_list", "pointers")

    def __init__(self, run: Run, tag: int) -> None:
        count = run.blocks
        # Whole columns are filled at once: a loop over blocks would cost more than the kernel takes for them.
        words = memoryview(bytearray(count * _IOCB_BYTES)).cast("Q")
        words[0::_IOCB_WORDS] = array("Q", range(tag, tag + count))
        words[2::_IOCB_WORDS] = array("Q", [(_PWRITE if run.write else _PREAD) | run.fd << 32]) * count
        words[3::_IOCB_WORDS] = column(run.address, run.block_nbytes, count)
        words[4::_IOCB_WORDS] = array("Q", [run.block_nbytes]) * count
        words[4 + (count - 1) * _IOCB_WORDS] = run.length(count - 1)
        words[5::_IOCB_WORDS] = column(run.file_offset, run.block_nbytes, count)
        self._iocbs = libc.Exported(words.obj)
        self._list = libc.Exported(column(self._iocbs.address, _IOCB_BYTES, count))
        self.pointers = self._list.address


def column(start: int, step: int, count: int) -> array[int]:
    """`start`, `start + step`, and so on: `count` numbers modulo 2**64."""
    if start < 0:  # a bounce block's place before the buffer: never given to the kernel
        return array("Q", [(start + index * step) % (1 << 64) for index in range(count)])
    return array("Q", range(start, start + step * count, step))


class LibaioEngine(Engine):
    """io_submit and io_getevents. See `Engine`."""

    name: ClassVar[str] = "libaio"

    def __init__(self, depth: int) -> None:
        self._context = 0
        machine = platform.machine()
        if sys.platform != "linux" or machine not in _NUMBERS or sys.byteorder != "little":
            raise EngineError(f"it needs Linux on {', '.join(_NUMBERS)}: this is {sys.platform} on {machine}")
        self._setup, self._destroy, self._submit, self._getevents = _NUMBERS[machine]
        context = bytearray(8)
        exported = libc.Exported(context)
        result = libc.syscall(self._setup, depth, exported.address)
        exported.release()
        if result == -errno.EAGAIN:
            raise EngineError(
                f"the system has contexts for no {depth} requests more (EAGAIN); raise fs.aio-max-nr with sysctl, "
                "lower queue_depth or intra_op_parallelism, or close other handles"
            )
        if result < 0:
            raise EngineError(f"the kernel refuses io_setup ({errno.errorcode.get(-result, -result)})")
        self._context = struct.unpack("Q", context)[0]
        self._in_flight = 0
        self._tags = memoryview(bytearray(depth * _EVENT_WORDS * 8)).cast("Q")
        self._results = memoryview(self._tags.obj).cast("q")
        self._events = libc.Exported(self._tags.obj)

    def pack(self, run: Run, tag: int) -> Packed:
        return Packed(run, tag)

    def submit(self, packed: Packed, start: int, count: int) -> int:
        accepted = libc.syscall(self._submit, self._context, count, packed.pointers + 8 * start)
        if accepted in (-errno.EAGAIN, -errno.EINTR):
            return 0
        self._in_flight += max(accepted, 0)
        return accepted

    def reap(self, minimum: int) -> tuple[list[int], list[int]]:
        count = libc.syscall(self._getevents, self._context, minimum, self._in_flight, self._events.address, 0)
        if count == -errno.EINTR:
            return [], []
        if count < 0:
            raise EngineError(f"the kernel refuses io_getevents ({errno.errorcode.get(-count, -count)})")
        self._in_flight -= count
        stop = count * _EVENT_WORDS
        return self._tags[0:stop:_EVENT_WORDS].tolist(), self._results[2:stop:_EVENT_WORDS].tolist()

    def close(self) -> None:
        if self._context:
            # Waits for whatever is still in flight.
            libc.syscall(self._destroy, self._context)
            self._context = 0

    @classmethod
    def path(cls) -> str:
        return "io_submit and io_getevents, straight to the kernel"
