"""TensorStore and the buffer pool."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ds_nvme
from ds_nvme import BufferPool, TensorStore

Pattern = Callable[..., bytearray]


@pytest.mark.parametrize("drives", [1, 3])
def test_what_is_put_is_got(tmp_path: Path, pattern: Pattern, drives: int) -> None:
    folders = [tmp_path / f"drive{number}" for number in range(drives)]
    sizes = [0, 1, 4097, 1 << 20, (3 << 20) + 5, 5 << 20]
    data = {f"layer/{size}": pattern(size) for size in sizes}
    with TensorStore(folders) as store:
        for name, each in data.items():
            store.put(name, each)
        assert len(store) == 6 and store.nbytes == sum(sizes) and "layer/1" in store
        for name, each in data.items():
            assert store.get(name).result() == each
            out = bytearray(len(each))
            assert store.get(name, out).result() is out and out == each
        files = {folder: len(list(folder.iterdir())) for folder in folders}
        assert min(files.values()) >= 2, "large tensors are striped"
    with TensorStore(folders) as store:
        assert list(store) == list(data)
        assert all(store.get(name).result() == each for name, each in data.items())


def test_replacing_and_deleting(tmp_path: Path, pattern: Pattern) -> None:
    with TensorStore(tmp_path) as store:
        for seed, size in ((1, 9000), (2, 9000), (3, 5), (4, 70_000)):
            store.put("x", pattern(size, seed=seed))
            assert store.get("x").result() == pattern(size, seed=seed) and store.nbytes == size
        store.delete("x")
        assert "x" not in store and store.nbytes == 0 and not list(tmp_path.iterdir())
        with pytest.raises(KeyError, match="none of the name 'x'"):
            store.get("x")
        with pytest.raises(KeyError):
            store.delete("x")


def test_names_that_are_no_file_names(tmp_path: Path, pattern: Pattern) -> None:
    names = ["", "..", "a/b", "/abs", "ü ", "x" * 500, "%1", ".tensor"]
    with TensorStore(tmp_path / "store") as store:
        for number, name in enumerate(names):
            store.put(name, pattern(100, seed=number))
        for number, name in enumerate(names):
            assert store.get(name).result() == pattern(100, seed=number)
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


def test_a_budget(tmp_path: Path) -> None:
    with TensorStore(tmp_path, budget_bytes=1000) as store:
        store.put("a", bytearray(600))
        with pytest.raises(ds_nvme.BudgetError, match="would hold 1200 of 1000"):
            store.put("b", bytearray(600))
        store.put("a", bytearray(1000)).result()


def test_prefetch(tmp_path: Path, pattern: Pattern) -> None:
    with TensorStore(tmp_path) as store:
        store.put("x", pattern(100_000))
        store.prefetch("x")
        store.prefetch("x")
        assert store.get("x").result() == pattern(100_000)
        store.prefetch("x")
        store.put("x", pattern(100_000, seed=2))
        assert store.get("x").result() == pattern(100_000, seed=2), "what was fetched before is out of date"


def test_a_store_that_was_not_closed_opens_empty(tmp_path: Path, pattern: Pattern) -> None:
    with TensorStore(tmp_path) as store:
        store.put("x", pattern(1000))
    store = TensorStore(tmp_path)
    store.put("x", pattern(1000, seed=2)).result()
    assert list(TensorStore(tmp_path)) == []
    store.close()
    store.close()
    assert TensorStore(tmp_path).get("x").result() == pattern(1000, seed=2)
    with pytest.raises(ds_nvme.ClosedHandleError):
        store.get("x")


def test_a_failed_put_leaves_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TensorStore(tmp_path) as store:
        monkeypatch.setattr("ds_nvme.operation.Operation.end", _fail_and(ds_nvme.Operation.end))
        transfer = store.put("x", bytearray(1000))
        with pytest.raises(ds_nvme.NvmeError, match="on purpose"):
            transfer.result()
        assert "x" not in store and store.nbytes == 0


def _fail_and(real: Callable[[ds_nvme.Operation], None]) -> Callable[[ds_nvme.Operation], None]:
    def end(operation: ds_nvme.Operation) -> None:
        operation.fail(ds_nvme.NvmeError("on purpose"))
        real(operation)

    return end


def test_transfers_can_be_awaited(tmp_path: Path, pattern: Pattern) -> None:
    async def main() -> None:
        with TensorStore(tmp_path) as store:
            await asyncio.gather(*[store.put(str(number), pattern(10_000, seed=number)) for number in range(5)])
            for number in range(5):
                assert await store.get(str(number)) == pattern(10_000, seed=number)

    asyncio.run(main())


def test_numpy_arrays_come_back(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(24, dtype=numpy.float32).reshape(2, 3, 4)
    with TensorStore(tmp_path) as store:
        store.put("x", array)
        back = store.get("x").result()
        assert back.dtype == array.dtype and (back == array).all() and back.flags.writeable


def test_tensors_come_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = {str(n): torch.randn(3, 5).to(dtype) for n, dtype in enumerate([torch.float32, torch.bfloat16])}
    tensors["empty"], tensors["scalar"] = torch.empty(0, 3), torch.tensor(3)
    with TensorStore(tmp_path) as store:
        for name, tensor in tensors.items():
            store.put(name, tensor)
        for name, tensor in tensors.items():
            back = store.get(name).result()
            assert back.dtype == tensor.dtype and back.shape == tensor.shape and torch.equal(back, tensor)


def test_a_pool_reuses_within_its_budget() -> None:
    with BufferPool(1 << 20, lock=False) as pool:
        first = pool.acquire(300_000)
        first.buffer[:5] = b"12345"
        with pytest.raises(ds_nvme.BudgetError, match="in use; release some"):
            pool.acquire(900_000)
        with pytest.raises(ds_nvme.BudgetError, match="the budget is 1048576"):
            pool.acquire(2 << 20)
        first.release()
        first.release()
        with pytest.raises(ds_nvme.ClosedHandleError):
            _ = first.buffer
        with pool.acquire(290_000) as again:
            assert len(again.buffer) == 290_000
        statistics = pool.statistics()
        assert (statistics.allocations, statistics.reuses, statistics.in_use_bytes) == (1, 1, 0)
        with pool.acquire(1 << 20):  # what is free gives way
            assert pool.statistics().held_bytes == 1 << 20
        assert pool.statistics().high_water_bytes == 1 << 20


def test_a_pool_waits_for_others() -> None:
    with BufferPool(1 << 20, lock=False) as pool:
        held = pool.acquire(1 << 20)
        threading.Timer(0.05, held.release).start()
        with pool.acquire(1 << 20, timeout=10) as buffer:
            assert len(buffer.as_array(bytearray(1))) == 1 << 20


def test_locked_memory_beyond_the_limit_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_nvme.memory.libc.lock_memory", lambda *_: -12)
    with pytest.raises(ds_nvme.BudgetError, match="ulimit -l"):
        BufferPool(1 << 20).acquire(1000)
    with ds_nvme.aio_handle() as handle, pytest.raises(ds_nvme.BudgetError, match="ulimit -l"):
        handle.new_cpu_locked_tensor(100, bytearray())
