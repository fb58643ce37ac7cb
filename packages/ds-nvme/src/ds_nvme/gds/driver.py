"""cuFile's calls, typed. They release the GIL while they run."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

from ds_nvme.errors import GdsError, NvmeError, file_error
from ds_nvme.gds.codes import CUDA_ERROR, gds_error
from ds_nvme.gds.library import cuda_name, load_cuda, load_cufile
from ds_nvme.gds.mode import Properties
from ds_nvme.native._cufile import ffi

_OPAQUE_FD = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD


class Driver:
    """libcufile with its driver open. Use `open_driver`, which opens each library once.

    It is never closed: others in the process may use it too, and the library closes it when the process ends.

    Args:
        path: see `load_cufile`.

    Raises:
        GdsError: it can't run here.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._cuda = load_cuda()
        self._library, self.path = load_cufile(path)
        try:
            self._check("a GPU is reached through cuFile's driver", self._library.cuFileDriverOpen())
        except AttributeError as error:
            raise GdsError(f"libcufile has cuFile's functions: {self.path} has not ({error}); name another") from error

    def version(self) -> str:
        """Of the library, as 1.14; "of an old release" before it told."""
        number = ffi.new("int *")
        try:
            if self._library.cuFileGetVersion(number).err:
                return "of unknown release"
        except AttributeError:
            return "of an old release"
        return f"{number[0] // 1000}.{number[0] % 1000 // 10}"

    def properties(self) -> Properties:
        """What it says of itself."""
        found = ffi.new("CUfileDrvProps_t *")
        self._check("cuFile tells its properties", self._library.cuFileDriverGetProperties(found))
        nvfs = found.nvfs
        return Properties((nvfs.major_version, nvfs.minor_version), nvfs.dstatusflags, nvfs.dcontrolflags, found.fflags)

    def register_file(self, fd: int, path: str) -> Any:
        """Prepare an open file. Undo with `deregister_file` before it is closed.

        Raises:
            GdsError: cuFile can't use it.
        """
        description = ffi.new("CUfileDescr_t *")
        description.type = _OPAQUE_FD
        description.handle.fd = fd
        handle = ffi.new("void **")
        self._check(f"cuFile can use the file {path}", self._library.cuFileHandleRegister(handle, description))
        return handle[0]

    def deregister_file(self, handle: Any) -> None:
        """Undo `register_file`."""
        self._library.cuFileHandleDeregister(handle)

    def register_memory(self, address: int, nbytes: int) -> None:
        """Pin device memory. Undo with `deregister_memory` before it is freed.

        Raises:
            GdsError: it can't be pinned.
        """
        self._check(f"cuFile pins {nbytes} bytes of device memory", self._library.cuFileBufRegister(address, nbytes, 0))

    def deregister_memory(self, address: int) -> None:
        """Undo `register_memory`.

        Raises:
            GdsError: it wasn't pinned.
        """
        self._check("cuFile unpins what was pinned", self._library.cuFileBufDeregister(address))

    def move(
        self, handle: Any, base: int, nbytes: int, file_offset: int, buffer_offset: int, *, write: bool, path: str
    ) -> int:
        """Read into or write from device memory at `base + buffer_offset`: the bytes moved, 0 at the file's end.

        Raises:
            FileError: the system refuses.
            GdsError: cuFile or CUDA does.
        """
        call = self._library.cuFileWrite if write else self._library.cuFileRead
        while True:
            moved: int = call(handle, base, nbytes, file_offset, buffer_offset)
            if moved >= 0:
                return moved
            code = ffi.errno
            if moved != -1 or code != errno.EINTR:
                raise self._failure(moved, code, path, file_offset, write)

    def _failure(self, result: int, code: int, path: str, offset: int, write: bool) -> NvmeError:
        if result == -1:
            return file_error(code, path, offset)
        doing = "writes" if write else "reads"
        return gds_error(f"cuFile {doing} {path} at offset {offset}", -result)

    def _check(self, rule: str, status: Any) -> None:
        if status.err:
            cuda = status.cu_err if status.err == CUDA_ERROR else 0
            raise gds_error(rule, status.err, cuda, cuda_name(self._cuda, cuda) if cuda else "")


_OPEN: dict[tuple[int, str | None], Driver] = {}
_LOCK = threading.Lock()


def open_driver(path: str | os.PathLike[str] | None = None) -> Driver:
    """The open driver of a library, the same one each time.

    Args:
        path: see `load_cufile`.

    Raises:
        GdsError: it can't run here; the message says what to install.
    """
    key = (os.getpid(), None if path is None else os.fspath(path))
    with _LOCK:
        if key not in _OPEN:
            _OPEN[key] = Driver(path)
        return _OPEN[key]


def gds_refusal(path: str | os.PathLike[str] | None = None) -> str | None:
    """Why `gds_handle` can't run here, or None where it can: it is tried.

    Args:
        path: of libcufile. Default: see `GdsHandle`.
    """
    try:
        open_driver(path)
    except GdsError as error:
        return str(error)
    return None
