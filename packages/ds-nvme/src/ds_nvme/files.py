"""One file, opened for one transfer."""

from __future__ import annotations

import errno
import os
import stat
from typing import TypeAlias

from ds_nvme.alignment import Alignment, inspect, reopen, without_direct
from ds_nvme.errors import FileError, TruncatedFileError, file_error
from ds_nvme.native import libc

_DIRECT: int = getattr(os, "O_DIRECT", 0)

Path: TypeAlias = "str | os.PathLike[str]"


class OpenFile:
    """A file that a transfer reads or writes, around the page cache (`direct`) or through it (`cached`).

    Args:
        path: the file; one that is written is created where it doesn't exist (mode 0666 less the umask).
        write: for writing; otherwise for reading.

    Raises:
        FileError: it can't be opened, or is neither a regular file nor a block device.
    """

    __slots__ = ("_cached", "direct", "identity", "path", "size", "write")

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path = os.fspath(path)
        self.write = write
        self.direct = self._cached = -1
        """Descriptor with O_DIRECT; -1 where the file can't be opened so."""
        flags = os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY
        try:
            self.direct = self._open(flags | _DIRECT) if _DIRECT else -1
            if self.direct < 0:
                self._cached = os.open(self.path, flags | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise file_error(error.errno or errno.EIO, self.path) from error
        status = os.fstat(self._any)
        if stat.S_ISREG(status.st_mode):
            self.size = status.st_size
            """Bytes, when it was opened."""
        elif stat.S_ISBLK(status.st_mode):
            self.size = os.lseek(self._any, 0, os.SEEK_END)
        else:
            self.close()
            raise FileError(
                errno.EINVAL, self.path, None, "tensors are kept in regular files or on block devices; name one"
            )
        self.identity = (status.st_dev, status.st_ino)
        """The same for every name of the file."""

    @property
    def cached(self) -> int:
        """Descriptor for I/O through the page cache; opened when first needed, which most transfers don't.

        Raises:
            FileError: it can't be opened a second time.
        """
        if self._cached < 0:
            try:
                self._cached = reopen(self.direct, os.O_WRONLY if self.write else os.O_RDONLY, self.path)
            except OSError as error:
                raise file_error(error.errno or errno.EIO, self.path) from error
        return self._cached

    def alignment(self) -> Alignment:
        """What O_DIRECT needs on it."""
        if self.direct < 0:
            return without_direct("its filesystem refuses O_DIRECT" if _DIRECT else "this system has no O_DIRECT")
        return inspect(self.direct, self.path, self.size, readable=not self.write)

    def require(self, offset: int, nbytes: int) -> None:
        """Check that the file holds a range.

        Raises:
            TruncatedFileError: it ends before.
        """
        if nbytes and offset + nbytes > self.size:
            raise TruncatedFileError(self.path, offset, nbytes, self.size)

    def grow(self, offset: int, to: int) -> None:
        """Reserve disk blocks from `offset` and make the file at least `to` bytes long; never shorter.

        Raises:
            NoSpaceError: they don't fit.
        """
        result = libc.allocate_blocks(self._any, offset, to - offset, keep_size=False)
        # Without support for it the writes themselves extend the file: slower, and just as right.
        if result < 0 and -result not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise file_error(-result, self.path, offset)

    def close(self) -> None:
        """Close its descriptors."""
        for fd in (self._cached, self.direct):
            if fd >= 0:
                os.close(fd)
        self._cached = self.direct = -1

    @property
    def _any(self) -> int:
        return self.direct if self.direct >= 0 else self._cached

    def _open(self, flags: int) -> int:
        """A descriptor with O_DIRECT, or -1 where the filesystem refuses it."""
        try:
            return os.open(self.path, flags | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return -1
            raise
