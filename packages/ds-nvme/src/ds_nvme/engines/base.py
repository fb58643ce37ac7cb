"""The interface of an engine: what carries blocks between memory and files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of one file from or to consecutive memory.

    Args:
        write: memory to file.
        fd: the file.
        address: of the first byte in memory.
        file_offset: of the first byte in the file.
        nbytes: bytes of all blocks together, more than 0.
        block_nbytes: bytes a block; the last may be shorter.
    """

    write: bool
    fd: int
    address: int
    file_offset: int
    nbytes: int
    block_nbytes: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.nbytes // self.block_nbytes)

    def length(self, index: int) -> int:
        """Bytes of block `index`."""
        return min(self.block_nbytes, self.nbytes - index * self.block_nbytes)

    def part(self, first: int, last: int) -> Run:
        """Blocks `first` to `last` (exclusive)."""
        start = first * self.block_nbytes
        nbytes = min(last * self.block_nbytes, self.nbytes) - start
        return replace(self, address=self.address + start, file_offset=self.file_offset + start, nbytes=nbytes)


class Engine(ABC):
    """Carries up to `depth` blocks at a time. Made, used and closed by one thread.

    A block is known by its tag, an integer below 2**64: that of a run's first block is given when it is packed, the
    others count up from there. Memory and descriptors stay valid until the block is reaped: that is the caller's part.

    Args:
        depth: most blocks in flight.

    Raises:
        EngineError: it can't run here; the message says why.
    """

    name: ClassVar[str]
    """As users choose it."""

    @abstractmethod
    def __init__(self, depth: int) -> None: ...

    @abstractmethod
    def pack(self, run: Run, tag: int) -> Any:
        """Make the requests of a run, once for all its blocks, in the engine's own form.

        Whoever submits keeps them until `submit` has taken the last of them; the kernel copies what it takes.
        """

    @abstractmethod
    def submit(self, packed: Any, start: int, count: int) -> int:
        """Start blocks `start` to `start + count` of a packed run.

        Returns:
            How many were accepted, 0 where the kernel has no room until something is reaped; or, where the first of
            them was refused, a negative errno.
        """

    @abstractmethod
    def reap(self, minimum: int) -> tuple[list[int], list[int]]:
        """Wait until at least `minimum` blocks have ended.

        Returns:
            Their tags, and for each the bytes moved or a negative errno, in the same order. Possibly fewer than asked
            (a signal came).
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Nothing may be in flight."""

    @classmethod
    @abstractmethod
    def path(cls) -> str:
        """What really carries the blocks, in words."""
