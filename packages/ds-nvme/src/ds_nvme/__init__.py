"""ds-nvme: tensors between memory and files, asynchronously and at the drive's speed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_nvme.description import Description
from ds_nvme.engines.choose import names as engine_names
from ds_nvme.errors import (
    AccessError,
    BudgetError,
    CancelledTransferError,
    ClosedHandleError,
    DeviceError,
    EngineError,
    FileError,
    GdsError,
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
    from ds_nvme.gathered import Gathered
    from ds_nvme.gds.driver import gds_refusal
    from ds_nvme.gds.handle import GdsHandle, gds_handle
    from ds_nvme.pool import BufferPool, PooledBuffer, PoolStatistics
    from ds_nvme.store import TensorStore

aio_handle = AioHandle
"""The documented name of `AioHandle`."""

__all__ = [
    "AccessError",
    "AioConfig",
    "AioHandle",
    "BudgetError",
    "BufferPool",
    "CancelledTransferError",
    "ClosedHandleError",
    "Description",
    "DeviceError",
    "EngineError",
    "FileError",
    "Gathered",
    "GdsError",
    "GdsHandle",
    "InvalidBufferError",
    "MissingFileError",
    "NoSpaceError",
    "NvmeError",
    "Operation",
    "OverlapError",
    "PoolStatistics",
    "PooledBuffer",
    "Segment",
    "TensorStore",
    "TransferPlan",
    "TruncatedFileError",
    "VerifyError",
    "aio_handle",
    "engine_names",
    "gds_handle",
    "gds_refusal",
]


_LATER = {
    "AioConfig": "config",
    "BufferPool": "pool",
    "Gathered": "gathered",
    "GdsHandle": "gds.handle",
    "PoolStatistics": "pool",
    "PooledBuffer": "pool",
    "TensorStore": "store",
    "gds_handle": "gds.handle",
    "gds_refusal": "gds.driver",
}
"""Modules that are imported when first used: pydantic alone takes longer than everything that a transfer needs."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"ds_nvme.{_LATER[name]}"), name)
    raise AttributeError(f"module 'ds_nvme' has no attribute {name!r}")
