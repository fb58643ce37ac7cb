"""Page-locked tensors: what `new_cpu_locked_tensor` hands out."""

from __future__ import annotations

import sys
import threading
from typing import Any

from ds_nvme.memory import Memory
from ds_nvme.view import View, is_tensor


class LockedTensors:
    """The locked tensors of one handle. They outlive it, unlocked: memory is freed when nothing refers to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memories: dict[int, Memory] = {}  # by address

    def new(self, num_elements: int, like: Any) -> Any:
        """See `AioHandle.new_cpu_locked_tensor`."""
        if num_elements < 0:
            raise ValueError(f"a tensor has 0 or more elements: got {num_elements}")
        memory = Memory(num_elements * _itemsize(like), lock=True)
        tensor = shape_like(memory, num_elements, like)
        with self._lock:
            self._memories[memory.address] = memory
        return tensor

    def free(self, tensor: Any) -> bool:
        """See `AioHandle.free_cpu_locked_tensor`."""
        view = View(tensor, writable=False)
        with self._lock:
            memory = self._memories.pop(view.address, None)
        view.release()
        if memory is None:
            return False
        memory.unlock()
        return True

    def close(self) -> None:
        """Unlock all that weren't freed."""
        with self._lock:
            memories, self._memories = self._memories, {}
        for memory in memories.values():
            memory.unlock()


def shape_like(memory: Memory, num_elements: int, like: Any) -> Any:
    """The beginning of `memory` as a flat tensor, numpy array or memoryview, with the dtype of `like`."""
    used = memory.buffer[: num_elements * _itemsize(like)]
    if is_tensor(like):
        torch = sys.modules["torch"]
        if not num_elements:
            return torch.empty(0, dtype=like.dtype)
        return torch.frombuffer(used, dtype=like.dtype)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(like, numpy.ndarray):
        return numpy.frombuffer(used, dtype=like.dtype)
    return used.cast(memoryview(like).format)  # type: ignore[call-overload]


def _itemsize(like: Any) -> int:
    if is_tensor(like):
        return int(like.element_size())
    return int(like.itemsize) if hasattr(like, "itemsize") else memoryview(like).itemsize
