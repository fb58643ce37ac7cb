"""`Operation.cancel`: what isn't under way yet never will be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

import ds_nvme
from ds_nvme import aio_handle
from ds_nvme.engines import choose
from ds_nvme.engines.threads import ThreadsEngine

Pattern = Callable[..., bytearray]
BLOCK = 4096


class GatedEngine(ThreadsEngine):
    """Tells of no block's end before the gate is open."""

    name: ClassVar[str] = "gated"
    gate: ClassVar[threading.Event]
    waiting: ClassVar[threading.Event]
    started: ClassVar[int]

    def submit(self, packed: object, start: int, count: int) -> int:
        GatedEngine.started += count
        return super().submit(packed, start, count)  # type: ignore[arg-type]

    def reap(self, minimum: int) -> tuple[list[int], list[int]]:
        self.waiting.set()
        assert self.gate.wait(60)
        return super().reap(minimum)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[GatedEngine]]:
    real = choose.candidates
    monkeypatch.setattr("ds_nvme.handle.candidates", lambda name: [GatedEngine] if name == "gated" else real(name))
    GatedEngine.gate, GatedEngine.waiting, GatedEngine.started = threading.Event(), threading.Event(), 0
    yield GatedEngine
    GatedEngine.gate.set()


def test_the_rest_is_not_begun(gated: type[GatedEngine], tmp_path: Path, pattern: Pattern) -> None:
    data = pattern(100 * BLOCK)
    with aio_handle(BLOCK, 4, engine="gated") as handle:
        write = handle.start_write(data, tmp_path / "file")
        assert gated.waiting.wait(60)
        assert write.cancel() and not write.cancel() and not write.done(), "what is under way is waited for"
        gated.gate.set()
        with pytest.raises(ds_nvme.CancelledTransferError, match=r"this write of .*file was; start it again"):
            write.result(60)
        assert gated.started == 4
        with pytest.raises(ds_nvme.TruncatedFileError):
            handle.sync_pread(bytearray(len(data)), tmp_path / "file")
        assert handle.sync_pwrite(data, tmp_path / "file") == 1 and (tmp_path / "file").read_bytes() == data


def test_one_that_waits_ends_before_those_in_front(gated: type[GatedEngine], tmp_path: Path, pattern: Pattern) -> None:
    data, back = pattern(64 * BLOCK), bytearray(64 * BLOCK)
    (tmp_path / "read").write_bytes(data)
    with aio_handle(BLOCK, 4, engine="gated") as handle:
        write = handle.start_write(data, tmp_path / "file")
        read = handle.start_read(back, tmp_path / "read")
        assert gated.waiting.wait(60)
        ended: list[bool] = []
        read.add_done_callback(lambda _: ended.append(write.done()))
        assert read.cancel()
        gated.gate.set()
        assert isinstance(read.exception(60), ds_nvme.CancelledTransferError) and back == bytearray(len(back))
        assert write.result(60) == len(data) and ended == [False]
        assert (tmp_path / "file").read_bytes() == data


def test_what_has_ended_cannot_be_cancelled(engine: str, tmp_path: Path, pattern: Pattern) -> None:
    with aio_handle(engine=engine) as handle:
        write = handle.start_write(pattern(1000), tmp_path / "file")
        assert write.result(60) == 1000 and not write.cancel() and write.exception() is None


def test_cancelled_at_any_moment(engine: str, tmp_path: Path, pattern: Pattern) -> None:
    """Each ends, whole or cancelled, and leaves handle and files usable."""
    data = pattern(40 * BLOCK + 100)
    with aio_handle(BLOCK, 4, intra_op_parallelism=2, engine=engine) as handle:
        for number in range(40):
            path = tmp_path / f"{number}"
            writes = [handle.start_write(data, path, part * len(data)) for part in range(3)]
            for _ in range(number * 20):  # some time passes
                pass
            cancelled = [write.cancel() for write in writes[1:]]
            errors = [write.exception(60) for write in writes]
            assert errors[0] is None
            assert [isinstance(error, ds_nvme.CancelledTransferError) for error in errors[1:]] == cancelled
            assert path.read_bytes()[: len(data)] == data
            assert handle.sync_pwrite(data, path, len(data)) == 1, "its region is free again"
