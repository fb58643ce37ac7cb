"""Where the bytes of a buffer are: numpy arrays, bytearrays, memoryviews, torch tensors on any device."""

from __future__ import annotations

import sys
from typing import Any

from ds_nvme.errors import InvalidBufferError
from ds_nvme.native import libc


class View:
    """The memory of one buffer, kept alive and unmoved until `release`.

    Args:
        buffer: an object with the buffer protocol, or a `torch.Tensor`; contiguous (row-major).
        writable: the transfer writes into the buffer.

    Raises:
        InvalidBufferError: it is no buffer, not contiguous, or read-only where it would be written.
    """

    __slots__ = ("_owner", "address", "nbytes")

    def __init__(self, buffer: Any, *, writable: bool) -> None:
        self.address = 0
        """Of the first byte in host memory; 0 for a tensor on a device."""
        self.nbytes = 0
        self._owner: Any = None
        if is_tensor(buffer):
            self._view_tensor(buffer)
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
        self.address, self.nbytes, self._owner = exported.address, exported.nbytes, exported

    def _view_tensor(self, tensor: Any) -> None:
        torch = sys.modules["torch"]
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise InvalidBufferError(
                f"a tensor has memory of its own: got layout {tensor.layout} on {tensor.device}; "
                "pass a dense tensor on the CPU"
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
            raise InvalidBufferError(
                f"a tensor is in host memory: got one on {tensor.device}; copy through a pinned CPU tensor"
            )
        self.address, self.nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self._owner = tensor

    def release(self) -> None:
        """Let go of the buffer: it may be resized or freed again."""
        owner, self._owner = self._owner, None
        if isinstance(owner, libc.Exported):
            owner.release()


def is_tensor(buffer: Any) -> bool:
    """Whether it is a torch tensor. torch is never imported for the answer: without it there are no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(buffer, torch.Tensor)
