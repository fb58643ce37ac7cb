"""gds_handle, against a libcufile that works on host memory and counts what it is called for."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from cffi import FFI

import ds_nvme
from ds_nvme import GdsHandle, gds_handle
from ds_nvme.devices.base import Device, DeviceBuffer
from ds_nvme.gds.mode import Properties, mode, read_config
from ds_nvme.memory import Memory
from ds_nvme.native import libc
from ds_nvme.native._cufile import ffi as bound

Pattern = Callable[..., bytearray]
BLOCK = 16384

FAKE = """
struct fake {
    long opened, files, buffers, reads, writes, bytes, violations, threads, most_bytes, hold, waiting;
    long fail_at, failure, failure_errno, open_error, open_cuda_error, buffer_error, file_error, devices, init_error;
    long last_base, last_offset;
};
extern struct fake fake;
void fake_properties(unsigned major, unsigned status_flags, unsigned control, unsigned features);
size_t fake_layout(int which);
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pycparser")
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the stand-in for libcufile needs Linux and a C compiler")
    target = tmp_path_factory.mktemp("cufile") / "libcufile.so"
    source = Path(__file__).with_name("fake_cufile.c")
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o", str(target), str(source)]
    subprocess.run(command, check=True)
    return target


class Cufile:
    """A stand-in of its own for each test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        ffi = FFI()
        ffi.cdef(FAKE)
        self.library: Any = ffi.dlopen(str(path))

    @property
    def state(self) -> Any:
        return self.library.fake


@pytest.fixture
def cufile(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cufile]:
    path = Path(shutil.copy(compiled, tmp_path / "libcufile-fake.so"))
    monkeypatch.setenv("DS_NVME_CUDA", str(path))
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "none.json"))
    monkeypatch.delenv("CUFILE_FORCE_COMPAT_MODE", raising=False)
    fake = Cufile(path)
    yield fake
    state = fake.state
    assert (state.violations, state.files, state.buffers) == (0, 0, 0), "all is right, and given back"


class Cuda(Device):
    """Its memory is the host's, so that the stand-in can move it."""

    name = "cuda:0"
    kind = "cuda"

    def using(self) -> Any:
        return nullcontext()

    def lock_pages(self, memory: Memory) -> str | None:
        return None

    def unlock_pages(self, memory: Memory) -> None:
        pass


class Done:
    def wait(self) -> None:
        pass


class Tensor(DeviceBuffer):
    """A CUDA tensor, and the buffer that it is."""

    device = Cuda()

    def __init__(self, data: bytes | bytearray, shift: int = 0) -> None:
        self._memory = Memory(len(data) + shift)
        self.nbytes = len(data)
        self.address = self._memory.address + shift
        self.ready: Callable[[], object] = lambda: None
        self._at = shift
        self._memory.buffer[shift : shift + len(data)] = data

    @property
    def data(self) -> bytes:
        return bytes(self._memory.buffer[self._at : self._at + self.nbytes])

    def __device_buffer__(self) -> Tensor:
        return self

    def copy_to_host(self, position: int, nbytes: int, memory: Memory, at: int) -> Done:
        libc.move(memory.address + at, self.address + position, nbytes)
        return Done()

    def copy_to_device(self, position: int, nbytes: int, memory: Memory, at: int) -> Done:
        libc.move(self.address + position, memory.address + at, nbytes)
        return Done()

    def wait_ready(self) -> None:
        self.ready()

    def empty(self, num_elements: int, alignment: int) -> Tensor:
        return Tensor(bytes(num_elements))


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def direct(folder: Path) -> bool:
    """Whether files there can be opened with O_DIRECT."""
    (folder / "probe").write_bytes(b"x")
    with ds_nvme.aio_handle() as handle:
        return "O_DIRECT, buffers" in str(handle.describe(folder / "probe"))


# --- layouts


def test_layouts_are_the_documented_ones(compiled: Path) -> None:
    library = Cufile(compiled).library
    # The sizes that a compiler gives NVIDIA's own header, of CUDA 12 and of CUDA 13.
    expected = [8, 24, 8, 16, 56, 16, 28, 32, 52]
    assert [library.fake_layout(which) for which in range(9)] == expected
    description, properties = bound.typeof("CUfileDescr_t"), bound.typeof("CUfileDrvProps_t")
    offsets, inner = dict(properties.fields), dict(dict(properties.fields)["nvfs"].type.fields)
    assert expected == [
        bound.sizeof("CUfileError_t"),
        bound.sizeof(description),
        bound.offsetof(description, "handle"),
        bound.offsetof(description, "fs_ops"),
        bound.sizeof(properties),
        inner["max_direct_io_size"].offset,
        inner["dcontrolflags"].offset,
        offsets["fflags"].offset,
        offsets["max_batch_io_timeout_msecs"].offset,
    ]
    assert bound.sizeof(dict(description.fields)["handle"].type) == 8


# --- transfers


@pytest.mark.parametrize("nbytes", [0, 1, 511, 513, 4096, 4097, BLOCK - 1, BLOCK, 5 * BLOCK, 5 * BLOCK + 7])
@pytest.mark.parametrize("offset", [0, 1, 512, 4096, 70001])
def test_there_and_back(cufile: Cufile, folder: Path, pattern: Pattern, nbytes: int, offset: int) -> None:
    path, data = folder / "file", pattern(nbytes)
    with gds_handle(BLOCK, 4, intra_op_parallelism=2, cufile=cufile.path) as handle:
        assert handle.sync_pwrite(Tensor(data, 3), path, offset) == 1
        if nbytes:
            assert path.read_bytes() == bytes(offset) + data
        back = Tensor(bytes(nbytes))
        assert handle.sync_pread(back, path, offset) == 1
        assert back.data == data
    if direct(folder):
        # Whole pages of the write, and all of the read, have gone through cuFile.
        pages = max((offset + nbytes) // 4096 - -(-offset // 4096), 0) * 4096
        assert cufile.state.bytes == pages + nbytes
    else:
        assert cufile.state.bytes == 0


def test_bytes_around_a_write_stay(cufile: Cufile, folder: Path, pattern: Pattern) -> None:
    path, before = folder / "file", pattern(20 * BLOCK, seed=2)
    path.write_bytes(before)
    with gds_handle(BLOCK, 4, cufile=cufile.path) as handle:
        for nbytes, offset in ((1, 0), (513, 4096), (5 * BLOCK, 5000), (9 * BLOCK + 100, 11 * BLOCK - 100)):
            data = pattern(nbytes, seed=offset + 3)
            handle.sync_pwrite(Tensor(data), path, offset)
            before[offset : offset + nbytes] = data
            assert path.read_bytes() == before


def test_blocks_are_shared_over_threads_and_the_gil_is_free(cufile: Cufile, tmp_path: Path, pattern: Pattern) -> None:
    if not direct(tmp_path):
        pytest.skip("no O_DIRECT here")
    data = pattern(20 * BLOCK)
    (tmp_path / "file").write_bytes(data)
    with gds_handle(BLOCK, 3, intra_op_parallelism=2, cufile=cufile.path) as handle:
        cufile.state.hold = 1
        back = Tensor(bytes(len(data)))
        handle.async_pread(back, tmp_path / "file")
        # Six calls at a time, all inside cuFile, while this thread runs: with the GIL held it would not.
        until(lambda: cufile.state.waiting == 6)
        time.sleep(0.02)
        assert cufile.state.waiting == 6 and cufile.state.reads == 6
        cufile.state.hold = 0
        assert handle.wait() == 1
        assert back.data == data and cufile.state.reads == 20 and cufile.state.threads == 6


def test_small_operations_need_few_threads(cufile: Cufile, tmp_path: Path) -> None:
    with gds_handle(BLOCK, 32, cufile=cufile.path) as handle:
        for number in range(20):
            handle.sync_pwrite(Tensor(bytes(4096)), tmp_path / f"{number}")
        assert sum(thread.name.startswith("ds-nvme-gds") for thread in threading.enumerate()) <= 4


def test_calls_that_move_less_than_asked(cufile: Cufile, tmp_path: Path, pattern: Pattern) -> None:
    data = pattern(10 * BLOCK)
    cufile.state.most_bytes = 4096
    with gds_handle(BLOCK, 2, cufile=cufile.path) as handle:
        handle.sync_pwrite(Tensor(data), tmp_path / "file")
        back = Tensor(bytes(len(data)))
        handle.sync_pread(back, tmp_path / "file")
        assert back.data == data == (tmp_path / "file").read_bytes()


def test_a_transfer_waits_for_the_callers_stream(cufile: Cufile, tmp_path: Path, pattern: Pattern) -> None:
    data, computed = pattern(3 * BLOCK), threading.Event()
    tensor = Tensor(bytes(len(data)))

    def ready() -> None:
        computed.wait(60)
        tensor._memory.buffer[: len(data)] = data

    tensor.ready = ready
    with gds_handle(BLOCK, 1, cufile=cufile.path) as handle:
        handle.async_pwrite(tensor, tmp_path / "file")
        assert cufile.state.writes == 0
        computed.set()
        assert handle.wait() == 1
    assert (tmp_path / "file").read_bytes() == data


def test_many_operations_and_their_futures(cufile: Cufile, tmp_path: Path, pattern: Pattern) -> None:
    data = [pattern(3000 + 9770 * number, seed=number) for number in range(30)]
    with gds_handle(4096, 8, intra_op_parallelism=2, cufile=cufile.path) as handle:
        for number, each in enumerate(data):
            assert handle.async_pwrite(Tensor(each), tmp_path / f"{number}") == 0
        assert handle.wait() == 30
        back = [Tensor(bytes(len(each))) for each in data]
        operations = [handle.start_read(each, tmp_path / f"{number}") for number, each in enumerate(back)]
        assert [operation.result() for operation in operations] == [len(each) for each in data]
        assert handle.read(back[5], tmp_path / "5", True) == 1
    assert [each.data for each in back] == [bytes(each) for each in data]


def test_a_file_is_whole_only_at_the_end(cufile: Cufile, tmp_path: Path, pattern: Pattern) -> None:
    if not direct(tmp_path):
        pytest.skip("no O_DIRECT here")
    data = pattern(9 * BLOCK)
    with gds_handle(BLOCK, 32, cufile=cufile.path) as handle:
        cufile.state.hold = 1
        operation = handle.start_write(Tensor(data), tmp_path / "file")
        until(lambda: cufile.state.waiting == 8)
        assert (tmp_path / "file").stat().st_size < len(data)
        cufile.state.hold = 0
        operation.result()
        assert cufile.state.writes == 9
    assert (tmp_path / "file").read_bytes() == data


# --- pinned memory


def test_pinned_tensors(cufile: Cufile, tmp_path: Path, pattern: Pattern) -> None:
    data = pattern(4 * BLOCK)
    (tmp_path / "file").write_bytes(data)
    with gds_handle(BLOCK, 1, cufile=cufile.path) as handle:
        mine = Tensor(bytes(4 * BLOCK))
        assert handle.pin_device_tensor(mine) and not handle.pin_device_tensor(mine)
        assert cufile.state.buffers == 1 and f"{4 * BLOCK} bytes of device memory pinned" in str(handle.describe())
        handle.sync_pread(mine, tmp_path / "file")
        assert mine.data == data
        part = Tensor(b"")
        part.address, part.nbytes = mine.address + BLOCK, BLOCK
        handle.sync_pread(part, tmp_path / "file", 3 * BLOCK)
        assert mine.data[BLOCK : 2 * BLOCK] == data[3 * BLOCK :]
        if cufile.state.reads:
            assert (cufile.state.last_base, cufile.state.last_offset) == (mine.address, BLOCK), "by base and offset"
        assert not handle.free_pinned_device_tensor(mine), "it wasn't made by the handle"
        assert handle.unpin_device_tensor(mine) and not handle.unpin_device_tensor(mine)

        made = handle.new_pinned_device_tensor(BLOCK, mine)
        assert made.nbytes == BLOCK and cufile.state.buffers == 1 and not handle.unpin_device_tensor(made)
        handle.sync_pread(made, tmp_path / "file")
        assert made.data == data[:BLOCK]
        assert handle.free_pinned_device_tensor(made) and cufile.state.buffers == 0
        handle.new_pinned_device_tensor(BLOCK, mine)
        handle.new_pinned_device_tensor(0, mine)
        handle.pin_device_tensor(mine)
        locked = handle.new_cpu_locked_tensor(100, bytearray(1))
        assert locked.nbytes == 100
    assert cufile.state.buffers == 0, "closing unpins"


def test_memory_in_use_stays_pinned(cufile: Cufile, tmp_path: Path) -> None:
    if not direct(tmp_path):
        pytest.skip("no O_DIRECT here")
    (tmp_path / "file").write_bytes(bytes(4096))
    with gds_handle(BLOCK, 1, cufile=cufile.path) as handle:
        tensor = Tensor(bytes(4096))
        handle.pin_device_tensor(tensor)
        cufile.state.hold = 1
        operation = handle.start_read(tensor, tmp_path / "file")
        until(lambda: cufile.state.waiting == 1)
        with pytest.raises(ds_nvme.InvalidBufferError, match="wait for them first"):
            handle.unpin_device_tensor(tensor)
        cufile.state.hold = 0
        operation.result()
        assert handle.unpin_device_tensor(tensor)


# --- errors


def test_errors_of_cufile_and_of_the_system(cufile: Cufile, tmp_path: Path, pattern: Pattern) -> None:
    if not direct(tmp_path):
        pytest.skip("no O_DIRECT here")
    data = pattern(9 * BLOCK)
    path = tmp_path / "file"
    path.write_bytes(data)
    state = cufile.state
    with gds_handle(BLOCK, 1, cufile=cufile.path) as handle:
        state.fail_at, state.failure = 3, -5012
        with pytest.raises(ds_nvme.GdsError, match=f"reads {path} at offset {2 * BLOCK}.*CUDA_POINTER_INVALID") as gds:
            handle.sync_pread(Tensor(bytes(len(data))), path)
        assert gds.value.code == 5012 and state.reads == 3, "what wasn't begun isn't begun any more"
        state.fail_at, state.failure, state.failure_errno = 1, -1, errno.ENOSPC
        with pytest.raises(ds_nvme.NoSpaceError, match="at offset 0") as full:
            handle.sync_pwrite(Tensor(data), path)
        assert full.value.path == str(path)
        state.fail_at = 0
        assert handle.sync_pread(Tensor(bytes(len(data))), path) == 1, "the handle goes on"
        state.file_error = 5008
        with pytest.raises(ds_nvme.GdsError, match=r"IO_NOT_SUPPORTED.*use aio_handle"):
            handle.sync_pread(Tensor(bytes(10)), path)
        state.file_error = 0
        state.buffer_error = 5036
        with pytest.raises(ds_nvme.GdsError, match="GPU_MEMORY_PINNING_FAILED"):
            handle.pin_device_tensor(Tensor(bytes(10)))
        state.buffer_error = 0
        with pytest.raises(ds_nvme.TruncatedFileError):
            handle.sync_pread(Tensor(bytes(len(data) + 1)), path)


def test_a_file_that_is_cut_meanwhile(cufile: Cufile, folder: Path, pattern: Pattern) -> None:
    path = folder / "file"
    path.write_bytes(pattern(9 * BLOCK))
    tensor = Tensor(bytes(9 * BLOCK))

    def cut() -> None:
        with path.open("r+b") as file:
            file.truncate(2 * BLOCK + 5)

    tensor.ready = cut
    said = pytest.raises(ds_nvme.TruncatedFileError, match=f"it has {2 * BLOCK + 5}")
    with gds_handle(BLOCK, 1, cufile=cufile.path) as handle, said:
        handle.sync_pread(tensor, path)


def test_other_memory_is_refused_before_a_file_is_made(cufile: Cufile, tmp_path: Path) -> None:
    with gds_handle(cufile=cufile.path) as handle:
        with pytest.raises(ds_nvme.InvalidBufferError, match="moves CUDA tensors: got memory of the CPU"):
            handle.sync_pwrite(bytearray(10), tmp_path / "file")
        with pytest.raises(ds_nvme.InvalidBufferError, match="is a CUDA tensor: got bytearray"):
            handle.pin_device_tensor(bytearray(10))
    assert not (tmp_path / "file").exists()
    with pytest.raises(ds_nvme.ClosedHandleError):
        handle.sync_pwrite(Tensor(b"x"), tmp_path / "file")
    with pytest.raises(ds_nvme.ClosedHandleError):
        handle.pin_device_tensor(Tensor(b"x"))


def test_closing_finishes_what_is_in_flight(cufile: Cufile, tmp_path: Path, pattern: Pattern) -> None:
    data = pattern(40 * BLOCK)
    handle = gds_handle(BLOCK, 2, cufile=cufile.path)
    operations = [handle.start_write(Tensor(data), tmp_path / f"{number}") for number in range(4)]
    handle.close()
    assert all(operation.done() and operation.exception() is None for operation in operations)
    assert all((tmp_path / f"{number}").read_bytes() == data for number in range(4))


# --- what runs here


def test_the_library_by_environment(cufile: Cufile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_NVME_CUFILE", str(cufile.path))
    monkeypatch.setattr("ds_nvme.gds.driver._OPEN", {})
    assert ds_nvme.gds_refusal() is None
    with gds_handle() as one, GdsHandle(4096, 8, True, False, 2) as two:
        assert two.get_block_size() == 4096 and two.get_queue_depth() == 8 and two.get_intra_op_parallelism() == 2
        assert two.get_single_submit() is True and two.get_overlap_events() is False
        assert str(cufile.path) in str(one.describe())
    assert cufile.state.opened == 1, "once a process"


def test_why_it_cannot_run(cufile: Cufile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = cufile.state
    monkeypatch.setattr("ds_nvme.gds.driver._OPEN", {})
    with pytest.raises(ds_nvme.GdsError, match=r"needs NVIDIA's libcufile: .*pip install nvidia-cufile"):
        gds_handle(cufile=tmp_path / "none.so")
    state.open_error, state.open_cuda_error = 5011, 999
    with pytest.raises(ds_nvme.GdsError, match=r"5011 .*CUDA 999 .CUDA_ERROR_FAKE") as caught:
        gds_handle(cufile=cufile.path)
    assert (caught.value.code, caught.value.cuda) == (5011, 999)
    state.open_error = 5001
    assert "load the nvidia-fs kernel module" in str(ds_nvme.gds_refusal(cufile.path))
    opened = state.opened
    state.init_error = 100
    with pytest.raises(ds_nvme.GdsError, match="cuInit reports CUDA 100"):
        gds_handle(cufile=cufile.path)
    state.init_error, state.devices = 0, 0
    assert "the driver shows none" in str(ds_nvme.gds_refusal(cufile.path))
    monkeypatch.setenv("DS_NVME_CUDA", str(tmp_path / "none.so"))
    assert "needs the NVIDIA driver" in str(ds_nvme.gds_refusal(cufile.path))
    assert state.opened == opened, "cuFile is asked for nothing before CUDA is known to work"
    with pytest.raises(ValueError, match="queue_depth is 1 or more"):
        gds_handle(queue_depth=0, cufile=cufile.path)


def test_descriptions_name_the_mode(cufile: Cufile, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(5000))
    with gds_handle(cufile=cufile.path) as handle:
        handle.sync_pread(Tensor(bytes(5000)), tmp_path / "file")
        text = str(handle.describe(tmp_path / "file"))
        assert "cuFile 1.14: direct (nvidia-fs 2.25 reaches NVMe, NVMe-oF; else in compatibility mode)" in text
        assert str(tmp_path / "file") in text and "at most 32 calls at a time" in text
        cufile.library.fake_properties(0, 0, 2, 0)
        assert "compatibility mode, through host memory (the nvidia-fs kernel module isn't loaded)" in str(
            handle.describe()
        )


@pytest.mark.parametrize(
    ("properties", "config", "environment", "direct", "said"),
    [
        (Properties((2, 25), 1 << 4, 0, 0), {}, {}, True, "it fails: allow_compat_mode is off"),
        (Properties((2, 25), 0, 2, 0), {}, {}, False, "no sort of storage"),
        (Properties((2, 25), 1 << 4, 2, 0), {"force_compat_mode": True}, {}, False, "cufile.json asks"),
        (Properties((2, 25), 1 << 4, 2, 0), {}, {"CUFILE_FORCE_COMPAT_MODE": "true"}, False, "asks for it"),
        (Properties((0, 0), 0, 2, 1 << 4), {"use_pci_p2pdma": True}, {}, True, "peer-to-peer"),
        (Properties((0, 0), 0, 2, 1 << 4), {}, {}, False, "use_pci_p2pdma is off"),
        (Properties((0, 0), 0, 2, 0), {"use_pci_p2pdma": True}, {}, False, "isn't loaded"),
    ],
)
def test_modes(properties: Properties, config: Any, environment: Any, direct: bool, said: str) -> None:
    found = mode(properties, config, environment)
    assert found.direct is direct and said in str(found)


def test_configurations_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "cufile.json"
    text = '{ // a comment\n"logging": {"dir": "http://x//y"},\n"properties": {"use_pci_p2pdma": true, // on\n}}'
    for content, expected in (
        (text, {"use_pci_p2pdma": True}),
        (json.dumps({"properties": {"a": "b // c"}}), {"a": "b // c"}),
        ("no json", {}),
        ("[]", {}),
    ):
        path.write_text(content)
        assert read_config({"CUFILE_ENV_PATH_JSON": str(path)}) == expected
    assert read_config({"CUFILE_ENV_PATH_JSON": str(tmp_path / "none")}) == {}


def test_importing_loads_no_cufile() -> None:
    program = "import sys, ds_nvme; print([m for m in sys.modules if 'gds' in m or 'cufile' in m or 'device' in m])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "gds" not in done.stdout and "cufile" not in done.stdout
