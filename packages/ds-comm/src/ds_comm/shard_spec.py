"""ShardSpec: which part of which logical tensor a rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShardSpec:
    """A piece of a logical tensor: the elements `[start, stop)` of its row-major flattening.

    Optimizers shard flat, checkpoints index pieces, and both speak of them with this one word.

    Args:
        name: the logical tensor's name, as in `named_parameters()`.
        shape: its whole shape.
        dtype: its dtype.
        start: first element held.
        stop: one past the last element held; `start == stop` is an empty piece.

    Raises:
        ValueError: the interval does not lie inside the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.global_numel:
            raise ValueError(
                f"a piece lies inside its tensor: {self.name!r} of shape {self.shape} has "
                f"{self.global_numel} elements, the piece is [{self.start}, {self.stop}); "
                "give 0 <= start <= stop <= number of elements"
            )

    @property
    def global_numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def numel(self) -> int:
        """Elements of this piece."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """The piece is the entire tensor."""
        return self.numel == self.global_numel

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This piece of the whole `tensor`, flat (a view where the tensor is contiguous).

        Raises:
            ValueError: the tensor has another number of elements than the logical one.
        """
        if tensor.numel() != self.global_numel:
            raise ValueError(
                f"a piece is taken from its own tensor: {self.name!r} has shape {self.shape}, "
                f"got {tuple(tensor.shape)}; pass the whole tensor"
            )
        return tensor.reshape(-1)[self.start : self.stop]

    def overlap(self, other: ShardSpec) -> tuple[int, int] | None:
        """The interval of the logical tensor that both pieces hold, or None where they share nothing."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return (start, stop) if self.name == other.name and start < stop else None
