"""What users of ds-nvme catch: `NvmeError` and its kinds."""

from __future__ import annotations

import errno
import os
from typing import Any


class NvmeError(Exception):
    """A transfer, a buffer or an engine failed. The base of every error of this package but wrong options."""

    others: tuple[BaseException, ...] = ()
    """Errors of further operations that failed in the same `wait()`."""


class InvalidBufferError(NvmeError, ValueError):
    """Memory that can't take part in a transfer: not contiguous, not writable, of the wrong size or kind."""


class ClosedHandleError(NvmeError):
    """The handle, pool or store was closed, or belongs to another process."""


class OverlapError(NvmeError):
    """A write meets a transfer in flight on the same bytes of the same file: the outcome would be chance."""


class CancelledTransferError(NvmeError):
    """The operation was cancelled: see `Operation.cancel`."""


class EngineError(NvmeError):
    """An engine can't run here, or the kernel refused it resources."""


class GdsError(EngineError):
    """cuFile can't be used here, or refused something.

    Args:
        message: rule, value and mend.
        code: cuFile's own code (CUfileOpError), 0 where it wasn't asked yet.
        cuda: the CUDA driver's code (CUresult), 0 where CUDA is well.
    """

    def __init__(self, message: str, code: int = 0, cuda: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.cuda = cuda


class DeviceError(NvmeError):
    """A device failed to copy."""


class VerifyError(NvmeError):
    """`validate` was asked for, and file and memory differ after the transfer."""


class BudgetError(NvmeError, MemoryError):
    """Memory beyond a pool's budget, or beyond what the system lets a process lock."""


class StoppedError(NvmeError):
    """A measurement was told to stop before it had a result."""


class FileError(NvmeError, OSError):
    """The kernel refused or failed I/O on a file.

    Args:
        code: the errno.
        path: the file.
        offset: file offset at which it failed, in bytes; None where the whole file is meant.
        hint: what the user can do.
    """

    def __init__(self, code: int, path: str, offset: int | None = None, hint: str = "") -> None:
        where = "" if offset is None else f" at offset {offset}"
        super().__init__(code, f"{os.strerror(code)}{where}{'; ' if hint else ''}{hint}", path)
        self.path = path
        self.offset = offset
        self._made_of: tuple[Any, ...] = (code, path, offset, hint)

    def __reduce__(self) -> tuple[Any, ...]:
        """What it was made of, so that it comes whole out of another process."""
        return type(self), self._made_of


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file or folder."""


class AccessError(FileError, PermissionError):
    """The file may not be read or written by this process."""


class NoSpaceError(FileError):
    """The filesystem or the user's quota is full."""


class TruncatedFileError(FileError, EOFError):
    """The file ends before the bytes that were asked for.

    Args:
        path: the file.
        offset: the first byte asked for.
        nbytes: how many were asked for.
        size: the file's size in bytes.
    """

    def __init__(self, path: str, offset: int, nbytes: int, size: int) -> None:
        OSError.__init__(
            self,
            errno.ENODATA,
            f"the file must hold what is read: {nbytes} bytes from offset {offset} were asked for, it has {size}; "
            "was it written completely?",
            path,
        )
        self.path = path
        self.offset = offset
        self.size = size
        self._made_of = (path, offset, nbytes, size)


_KINDS: dict[int, tuple[type[FileError], str]] = {
    errno.ENOENT: (MissingFileError, "check the path"),
    errno.EACCES: (AccessError, "check the owner and mode of the file and its folder"),
    errno.EPERM: (AccessError, "check the owner and mode of the file and its folder"),
    errno.EROFS: (AccessError, "the filesystem is mounted read-only"),
    errno.ENOSPC: (NoSpaceError, "free space; the file is incomplete"),
    errno.EDQUOT: (NoSpaceError, "the quota is used up; the file is incomplete"),
}


def file_error(code: int, path: str, offset: int | None = None) -> FileError:
    """The typed error for an errno on a file."""
    kind, hint = _KINDS.get(code, (FileError, ""))
    return kind(code, path, offset, hint)
