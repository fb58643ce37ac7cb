"""Memory that the host can't address, played by a device whose kernels and copies run late, in streams of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ds_nvme
from ds_nvme import AioHandle, aio_handle, slots
from ds_nvme.devices.base import Device, DeviceBuffer
from ds_nvme.memory import Memory

Pattern = Callable[..., bytearray]
BLOCK = 16384
SLOT = 4 * BLOCK


class Event:
    """A point in a stream."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.error: Exception | None = None

    def reach(self) -> None:
        self._reached.set()

    def wait(self) -> None:
        assert self._reached.wait(60), "a stream stands still"
        if self.error is not None:
            raise self.error


class Stream:
    """Runs what is queued, in order, in a thread of its own: later than it was queued."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    def queue(self, work: Callable[[], object]) -> Event:
        event = Event()

        def run() -> None:
            time.sleep(0.0002)
            try:
                work()
            except Exception as error:
                event.error = error
            event.reach()

        self._queue.put(run)
        return event

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (run := self._queue.get()) is not None:
            run()


class FakeDevice(Device):
    """A device with a stream of kernels, and one of copies for each direction."""

    name = "fake:0"
    kind = "fake"

    def __init__(self) -> None:
        self.kernels = Stream()
        self.copies = {write: Stream() for write in (False, True)}
        self.moved: list[tuple[bool, int, int]] = []
        self.before_copy: Callable[[bool, int], object] = lambda write, position: None
        self.locked: set[int] = set()
        self.most_locked = 0
        self.refusal: str | None = None
        self.users: set[int] = set()

    @contextmanager
    def using(self) -> Iterator[None]:
        self.users.add(threading.get_ident())
        yield
        self.users.remove(threading.get_ident())

    def lock_pages(self, memory: Memory) -> str | None:
        if self.refusal is None:
            self.locked.add(memory.address)
            self.most_locked = max(self.most_locked, len(self.locked))
        return self.refusal

    def unlock_pages(self, memory: Memory) -> None:
        self.locked.remove(memory.address)

    def close(self) -> None:
        for stream in (self.kernels, *self.copies.values()):
            stream.stop()


class FakeTensor:
    """Bytes on the device. The host reaches them by copies only: their address is nobody's."""

    def __init__(self, device: FakeDevice, data: bytes | bytearray) -> None:
        self.device = device
        self.data = bytearray(data)

    def __device_buffer__(self) -> FakeBuffer:
        return FakeBuffer(self)


class FakeBuffer(DeviceBuffer):
    def __init__(self, tensor: FakeTensor) -> None:
        self.device: FakeDevice = tensor.device
        self.address = 0x11  # whoever reads or writes there is told by a signal
        self.nbytes = len(tensor.data)
        self._data = tensor.data
        self._ready = self.device.kernels.queue(lambda: None)

    def copy_to_host(self, position: int, nbytes: int, memory: Memory, at: int) -> Event:
        return self._copy(True, position, nbytes, memory, at)

    def copy_to_device(self, position: int, nbytes: int, memory: Memory, at: int) -> Event:
        return self._copy(False, position, nbytes, memory, at)

    def _copy(self, write: bool, position: int, nbytes: int, memory: Memory, at: int) -> Event:
        assert threading.get_ident() in self.device.users
        assert 0 <= position <= position + nbytes <= self.nbytes and nbytes > 0

        def run() -> None:
            self._ready.wait()
            self.device.before_copy(write, position)
            if write:
                memory.buffer[at : at + nbytes] = self._data[position : position + nbytes]
            else:
                self._data[position : position + nbytes] = memory.buffer[at : at + nbytes]
            self.device.moved.append((write, position, nbytes))

        return self.device.copies[write].queue(run)

    def wait_ready(self) -> None:
        self._ready.wait()

    def empty(self, num_elements: int, alignment: int) -> Any:
        raise NotImplementedError


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    fake = FakeDevice()
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_LEAST_SLOT", SLOT)
    monkeypatch.setattr(slots, "MOST_BLOCK", SLOT)


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4097, BLOCK - 1, SLOT, SLOT + 1, 9 * SLOT + 777])
@pytest.mark.parametrize("offset", [0, 1, 4096, 70001])
def test_there_and_back(
    engine: str, folder: Path, pattern: Pattern, device: FakeDevice, nbytes: int, offset: int
) -> None:
    path = folder / "file"
    data = pattern(nbytes)
    with aio_handle(BLOCK, 4, engine=engine) as handle:
        assert handle.sync_pwrite(FakeTensor(device, data), path, offset) == 1
        if nbytes:
            assert path.read_bytes() == bytes(offset) + data
        back = FakeTensor(device, bytes(nbytes))
        assert handle.sync_pread(back, path, offset) == 1
        assert back.data == data


def test_bytes_around_a_write_stay(engine: str, folder: Path, pattern: Pattern, device: FakeDevice) -> None:
    path = folder / "file"
    before = pattern(5 * SLOT, seed=2)
    path.write_bytes(before)
    with aio_handle(BLOCK, 4, engine=engine) as handle:
        for nbytes, offset in ((1, 0), (5000, 1), (3 * SLOT, 4097), (SLOT, 4 * SLOT)):
            data = pattern(nbytes, seed=offset + 3)
            handle.sync_pwrite(FakeTensor(device, data), path, offset)
            before[offset : offset + nbytes] = data
            assert path.read_bytes() == before


def test_a_write_waits_for_what_computes_it(tmp_path: Path, pattern: Pattern, device: FakeDevice) -> None:
    tensor, data = FakeTensor(device, bytes(3 * SLOT)), pattern(3 * SLOT)
    computed = threading.Event()

    def kernel() -> None:
        computed.wait(60)
        tensor.data[:] = data

    with aio_handle(BLOCK, 4) as handle:
        device.kernels.queue(kernel)
        handle.async_pwrite(tensor, tmp_path / "file")  # returns at once
        assert not device.moved
        computed.set()
        assert handle.wait() == 1
    assert (tmp_path / "file").read_bytes() == data


def test_a_read_waits_for_what_uses_the_old_values(tmp_path: Path, pattern: Pattern, device: FakeDevice) -> None:
    old, data = pattern(3 * SLOT, seed=5), pattern(3 * SLOT)
    (tmp_path / "file").write_bytes(data)
    tensor = FakeTensor(device, old)
    release, seen = threading.Event(), []
    with aio_handle(BLOCK, 4) as handle:
        device.kernels.queue(lambda: (release.wait(60), seen.append(bytes(tensor.data))))
        operation = handle.start_read(tensor, tmp_path / "file")
        assert not operation.wait(0.05)
        release.set()
        operation.result()
        assert tensor.data == data, "all bytes are there when it counts as done"
    assert seen == [old]


def test_a_write_that_waits_holds_up_no_read(tmp_path: Path, pattern: Pattern, device: FakeDevice) -> None:
    data = pattern(9 * SLOT)
    (tmp_path / "file").write_bytes(data)
    release = threading.Event()
    with aio_handle(BLOCK, 4) as handle:
        back = FakeTensor(device, bytes(len(data)))
        reading = handle.start_read(back, tmp_path / "file")
        device.kernels.queue(lambda: release.wait(60))
        writing = handle.start_write(FakeTensor(device, data), tmp_path / "other")
        assert reading.result(60) == len(data) and not writing.done()
        release.set()
        writing.result(60)


def test_memory_is_bounded_and_given_back(tmp_path: Path, pattern: Pattern, device: FakeDevice) -> None:
    data = pattern(40 * SLOT)
    with aio_handle(BLOCK, 32, intra_op_parallelism=2) as handle:
        for number in range(3):
            handle.async_pwrite(FakeTensor(device, data), tmp_path / f"{number}")
        assert handle.wait() == 3
        assert device.most_locked == 4
        handle.sync_pread(FakeTensor(device, data), tmp_path / "0")
        assert device.most_locked == 8, "four for each direction"
        assert f"from fake:0 through 4 buffers of {SLOT} bytes, page-locked" in str(handle.describe())
    assert not device.locked


def test_a_small_transfer_takes_one_buffer(tmp_path: Path, device: FakeDevice) -> None:
    with aio_handle(BLOCK, 4) as handle:
        for _ in range(5):
            handle.sync_pwrite(FakeTensor(device, b"x" * 100), tmp_path / "file")
        assert device.most_locked == 1


def test_memory_that_cannot_be_locked_does_too(tmp_path: Path, pattern: Pattern, device: FakeDevice) -> None:
    device.refusal = "there is a limit"
    data = pattern(5 * SLOT)
    with aio_handle(BLOCK, 4) as handle:
        handle.sync_pwrite(FakeTensor(device, data), tmp_path / "file")
        assert "not page-locked: there is a limit" in str(handle.describe())
    assert (tmp_path / "file").read_bytes() == data


def test_the_drive_works_while_a_copy_does(tmp_path: Path, pattern: Pattern, device: FakeDevice) -> None:
    data = pattern(8 * SLOT)
    (tmp_path / "file").write_bytes(data)
    release = threading.Event()
    device.before_copy = lambda write, position: release.wait(60)
    with aio_handle(BLOCK, 4) as handle:
        reading = handle.start_read(FakeTensor(device, bytes(len(data))), tmp_path / "file")
        # The first copy stands still; the file's part of the other three buffers goes on, and no further.
        until(lambda: handle.describe().straight_blocks == 4 * SLOT // BLOCK)
        time.sleep(0.05)
        assert handle.describe().straight_blocks == 4 * SLOT // BLOCK and not device.moved
        release.set()
        reading.result()


def test_copies_go_on_while_the_drive_works(tmp_path: Path, pattern: Pattern, device: FakeDevice) -> None:
    """Of a write: the file's parts are held up, the copies of all buffers aren't."""
    data = pattern(8 * SLOT)
    release = threading.Event()
    with aio_handle(BLOCK, 4) as handle:
        put = handle._crew.put

        def late(task: Any) -> None:
            threading.Thread(target=lambda: (release.wait(60), put(task))).start()

        handle._crew.put = late  # type: ignore[method-assign]
        writing = handle.start_write(FakeTensor(device, data), tmp_path / "file")
        until(lambda: len(device.moved) == 4)
        time.sleep(0.05)
        assert len(device.moved) == 4 and not writing.done()
        release.set()
        writing.result()
    assert (tmp_path / "file").read_bytes() == data


def test_a_file_is_whole_only_at_the_end(tmp_path: Path, pattern: Pattern, device: FakeDevice) -> None:
    data, release = pattern(2 * SLOT + BLOCK), threading.Event()
    with aio_handle(BLOCK, 4) as handle:
        put, parts = handle._crew.put, []

        def late(task: Any) -> None:
            """The file's part of the first buffer waits; slots are left for all others."""
            parts.append(task)
            threading.Thread(target=lambda: (task is not parts[0] or release.wait(60), put(task))).start()

        handle._crew.put = late  # type: ignore[method-assign]
        writing = handle.start_write(FakeTensor(device, data), tmp_path / "file")
        until(lambda: handle.describe().straight_blocks == SLOT // BLOCK)
        time.sleep(0.05)
        assert len(device.moved) == 2 and (tmp_path / "file").stat().st_size < len(data)
        with pytest.raises(ds_nvme.TruncatedFileError):
            aio_handle().start_read(bytearray(len(data)), tmp_path / "file")
        release.set()
        writing.result()
    assert device.moved[-1] == (True, 2 * SLOT, BLOCK) and (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("write", [False, True])
def test_a_copy_that_fails(tmp_path: Path, pattern: Pattern, device: FakeDevice, write: bool) -> None:
    data = pattern(30 * SLOT)
    (tmp_path / "file").write_bytes(data)

    def fail(_: bool, position: int) -> None:
        if position == 5 * SLOT:
            raise RuntimeError("an illegal memory access")

    with aio_handle(BLOCK, 4) as handle:
        start = handle.start_write if write else handle.start_read
        device.before_copy = fail
        operation = start(FakeTensor(device, data), tmp_path / "file")
        with pytest.raises(ds_nvme.DeviceError, match="illegal memory access"):
            operation.result()
        assert len(device.moved) < 20, "what wasn't begun isn't begun any more"
        device.before_copy = lambda *_: None
        assert start(FakeTensor(device, data), tmp_path / "file").result() == len(data)


def test_a_file_that_is_cut_meanwhile(engine: str, folder: Path, pattern: Pattern, device: FakeDevice) -> None:
    data = pattern(20 * SLOT)
    path = folder / "file"
    path.write_bytes(data)
    back = FakeTensor(device, bytes(len(data)))

    def cut(_: bool, position: int) -> None:
        if position == SLOT:
            with path.open("r+b") as file:
                file.truncate(10 * SLOT + 5)

    device.before_copy = cut
    with aio_handle(BLOCK, 4, engine=engine) as handle:
        operation = handle.start_read(back, path)
        fine = handle.start_read(FakeTensor(device, bytes(SLOT)), path)
        with pytest.raises(ds_nvme.TruncatedFileError, match=f"it has {10 * SLOT + 5}"):
            operation.result()
        assert fine.result() == SLOT, "an error is its operation's only"
        assert len(device.moved) <= 13


def test_many_operations_both_ways(engine: str, tmp_path: Path, pattern: Pattern, device: FakeDevice) -> None:
    data = [pattern(3000 + 9770 * number, seed=number) for number in range(30)]
    with aio_handle(4096, 8, intra_op_parallelism=2, engine=engine) as handle:
        writes = [handle.start_write(FakeTensor(device, each), tmp_path / f"{n}") for n, each in enumerate(data)]
        back = [FakeTensor(device, bytes(len(each))) for each in data]
        reads = [
            (write.result(), handle.start_read(target, tmp_path / f"{n}"))[1]
            for n, (write, target) in enumerate(zip(writes, back))
        ]
        assert [read.result() for read in reads] == [len(each) for each in data]
    assert [each.data for each in back] == data


def test_closing_finishes_what_is_in_flight(tmp_path: Path, pattern: Pattern, device: FakeDevice) -> None:
    data = pattern(20 * SLOT)
    handle = aio_handle(BLOCK, 4)
    operations = [handle.start_write(FakeTensor(device, data), tmp_path / f"{n}") for n in range(3)]
    handle.close()
    assert all(operation.done() and operation.exception() is None for operation in operations)
    assert all((tmp_path / f"{n}").read_bytes() == data for n in range(3))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ds-nvme-fake")]


def test_validation(tmp_path: Path, pattern: Pattern, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pattern(5 * SLOT)
    with aio_handle(BLOCK, 4) as handle:
        assert handle.write(FakeTensor(device, data), tmp_path / "file", True) == 1
        spoil = FakeTensor(device, bytes(len(data)))
        device.before_copy = lambda write, position: write and spoil.data.__setitem__(100, spoil.data[100] ^ 1)
        with pytest.raises(ds_nvme.VerifyError, match="differs"):
            handle.read(spoil, tmp_path / "file", True)


def test_plans_say_what_happens(tmp_path: Path, pattern: Pattern, device: FakeDevice) -> None:
    (tmp_path / "file").write_bytes(pattern(5 * SLOT))
    with aio_handle(BLOCK, 4) as handle:
        tensor = FakeTensor(device, bytes(4 * SLOT))
        plan = handle.plan(tensor, tmp_path / "file", 100)
        operation = handle.start_read(tensor, tmp_path / "file", 100)
        operation.result()
        assert operation.plan == plan and plan.nbytes == 4 * SLOT


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    block=st.sampled_from([512, 4096, BLOCK, 1 << 20]),
    depth=st.integers(1, 9),
    parallel=st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.booleans(), st.booleans(), st.integers(0, 99_999), st.integers(0, 5 * SLOT)), max_size=6
    ),
)
def test_like_a_plain_file(
    tmp_path: Path,
    pattern: Pattern,
    block: int,
    depth: int,
    parallel: int,
    steps: list[tuple[bool, bool, int, int]],
) -> None:
    """Any sequence of reads and writes, from the device and the host, does what it does to a bytearray."""
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    model = bytearray()
    device = FakeDevice()

    def step(handle: AioHandle, number: int, write: bool, on_device: bool, offset: int, nbytes: int) -> None:
        if write or offset + nbytes > len(model) or not path.exists():
            data = pattern(nbytes, seed=number)
            handle.sync_pwrite(FakeTensor(device, data) if on_device else data, path, offset)
            if nbytes:
                model.extend(bytes(max(offset + nbytes - len(model), 0)))
                model[offset : offset + nbytes] = data
        else:
            back: Any = FakeTensor(device, bytes(nbytes)) if on_device else bytearray(nbytes)
            handle.sync_pread(back, path, offset)
            assert (back.data if on_device else back) == model[offset : offset + nbytes]

    try:
        with aio_handle(block, depth, intra_op_parallelism=parallel) as handle:
            for number, each in enumerate(steps):
                step(handle, number, *each)
        assert (path.read_bytes() if path.exists() else b"") == model
    finally:
        device.close()
