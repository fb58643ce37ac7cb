"""One transfer, measured: what `ds_io` shows."""

from __future__ import annotations

import errno
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from ds_nvme.drives import nameless
from ds_nvme.errors import FileError, StoppedError, file_error
from ds_nvme.files import OpenFile, Path
from ds_nvme.options import Candidate
from ds_nvme.page_cache import drop_everything, drop_pages
from ds_nvme.places import HOST, Place

_SIZE = 400 << 20


@dataclass(frozen=True)
class Gauged:
    """What one transfer, repeated, took.

    Args:
        write: or read.
        nbytes: moved each time.
        seconds: of each time.
        processor_seconds: of this process in all loops together.
        direct: around the page cache; otherwise through it.
        engine: that was used.
        path: what really carried the blocks.
        why: why this engine.
    """

    write: bool
    nbytes: int
    seconds: tuple[float, ...]
    processor_seconds: float
    direct: bool
    engine: str
    path: str
    why: str

    @property
    def rates(self) -> list[float]:
        """Bytes a second of each loop."""
        return [self.nbytes / each for each in self.seconds]

    @property
    def rate(self) -> float:
        """Bytes a second, the median over loops."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Largest less smallest rate as a part of the median."""
        return (max(self.rates) - min(self.rates)) / self.rate

    @property
    def processor_seconds_per_gib(self) -> float:
        """Processor seconds of this process for each GiB moved."""
        return self.processor_seconds / (self.nbytes * len(self.seconds) / (1 << 30))


def gauge(
    candidate: Candidate,
    *,
    write: bool,
    folder: Path | None = None,
    file: Path | None = None,
    io_size: int | None = None,
    loops: int = 5,
    place: Place = HOST,
    flush: bool = False,
    stop: Callable[[], bool] | None = None,
) -> Gauged:
    """Measure one transfer of a whole file by one handle.

    Args:
        candidate: the handle's options; its engine may be "auto".
        write: or read.
        folder: where to make a file without a name, which is written once before anything is measured.
        file: instead of a folder: a file to read, or one that does not exist yet to write, which stays.
        io_size: bytes. Default: 400 MiB, or those of the file that is read.
        loops: how often. Default: 5.
        place: where the memory is. Default: host memory.
        flush: drop the page cache before each read, the system's too where this process may. Without it only pages of a
            file that can't be read around the page cache are dropped.
        stop: asked between loops whether to end early.

    Raises:
        ValueError: not one of folder and file, or a count below 1.
        FileError: the file exists (when writing), is missing or too short (when reading), or can't be used.
        StoppedError: `stop` said so before anything was measured.
        NvmeError: the engine, the place or the drive can't be used.
    """
    if (folder is None) == (file is None):
        raise ValueError(f"a transfer has a folder or a file, one of them: got folder {folder!r} and file {file!r}")
    if loops < 1 or (io_size is not None and io_size < 1):
        raise ValueError(f"a transfer moves 1 byte or more, 1 loop or more: got {io_size} bytes, {loops} loops")
    with ExitStack() as stack:
        handle = stack.enter_context(place.open(candidate))
        path, size = _target(stack, folder, file, io_size, write)
        buffer = place.allocate(size, stack)
        if write or folder is not None:
            handle.sync_pwrite(buffer, path)  # so that a measured write allocates nothing, and a read finds something
        seconds: list[float] = []
        processor = 0.0
        for _ in range(loops):
            if stop is not None and stop():
                break
            if not write:
                _forget(path, flush)
            spent, begin = time.process_time(), time.perf_counter()
            (handle.sync_pwrite if write else handle.sync_pread)(buffer, path)
            seconds.append(time.perf_counter() - begin)
            processor += time.process_time() - spent
        if not seconds:
            raise StoppedError("a transfer is measured once or more: this one was stopped before")
        found = handle.describe()
        opened = OpenFile(path, write=False)
        stack.callback(opened.close)
        return Gauged(write, size, tuple(seconds), processor, opened.direct >= 0, found.engine, found.path, found.why)


def _target(
    stack: ExitStack, folder: Path | None, file: Path | None, io_size: int | None, write: bool
) -> tuple[str, int]:
    """The path and the bytes to move."""
    if folder is not None:
        return f"/proc/self/fd/{stack.enter_context(nameless(folder)).fileno()}", io_size or _SIZE
    path = os.fspath(file or "")
    if write:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError as error:
            raise FileError(errno.EEXIST, path, None, "a measured write would overwrite it; name a new file") from error
        except OSError as error:
            raise file_error(error.errno or errno.EIO, path) from error
        stack.push(partial(_remove_failed, path))
        return path, io_size or _SIZE
    opened = OpenFile(path, write=False)
    opened.close()
    if not opened.size:
        raise FileError(errno.ENODATA, path, None, "it is empty; name one that holds something")
    return path, io_size or opened.size


def _remove_failed(path: str, kind: object, *_: object) -> None:
    if kind is not None:
        os.unlink(path)


def _forget(path: str, flush: bool) -> None:
    """Take the file out of the page cache, where it may be in there."""
    opened = OpenFile(path, write=False)
    try:
        if flush or opened.direct < 0:
            drop_pages([opened.cached])
    finally:
        opened.close()
    if flush:
        drop_everything()
