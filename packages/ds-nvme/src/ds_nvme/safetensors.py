"""safetensors files at the drive's speed: `load_file` and `save_file` as `safetensors.torch` has them.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the length of a JSON header, the
header, the tensors' bytes one after another. Needs the library whose tensors are wanted, torch or numpy, and nothing
of the safetensors package.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ds_nvme.alignment import PAGE
from ds_nvme.errors import NvmeError
from ds_nvme.files import Path
from ds_nvme.handle import AioHandle
from ds_nvme.like import kind_of
from ds_nvme.memory import Memory
from ds_nvme.view import View

_LARGEST_HEADER = 100_000_000  # as the format's own implementation has it
_STAGE = 32 << 20

# Format's name: torch's, numpy's (None where it has none), bytes.
_DTYPES: dict[str, tuple[str, str | None, int]] = {
    "F64": ("float64", "<f8", 8),
    "F32": ("float32", "<f4", 4),
    "F16": ("float16", "<f2", 2),
    "BF16": ("bfloat16", None, 2),
    "F8_E4M3": ("float8_e4m3fn", None, 1),
    "F8_E5M2": ("float8_e5m2", None, 1),
    "I64": ("int64", "<i8", 8),
    "I32": ("int32", "<i4", 4),
    "I16": ("int16", "<i2", 2),
    "I8": ("int8", "|i1", 1),
    "U64": ("uint64", "<u8", 8),
    "U32": ("uint32", "<u4", 4),
    "U16": ("uint16", "<u2", 2),
    "U8": ("uint8", "|u1", 1),
    "BOOL": ("bool", "|b1", 1),
    "C64": ("complex64", "<c8", 8),
}
_BY_TORCH = {torch: name for name, (torch, _, _) in _DTYPES.items()}
_BY_NUMPY = {numpy: name for name, (_, numpy, _) in _DTYPES.items() if numpy is not None}


class SafetensorsError(NvmeError, ValueError):
    """A file that isn't in the safetensors format, or a tensor that can't be."""


@dataclass(frozen=True)
class _Stored:
    name: str
    dtype: str
    dims: tuple[int, ...]
    start: int
    stop: int


def load_file(
    filename: Path,
    device: Any = "cpu",
    *,
    library: Literal["torch", "numpy"] = "torch",
    handle: AioHandle | None = None,
) -> dict[str, Any]:
    """Load all tensors of a file.

    They share one stretch of memory: it is freed when the last of them is.

    Args:
        filename: the file.
        device: where tensors of torch go. Default: the CPU.
        library: whose tensors. Default: torch's.
        handle: to read with. Default: one of its own.

    Raises:
        SafetensorsError: the file is not in the format.
        MissingFileError, TruncatedFileError: see `AioHandle.start_read`.
    """
    path = os.fspath(filename)
    with _borrowed(handle) as ours:
        begin, stored = _read_header(path, ours)
        size = max((tensor.stop for tensor in stored), default=0)
        if os.path.getsize(path) > begin + size:
            raise SafetensorsError(
                f"a safetensors file ends with its last tensor: {path} should have {begin + size} bytes, "
                f"it has {os.path.getsize(path)}"
            )
        # The first byte lies in its page of memory where it lies in its page of the file: no copy is needed.
        memory = Memory(size + PAGE)
        shift = begin % PAGE
        data = memory.buffer[shift : shift + size]
        ours.start_read(data, path, begin).result()
    make = _torch_maker(device) if library == "torch" else _numpy_maker(path)
    return {tensor.name: make(data[tensor.start : tensor.stop], tensor) for tensor in stored}


def save_file(
    tensors: Mapping[str, Any],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    handle: AioHandle | None = None,
) -> None:
    """Save tensors in a file, which appears under its name in one step when it is complete and on the drive.

    Args:
        tensors: by name; contiguous, torch's on any device or numpy's.
        filename: the file; one that exists is replaced.
        metadata: texts to keep with them.
        handle: to write with. Default: one of its own.

    Raises:
        SafetensorsError: a dtype that the format does not have.
        InvalidBufferError, NoSpaceError, AccessError.
    """
    path = os.fspath(filename)
    ordered = sorted(tensors.items(), key=lambda item: (-_DTYPES[_dtype(*item)][2], item[0]))
    views = [View(tensor, writable=False) for _, tensor in ordered]
    header: dict[str, Any] = {} if not metadata else {"__metadata__": dict(metadata)}
    position = 0
    for (name, tensor), view in zip(ordered, views):
        dims = list(kind_of(tensor).dims)
        header[name] = {
            "dtype": _dtype(name, tensor),
            "shape": dims,
            "data_offsets": [position, position + view.nbytes],
        }
        position += view.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)  # the format allows it; tensors then begin on a page
    head = bytearray(struct.pack("<Q", len(text)) + text)
    # A name of its own: what a killed save has left is never written into. Short, as names have a limit.
    made, draft = tempfile.mkstemp(".draft", dir=os.path.dirname(path) or ".")
    os.close(made)
    try:
        with _borrowed(handle) as ours:
            _write(ours, draft, head, views)
        _sync(draft)
        os.replace(draft, path)
        _sync(os.path.dirname(path) or ".")
    finally:
        for view in views:
            view.release()
        if os.path.exists(draft):
            os.unlink(draft)


def _write(handle: AioHandle, path: str, head: bytearray, views: list[View]) -> None:
    """Copy everything into two buffers in turn: one is filled while the other is written, both always aligned."""
    pieces = [View(head, writable=False), *views]
    total = sum(piece.nbytes for piece in pieces)
    stages = [Memory(min(_STAGE, total)) for _ in range(2 if total > _STAGE else 1)]
    writing: list[Any] = [None, None]
    offset = turn = filled = 0
    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            if filled == 0 and writing[turn] is not None:
                writing[turn].result()
            step = min(piece.nbytes - done, stages[turn].nbytes - filled)
            piece.copy_out(done, step, stages[turn], filled)
            filled, done = filled + step, done + step
            if filled == stages[turn].nbytes:
                writing[turn] = handle.start_write(stages[turn].buffer, path, offset)
                offset, turn, filled = offset + filled, (turn + 1) % len(stages), 0
    if filled:
        handle.start_write(stages[turn].buffer[:filled], path, offset).result()
    for operation in writing:
        if operation is not None:
            operation.result()
    pieces[0].release()


def _read_header(path: str, handle: AioHandle) -> tuple[int, list[_Stored]]:
    """Where the tensors' bytes begin, and what they are."""
    length = bytearray(8)
    handle.sync_pread(length, path)
    nbytes = struct.unpack("<Q", length)[0]
    if nbytes > _LARGEST_HEADER:
        raise SafetensorsError(f"a safetensors header has at most {_LARGEST_HEADER} bytes: {path} claims {nbytes}")
    text = bytearray(nbytes)
    handle.sync_pread(text, path, 8)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        stored = [
            _Stored(name, each["dtype"], tuple(each["shape"]), *each["data_offsets"]) for name, each in header.items()
        ]
        stored.sort(key=lambda tensor: (tensor.start, tensor.stop))
        _check(stored)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SafetensorsError(f"a safetensors file begins with a valid header: {path} does not ({error})") from error
    return 8 + nbytes, stored


def _check(stored: list[_Stored]) -> None:
    position = 0
    for tensor in stored:
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{tensor.name!r} has the unknown dtype {tensor.dtype!r}")
        count = _DTYPES[tensor.dtype][2]
        for dim in tensor.dims:
            if not isinstance(dim, int) or dim < 0:
                raise ValueError(f"{tensor.name!r} has the shape {tensor.dims}")
            count *= dim
        if (tensor.start, tensor.stop) != (position, position + count):
            raise ValueError(
                f"{tensor.name!r} lies at [{tensor.start}, {tensor.stop}), not [{position}, {position + count})"
            )
        position += count


def _torch_maker(device: Any) -> Any:
    torch = importlib.import_module("torch")

    def make(data: memoryview, tensor: _Stored) -> Any:
        dtype = getattr(torch, _DTYPES[tensor.dtype][0])
        if not data.nbytes:
            return torch.empty(tensor.dims, dtype=dtype, device=device)
        flat = torch.frombuffer(data, dtype=torch.uint8)
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()  # writers that don't sort by dtype leave tensors at odd places
        return flat.view(dtype).reshape(tensor.dims).to(device)

    return make


def _numpy_maker(path: str) -> Any:
    numpy = importlib.import_module("numpy")

    def make(data: memoryview, tensor: _Stored) -> Any:
        dtype = _DTYPES[tensor.dtype][1]
        if dtype is None:
            raise SafetensorsError(
                f"numpy has all dtypes that are loaded into it: {tensor.name!r} of {path} is {tensor.dtype}; "
                "use library='torch'"
            )
        array = numpy.frombuffer(data, dtype=dtype).reshape(tensor.dims)
        return array if array.flags.aligned else array.copy()

    return make


def _dtype(name: str, tensor: Any) -> str:
    kind = kind_of(tensor)
    found = (_BY_TORCH if kind.library == "torch" else _BY_NUMPY).get(kind.dtype) if kind.library != "buffer" else None
    if found is None:
        raise SafetensorsError(
            f"safetensors keeps arrays of {', '.join(_DTYPES)}: {name!r} is {kind.dtype or kind.library}"
        )
    return found


class _borrowed:
    """A handle for a while: the caller's, or one of its own that is closed afterwards."""

    def __init__(self, handle: AioHandle | None) -> None:
        self._own = handle is None
        self._handle = handle or AioHandle()

    def __enter__(self) -> AioHandle:
        return self._handle

    def __exit__(self, *_: object) -> None:
        if self._own:
            self._handle.close()


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
