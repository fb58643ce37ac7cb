"""ds-nvme: tensors between memory and files, asynchronously and at the drive's speed."""

from typing import TYPE_CHECKING, Any

from ds_nvme.description import Description
from ds_nvme.engines.choose import names as engine_names
from ds_nvme.errors import (
    AccessError,
    BudgetError,
    ClosedHandleError,
    EngineError,
    FileError,
    InvalidBufferError,
    MissingFileError,
    NoSpaceError,
    NvmeError,
    OverlapError,
    TruncatedFileError,
    VerifyError,
)
from ds_nvme.handle import AioHandle
from ds_nvme.operation import Operation
from ds_nvme.plan import Segment, TransferPlan

if TYPE_CHECKING:
    from ds_nvme.config import AioConfig

aio_handle = AioHandle
"""The documented name of `AioHandle`."""

__all__ = [
    "AccessError",
    "AioConfig",
    "AioHandle",
    "BudgetError",
    "ClosedHandleError",
    "Description",
    "EngineError",
    "FileError",
    "InvalidBufferError",
    "MissingFileError",
    "NoSpaceError",
    "NvmeError",
    "Operation",
    "OverlapError",
    "Segment",
    "TransferPlan",
    "TruncatedFileError",
    "VerifyError",
    "aio_handle",
    "engine_names",
]


def __getattr__(name: str) -> Any:
    # pydantic takes longer to import than everything else here together.
    if name == "AioConfig":
        from ds_nvme.config import AioConfig

        return AioConfig
    raise AttributeError(f"module 'ds_nvme' has no attribute {name!r}")
