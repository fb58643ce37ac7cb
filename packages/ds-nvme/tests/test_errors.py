"""What goes wrong is said, with file and offset, and harms nothing else."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ds_nvme
from ds_nvme import AioHandle, aio_handle
from ds_nvme.memory import Memory

Pattern = Callable[..., bytearray]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_missing_file(engine: str, tmp_path: Path) -> None:
    with aio_handle(engine=engine) as handle:
        with pytest.raises(ds_nvme.MissingFileError, match="check the path") as caught:
            handle.sync_pread(bytearray(10), tmp_path / "none")
        assert caught.value.filename == str(tmp_path / "none") and isinstance(caught.value, FileNotFoundError)
        with pytest.raises(ds_nvme.MissingFileError):
            handle.sync_pwrite(bytearray(10), tmp_path / "none" / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_read_only_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o444)
    with aio_handle() as handle, pytest.raises(ds_nvme.AccessError, match="owner and mode"):
        handle.sync_pwrite(bytearray(10), tmp_path / "file")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with aio_handle() as handle:
        for move in (handle.sync_pread, handle.sync_pwrite):
            with pytest.raises(ds_nvme.FileError):
                move(bytearray(10), tmp_path)


def test_a_file_that_ends_too_early(engine: str, folder: Path) -> None:
    (folder / "file").write_bytes(bytes(10_000))
    with aio_handle(engine=engine) as handle:
        with pytest.raises(ds_nvme.TruncatedFileError, match=r"4096 bytes from offset 8000 .* it has 10000"):
            handle.sync_pread(bytearray(4096), folder / "file", 8000)
        assert handle.sync_pread(bytearray(2000), folder / "file", 8000) == 1


def test_a_file_that_is_truncated_meanwhile(engine: str, folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(bytes(1 << 20))
    with aio_handle(4096, 2, engine=engine) as handle:
        real = ds_nvme.files.OpenFile.require

        def truncate(self: ds_nvme.files.OpenFile, offset: int, nbytes: int) -> None:
            real(self, offset, nbytes)
            os.truncate(path, 300_001)

        ds_nvme.files.OpenFile.require = truncate  # type: ignore[method-assign]
        try:
            with pytest.raises(ds_nvme.TruncatedFileError):
                handle.sync_pread(bytearray(1 << 20), path)
        finally:
            ds_nvme.files.OpenFile.require = real  # type: ignore[method-assign]
        assert handle.sync_pread(bytearray(300_001), path) == 1, "the handle still works"


def test_a_full_disk(engine: str, tmp_path: Path, pattern: Pattern) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small filesystem")
    try:
        with aio_handle(4096, 4, engine=engine) as handle:
            with pytest.raises(ds_nvme.NoSpaceError, match="the file is incomplete") as caught:
                handle.sync_pwrite(pattern(1 << 20), tmp_path / "file")
            assert caught.value.path == str(tmp_path / "file") and caught.value.offset is not None
            # Nobody takes what is there for the whole.
            with pytest.raises(ds_nvme.TruncatedFileError):
                handle.sync_pread(bytearray(1 << 20), tmp_path / "file")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_buffers_that_cannot_take_part(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with aio_handle() as handle:
        for wrong in (bytes(10), "text", 5, memoryview(bytearray(20))[::2]):
            with pytest.raises(ds_nvme.InvalidBufferError):
                handle.sync_pread(wrong, tmp_path / "file")
        assert handle.sync_pwrite(b"bytes can be written", tmp_path / "file") == 1
        with pytest.raises(ValueError, match="0 or more bytes: got -1"):
            handle.sync_pread(bytearray(10), tmp_path / "file", -1)


@pytest.mark.parametrize("option", ["block_size", "queue_depth", "intra_op_parallelism"])
def test_options_out_of_range(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is 1 or more: got 0"):
        AioHandle(**{option: 0})
    with pytest.raises(ValueError, match="one of auto, libaio"):
        AioHandle(engine="floppy")


def test_a_closed_handle(engine: str, tmp_path: Path) -> None:
    handle = aio_handle(engine=engine)
    handle.close()
    handle.close()
    assert handle.closed
    with pytest.raises(ds_nvme.ClosedHandleError, match="make a new one"):
        handle.sync_pwrite(bytearray(10), tmp_path / "file")


def test_closing_waits_for_what_is_in_flight(engine: str, folder: Path, pattern: Pattern) -> None:
    data = pattern(3 << 20)
    handle = aio_handle(65536, 4, engine=engine)
    operations = [handle.start_write(data, folder / f"{number}") for number in range(4)]
    handle.close()
    assert all(operation.done() and operation.exception() is None for operation in operations)
    assert all((folder / f"{number}").read_bytes() == data for number in range(4))


def test_a_forgotten_handle_is_closed(engine: str, tmp_path: Path, pattern: Pattern) -> None:
    before = open_files()
    data = pattern(1 << 20)
    operation = aio_handle(65536, 4, engine=engine).start_write(data, tmp_path / "file")
    gc.collect()
    assert operation.result(10) == len(data)
    assert open_files() == before


def test_overlapping_writes(engine: str, tmp_path: Path, pattern: Pattern) -> None:
    data = pattern(8 << 20)
    with aio_handle(4096, 1, single_submit=True, engine=engine) as handle, aio_handle(engine=engine) as other:
        first = handle.start_write(data, tmp_path / "file")
        with pytest.raises(ds_nvme.OverlapError, match="wait for it first"):
            other.start_write(bytearray(1), tmp_path / "file", len(data) - 1)
        assert other.sync_pwrite(bytearray(1), tmp_path / "file", len(data)) == 1
        assert first.result() == len(data)
        assert other.sync_pwrite(bytearray(1), tmp_path / "file", len(data) - 1) == 1


def test_each_operation_has_its_own_error(engine: str, tmp_path: Path, pattern: Pattern) -> None:
    data = pattern(100_000)
    with aio_handle(4096, 4, engine=engine) as handle:
        (tmp_path / "short").write_bytes(data)
        back = bytearray(100_000)
        fine = handle.start_write(data, tmp_path / "fine")
        handle.async_pread(back, tmp_path / "short")
        with pytest.raises(ds_nvme.TruncatedFileError):
            handle.async_pread(bytearray(200_000), tmp_path / "short")
        assert handle.wait() == 1 and fine.result() == 100_000 and back == data


def test_validation_finds_a_difference(tmp_path: Path, pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pattern(100_000)
    with aio_handle() as handle:
        assert handle.write(data, tmp_path / "file", True) == 1
        monkeypatch.setattr("ds_nvme.operation.libc.equal", lambda *_: False)
        with pytest.raises(ds_nvme.VerifyError, match="differs"):
            handle.write(data, tmp_path / "file", True)
        handle.pwrite(data, tmp_path / "file", True, True)
        handle.pwrite(data, tmp_path / "other", True, True)
        with pytest.raises(ds_nvme.VerifyError) as caught:
            handle.wait()
        assert len(caught.value.others) == 1


def test_nothing_leaks(engine: str, tmp_path: Path, pattern: Pattern) -> None:
    before = open_files()
    for _ in range(5):
        with aio_handle(4096, 4, intra_op_parallelism=2, engine=engine) as handle:
            handle.sync_pwrite(pattern(50_000), tmp_path / "file")
            with pytest.raises(ds_nvme.TruncatedFileError):
                handle.sync_pread(bytearray(60_000), tmp_path / "file")
    gc.collect()
    assert open_files() == before


_ENDLESS = """
import itertools, sys, ds_nvme
handle = ds_nvme.aio_handle(4096, 8192, engine=sys.argv[2])
data = b"7" * (16 << 20)
for number in itertools.count():
    operation = handle.start_write(data, f"{sys.argv[1]}/{number}")
    print("writing", flush=True)
    operation.result()
"""


def contexts() -> int:
    return int(Path("/proc/sys/fs/aio-nr").read_text())


def test_a_killed_process_leaves_no_context_and_no_part_that_passes_for_whole(engine: str, tmp_path: Path) -> None:
    before = contexts() if engine == "libaio" else 0
    for delay in (0.0, 0.004, 0.02):
        folder = tmp_path / f"{delay}"
        folder.mkdir()
        process = subprocess.Popen([sys.executable, "-c", _ENDLESS, folder, engine], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        if engine == "libaio":
            # Other processes may hold contexts of their own: this one's is larger than all of theirs.
            assert contexts() >= before + 8000
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for path in folder.iterdir():
            with aio_handle(engine=engine) as handle:
                back = Memory(16 << 20).buffer
                try:
                    handle.sync_pread(back, path)
                except ds_nvme.TruncatedFileError:
                    assert path.stat().st_size < len(back)
                else:
                    assert back == b"7" * len(back), f"{path} has its full size"
        if engine == "libaio":
            limit = time.monotonic() + 30
            while contexts() > before + 4000 and time.monotonic() < limit:
                time.sleep(0.01)
            assert contexts() <= before + 4000


def test_an_interpreter_that_ends_finishes_its_transfers(engine: str, tmp_path: Path) -> None:
    program = (
        "import sys, ds_nvme; handle = ds_nvme.aio_handle(65536, 4, engine=sys.argv[2]); "
        "operation = handle.start_write(bytes(8 << 20), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "file"), engine], check=True, timeout=240)
    assert (tmp_path / "file").stat().st_size == 8 << 20


def test_a_fork_is_told(engine: str, tmp_path: Path) -> None:
    program = """
import os, sys, ds_nvme
handle = ds_nvme.aio_handle(engine=sys.argv[2])
handle.sync_pwrite(b"x" * 10000, sys.argv[1])
child = os.fork()
if child == 0:
    try:
        handle.sync_pread(bytearray(10), sys.argv[1])
    except ds_nvme.ClosedHandleError:
        with ds_nvme.aio_handle(engine=sys.argv[2]) as own:
            own.sync_pread(bytearray(10), sys.argv[1])
        sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
handle.sync_pread(bytearray(10), sys.argv[1])
"""
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "file"), engine]
    subprocess.run(command, check=True, timeout=240)
