"""What the kernel may do at any time: refuse, interrupt, cut short. Played by an engine that does so on purpose."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

import ds_nvme
from ds_nvme import aio_handle
from ds_nvme.alignment import reopen
from ds_nvme.engines import choose
from ds_nvme.engines.base import Run
from ds_nvme.engines.threads import ThreadsEngine
from ds_nvme.memory import Memory
from ds_nvme.native import libc

Pattern = Callable[..., bytearray]


class FaultyEngine(ThreadsEngine):
    """Does a part of what it is asked, and reports errors that have a remedy."""

    name: ClassVar[str] = "faulty"
    faults: ClassVar[tuple[int, ...]] = (errno.EAGAIN, errno.EINTR, errno.EINVAL)

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self._random = random.Random(7)
        self._begun: dict[int, tuple[Run, int]] = {}  # by tag: the run and the number in it

    def submit(self, packed: tuple[Run, int], start: int, count: int) -> int:
        chance = self._random.random()
        if chance < 0.2:
            return 0
        if chance < 0.3:
            return -self._random.choice(self.faults)
        count = self._random.randint(1, count)
        run, tag = packed
        self._begun |= {tag + index: (run, index) for index in range(start, start + count)}
        return super().submit(packed, start, count)

    def reap(self, minimum: int) -> tuple[list[int], list[int]]:
        if self._random.random() < 0.2:
            return [], []
        tags, results = super().reap(minimum)
        for index, result in enumerate(results):
            chance = self._random.random()
            if chance < 0.3 and result > 0:
                results[index] = self._random.randrange(result)
            elif chance < 0.5:
                results[index] = -self._random.choice(self.faults)
            if results[index] != result:
                self._undo(*self._begun[tags[index]], max(results[index], 0))
        return tags, results

    @staticmethod
    def _undo(run: Run, index: int, kept: int) -> None:
        """Spoil what lies beyond the bytes that are said to have been moved."""
        position, nbytes = index * run.block_nbytes + kept, run.length(index) - kept
        if not run.write:
            spoiled = Memory(nbytes)
            libc.move(run.address + position, spoiled.address, nbytes)
            return
        fd = reopen(run.fd, os.O_WRONLY, "")
        os.pwrite(fd, bytes(nbytes), run.file_offset + position)
        os.close(fd)


class BrokenEngine(ThreadsEngine):
    """Fails in itself."""

    name: ClassVar[str] = "broken"

    def reap(self, minimum: int) -> tuple[list[int], list[int]]:
        raise RuntimeError("defect")


class FailingEngine(FaultyEngine):
    """Reports errors without a remedy."""

    name: ClassVar[str] = "failing"
    faults: ClassVar[tuple[int, ...]] = (errno.EIO,)


@pytest.fixture(autouse=True)
def register(monkeypatch: pytest.MonkeyPatch) -> None:
    real = choose.candidates
    ours = {"faulty": FaultyEngine, "broken": BrokenEngine, "failing": FailingEngine}
    monkeypatch.setattr("ds_nvme.handle.candidates", lambda name: [ours[name]] if name in ours else real(name))


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("parallel", [1, 2])
def test_short_and_refused_blocks_are_finished(folder: Path, pattern: Pattern, shift: int, parallel: int) -> None:
    with aio_handle(4096, 5, intra_op_parallelism=parallel, engine="faulty") as handle:
        for nbytes in (1, 4096, 300_001, 3 << 20):  # the last has more blocks than are packed at once
            data = Memory(nbytes + shift).buffer[shift : shift + nbytes]
            data[:] = pattern(nbytes)
            back = Memory(nbytes + shift).buffer[shift : shift + nbytes]
            handle.sync_pwrite(data, folder / "file", 4096)
            assert (folder / "file").read_bytes()[4096:] == data
            handle.sync_pread(back, folder / "file", 4096)
            assert back == data
        assert handle.describe().mended_blocks > 0


def test_an_error_ends_its_operation_only(folder: Path, pattern: Pattern) -> None:
    data = pattern(1 << 20)
    with aio_handle(4096, 5, intra_op_parallelism=2, engine="failing") as handle:
        for _ in range(5):
            with pytest.raises(ds_nvme.FileError, match=r"Input/output error at offset \d+") as caught:
                handle.sync_pwrite(data, folder / "file")
            assert caught.value.errno == errno.EIO
    with aio_handle() as handle:
        assert handle.sync_pwrite(data, folder / "file") == 1


def test_a_broken_engine_fails_its_operations(tmp_path: Path, pattern: Pattern) -> None:
    data = pattern(1 << 20)
    with aio_handle(4096, 5, engine="broken") as handle:
        operations = [handle.start_write(data, tmp_path / f"{number}") for number in range(3)]
        for operation in operations:
            with pytest.raises(ds_nvme.EngineError, match="defect"):
                operation.result(10)
