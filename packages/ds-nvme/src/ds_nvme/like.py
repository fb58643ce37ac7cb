"""What sort of array some bytes are: kept beside them, so that the same comes back."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

from ds_nvme.memory import Memory
from ds_nvme.view import is_tensor


@dataclass(frozen=True)
class Kind:
    """Library, dtype and shape of an array.

    Args:
        library: whose array; "buffer" for plain bytes.
        dtype: its name there; "" for plain bytes.
        dims: the shape.
    """

    library: Literal["torch", "numpy", "buffer"]
    dtype: str
    dims: tuple[int, ...]

    def shape(self, memory: Memory, nbytes: int) -> Any:
        """The first `nbytes` of memory as such an array. The library is imported for it."""
        used = memory.buffer[:nbytes]
        if self.library == "torch":
            torch = importlib.import_module("torch")
            dtype = getattr(torch, self.dtype)
            if not math.prod(self.dims):
                return torch.empty(self.dims, dtype=dtype)
            return torch.frombuffer(used, dtype=dtype).reshape(self.dims)
        if self.library == "numpy":
            numpy = importlib.import_module("numpy")
            return numpy.frombuffer(used, dtype=self.dtype).reshape(self.dims)
        return used

    @staticmethod
    def flatten(array: Any) -> Any:
        """A contiguous array as flat bytes that can be sliced, sharing its memory."""
        if is_tensor(array):
            return array.detach().reshape(-1).view(sys.modules["torch"].uint8)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(array, numpy.ndarray):
            return array.reshape(-1).view(numpy.uint8)
        return memoryview(array).cast("B")


def kind_of(array: Any) -> Kind:
    """The kind of an array, tensor or buffer."""
    if is_tensor(array):
        return Kind("torch", str(array.dtype).removeprefix("torch."), tuple(array.shape))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return Kind("numpy", array.dtype.str, tuple(array.shape))
    return Kind("buffer", "", (memoryview(array).nbytes,))
