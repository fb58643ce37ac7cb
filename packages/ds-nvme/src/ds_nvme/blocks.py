"""A block's end: what the kernel refused or cut short is finished, what failed is said."""

from __future__ import annotations

import errno
import os

from ds_nvme.engines.base import Run
from ds_nvme.errors import NvmeError, TruncatedFileError, file_error
from ds_nvme.memory import Memory
from ds_nvme.native import libc
from ds_nvme.share import divide, final
from ds_nvme.task import Task

_MENDABLE = frozenset({errno.EAGAIN, errno.EINTR, errno.EINVAL, errno.EOPNOTSUPP, errno.ECANCELED})
"""Errors of a block after which a plain pread or pwrite through the page cache may still do."""


def mend(operation: Task, run: Run, index: int, address: int, result: int) -> bool | None:
    """Finish a block that was not moved whole, through the page cache.

    Args:
        operation: whose block; told where it fails.
        run: of which it is block `index`.
        address: of its memory: the user's, or a bounce buffer's.
        result: bytes moved, or a negative errno.

    Returns:
        True where it was finished, None where nothing was missing, False where it failed.
    """
    plan = operation.plan
    offset = run.file_offset + index * run.block_nbytes
    # A direct read may ask for more than the user did, beyond the end of the file.
    wanted = min(run.length(index), plan.file_offset + plan.nbytes - offset)
    if result < 0 and -result not in _MENDABLE:
        operation.fail(file_error(-result, operation.path, offset))
        return False
    done = max(result, 0)
    if done >= wanted:
        return None
    try:
        fd = operation.file.cached
    except NvmeError as error:
        operation.fail(error)
        return False
    move = libc.pwrite if run.write else libc.pread
    while done < wanted:
        moved = move(fd, address + done, wanted - done, offset + done)
        if moved == 0 and not run.write:
            end = min(offset + done, os.fstat(fd).st_size or offset + done)  # a block device has no st_size
            operation.fail(TruncatedFileError(operation.path, plan.file_offset, plan.nbytes, end))
            return False
        if moved <= 0:
            operation.fail(file_error(-moved or errno.EIO, operation.path, offset + done))
            return False
        done += moved
    return True


def copy_out(operation: Task, run: Run, index: int, bounce: int) -> None:
    """Copy what was asked for of a block that was read into a bounce buffer at address `bounce`."""
    begin = run.address + index * run.block_nbytes
    start = max(begin, operation.address)
    stop = min(begin + run.length(index), operation.address + operation.plan.nbytes)
    libc.move(start, bounce + start - begin, stop - start)


def carry_out(operation: Task) -> None:
    """Carry out an operation of one block in the caller's thread: a queue can't make it faster, a thread slower."""
    operation.begin(1)
    shares = divide(operation, 1)
    jobs = [*shares[0].jobs, *(share.jobs[0] for share in [final(operation)] if share is not None)]
    for job in jobs:
        run = job.run
        nbytes = run.length(0)
        memory = Memory(nbytes) if job.bounce else None
        address = memory.address if memory is not None else run.address
        if memory is not None and run.write:
            libc.move(address, run.address, nbytes)
        result = (libc.pwrite if run.write else libc.pread)(run.fd, address, nbytes, run.file_offset)
        if result != nbytes and mend(operation, run, 0, address, result) is False:
            break
        if memory is not None and not run.write:
            copy_out(operation, run, 0, address)
    operation.leave()
    operation.end()
