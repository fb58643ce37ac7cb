"""The handle that moves bytes between files and CUDA tensors through cuFile: `gds_handle`."""

from __future__ import annotations

import os
from typing import Any

from ds_nvme.alignment import Alignment
from ds_nvme.description import Description
from ds_nvme.devices.base import DeviceBuffer
from ds_nvme.errors import InvalidBufferError
from ds_nvme.face import Handle
from ds_nvme.files import OpenFile, Path
from ds_nvme.gds.crew import GdsCrew, GdsOperation
from ds_nvme.gds.driver import open_driver
from ds_nvme.gds.mode import current_mode
from ds_nvme.gds.pins import Pins
from ds_nvme.gds.plan import plan_gds
from ds_nvme.operation import Operation
from ds_nvme.plan import TransferPlan
from ds_nvme.regions import Region
from ds_nvme.view import View, is_tensor

_GPU_PAGE = 64 << 10
"""What cuFile pins device memory by, in bytes."""


class GdsHandle(Handle):
    """Moves CUDA tensors to and from files through cuFile (GPUDirect Storage), asynchronously.

    The faces are those of `AioHandle`. Buffers are contiguous CUDA tensors; pinned ones (`pin_device_tensor`,
    `new_pinned_device_tensor`) are moved without a detour through cuFile's own buffers. Whether bytes go straight
    between drive and GPU or through host memory is cuFile's to decide: `describe()` says what is known of it.
    libcufile is looked for where the linker, pip (nvidia-cufile) and the CUDA toolkit put it; the environment variable
    DS_NVME_CUFILE names it elsewhere, DS_NVME_CUDA likewise names libcuda.

    Args:
        block_size: bytes of one cuFile call.
        queue_depth: most calls at a time, for each of `intra_op_parallelism`; at most 32 altogether, each in a thread.
        single_submit: no difference: cuFile takes calls one by one.
        overlap_events: no difference: each thread goes on as its call ends.
        intra_op_parallelism: see `queue_depth`.
        cufile: the file of libcufile. Default: see above.

    Raises:
        ValueError: an option is out of range.
        GdsError: cuFile can't run here; the message says what to install.

    Source: DeepNVMe tutorial, "Creating DeepNVMe Handles".
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = True,
        intra_op_parallelism: int = 1,
        *,
        cufile: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._driver = open_driver(cufile)
        self._pins = Pins(self._driver)
        self._crew = GdsCrew(self._driver, queue_depth * intra_op_parallelism)
        self._close_with(self._crew.close, self._pins.close)

    def new_pinned_device_tensor(self, num_elements: int, like: Any) -> Any:
        """Pinned device memory, from and to which cuFile moves bytes without a detour. Uninitialised, flat.

        Args:
            num_elements: its elements.
            like: a tensor whose dtype and device it gets; the current CUDA device for a tensor on the CPU.

        Raises:
            GdsError: it can't be pinned.
        """
        if num_elements < 0:
            raise ValueError(f"a tensor has 0 or more elements: got {num_elements}")
        self._require_open()
        if is_tensor(like) and like.device.type == "cpu":
            like = like.new_empty(0, device="cuda")
        tensor = _device_buffer(like).empty(num_elements, _GPU_PAGE)
        self._pins.add(_device_buffer(tensor), tensor, ours=True)
        return tensor

    def free_pinned_device_tensor(self, tensor: Any) -> bool:
        """Unpin memory of `new_pinned_device_tensor`; it is freed when nothing refers to it any more.

        Returns:
            Whether it was this handle's.

        Raises:
            InvalidBufferError: a transfer uses it.
        """
        return self._pins.remove(_device_buffer(tensor), ours=True)

    def pin_device_tensor(self, tensor: Any) -> bool:
        """Pin a tensor's memory, until `unpin_device_tensor` or the handle's end; it stays alive as long.

        Returns:
            Whether it wasn't pinned before.

        Raises:
            GdsError: it can't be pinned.
        """
        self._require_open()
        return self._pins.add(_device_buffer(tensor), tensor, ours=False)

    def unpin_device_tensor(self, tensor: Any) -> bool:
        """Undo `pin_device_tensor`.

        Returns:
            Whether it was pinned by this handle's `pin_device_tensor`.

        Raises:
            InvalidBufferError: a transfer uses it.
        """
        return self._pins.remove(_device_buffer(tensor), ours=False)

    def describe(self, filename: Path | None = None) -> Description:
        """Which way transfers go and why; with a file, also how that file can be accessed. Prints as text."""
        notes = [f"{self._pins.nbytes} bytes of device memory pinned; at most {self._crew.most} calls at a time"]
        if filename is not None and not self._alignment(filename).direct:
            notes.append("without O_DIRECT nothing of this file goes through cuFile")
        return Description(
            engine="cufile",
            path=f"cuFile {self._driver.version()}: {current_mode(self._driver.properties())}",
            why=f"loaded {self._driver.path}",
            refused={},
            block_size=self._block_size,
            queue_depth=self._queue_depth,
            single_submit=self._single_submit,
            overlap_events=self._overlap_events,
            intra_op_parallelism=self._intra_op_parallelism,
            blocks_at_once=0,
            straight_blocks=self._crew.direct_blocks,
            bounced_blocks=0,
            mended_blocks=self._crew.cached_blocks,
            notes=tuple(notes),
            file=self._access(filename),
        )

    # --- how

    def _accept(self, view: View) -> None:
        if view.device is None or view.device.device.kind != "cuda":
            where = "the CPU" if view.device is None else view.device.device.name
            raise InvalidBufferError(
                f"gds_handle moves CUDA tensors: got memory of {where}; use aio_handle, or move it with .cuda()"
            )

    def _plan(self, view: View, file: OpenFile, file_offset: int, write: bool) -> TransferPlan:
        return plan_gds(
            write=write,
            nbytes=view.nbytes,
            file_offset=file_offset,
            file_size=file.size,
            alignment=file.alignment(),
            block_size=self._block_size,
        )

    def _operation(self, plan: TransferPlan, file: OpenFile, view: View, region: Region, validate: bool) -> Operation:
        return GdsOperation(plan, file, view, region, self._driver, self._pins, validate)

    def _put(self, operation: Operation) -> None:
        assert isinstance(operation, GdsOperation)
        operation.register()
        self._crew.put(operation)

    def _alignment(self, filename: Path) -> Alignment:
        file = OpenFile(filename, write=False)
        try:
            return file.alignment()
        finally:
            file.close()


gds_handle = GdsHandle
"""The documented name of `GdsHandle`."""


def _device_buffer(tensor: Any) -> DeviceBuffer:
    """How a CUDA tensor takes part. Raises InvalidBufferError where it can't."""
    view = View(tensor, writable=False)
    if view.device is None or view.device.device.kind != "cuda":
        raise InvalidBufferError(f"a pinned device tensor is a CUDA tensor: got {type(tensor).__name__} elsewhere")
    return view.device
