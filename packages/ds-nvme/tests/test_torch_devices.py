"""torch's devices: the adapter on torch's CPU with streams played, and real CUDA tensors where there is CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ds_nvme
from ds_nvme import aio_handle, gds_handle, gds_refusal
from ds_nvme.devices.torch_device import TorchBuffer, TorchDevice, torch_device
from ds_nvme.memory import Memory

torch = pytest.importorskip("torch")

Pattern = Callable[..., bytearray]


class Streams:
    """What torch.cuda offers of streams and events. Notes what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "caller"
        self.capturing = False
        self.broken = False
        self.code: Any = 0
        log = self.log

        class Stream:
            def __init__(self, device: Any) -> None:
                self.name = f"side {sum(each.startswith('new') for each in log)}"
                log.append(f"new {self.name}")

            def wait_event(self, event: Any) -> None:
                log.append(f"{self.name} waits for {event.name}")

        class Event:
            name = ""

            def record(self, stream: Any) -> None:
                self.name = f"an event of {getattr(stream, 'name', stream)}"
                log.append(self.name)

            def synchronize(self) -> None:
                log.append(f"the host waits for {self.name}")

        self.Stream, self.Event = Stream, Event

    def current_stream(self, device: Any) -> str:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nMore lines")
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(f"in {stream.name}")
        yield

    def cudart(self) -> Any:
        return SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, flags: self.code, cudaHostUnregister=lambda address: 0
        )


class OnDevice:
    """A CPU tensor that takes part as one on a device does."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __device_buffer__(self) -> TorchBuffer:
        return TorchBuffer(self.tensor)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    played = Streams()
    torch_device.cache_clear()
    monkeypatch.setattr(torch, "cpu", played)
    return played


def tensors() -> Iterator[Any]:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        yield (torch.randn(77, 131) * 3).to(dtype)
    yield torch.tensor(7.0)
    yield torch.empty(0, 3)
    yield torch.nn.Parameter(torch.randn(5000))
    with torch.inference_mode():
        yield torch.randn(5000)


def same(one: Any, other: Any) -> bool:
    return bytes(one.detach().reshape(-1).view(torch.uint8)) == bytes(other.detach().reshape(-1).view(torch.uint8))


def test_every_sort_of_tensor(streams: Streams, tmp_path: Path) -> None:
    with aio_handle(4096, 4) as handle:
        for tensor in tensors():
            before = tensor.detach().clone()
            handle.sync_pwrite(OnDevice(tensor), tmp_path / "file")
            with torch.inference_mode():
                tensor.zero_()
            handle.sync_pread(OnDevice(tensor), tmp_path / "file")
            assert same(tensor, before), tensor.dtype


def test_copies_are_ordered_by_events(streams: Streams, tmp_path: Path) -> None:
    with aio_handle(4096, 4) as handle:
        handle.sync_pwrite(OnDevice(torch.ones(100)), tmp_path / "file")
        write = streams.log.copy()
        handle.sync_pread(OnDevice(torch.ones(100)), tmp_path / "file")
        read = streams.log[len(write) :]
    for log, side in ((write[2:], "side 1"), (read, "side 0")):
        assert log == [
            "an event of caller",
            f"in {side}",
            f"{side} waits for an event of caller",
            f"an event of {side}",
            f"the host waits for an event of {side}",
        ]


def test_what_devices_report(streams: Streams, tmp_path: Path) -> None:
    tensor = OnDevice(torch.ones(5000))
    with aio_handle(4096, 4) as handle:
        handle.sync_pwrite(tensor, tmp_path / "file")
        streams.capturing = True
        with pytest.raises(ds_nvme.InvalidBufferError, match="capturing"):
            handle.sync_pwrite(tensor, tmp_path / "file")
        streams.capturing = False
        streams.broken = True
        with pytest.raises(ds_nvme.DeviceError, match=r"cpu reports CUDA error: an illegal .* encountered; an earlier"):
            handle.sync_pwrite(tensor, tmp_path / "file")
        with pytest.raises(RuntimeError), streams.device(None):
            pass
    with aio_handle(4096, 4) as handle, pytest.raises(ds_nvme.DeviceError, match="illegal"):
        handle.sync_pwrite(tensor, tmp_path / "file")


@pytest.mark.parametrize("code", [2, SimpleNamespace(value=2)])
def test_page_locking(streams: Streams, code: Any) -> None:
    device, memory = torch_device(torch.device("cpu")), Memory(5000)
    assert device.lock_pages(memory) is None
    device.unlock_pages(memory)
    streams.code = code
    assert device.lock_pages(memory) == "cudaHostRegister of 8192 bytes failed with code 2"


def test_new_memory_is_apart(streams: Streams) -> None:
    buffer = TorchBuffer(torch.empty(3, dtype=torch.bfloat16))
    made = buffer.empty(1000, 65536)
    assert made.shape == (1000,) and made.dtype == torch.bfloat16 and made.data_ptr() % 65536 == 0
    assert made.untyped_storage().nbytes() >= 2 * 65536
    assert buffer.empty(0, 65536).shape == (0,)


def test_devices_without_streams_are_refused() -> None:
    with pytest.raises(ds_nvme.InvalidBufferError, match=r"without torch.mps.Stream; move it with .cpu"):
        TorchDevice(torch.device("mps"))
    with pytest.raises(ds_nvme.InvalidBufferError, match=r"got one on privateuseone:0, without torch.privateuseone"):
        TorchDevice(torch.device("privateuseone:0"))


# --- CUDA

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
SIZES = [0, 1, 511, 4096, 4097, (1 << 20) + 3, (20 << 20) + 12345]


@pytest.fixture(params=["aio", "gds"])
def cuda_handle(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Both handles. Closed afterwards."""
    if request.param == "gds" and (reason := gds_refusal()) is not None:
        pytest.skip(reason)
    with (aio_handle if request.param == "aio" else gds_handle)(1 << 20, 32, intra_op_parallelism=2) as handle:
        yield handle


@needs_cuda
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 4096, 70001])
def test_cuda_tensors(cuda_handle: Any, folder: Path, pattern: Pattern, nbytes: int, offset: int) -> None:
    path, data = folder / "file", pattern(nbytes)
    whole = torch.empty(nbytes + 64, dtype=torch.uint8, device="cuda")
    for shift in (0, 5):
        tensor = whole[shift : shift + nbytes]
        tensor.copy_(torch.frombuffer(data, dtype=torch.uint8) if nbytes else tensor)
        cuda_handle.sync_pwrite(tensor, path, offset)
        if nbytes:
            assert path.read_bytes() == bytes(offset) + data
        whole.zero_()
        cuda_handle.sync_pread(tensor, path, offset)
        assert bytes(tensor.cpu().numpy()) == data
        assert not whole[:shift].any() and not whole[shift + nbytes :].any()


@needs_cuda
def test_cuda_order(cuda_handle: Any, tmp_path: Path) -> None:
    """Kernels queued before a transfer come before it, those queued after its end see it; on any stream."""
    side = torch.cuda.Stream()
    tensor = torch.zeros(8 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for number in range(5):
            torch.cuda._sleep(50_000_000)
            tensor.fill_(number)
            cuda_handle.async_pwrite(tensor, tmp_path / "file")
            assert cuda_handle.wait() == 1
            torch.cuda._sleep(50_000_000)
            old = tensor.clone()
            cuda_handle.sync_pread(tensor, tmp_path / "file")
            assert (tensor == number).all() and (old == number).all()


@needs_cuda
def test_cuda_page_locked_staging_and_free_memory(tmp_path: Path) -> None:
    tensor = torch.randn(64 << 20, device="cuda")
    before = torch.cuda.memory_allocated()
    with aio_handle(1 << 20, 32) as handle:
        handle.write(tensor, tmp_path / "file", True)
        back = torch.empty_like(tensor)
        handle.read(back, tmp_path / "file", True)
        assert torch.equal(back, tensor)
        assert str(handle.describe()).count("page-locked") == 2 and "not page-locked" not in str(handle.describe())
    del back
    assert torch.cuda.memory_allocated() == before


@needs_cuda
def test_cuda_pinned_device_tensors(tmp_path: Path) -> None:
    if (reason := gds_refusal()) is not None:
        pytest.skip(reason)
    with gds_handle(1 << 20, 8) as handle:
        tensor = handle.new_pinned_device_tensor(3 << 20, torch.empty(0, dtype=torch.bfloat16))
        assert tensor.is_cuda and tensor.dtype == torch.bfloat16 and tensor.data_ptr() % 65536 == 0
        tensor.normal_()
        other = torch.empty_like(tensor)
        assert handle.pin_device_tensor(other)
        handle.sync_pwrite(tensor, tmp_path / "file")
        handle.sync_pread(other, tmp_path / "file")
        assert torch.equal(tensor, other)
        half = other[: 1 << 20]
        handle.sync_pread(half, tmp_path / "file", 4 << 20)
        assert torch.equal(half, tensor[2 << 20 :])
        assert handle.unpin_device_tensor(other) and handle.free_pinned_device_tensor(tensor)


@needs_cuda
def test_cuda_graphs_are_left_alone(tmp_path: Path) -> None:
    tensor, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with aio_handle() as handle, torch.cuda.graph(graph):
        with pytest.raises(ds_nvme.InvalidBufferError, match="capturing"):
            handle.sync_pwrite(tensor, tmp_path / "file")
        tensor.add_(1)
