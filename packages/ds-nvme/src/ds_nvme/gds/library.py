"""Finding and loading libcufile and the CUDA driver's library.

Note [CUDA first]
    libcufile is asked for nothing before the CUDA driver has shown a device: without one, cuFileDriverOpen of
    libcufile 1.20 (CUDA 13) never returns.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_nvme.errors import GdsError
from ds_nvme.native._cufile import ffi

CUFILE_VARIABLE = "DS_NVME_CUFILE"
"""Environment variable: the file of libcufile, where it isn't found by itself."""
CUDA_VARIABLE = "DS_NVME_CUDA"
"""Environment variable: the file of libcuda, where it isn't found by itself."""


def load_cuda() -> Any:
    """The CUDA driver's library, initialised, with at least one device.

    Raises:
        GdsError: there is no driver or no device.
    """
    name = os.environ.get(CUDA_VARIABLE) or "libcuda.so.1"
    try:
        cuda: Any = ffi.dlopen(name)
        code = cuda.cuInit(0)
    except (OSError, AttributeError) as error:
        raise GdsError(
            f"cuFile needs the NVIDIA driver: {_first_line(error)}; install it, in a container start that with "
            f"--gpus, or name its libcuda.so.1 in {CUDA_VARIABLE}"
        ) from error
    if code:
        raise GdsError(
            f"cuFile needs a CUDA device: cuInit reports CUDA {code} ({cuda_name(cuda, code)}); check nvidia-smi",
            cuda=code,
        )
    count = ffi.new("int *")
    code = cuda.cuDeviceGetCount(count)
    if code or not count[0]:
        raise GdsError(
            "cuFile needs a CUDA device: the driver shows none; check nvidia-smi and CUDA_VISIBLE_DEVICES", cuda=code
        )
    return cuda


def load_cufile(path: str | os.PathLike[str] | None) -> tuple[Any, str]:
    """libcufile and what it was loaded by.

    Args:
        path: its file. Default: that of DS_NVME_CUFILE, or else where linker, pip and the CUDA toolkit put it.

    Raises:
        GdsError: it is nowhere, or can't be loaded.
    """
    given = path if path is not None else os.environ.get(CUFILE_VARIABLE)
    tried: list[str] = []
    for name in [os.fspath(given)] if given else _places():
        try:
            return ffi.dlopen(name), name
        except OSError as error:
            tried.append(_first_line(error))
    raise GdsError(
        f"gds_handle needs NVIDIA's libcufile: {'; '.join(tried)}; install it with pip install nvidia-cufile "
        "(CUDA 13) or nvidia-cufile-cu12, or with the CUDA toolkit's GDS packages, or name the file in "
        f"{CUFILE_VARIABLE}"
    )


def cuda_name(cuda: Any, code: int) -> str:
    """A CUDA driver's error code as CUDA writes it, or ""."""
    name = ffi.new("char **")
    try:
        known = cuda.cuGetErrorName(code, name) == 0 and name[0] != ffi.NULL
    except AttributeError:
        return ""
    return ffi.string(name[0]).decode() if known else ""


def _places() -> Iterator[str]:
    yield "libcufile.so.0"  # the linker's; also one that torch has loaded from its own wheels
    folders: list[Path] = []
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations if spec is not None else None) or []:
        folders += [*sorted(Path(root).glob("cu[0-9]*/lib"), reverse=True), Path(root, "cufile", "lib")]
    machine = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}.get(platform.machine(), "")
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    folders += [home / "lib64", home / "targets" / machine / "lib"]
    for folder in folders:
        if (file := folder / "libcufile.so.0").exists():
            yield str(file)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
