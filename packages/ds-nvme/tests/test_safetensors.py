"""safetensors files: ours and the format's own implementation read each other."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import ds_nvme
from ds_nvme.safetensors import SafetensorsError, load_file, save_file


def write_raw(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_numpy_arrays_come_back(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    arrays = {
        "a": numpy.arange(1000, dtype=numpy.float32).reshape(10, 100),
        "b": numpy.arange(7, dtype=numpy.int8),
        "c": numpy.zeros((0, 3), dtype=numpy.float64),
        "d": numpy.array(True),
        "e": numpy.arange(100_001, dtype=numpy.float16),
    }
    save_file(arrays, tmp_path / "x.safetensors", {"made": "here"})
    back = load_file(tmp_path / "x.safetensors", library="numpy")
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        assert (back[name] == array).all()
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_both_implementations_read_each_other(tmp_path: Path) -> None:
    torch, theirs = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float16, torch.float8_e4m3fn]
    tensors = {f"t{n}": (torch.randn(17, n + 1) * 5).to(dtype) for n, dtype in enumerate(dtypes)}
    tensors["empty"], tensors["scalar"] = torch.empty(2, 0), torch.tensor(2.5)
    save_file(tensors, tmp_path / "ours", {"k": "v"})
    theirs.save_file(tensors, tmp_path / "theirs")
    for back in (theirs.load_file(tmp_path / "ours"), load_file(tmp_path / "theirs"), load_file(tmp_path / "ours")):
        assert set(back) == set(tensors)
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
            assert torch.equal(back[name].to(torch.float64), tensor.to(torch.float64)), name


def test_files_larger_than_the_staging_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    monkeypatch.setattr("ds_nvme.safetensors._STAGE", 65536)
    arrays = {str(n): numpy.full(9000 * n + 5, n, dtype=numpy.int32) for n in range(12)}
    save_file(arrays, tmp_path / "x")
    back = load_file(tmp_path / "x", library="numpy")
    assert all((back[name] == array).all() for name, array in arrays.items())


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"{", "Expecting property name"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "not \\[0, 8\\)"),
        ({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "lies at"),
        ({"a": 5}, "does not"),
        (b"[]", "does not"),
    ],
)
def test_broken_headers(tmp_path: Path, header: Any, said: str) -> None:
    write_raw(tmp_path / "x", header, bytes(100))
    with pytest.raises(SafetensorsError, match=said):
        load_file(tmp_path / "x", library="numpy")


def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    with pytest.raises(ds_nvme.TruncatedFileError):
        load_file(tmp_path / "x", library="numpy")
    (tmp_path / "x").write_bytes(b"\xff" * 100)
    with pytest.raises(SafetensorsError, match="claims"):
        load_file(tmp_path / "x", library="numpy")
    write_raw(tmp_path / "x", {"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}}, bytes(399))
    with pytest.raises(ds_nvme.TruncatedFileError):
        load_file(tmp_path / "x", library="numpy")
    write_raw(tmp_path / "x", {"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}}, bytes(401))
    with pytest.raises(SafetensorsError, match="ends with its last tensor"):
        load_file(tmp_path / "x", library="numpy")


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(SafetensorsError, match="keeps arrays of"):
        save_file({"a": bytearray(5)}, tmp_path / "x")
    assert not list(tmp_path.iterdir())
