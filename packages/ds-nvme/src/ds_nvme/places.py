"""Where the memory of a measured transfer is, and which kind of handle moves it."""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_nvme.handle import AioHandle
from ds_nvme.memory import Memory
from ds_nvme.options import GDS, Candidate
from ds_nvme.space import Space


@dataclass(frozen=True)
class Place:
    """Host memory, or that of a GPU by way of host memory or directly.

    Args:
        gpu: tensors on torch's current CUDA device instead of host memory.
        gds: moved by `gds_handle`; needs `gpu`.
    """

    gpu: bool = False
    gds: bool = False

    def refusal(self) -> str | None:
        """Why it can't be used here, or None where it can. It is tried, as far as that takes no transfer."""
        if not self.gpu:
            return None
        try:
            torch = _torch()
        except ImportError as error:
            return f"GPU memory is torch's: torch can't be imported ({error})"
        if not torch.cuda.is_available():
            built = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
            return f"GPU memory is on a CUDA device: torch {torch.__version__} {built}"
        if not self.gds:
            return None
        try:
            _gds_handle()().close()
        except ImportError as error:
            return f"GPUDirect Storage goes through gds_handle, which this ds-nvme does not have ({error})"
        except Exception as error:  # whatever keeps the driver from starting is the answer
            return f"GPUDirect Storage can't run here: {error}"
        return None

    def candidates(self, space: Space) -> list[Candidate]:
        """All combinations of the space that differ here: a `gds_handle` has no choice of engines."""
        found = space.candidates()
        return list(dict.fromkeys(replace(each, engine=GDS) for each in found)) if self.gds else found

    def open(self, candidate: Candidate) -> Any:
        """A handle with these options."""
        options = asdict(candidate)
        if not self.gds:
            return AioHandle(**options)
        del options["engine"]
        return _gds_handle()(**options)

    def allocate(self, nbytes: int, stack: ExitStack) -> Any:
        """A flat buffer of random bytes, which lives at least until the stack unwinds."""
        # Not zeros: some storage notices those, and keeps none of them.
        if not self.gpu:
            buffer = Memory(nbytes).buffer[:nbytes]
            noise = os.urandom(min(nbytes, 1 << 20))
            for start in range(0, nbytes, len(noise)):
                buffer[start : start + len(noise)] = noise[: nbytes - start]
            return buffer
        torch = _torch()
        tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
        if self.gds:
            handle = stack.enter_context(_gds_handle()())
            handle.pin_device_tensor(tensor)
            stack.callback(handle.unpin_device_tensor, tensor)
        return tensor

    def __str__(self) -> str:
        return "GPU memory through GPUDirect Storage" if self.gds else "GPU memory" if self.gpu else "host memory"


HOST = Place()


def _torch() -> Any:
    # By name: nothing here needs torch until someone asks for GPU memory.
    return importlib.import_module("torch")


def _gds_handle() -> Any:
    try:
        return importlib.import_module("ds_nvme").gds_handle
    except AttributeError as error:
        raise ImportError(str(error)) from None
