"""Ten minutes of everything at once, with bounded memory and descriptors: `make test-long`."""

from __future__ import annotations

import gc
import os
import random
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import ds_nvme
from ds_nvme import AioHandle, Operation, aio_handle, engine_names
from ds_nvme.engines.choose import refusal
from ds_nvme.memory import Memory

SECONDS = float(os.environ.get("DS_SOAK_SECONDS", "600"))
MOST_BYTES = 3 << 20
"""Of a file."""
FILES, HANDLES, MOST_THREADS = 6, 6, 3
MOST_AT_ONCE = 12
LULLS = 20
"""Times that all handles are closed, and nothing may be left of them."""
SLACK_BYTES = 48 << 20
"""What memory may grow by from the first lull on: allocators keep some of what was freed."""


@dataclass
class Model:
    """A file, and the bytes that it must hold."""

    path: Path
    content: bytearray = field(default_factory=bytearray)
    busy: list[tuple[int, int, bool]] = field(default_factory=list)
    """Start, stop and whether it is written, of what is in flight."""

    def free(self, start: int, stop: int, write: bool) -> bool:
        """Whether a transfer of these bytes meets none in flight that it must not meet."""
        return not any((write or other) and start < b and a < stop for a, b, other in self.busy)

    def put(self, offset: int, data: bytes | memoryview) -> None:
        """It holds these bytes now."""
        if len(data):
            self.content.extend(bytes(max(offset + len(data) - len(self.content), 0)))
            self.content[offset : offset + len(data)] = data

    def check(self) -> None:
        """The file holds what it must."""
        assert (self.path.read_bytes() if self.path.exists() else b"") == self.content, self.path


@dataclass(frozen=True)
class Write:
    """One in flight."""

    model: Model
    offset: int
    data: memoryview
    operation: Operation


@dataclass(frozen=True)
class Read:
    """One in flight, and what it must bring."""

    buffer: memoryview
    wanted: bytes
    operation: Operation


class Soak:
    """Random transfers on several handles and files, checked against models."""

    def __init__(self, seed: int, folders: list[Path]) -> None:
        self._random = random.Random(seed)
        self._engines = [name for name in engine_names() if refusal(name) is None]
        self._models = [Model(folders[number % len(folders)] / f"{number}") for number in range(FILES)]
        self._handles: list[AioHandle] = []
        # An io_uring takes three descriptors a thread (its own, and one of each mapping); bounce buffers are most of
        # the memory.
        self._most_fds = open_files() + 3 * HANDLES * MOST_THREADS
        self._most_bytes = resident_bytes() + (768 << 20)
        self._pattern = self._random.randbytes(MOST_BYTES + 4096)
        self.counts: dict[str, int] = dict.fromkeys(("write", "read", "cancel", "refused", "reopen", "remove"), 0)

    def batch(self) -> None:
        """Up to twelve transfers in flight together, then all of them checked."""
        writes: list[Write] = []
        reads: list[Read] = []
        for _ in range(self._random.randint(1, MOST_AT_ONCE)):
            model = self._random.choice(self._models)
            if self._random.random() < 0.5:
                writes += self._write(model)
            else:
                reads += self._read(model)
        if self._random.random() < 0.1:
            self._reopen()  # closing waits for what is in flight
        self._settle(writes)
        for read in reads:
            assert read.operation.result(300) == len(read.buffer) and read.buffer == read.wanted, read.operation
        for model in self._models:
            model.busy.clear()
        if self._random.random() < 0.02:
            self._remove(self._random.choice(self._models))

    def run(self, until: float) -> None:
        """Batches up to a time (of the monotonic clock), with fresh handles; then every file holds what it must."""
        self._handles = [self._open() for _ in range(HANDLES)]
        try:
            while time.monotonic() < until:
                self.batch()
                assert open_files() <= self._most_fds, self.counts
                assert resident_bytes() < self._most_bytes, self.counts
        finally:
            for handle in self._handles:
                handle.close()
        for model in self._models:
            model.check()

    def _open(self) -> AioHandle:
        chance = self._random
        return aio_handle(
            chance.choice([512, 4096, 16384, 131072, 1 << 20]),
            chance.choice([1, 4, 32, 128]),
            chance.random() < 0.2,
            chance.random() < 0.8,
            chance.randint(1, MOST_THREADS),
            engine=chance.choice(self._engines),
        )

    def _size(self) -> int:
        return int(self._random.choice([1, 511, 4096, 5000, 65536, 300_000, 1 << 20]) * self._random.uniform(0.5, 1.0))

    def _buffer(self, nbytes: int) -> memoryview:
        shift = self._random.choice([0, 0, 0, 1, 512])
        return Memory(nbytes + shift).buffer[shift : shift + nbytes]

    def _write(self, model: Model) -> Iterator[Write]:
        nbytes, step = self._size(), self._random.choice([1, 512, 4096])
        offset = self._random.randint(0, MOST_BYTES - nbytes) // step * step
        if not model.free(offset, offset + nbytes, True):
            self._refuse(model, offset, nbytes)
            return
        data = self._buffer(nbytes)
        start = self._random.randrange(4096)
        data[:] = self._pattern[start : start + nbytes]
        operation = self._random.choice(self._handles).start_write(data, model.path, offset)
        model.busy.append((offset, offset + nbytes, True))
        if self._random.random() < 0.05 and operation.cancel():
            self.counts["cancel"] += 1
        self.counts["write"] += 1
        yield Write(model, offset, data, operation)

    def _read(self, model: Model) -> Iterator[Read]:
        # Only what was there before this batch: a growing file's size is in flight with it.
        size = len(model.content)
        nbytes = min(self._size(), size)
        offset = self._random.randint(0, size - nbytes)
        if not size or not model.free(offset, offset + nbytes, False):
            return
        buffer = self._buffer(nbytes)
        operation = self._random.choice(self._handles).start_read(buffer, model.path, offset)
        model.busy.append((offset, offset + nbytes, False))
        self.counts["read"] += 1
        yield Read(buffer, bytes(model.content[offset : offset + nbytes]), operation)

    def _settle(self, writes: list[Write]) -> None:
        """Wait for all writes; then put into the models what has arrived."""
        errors = [write.operation.exception(300) for write in writes]
        for write, error in zip(writes, errors):
            if error is None:
                write.model.put(write.offset, write.data)
        for write, error in zip(writes, errors):
            if error is not None:
                assert isinstance(error, ds_nvme.CancelledTransferError), error
                # Old and new bytes mixed, as far as it came: there the file alone knows.
                came = write.model.path.read_bytes()[write.offset : write.offset + len(write.data)]
                write.model.put(write.offset, came)

    def _refuse(self, model: Model, offset: int, nbytes: int) -> None:
        """What must be refused is refused, and harms nothing."""
        handle = self._random.choice(self._handles)
        with pytest.raises(ds_nvme.MissingFileError):
            handle.start_read(bytearray(nbytes), model.path.with_name("missing"))
        if model.path.exists():
            with pytest.raises(ds_nvme.TruncatedFileError):
                handle.start_read(bytearray(nbytes + 1), model.path, MOST_BYTES)
        self.counts["refused"] += 1

    def _reopen(self) -> None:
        index = self._random.randrange(HANDLES)
        self._handles[index].close()
        self._handles[index] = self._open()
        self.counts["reopen"] += 1

    def _remove(self, model: Model) -> None:
        model.path.unlink(missing_ok=True)
        model.content.clear()
        self.counts["remove"] += 1


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def open_files() -> int:
    """Descriptors of this process, now."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.long
def test_soak(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it where the test fails
    threads, files = threading.active_count(), open_files()
    begin = time.monotonic()
    resident: list[int] = []
    with ExitStack() as stack:
        folders = [tmp_path]
        if os.path.isdir("/dev/shm"):  # a filesystem without O_DIRECT
            folders.append(Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))))
        soak = Soak(seed, folders)
        for number in range(LULLS):
            soak.run(begin + SECONDS * (number + 1) / LULLS)
            gc.collect()
            resident.append(resident_bytes())
            assert threading.active_count() == threads and open_files() == files, soak.counts
            assert resident[-1] <= resident[0] + SLACK_BYTES, (soak.counts, resident)
    print(f"{soak.counts}, MiB resident in the lulls: {[nbytes >> 20 for nbytes in resident]}")
    assert all(soak.counts.values()), "everything was tried"
