"""What users of asynchronous I/O do without thinking of it: memory swapped away, callbacks that raise or go on."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import ds_nvme
from ds_nvme import aio_handle
from ds_nvme.errors import file_error
from ds_nvme.safetensors import load_file, save_file

np = pytest.importorskip("numpy")


def test_a_tensor_that_is_given_other_memory_keeps_what_a_read_fills(tmp_path: Path) -> None:
    """As ZeRO does with parameters: the kernel must not write into what someone else has got meanwhile."""
    torch = pytest.importorskip("torch")
    size = 64 << 20
    with aio_handle(queue_depth=1) as handle:
        handle.sync_pwrite(torch.ones(size, dtype=torch.uint8), tmp_path / "file")
        tensor = torch.zeros(size, dtype=torch.uint8)
        reading = handle.start_read(tensor, tmp_path / "file")
        tensor.data = torch.empty(0, dtype=torch.uint8)
        others = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        reading.result()
    assert not any(other.any() for other in others)


@pytest.mark.parametrize("error", [RuntimeError("mine"), SystemExit(3), asyncio.CancelledError()])
def test_callbacks_that_raise_hurt_nobody(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: shown.append(value))

    def fail(_: object) -> None:
        raise error

    called: list[object] = []
    with aio_handle() as handle:
        for number in range(3):
            operation = handle.start_write(bytes(3 << 20), tmp_path / f"file{number}")
            operation.add_done_callback(fail)
            operation.add_done_callback(called.append)
            assert operation.wait(60)
    assert 1 <= len(called) <= 3 and set(shown) <= {error}


def test_a_callback_may_start_the_next_transfer_while_the_handle_closes(tmp_path: Path) -> None:
    for _ in range(20):
        handle = aio_handle(intra_op_parallelism=2)

        def again(_: object, handle: Any = handle) -> None:
            with contextlib.suppress(ds_nvme.ClosedHandleError, ds_nvme.OverlapError):
                handle.start_write(bytes(2 << 20), tmp_path / "file").add_done_callback(again)

        handle.start_write(bytes(2 << 20), tmp_path / "file").add_done_callback(again)
        closing = threading.Thread(target=handle.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()


def test_errors_come_whole_out_of_another_process(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    found: list[Any] = [file_error(28, "/full", 4096), file_error(5, "/broken")]
    with aio_handle() as handle:
        for name in ("short", "missing"):
            with pytest.raises(ds_nvme.NvmeError) as caught:
                handle.sync_pread(bytearray(9), tmp_path / name)
            found.append(caught.value)
    for error in found:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.path, copy.offset) == (type(error), str(error), error.path, error.offset)


def test_what_a_killed_save_left_is_no_part_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for left in (f"{path}.1.draft", tmp_path / "x.draft"):
        Path(left).write_bytes(bytes(100_000))
    saving = [threading.Thread(target=save_file, args=({"x": np.full(9, n)}, str(path))) for n in range(4)]
    for each in saving:
        each.start()
    for each in saving:
        each.join()
    assert set(load_file(str(path))["x"].tolist()) <= {0, 1, 2, 3}
    assert path.stat().st_size < 10_000
    save_file({"x": np.zeros(2)}, str(tmp_path / ("n" * 240 + ".st")))


def test_addresses_are_no_values(tmp_path: Path) -> None:
    with aio_handle() as handle, pytest.raises(ds_nvme.InvalidBufferError, match="Python objects"):
        handle.sync_pwrite(np.array([object()] * 4), tmp_path / "file")
