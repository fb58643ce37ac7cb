"""Drives under measurement: how fast are certain options?"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from ds_nvme.errors import StoppedError, file_error
from ds_nvme.files import OpenFile, Path
from ds_nvme.operation import Operation
from ds_nvme.options import Candidate
from ds_nvme.page_cache import drop_everything, drop_pages
from ds_nvme.places import HOST, Place

_PIECE = 16 << 20


class Drives:
    """A file on each drive, written once, and memory to move. A context manager.

    The files have no names: nothing is left behind, not even by a killed process.

    Args:
        folders: one, or one on each drive.
        io_size: bytes of a file.
        place: where the memory is. Default: host memory.
        flush: before each measured read drop the files' pages, and the whole page cache where this process may. Without
            it only pages of files that can't be read around the page cache are dropped.
        stop: asked between pieces whether to end early.

    Raises:
        ValueError: nothing to write, or nowhere.
    """

    def __init__(
        self,
        folders: Path | Sequence[Path],
        io_size: int,
        *,
        place: Place = HOST,
        flush: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        if io_size < 1:
            raise ValueError(f"a file to measure with has 1 byte or more: got {io_size}")
        self._folders = [folders] if isinstance(folders, str) or not isinstance(folders, Sequence) else list(folders)
        if not self._folders:
            raise ValueError("drives are measured by a folder on each: got none")
        self._io_size = io_size
        self._place, self._flush = place, flush
        self._stop = stop or (lambda: False)
        self._stack = ExitStack()

    def __enter__(self) -> Drives:
        """Write the files.

        Raises:
            FileError: a folder can't be written to, or is full.
            StoppedError: `stop` said so.
        """
        with ExitStack() as stack:
            self._files = [stack.enter_context(nameless(folder)) for folder in self._folders]
            self._buffers = [self._place.allocate(self._io_size, stack) for _ in self._files]
            begin = time.perf_counter()
            with self._place.open(Candidate("auto", 1 << 20, 32)) as handle:
                for path, buffer in self._targets():
                    for start in range(0, self._io_size, _PIECE):
                        if self._stop():
                            raise StoppedError("drives are written to before they are measured: stopped meanwhile")
                        handle.sync_pwrite(buffer[start : start + _PIECE], path, start)
            self._best_rate = self._io_size * len(self._files) / (time.perf_counter() - begin)
            self._paged = [file.fileno() for file in self._files if self._flush or not _is_direct(file.fileno())]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, candidate: Candidate, write: bool, seconds: float) -> float:
        """Keep the queues full for a while, or until `stop` says so.

        Args:
            candidate: options of the handles, one for each drive.
            write: or read.
            seconds: how long; at least one piece of 16 MiB is moved.

        Returns:
            Bytes a second over all drives.
        """
        if not write:
            drop_pages(self._paged)
            if self._flush:
                drop_everything()  # whoever asked for it was told beforehand where it can't be
        with ExitStack() as stack:
            streams = [
                _Stream(stack.enter_context(self._place.open(candidate)), candidate, write, path, buffer)
                for path, buffer in self._targets()
            ]
            for stream in streams:
                # A deep queue of large blocks would take longer to empty than the time there is.
                stream.limit(seconds * self._best_rate / len(streams))
            begin = time.perf_counter()
            while True:
                for stream in streams:
                    stream.step()
                if time.perf_counter() - begin >= seconds or self._stop():
                    break
            # What is in flight counts too, with the time until its end.
            moved = sum(stream.finish() for stream in streams)
            rate = moved / (time.perf_counter() - begin)
            self._best_rate = max(self._best_rate, rate)
            return rate

    def _targets(self) -> Iterator[tuple[str, Any]]:
        for file, buffer in zip(self._files, self._buffers):
            yield f"/proc/self/fd/{file.fileno()}", buffer


def nameless(folder: Path) -> Any:
    """A file without a name.

    Raises:
        FileError: the folder is missing or not writable.
    """
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError as error:
        raise file_error(error.errno or 0, str(folder)) from error


def _is_direct(fd: int) -> bool:
    file = OpenFile(f"/proc/self/fd/{fd}", write=False)
    try:
        return file.direct >= 0
    finally:
        file.close()


class _Stream:
    """Transfers of pieces of one file, round and round, with enough in flight that the queue never runs dry."""

    def __init__(self, handle: Any, candidate: Candidate, write: bool, path: str, buffer: Any) -> None:
        self._start = handle.start_write if write else handle.start_read
        self._path, self._buffer = path, buffer
        self._starts = list(range(0, len(buffer), _PIECE))
        queue_bytes = candidate.queue_depth * candidate.block_size * candidate.intra_op_parallelism
        # Never all pieces: one that is in flight is not started again.
        self._most = min(1 + -(-queue_bytes // _PIECE), max(len(self._starts) - 1, 1))
        self._flying: deque[Operation] = deque()
        self._turn = self._moved = 0

    def limit(self, nbytes: float) -> None:
        """Have no more in flight than so many bytes, but one piece at least."""
        self._most = max(min(self._most, int(nbytes / _PIECE)), 1)

    def step(self) -> None:
        """Start pieces until enough are in flight, then wait for the first."""
        while len(self._flying) < self._most:
            start = self._starts[self._turn % len(self._starts)]
            self._turn += 1
            self._flying.append(self._start(self._buffer[start : start + _PIECE], self._path, start))
        self._moved += self._flying.popleft().result()

    def finish(self) -> int:
        """Wait for what is in flight: bytes moved in all."""
        while self._flying:
            self._moved += self._flying.popleft().result()
        return self._moved
