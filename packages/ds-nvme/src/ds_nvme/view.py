"""Where the bytes of a buffer are: numpy arrays, bytearrays, memoryviews, torch tensors on any device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ds_nvme.errors import InvalidBufferError
from ds_nvme.memory import Memory
from ds_nvme.native import libc

if TYPE_CHECKING:
    from ds_nvme.devices.base import DeviceBuffer


class View:
    """The memory of one buffer, kept alive and unmoved until `release`.

    Args:
        buffer: an object with the buffer protocol, a `torch.Tensor`, or anything with `__device_buffer__`; contiguous
            (row-major).
        writable: the transfer writes into the buffer.

    Raises:
        InvalidBufferError: it is no buffer, not contiguous, read-only where it would be written, or on a device that
            can't take part.
    """

    __slots__ = ("_owner", "address", "device", "nbytes")

    def __init__(self, buffer: Any, *, writable: bool) -> None:
        self.address = 0
        """Of the first byte: in host memory, or on the device where there is one."""
        self.nbytes = 0
        self.device: DeviceBuffer | None = None
        """How to reach memory that isn't the host's."""
        self._owner: Any = None
        if is_tensor(buffer):
            self._view_tensor(buffer)
        elif hasattr(type(buffer), "__device_buffer__"):
            self._view_device(buffer.__device_buffer__(), buffer)
        else:
            self._view_exported(buffer, writable)

    def _view_exported(self, buffer: Any, writable: bool) -> None:
        try:
            exported = libc.Exported(buffer, writable=writable)
        except (TypeError, ValueError, BufferError) as error:
            raise InvalidBufferError(
                f"a buffer is contiguous memory{', and writable where a file is read into it' if writable else ''}: "
                f"got {type(buffer).__name__} ({error}); pass a contiguous array, bytearray, memoryview or tensor"
            ) from error
        if getattr(getattr(buffer, "dtype", None), "hasobject", False):
            exported.release()
            raise InvalidBufferError(
                f"a file holds values: got an array of Python objects ({buffer.dtype}), which are addresses; "
                "convert it to numbers"
            )
        self.address, self.nbytes, self._owner = exported.address, exported.nbytes, exported

    def _view_tensor(self, tensor: Any) -> None:
        torch = sys.modules["torch"]
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise InvalidBufferError(
                f"a tensor has memory of its own: got layout {tensor.layout} on {tensor.device}; pass a dense tensor"
            )
        if not tensor.is_contiguous():
            raise InvalidBufferError(
                f"a tensor is contiguous: got shape {tuple(tensor.shape)} with strides {tuple(tensor.stride())}; "
                "call .contiguous() (and for a read, copy back)"
            )
        if tensor.is_conj() or tensor.is_neg():
            raise InvalidBufferError(
                "a tensor's memory holds its values: got one that is conjugated or negated when read; "
                "call .resolve_conj().resolve_neg()"
            )
        if tensor.device.type != "cpu":
            from ds_nvme.devices.torch_device import TorchBuffer

            self._view_device(TorchBuffer(tensor), tensor)
            return
        self.address, self.nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self._owner = tensor.detach()  # of the same memory also where the caller's tensor is given other

    def _view_device(self, device: DeviceBuffer, owner: Any) -> None:
        self.address, self.nbytes = device.address, device.nbytes
        self.device, self._owner = device, owner

    def copy_out(self, position: int, nbytes: int, memory: Memory, at: int) -> None:
        """Copy bytes `[position, position + nbytes)` to `memory`, from its byte `at` on, wherever they are."""
        if self.device is None:
            libc.move(memory.address + at, self.address + position, nbytes)
        else:
            self.device.copy_to_host(position, nbytes, memory, at).wait()

    def equals(self, position: int, address: int, nbytes: int) -> bool:
        """Whether bytes `[position, position + nbytes)` are those at `address` in host memory."""
        if self.device is None:
            return libc.equal(address, self.address + position, nbytes)
        memory = Memory(nbytes)
        self.copy_out(position, nbytes, memory, 0)
        return libc.equal(address, memory.address, nbytes)

    def release(self) -> None:
        """Let go of the buffer: it may be resized or freed again."""
        owner, self._owner = self._owner, None
        self.device = None
        if isinstance(owner, libc.Exported):
            owner.release()


def is_tensor(buffer: Any) -> bool:
    """Whether it is a torch tensor. torch is never imported for the answer: without it there are no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(buffer, torch.Tensor)
