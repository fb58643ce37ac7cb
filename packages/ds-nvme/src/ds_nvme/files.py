"""One file, opened for one transfer."""

from __future__ import annotations

import errno
import os
import stat
from typing import TypeAlias

from ds_nvme.alignment import Alignment, inspect, reopen, without_direct
from ds_nvme.errors import FileError, TruncatedFileError, file_error
from ds_nvme.native import libc

Path: TypeAlias = "str | os.PathLike[str]"


class OpenFile:
    """A file that a transfer reads or writes: through the page cache, and beside it where `open_direct` was called.

    Args:
        path: the file; one that is written is created where it doesn't exist (mode 0666 less the umask).
        write: for writing; otherwise for reading.

    Raises:
        FileError: it can't be opened, or is neither a regular file nor a block device.
    """

    __slots__ = ("cached", "direct", "identity", "path", "size", "write")

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path = os.fspath(path)
        self.write = write
        self.direct = -1
        """Descriptor with O_DIRECT; -1 where there is none."""
        flags = os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY
        try:
            self.cached = os.open(self.path, flags | os.O_CLOEXEC, 0o666)
            """Descriptor for I/O through the page cache."""
        except OSError as error:
            raise file_error(error.errno or errno.EIO, self.path) from error
        status = os.fstat(self.cached)
        if stat.S_ISREG(status.st_mode):
            self.size = status.st_size
            """Bytes, when it was opened."""
        elif stat.S_ISBLK(status.st_mode):
            self.size = os.lseek(self.cached, 0, os.SEEK_END)
        else:
            self.close()
            raise FileError(
                errno.EINVAL, self.path, None, "tensors are kept in regular files or on block devices; name one"
            )
        self.identity = (status.st_dev, status.st_ino)
        """The same for every name of the file."""

    def alignment(self) -> Alignment:
        """What O_DIRECT needs on it."""
        try:
            return inspect(self.cached, self.size)
        except OSError as error:
            return without_direct(f"it can't be opened a second time: {error.strerror}")

    def require(self, offset: int, nbytes: int) -> None:
        """Check that the file holds a range.

        Raises:
            TruncatedFileError: it ends before.
        """
        if nbytes and offset + nbytes > self.size:
            raise TruncatedFileError(self.path, offset, nbytes, self.size)

    def open_direct(self) -> bool:
        """Open it for O_DIRECT too; False where the system refuses."""
        if self.direct < 0:
            try:
                self.direct = reopen(self.cached, (os.O_WRONLY if self.write else os.O_RDONLY) | os.O_DIRECT)
            except OSError:
                return False
        return True

    def grow(self, offset: int, to: int) -> None:
        """Reserve disk blocks from `offset` and make the file at least `to` bytes long; never shorter.

        Raises:
            NoSpaceError: they don't fit.
        """
        result = libc.allocate_blocks(self.cached, offset, to - offset, keep_size=False)
        # Without support for it the writes themselves extend the file: slower, and just as right.
        if result < 0 and -result not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise file_error(-result, self.path, offset)

    def close(self) -> None:
        """Close its descriptors."""
        for fd in (self.cached, self.direct):
            if fd >= 0:
                os.close(fd)
        self.cached = self.direct = -1
