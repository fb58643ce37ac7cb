"""Arrays of numpy and tensors of torch, page-locked memory, and the configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ds_nvme
from ds_nvme import AioConfig, aio_handle
from ds_nvme.native import declare


def test_numpy(engine: str, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.random.default_rng(1).standard_normal((100, 333))
    with aio_handle(4096, 4, engine=engine) as handle:
        handle.sync_pwrite(array, tmp_path / "file")
        back = numpy.empty_like(array)
        handle.sync_pread(back, tmp_path / "file")
        assert (back == array).all()
        for wrong in (array.T, array[:, ::2]):
            with pytest.raises(ds_nvme.InvalidBufferError, match="contiguous"):
                handle.sync_pwrite(wrong, tmp_path / "file")
        back.flags.writeable = False
        with pytest.raises(ds_nvme.InvalidBufferError, match="writable"):
            handle.sync_pread(back, tmp_path / "file")
        locked = handle.new_cpu_locked_tensor(array.size, array)
        assert locked.dtype == array.dtype and locked.shape == (array.size,) and locked.ctypes.data % 4096 == 0
        handle.sync_pread(locked, tmp_path / "file")
        assert (locked == array.reshape(-1)).all()
        assert handle.free_cpu_locked_tensor(locked) and not handle.free_cpu_locked_tensor(locked)


def test_torch(engine: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with aio_handle(4096, 4, engine=engine) as handle:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            tensor = (torch.randn(77, 131) * 3).to(dtype)
            handle.sync_pwrite(tensor, tmp_path / "file")
            back = torch.empty_like(tensor)
            handle.sync_pread(back, tmp_path / "file")
            assert torch.equal(back, tensor)
            locked = handle.new_cpu_locked_tensor(tensor.numel(), tensor)
            assert locked.dtype == dtype and locked.shape == (tensor.numel(),) and locked.data_ptr() % 4096 == 0
            handle.sync_pread(locked, tmp_path / "file")
            assert torch.equal(locked, tensor.reshape(-1))
            assert handle.free_cpu_locked_tensor(locked)
        parameter = torch.nn.Parameter(torch.randn(1000))
        handle.sync_pwrite(parameter, tmp_path / "file")
        handle.sync_pread(parameter, tmp_path / "file")
        for wrong, said in (
            (torch.randn(5, 6).T, "call .contiguous"),
            (torch.empty(5, device="meta"), "memory of its own"),
            (torch.eye(5).to_sparse(), "memory of its own"),
            (torch.randn(5, dtype=torch.complex64).conj(), "resolve_conj"),
        ):
            with pytest.raises(ds_nvme.InvalidBufferError, match=said):
                handle.sync_pwrite(wrong, tmp_path / "file")


def test_memory_outlives_its_tensor(engine: str, tmp_path: Path) -> None:
    """The caller drops its buffer while the transfer is in flight."""
    with aio_handle(4096, 2, engine=engine) as handle:
        operations = [handle.start_write(bytearray([n]) * 300_000, tmp_path / f"{n}") for n in range(20)]
        assert [operation.result() for operation in operations] == [300_000] * 20
    assert all((tmp_path / f"{n}").read_bytes() == bytes([n]) * 300_000 for n in range(20))


def test_a_bytearray_can_be_resized_afterwards_only(engine: str, tmp_path: Path) -> None:
    data = bytearray(1 << 20)
    with aio_handle(4096, 1, engine=engine) as handle:
        operation = handle.start_write(data, tmp_path / "file")
        if not operation.done():
            with pytest.raises(BufferError):
                data.extend(b"more")
        operation.result()
        data.extend(b"more")


# A read from an empty pipe holds a transfer up until somebody writes: here only another thread of Python's can.
HELD_UP = """
import os, sys, threading, time
from ds_nvme.engines.base import Run
from ds_nvme.engines.choose import candidates
from ds_nvme.native import libc

inlet, outlet = os.pipe()
memory = libc.Exported(bytearray(1))
begun = threading.Event()

def count():
    begun.wait()
    for _ in range(100):
        time.sleep(0.001)  # the transfer's thread goes on, into the kernel
    os.write(outlet, b"x")

threading.Thread(target=count).start()
engine = candidates(sys.argv[1])[0](1)
packed = engine.pack(Run(False, inlet, memory.address, 0, 1, 1), 5)
begun.set()
assert engine.submit(packed, 0, 1) == 1
assert engine.reap(1) == ([5], [1])
engine.close()
"""


def test_python_runs_on_during_a_transfer(engine: str) -> None:
    """Engines hold no GIL while the kernel works. With it held, this would wait for itself and never end."""
    if engine == "threads":
        pytest.skip("pread takes no pipe; it is called as the other engines' system calls are")
    subprocess.run([sys.executable, "-c", HELD_UP, engine], check=True, timeout=240)


def test_the_configuration() -> None:
    config = AioConfig.model_validate({"block_size": 4096, "thread_count": 2})
    with config.handle() as handle:
        assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (4096, 8, 2)
        assert handle.get_overlap_events() is True and handle.get_single_submit() is False
    assert AioConfig(intra_op_parallelism=3).intra_op_parallelism == 3
    with pytest.raises(ValueError, match="Extra inputs"):
        AioConfig.model_validate({"blocksize": 4096})


def test_descriptions_name_the_path(engine: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    with aio_handle(engine=engine) as handle:
        handle.sync_pread(bytearray(10_000), tmp_path / "file")
        description = handle.describe(tmp_path / "file")
        assert description.engine == engine and description.why == "asked for"
        assert str(tmp_path / "file") in str(description)
        assert "read of 10000 bytes" in str(handle.plan(bytearray(10_000), tmp_path / "file"))


@pytest.mark.parametrize("name", declare.FILES)
def test_the_bindings_are_what_the_declarations_say(name: str) -> None:
    pytest.importorskip("pycparser")
    assert Path(declare.__file__).with_name(f"{name}.py").read_text() == declare.render(name)


def test_importing_is_quick_and_loads_nothing_heavy() -> None:
    program = "import sys, ds_nvme; print([m for m in ('torch', 'numpy', 'pydantic', 'asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert all(getattr(ds_nvme, name) is not None for name in ds_nvme.__all__)
    with pytest.raises(AttributeError):
        _: Any = ds_nvme.nothing
