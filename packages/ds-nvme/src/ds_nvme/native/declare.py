"""Write `_bindings.py` and `_cufile.py` from the declarations below: `python -m ds_nvme.native.declare`.

cffi's out-of-line ABI mode: the declarations are parsed here, once, not at every import (pycparser costs 40 ms),
and no compiler takes part. The written files are committed; a test keeps them equal to what this module writes.

Addresses are declared `uintptr_t` where C says `void *`: Python passes them as integers without a cast, and
every ABI that Linux and macOS have passes both alike.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

DECLARATIONS = """
long syscall(long number, long a, long b, long c, long d, long e, long f);
ssize_t pread(int fd, uintptr_t buffer, size_t nbytes, int64_t offset);
ssize_t pwrite(int fd, uintptr_t buffer, size_t nbytes, int64_t offset);
int fallocate(int fd, int mode, int64_t offset, int64_t nbytes);
int statx(int directory, const char *path, int flags, unsigned int mask, void *result);
int mlock(uintptr_t address, size_t nbytes);
int munlock(uintptr_t address, size_t nbytes);
int madvise(uintptr_t address, size_t nbytes, int advice);
uintptr_t memmove(uintptr_t to, uintptr_t from, size_t nbytes);
int memcmp(uintptr_t one, uintptr_t other, size_t nbytes);
"""

CUFILE_DECLARATIONS = """
typedef struct { int err; int cu_err; } CUfileError_t;
typedef struct {
    int type;
    union { int fd; void *handle; } handle;
    const void *fs_ops;
} CUfileDescr_t;
typedef struct {
    struct {
        unsigned int major_version;
        unsigned int minor_version;
        size_t poll_thresh_size;
        size_t max_direct_io_size;
        unsigned int dstatusflags;
        unsigned int dcontrolflags;
    } nvfs;
    unsigned int fflags;
    unsigned int max_device_cache_size;
    unsigned int per_buffer_cache_size;
    unsigned int max_device_pinned_mem_size;
    unsigned int max_batch_io_size;
    unsigned int max_batch_io_timeout_msecs;
} CUfileDrvProps_t;
CUfileError_t cuFileDriverOpen(void);
CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *properties);
CUfileError_t cuFileGetVersion(int *version);
CUfileError_t cuFileHandleRegister(void **handle, CUfileDescr_t *description);
void cuFileHandleDeregister(void *handle);
CUfileError_t cuFileBufRegister(uintptr_t base, size_t nbytes, int flags);
CUfileError_t cuFileBufDeregister(uintptr_t base);
ssize_t cuFileRead(void *handle, uintptr_t base, size_t nbytes, int64_t file_offset, int64_t buffer_offset);
ssize_t cuFileWrite(void *handle, uintptr_t base, size_t nbytes, int64_t file_offset, int64_t buffer_offset);
int cuInit(unsigned int flags);
int cuDeviceGetCount(int *count);
int cuGetErrorName(int code, const char **name);
"""
"""Source: NVIDIA's cuFile API Reference Guide and CUDA Driver API; enumerations are declared as the `int` they are."""

FILES = {"_bindings": DECLARATIONS, "_cufile": CUFILE_DECLARATIONS}

_HEADER = """\
# Written by ds_nvme.native.declare: edit the declarations there.
# fmt: off
# ruff: noqa
# mypy: ignore-errors
"""


def render(name: str) -> str:
    """The text of `_bindings.py` or `_cufile.py`."""
    import cffi  # type: ignore[import-untyped, unused-ignore]

    builder = cffi.FFI()
    builder.cdef(FILES[name])
    builder.set_source(f"ds_nvme.native.{name}", None)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, f"{name}.py")
        builder.emit_python_code(str(target))
        return _HEADER + target.read_text()


if __name__ == "__main__":
    for each in FILES:
        Path(__file__).with_name(f"{each}.py").write_text(render(each))
        sys.stdout.write(f"written: {each}.py\n")
