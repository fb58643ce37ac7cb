"""What the kernel may do at any time: refuse, interrupt, cut short. Played by an engine that does so on purpose."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

import ds_nvme
from ds_nvme import aio_handle
from ds_nvme.engines import choose
from ds_nvme.engines.base import Run
from ds_nvme.engines.threads import ThreadsEngine

Pattern = Callable[..., bytearray]


class FaultyEngine(ThreadsEngine):
    """Does a part of what it is asked, and reports errors that have a remedy."""

    name: ClassVar[str] = "faulty"
    faults: ClassVar[tuple[int, ...]] = (errno.EAGAIN, errno.EINTR, errno.EINVAL)

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self._random = random.Random(7)

    def submit(self, packed: tuple[Run, int], start: int, count: int) -> int:
        chance = self._random.random()
        if chance < 0.2:
            return 0
        if chance < 0.3:
            return -self._random.choice(self.faults)
        return super().submit(packed, start, self._random.randint(1, count))

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
        return tags, results


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
        for nbytes in (1, 4096, 300_001, 1 << 20):
            data = ds_nvme.memory.Memory(nbytes + shift).buffer[shift : shift + nbytes]
            data[:] = pattern(nbytes)
            back = bytearray(nbytes)
            handle.sync_pwrite(data, folder / "file", 4096)
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
