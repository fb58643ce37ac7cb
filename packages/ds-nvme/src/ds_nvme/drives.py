"""Drives under measurement: how fast are certain options?"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from ds_nvme.files import Path
from ds_nvme.handle import AioHandle
from ds_nvme.memory import Memory
from ds_nvme.operation import Operation
from ds_nvme.options import Candidate

_PIECE = 16 << 20


class Drives:
    """A file on each drive, already written once, and memory to move. A context manager.

    The files have no names: nothing is left behind, not even by a killed process.

    Args:
        folders: one, or one on each drive.
        io_size: bytes of a file.
    """

    def __init__(self, folders: Path | Sequence[Path], io_size: int) -> None:
        if io_size < 1:
            raise ValueError(f"a file to measure with has 1 byte or more: got {io_size}")
        listed = [folders] if isinstance(folders, str) or not isinstance(folders, Sequence) else list(folders)
        self._stack = ExitStack()
        self._io_size = io_size
        self._files = [self._stack.enter_context(tempfile.TemporaryFile(dir=folder)) for folder in listed]  # noqa: SIM115
        self._buffers = [Memory(io_size) for _ in self._files]

    def __enter__(self) -> Drives:
        begin = time.perf_counter()
        with AioHandle() as handle:
            for path, buffer in self._targets():
                handle.sync_pwrite(buffer, path)
        self._best_rate = self._io_size * len(self._files) / (time.perf_counter() - begin)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, candidate: Candidate, write: bool, seconds: float) -> float:
        """Keep the queues full for a while.

        Args:
            candidate: options of the handles, one for each drive.
            write: or read.
            seconds: how long; at least one piece of 16 MiB is moved.

        Returns:
            Bytes a second over all drives.
        """
        with ExitStack() as stack:
            streams = [
                _Stream(stack.enter_context(AioHandle(**asdict(candidate))), candidate, write, path, buffer)
                for path, buffer in self._targets()
            ]
            for stream in streams:
                # A deep queue of large blocks would take longer to empty than the time there is.
                stream.limit(seconds * self._best_rate / len(streams))
            begin = time.perf_counter()
            while True:
                for stream in streams:
                    stream.step()
                if time.perf_counter() - begin >= seconds:
                    break
            # What is in flight counts too, with the time until its end.
            moved = sum(stream.finish() for stream in streams)
            rate = moved / (time.perf_counter() - begin)
            self._best_rate = max(self._best_rate, rate)
            return rate

    def _targets(self) -> Iterator[tuple[str, memoryview]]:
        for file, memory in zip(self._files, self._buffers):
            yield f"/proc/self/fd/{file.fileno()}", memory.buffer[: self._io_size]


class _Stream:
    """Transfers of pieces of one file, round and round, with enough in flight that the queue never runs dry."""

    def __init__(self, handle: AioHandle, candidate: Candidate, write: bool, path: str, buffer: memoryview) -> None:
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
