"""The conformance suite of engines: bytes arrive whole, on every engine and filesystem."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_nvme import AioHandle, aio_handle
from ds_nvme.memory import Memory

BLOCK = 16384
Pattern = Callable[..., bytearray]
SIZES = [0, 1, 511, 512, 513, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 7]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 512, 4096, 70001])
def test_what_is_written_is_read(engine: str, folder: Path, pattern: Pattern, nbytes: int, offset: int) -> None:
    path = folder / "file"
    data = pattern(nbytes)
    with aio_handle(BLOCK, 4, engine=engine) as handle:
        assert handle.sync_pwrite(data, path, offset) == 1
        if nbytes:
            assert path.read_bytes() == bytes(offset) + data
        back = bytearray(nbytes)
        assert handle.sync_pread(back, path, offset) == 1
        assert back == data


@pytest.mark.parametrize("nbytes", [1, 513, 3 * BLOCK, 9 * BLOCK + 100])
def test_bytes_around_a_write_stay(engine: str, folder: Path, pattern: Pattern, nbytes: int) -> None:
    path = folder / "file"
    before = pattern(20 * BLOCK, seed=2)
    path.write_bytes(before)
    with aio_handle(BLOCK, 4, engine=engine) as handle:
        for offset in (0, 1, 4096, 5000, 20 * BLOCK - nbytes):
            data = pattern(nbytes, seed=offset + 3)
            handle.sync_pwrite(data, path, offset)
            before[offset : offset + nbytes] = data
            assert path.read_bytes() == before


@pytest.mark.parametrize("options", [(True, True, 1), (False, False, 1), (True, False, 2), (False, True, 3)])
def test_every_way_to_submit(engine: str, folder: Path, pattern: Pattern, options: tuple[bool, bool, int]) -> None:
    with aio_handle(4096, 3, *options, engine=engine) as handle:
        data, back = pattern(40 * 4096 + 9), bytearray(40 * 4096 + 9)
        handle.write(data, folder / "file", True)
        handle.read(back, folder / "file", True)
        assert back == data
        assert handle.get_single_submit() is options[0]
        assert handle.get_overlap_events() is options[1]
        assert handle.get_intra_op_parallelism() == options[2]


@pytest.mark.parametrize("shift", [0, 1, 64, 512])
def test_aligned_and_unaligned_memory(engine: str, folder: Path, pattern: Pattern, shift: int) -> None:
    nbytes = 12 * BLOCK
    source, target = Memory(nbytes + 512).buffer[shift : shift + nbytes], Memory(nbytes + 512).buffer[: nbytes + 512]
    source[:] = pattern(nbytes)
    with aio_handle(BLOCK, 4, engine=engine) as handle:
        handle.sync_pwrite(source, folder / "file")
        handle.sync_pread(target[shift : shift + nbytes], folder / "file")
    assert target[shift : shift + nbytes] == source
    assert bytes(target[:shift]) == bytes(shift)
    assert bytes(target[shift + nbytes :]) == bytes(512 - shift)


@pytest.mark.parametrize("shift", [0, 8])
def test_more_blocks_than_are_packed_at_once(engine: str, folder: Path, pattern: Pattern, shift: int) -> None:
    nbytes = 512 * 1300 + 77
    data, back = (Memory(nbytes + shift).buffer[shift:][:nbytes] for _ in range(2))
    data[:] = pattern(nbytes)
    with aio_handle(512, 16, engine=engine) as handle:
        handle.sync_pwrite(data, folder / "file")
        assert (folder / "file").read_bytes() == data
        handle.sync_pread(back, folder / "file")
    assert back == data


def test_many_operations_in_flight(engine: str, folder: Path, pattern: Pattern) -> None:
    data = [pattern(3000 + 977 * number, seed=number) for number in range(60)]
    with aio_handle(4096, 8, intra_op_parallelism=2, engine=engine) as handle:
        for number, each in enumerate(data):
            assert handle.async_pwrite(each, folder / f"{number}") == 0
        assert handle.wait() == 60
        back = [bytearray(len(each)) for each in data]
        for number, each in enumerate(back):
            assert handle.async_pread(each, folder / f"{number}") == 0
        assert handle.wait() == 60
        assert handle.wait() == 0
    assert back == data


def test_neighbours_write_one_file_at_once(engine: str, folder: Path, pattern: Pattern) -> None:
    """Unaligned pieces of one file, all in flight: no piece disturbs the edges of another."""
    pieces = [pattern(1000 * number + 3, seed=number) for number in range(40)]
    with aio_handle(4096, 16, intra_op_parallelism=2, engine=engine) as handle:
        offset = 0
        for piece in pieces:
            handle.async_pwrite(piece, folder / "file", offset)
            offset += len(piece)
        assert handle.wait() == 40
    assert (folder / "file").read_bytes() == b"".join(pieces)


def test_operations_are_futures(engine: str, tmp_path: Path, pattern: Pattern) -> None:
    data, back = pattern(5 * BLOCK), bytearray(5 * BLOCK)

    async def round_trip(handle: AioHandle) -> int:
        assert await handle.start_write(data, tmp_path / "file") == len(data)
        moved = await asyncio.gather(*[handle.start_read(back, tmp_path / "file") for _ in range(5)])
        return sum(moved)

    with aio_handle(BLOCK, 4, engine=engine) as handle:
        assert asyncio.run(round_trip(handle)) == 5 * len(data)
        operation = handle.start_read(back, tmp_path / "file")
        called: list[Any] = []
        operation.add_done_callback(called.append)
        assert operation.result(timeout=10) == len(data) and operation.done() and operation.exception() is None
        operation.add_done_callback(called.append)
        assert called == [operation, operation]
        assert handle.wait() == 0, "operations that someone holds are theirs to wait for"
    assert back == data
