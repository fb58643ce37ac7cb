"""cuFile's own error codes (CUfileOpError), in words.

Source: NVIDIA's cuFile API Reference Guide, "cuFile API Functional Specification".
"""

from __future__ import annotations

from ds_nvme.errors import GdsError

CUDA_ERROR = 5011
"""The CUDA driver failed: its own code says how."""

_CODES = {
    5001: ("DRIVER_NOT_INITIALIZED", "load the nvidia-fs kernel module, or set allow_compat_mode in cufile.json"),
    5002: ("DRIVER_INVALID_PROPS", "check cufile.json"),
    5003: ("DRIVER_UNSUPPORTED_LIMIT", "check the sizes in cufile.json"),
    5004: ("DRIVER_VERSION_MISMATCH", "install nvidia-fs and libcufile of one release"),
    5005: ("DRIVER_VERSION_READ_ERROR", "install nvidia-fs and libcufile of one release"),
    5006: ("DRIVER_CLOSING", "the process is ending"),
    5007: ("PLATFORM_NOT_SUPPORTED", "use aio_handle, or set allow_compat_mode in cufile.json"),
    5008: ("IO_NOT_SUPPORTED", "the file's filesystem has no GPUDirect: use aio_handle, or set allow_compat_mode"),
    5009: ("DEVICE_NOT_SUPPORTED", "the GPU has no GPUDirect: use aio_handle, or set allow_compat_mode"),
    5010: ("NVFS_DRIVER_ERROR", "see dmesg for nvidia-fs"),
    CUDA_ERROR: ("CUDA_DRIVER_ERROR", "an earlier kernel may have failed"),
    5012: ("CUDA_POINTER_INVALID", "pass a CUDA tensor"),
    5013: ("CUDA_MEMORY_TYPE_INVALID", "pass memory of cudaMalloc, not managed or virtual memory"),
    5014: ("CUDA_POINTER_RANGE_ERROR", "is the tensor larger than its memory?"),
    5015: ("CUDA_CONTEXT_MISMATCH", "pass a tensor of this process's primary CUDA context"),
    5016: ("INVALID_MAPPING_SIZE", "raise max_device_pinned_mem_size_kb in cufile.json, or pin less"),
    5017: ("INVALID_MAPPING_RANGE", "pin the whole tensor"),
    5018: ("INVALID_FILE_TYPE", "name a regular file"),
    5019: ("INVALID_FILE_OPEN_FLAG", "use aio_handle for this file"),
    5020: ("DIO_NOT_SET", "the file's filesystem has no direct I/O: use aio_handle"),
    5022: ("INVALID_VALUE", "the release of libcufile may not know this"),
    5023: ("MEMORY_ALREADY_REGISTERED", "pin each tensor once"),
    5024: ("MEMORY_NOT_REGISTERED", "pin the tensor first"),
    5025: ("PERMISSION_DENIED", "check the modes of /dev/nvidia-fs* and of the file"),
    5027: ("HANDLE_NOT_REGISTERED", "make a new handle"),
    5028: ("HANDLE_ALREADY_REGISTERED", "make a new handle"),
    5029: ("DEVICE_NOT_FOUND", "check nvidia-smi"),
    5030: ("INTERNAL_ERROR", "see cufile.log"),
    5031: ("GETNEWFD_FAILED", "raise ulimit -n"),
    5033: ("NVFS_SETUP_ERROR", "see cufile.log; the NVIDIA driver may be missing here"),
    5034: ("IO_DISABLED", "cufile.json turns GPUDirect off for this file: use aio_handle, or set allow_compat_mode"),
    5036: ("GPU_MEMORY_PINNING_FAILED", "pin less: the GPU's BAR memory is used up (nvidia-smi -q -d MEMORY)"),
    5043: ("NOMEM_ERROR", "free memory"),
    5044: ("IO_ERROR", "see dmesg for the drive"),
}


def gds_error(rule: str, code: int, cuda: int = 0, cuda_name: str = "") -> GdsError:
    """The typed error for a code.

    Args:
        rule: what should have worked, with its values.
        code: of cuFile.
        cuda: of the CUDA driver, where `code` is CUDA_ERROR.
        cuda_name: its name.
    """
    name, mend = _CODES.get(code, ("", "see cufile.log"))
    said = f"cuFile reports {code}{f' (CU_FILE_{name})' if name else ''}"
    if cuda:
        said += f", CUDA {cuda}{f' ({cuda_name})' if cuda_name else ''}"
    return GdsError(f"{rule}: {said}; {mend}", code, cuda)
