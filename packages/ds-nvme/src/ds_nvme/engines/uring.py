"""io_uring, by its system calls and shared rings: needs no library.

Rings are made with IORING_SETUP_SINGLE_ISSUER and DEFER_TASKRUN (Linux 6.1): completions then appear only while this
thread is in io_uring_enter, so that Python, which has no memory barriers, reads them safely on every processor.

Buffers and files are not registered: that pins the same pages before the first request that the requests would pin on
their way. Measured at 128 KiB blocks and 32 in flight, it costs 3 ms a GiB of huge pages and saves no processor time.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import sys
from array import array
from typing import ClassVar

from ds_nvme.engines.base import Engine, Run
from ds_nvme.engines.libaio import column
from ds_nvme.errors import EngineError
from ds_nvme.native import libc

# Source: linux/include/uapi/linux/io_uring.h.
_SETUP, _ENTER = 425, 426
_CLAMP, _SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 4, 1 << 12, 1 << 13
_ENTER_GETEVENTS = 1
_FEAT_SINGLE_MMAP = 1
_OFFSET_RINGS, _OFFSET_SQES = 0, 0x10000000
_READ, _WRITE = 22, 23
_PARAMS_BYTES = 120
# struct io_uring_sqe as eight 64-bit words: opcode | flags | priority | descriptor, offset, address,
# bytes | rw_flags, user data, buffer index and more. struct io_uring_cqe as two: user data, result | flags.
_SQE_WORDS = 8
_MOST_BYTES = 0x7FFFF000  # a request; the kernel moves no more at once


class UringEngine(Engine):
    """io_uring. See `Engine`."""

    name: ClassVar[str] = "io_uring"

    def __init__(self, depth: int) -> None:
        self._fd = -1
        if sys.platform != "linux" or sys.byteorder != "little":
            raise EngineError(f"it needs Linux on a little-endian processor: this is {sys.platform}")
        params = bytearray(_PARAMS_BYTES)
        struct.pack_into("I", params, 8, _CLAMP | _SINGLE_ISSUER | _DEFER_TASKRUN)
        exported = libc.Exported(params)
        fd = libc.syscall(_SETUP, depth, exported.address)
        exported.release()
        if fd < 0:
            raise EngineError(_refusal(-fd))
        self._fd = fd
        self._in_flight = 0
        os.set_inheritable(fd, False)
        sq_entries, cq_entries, _, _, _, features = struct.unpack_from("6I", params)
        if not features & _FEAT_SINGLE_MMAP or cq_entries < depth:
            os.close(fd)
            raise EngineError(f"the kernel's ring holds {cq_entries} requests, {depth} were asked for")
        _, sq_tail, _, _, _, _, sq_array = struct.unpack_from("7I", params, 40)
        cq_head, cq_tail, _, _, _, cqes = struct.unpack_from("6I", params, 80)
        rings_bytes = max(sq_array + 4 * sq_entries, cqes + 16 * cq_entries)
        self._rings = mmap.mmap(fd, rings_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=_OFFSET_RINGS)
        self._sqes_map = mmap.mmap(fd, 64 * sq_entries, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=_OFFSET_SQES)
        self._numbers = memoryview(self._rings)[: rings_bytes // 4 * 4].cast("I")
        self._sqes = memoryview(self._sqes_map).cast("Q")
        self._sq_entries, self._sq_tail = sq_entries, sq_tail // 4
        self._cq_entries, self._cq_head, self._cq_tail = cq_entries, cq_head // 4, cq_tail // 4
        completed = memoryview(self._rings)[cqes : cqes + 16 * cq_entries]
        self._tags = completed.cast("Q")
        self._results = completed.cast("i")
        for index in range(sq_entries):
            self._numbers[sq_array // 4 + index] = index

    def pack(self, run: Run, tag: int) -> memoryview:
        count = run.blocks
        words = memoryview(bytearray(count * _SQE_WORDS * 8)).cast("Q")
        words[0::_SQE_WORDS] = array("Q", [(_WRITE if run.write else _READ) | run.fd << 32]) * count
        words[1::_SQE_WORDS] = column(run.file_offset, run.block_nbytes, count)
        words[2::_SQE_WORDS] = column(run.address, run.block_nbytes, count)
        words[3::_SQE_WORDS] = array("Q", [min(run.block_nbytes, _MOST_BYTES)]) * count
        words[3 + (count - 1) * _SQE_WORDS] = min(run.length(count - 1), _MOST_BYTES)
        words[4::_SQE_WORDS] = array("Q", range(tag, tag + count))
        return words

    def submit(self, packed: memoryview, start: int, count: int) -> int:
        count = min(count, self._sq_entries)
        # The kernel takes requests only inside io_uring_enter, so the ring is empty now.
        tail = self._numbers[self._sq_tail]
        slot = tail % self._sq_entries
        before_wrap = min(count, self._sq_entries - slot)
        self._sqes[slot * _SQE_WORDS : (slot + before_wrap) * _SQE_WORDS] = packed[
            start * _SQE_WORDS : (start + before_wrap) * _SQE_WORDS
        ]
        if before_wrap < count:
            self._sqes[: (count - before_wrap) * _SQE_WORDS] = packed[
                (start + before_wrap) * _SQE_WORDS : (start + count) * _SQE_WORDS
            ]
        self._numbers[self._sq_tail] = (tail + count) % (1 << 32)
        accepted = libc.syscall(_ENTER, self._fd, count, 0, 0)
        if accepted < count:
            self._numbers[self._sq_tail] = (tail + max(accepted, 0)) % (1 << 32)
        self._in_flight += max(accepted, 0)
        return 0 if accepted in (-errno.EAGAIN, -errno.EBUSY, -errno.EINTR) else accepted

    def reap(self, minimum: int) -> tuple[list[int], list[int]]:
        result = libc.syscall(_ENTER, self._fd, 0, minimum, _ENTER_GETEVENTS)
        if result < 0 and -result != errno.EINTR:
            raise EngineError(f"the kernel refuses io_uring_enter ({errno.errorcode.get(-result, -result)})")
        head, tail = self._numbers[self._cq_head], self._numbers[self._cq_tail]
        count = (tail - head) % (1 << 32)
        slot = head % self._cq_entries
        stop = min(slot + count, self._cq_entries)
        tags = self._tags[2 * slot : 2 * stop : 2].tolist()
        results = self._results[4 * slot + 2 : 4 * stop : 4].tolist()
        if wrapped := slot + count - stop:
            tags += self._tags[0 : 2 * wrapped : 2].tolist()
            results += self._results[2 : 4 * wrapped : 4].tolist()
        self._numbers[self._cq_head] = tail
        self._in_flight -= count
        return tags, results

    def close(self) -> None:
        if self._fd < 0:
            return
        while self._in_flight:  # after a failure only: memory must not be let go while the kernel uses it
            self.reap(self._in_flight)
        for view in (self._numbers, self._sqes, self._tags, self._results):
            view.release()
        self._rings.close()
        self._sqes_map.close()
        os.close(self._fd)
        self._fd = -1

    @classmethod
    def path(cls) -> str:
        return "io_uring, straight to the kernel"


def _refusal(code: int) -> str:
    reasons = {
        errno.ENOSYS: "the kernel has no io_uring",
        errno.EPERM: "io_uring is forbidden here (sysctl kernel.io_uring_disabled, or a container's seccomp profile)",
        errno.EINVAL: "the kernel's io_uring is older than Linux 6.1",
        errno.ENOMEM: "io_uring needs more locked memory than ulimit -l allows",
    }
    return reasons.get(code, f"the kernel refuses io_uring_setup ({errno.errorcode.get(code, code)})")
