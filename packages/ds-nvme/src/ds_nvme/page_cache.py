"""The kernel's page cache: emptying it, so that a read is a read from the drive."""

from __future__ import annotations

import os
from collections.abc import Iterable

_SWITCH = "/proc/sys/vm/drop_caches"


def drop_pages(fds: Iterable[int]) -> None:
    """Write the pages of these files back and forget them. Needs no rights; does nothing for files in memory."""
    for fd in fds:
        os.fsync(fd)  # only clean pages can be dropped
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def drop_everything() -> str | None:
    """Forget the clean pages of all files of the machine.

    Returns:
        None, or why the kernel does not let this process do so.
    """
    try:
        with open(_SWITCH, "w") as switch:
            switch.write("1")
    except OSError as error:
        return f"{_SWITCH}: {os.strerror(error.errno or 0)}; the whole page cache is dropped by root only"
    return None
