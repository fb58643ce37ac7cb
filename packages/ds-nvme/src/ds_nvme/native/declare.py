"""Write `_bindings.py` from the declarations below: `python -m ds_nvme.native.declare`.

cffi's out-of-line ABI mode: the declarations are parsed here, once, not at every import (pycparser costs 40 ms),
and no compiler takes part. The written file is committed; a test keeps it equal to what this module writes.

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

_HEADER = """\
# Written by ds_nvme.native.declare: edit the declarations there.
# fmt: off
# ruff: noqa
# mypy: ignore-errors
"""


def render() -> str:
    """The text of `_bindings.py`."""
    import cffi  # type: ignore[import-untyped, unused-ignore]

    builder = cffi.FFI()
    builder.cdef(DECLARATIONS)
    builder.set_source("ds_nvme.native._bindings", None)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "_bindings.py")
        builder.emit_python_code(str(target))
        return _HEADER + target.read_text()


if __name__ == "__main__":
    Path(__file__).with_name("_bindings.py").write_text(render())
    sys.stdout.write("written: _bindings.py\n")
