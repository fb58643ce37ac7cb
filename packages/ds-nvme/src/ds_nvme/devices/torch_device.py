"""Devices of torch: CUDA, and every other whose torch module has streams and events. Never imports torch itself.

Note [streams]
    Copies run on a stream of their own for each direction, so that reads, writes and the caller's kernels overlap.
    Each waits for an event recorded on the caller's current stream when the transfer was asked for. The other way
    round no stream waits: a transfer counts as done when the host has seen its copies end, and what is queued after
    that comes later on every stream.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, cast

from ds_nvme.devices.base import Copy, Device, DeviceBuffer
from ds_nvme.errors import DeviceError, InvalidBufferError
from ds_nvme.memory import Memory

_NEEDED = ("Event", "Stream", "current_stream", "device", "stream")


class TorchCopy:
    """A copy, and the tensors it uses."""

    __slots__ = ("_event", "_kept", "_name")

    def __init__(self, name: str, event: Any, *kept: Any) -> None:
        self._name = name
        self._event = event
        self._kept = kept

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise _failed(self._name, error) from error


class TorchDevice(Device):
    """A device by its `torch.device`. Use `torch_device`, which makes one of each.

    Args:
        device: with its index.

    Raises:
        InvalidBufferError: torch has no streams and events for it.
    """

    def __init__(self, device: Any) -> None:
        self.name, self.kind = str(device), str(device.type)
        self.torch = sys.modules["torch"]
        self.device = device
        self.module = cast(Any, getattr(self.torch, self.kind, None))
        missing = [name for name in _NEEDED if not hasattr(self.module, name)]
        if missing:
            raise InvalidBufferError(
                f"a tensor is on the CPU, or on a device that torch has streams and events for: got one on {device}, "
                f"without torch.{self.kind}.{missing[0]}; move it with .cpu()"
            )
        # Waiting threads should sleep, not spin: what is waited for may be a long kernel.
        self._event_options = {"blocking": True} if self.kind == "cuda" else {}
        self._streams = {write: self.module.Stream(device) for write in (False, True)}

    def using(self) -> AbstractContextManager[object]:
        used: AbstractContextManager[object] = self.module.device(self.device)
        return used

    def lock_pages(self, memory: Memory) -> str | None:
        if not hasattr(self.module, "cudart"):
            return f"torch.{self.kind} can't page-lock memory that exists"
        # cudaHostRegister: unlike torch's own pinned memory it is whole pages, and given back when the handle closes.
        result = self.module.cudart().cudaHostRegister(memory.address, memory.nbytes, 0)
        code = int(getattr(result, "value", result))
        return None if code == 0 else f"cudaHostRegister of {memory.nbytes} bytes failed with code {code}"

    def unlock_pages(self, memory: Memory) -> None:
        if hasattr(self.module, "cudart"):
            self.module.cudart().cudaHostUnregister(memory.address)

    def event(self, stream: Any) -> Any:
        """A point in a stream, after everything queued there so far."""
        event = self.module.Event(**self._event_options)
        event.record(stream)
        return event

    def copy(self, target: Any, source: Any, ready: Any, *, write: bool) -> Copy:
        """Begin to copy between flat tensors, after an event, on the stream of that direction."""
        stream = self._streams[write]
        try:
            # Tensors made in inference mode may be changed only there, and all others may be too.
            with self.torch.inference_mode(), self.using(), self.module.stream(stream):
                stream.wait_event(ready)
                target.copy_(source, non_blocking=True)
                event = self.event(stream)
        except RuntimeError as error:
            raise _failed(self.name, error) from error
        return TorchCopy(self.name, event, target, source)


@cache
def torch_device(device: Any) -> TorchDevice:
    """The device that a tensor is on; the same one each time."""
    return TorchDevice(device)


class TorchBuffer(DeviceBuffer):
    """A tensor on a device. See `DeviceBuffer`.

    Args:
        tensor: dense and contiguous.

    Raises:
        InvalidBufferError: its device can't take part, or a graph is being captured.
    """

    def __init__(self, tensor: Any) -> None:
        self.device: TorchDevice = torch_device(tensor.device)
        module = self.device.module
        capturing = getattr(module, "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            raise InvalidBufferError(
                "a transfer is no part of a graph: the current stream is capturing one; ask for the transfer outside "
                "the capture"
            )
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel() * tensor.element_size()
        self._tensor = tensor
        with self.device.torch.inference_mode():
            self._flat = tensor.detach().reshape(-1).view(self.device.torch.uint8)
        self._ready = self.device.event(module.current_stream(tensor.device))

    def copy_to_host(self, position: int, nbytes: int, memory: Memory, at: int) -> Copy:
        part = self._flat[position : position + nbytes]
        return self.device.copy(self._host(memory, at, nbytes), part, self._ready, write=True)

    def copy_to_device(self, position: int, nbytes: int, memory: Memory, at: int) -> Copy:
        part = self._flat[position : position + nbytes]
        return self.device.copy(part, self._host(memory, at, nbytes), self._ready, write=False)

    def wait_ready(self) -> None:
        TorchCopy(self.device.name, self._ready).wait()

    def empty(self, num_elements: int, alignment: int) -> Any:
        torch = self.device.torch
        nbytes = num_elements * self._tensor.element_size()
        rounded = -(-nbytes // alignment) * alignment
        whole = torch.empty(rounded + alignment, dtype=torch.uint8, device=self._tensor.device)
        shift = -whole.data_ptr() % alignment
        return whole[shift : shift + nbytes].view(self._tensor.dtype)

    def _host(self, memory: Memory, at: int, nbytes: int) -> Any:
        torch = self.device.torch
        return torch.frombuffer(memory.buffer, dtype=torch.uint8, count=nbytes, offset=at)


def _failed(name: str, error: RuntimeError) -> DeviceError:
    return DeviceError(
        f"a device copies what it is asked to: {name} reports {str(error).splitlines()[0]}; an earlier kernel may "
        "have failed, see the cause"
    )
