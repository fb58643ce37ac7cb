"""Calls that can't be, refused in words before anything is sent.

The checks see one rank's arguments only: what ranks must agree on is compared when they meet (see `links`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.distributed import ReduceOp

from ds_comm.shared_memory import even_splits


def check_pieces(
    whole: torch.Tensor, piece: torch.Tensor, splits: Sequence[int] | None, rank: int, world: int
) -> Sequence[int]:
    """The boundaries of the ranks' pieces in `whole`: world + 1 numbers, `splits` or equal ones.

    Raises:
        ValueError: the pieces do not make up the whole, `piece` is not the size of this rank's, either is not flat
            and contiguous, or they are on different devices.
    """
    numel = whole.numel()
    bounds = even_splits(numel, world) if splits is None else splits
    if splits is None:
        fits = numel % world == 0
    else:
        fits = len(bounds) == world + 1 and bounds[0] == 0 and bounds[-1] == numel
        fits = fits and all(start <= stop for start, stop in pairwise(bounds))
    if not (
        fits
        and piece.numel() == bounds[rank + 1] - bounds[rank]
        and whole.dim() == piece.dim() == 1
        and whole.is_contiguous()
        and piece.is_contiguous()
    ):
        raise ValueError(
            f"the whole holds one piece of each of {world} ranks, one after another, both flat and contiguous: "
            f"whole {_form(whole)}, piece {_form(piece)} on rank {rank}, "
            f"splits {'equal' if splits is None else tuple(splits)}; pad the whole, or pass the boundaries as splits="
        )
    if whole.device != piece.device:
        raise ValueError(
            f"the whole and the piece are on one device: {whole.device} and {piece.device}; move one of them"
        )
    return bounds


def check_reduce_scatter(whole: torch.Tensor, piece: torch.Tensor, op: ReduceOp.RedOpType) -> None:
    """Raises ValueError unless a reduce-scatter of `whole` by `op` can be left in `piece`."""
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"a reduce-scatter sums or averages: op={op}; use ReduceOp.SUM or ReduceOp.AVG")
    if whole.dtype != piece.dtype and not torch.can_cast(whole.dtype, piece.dtype):
        raise ValueError(
            f"the output can hold the input's kind of numbers: {whole.dtype} into {piece.dtype}; "
            "give an output of floating-point numbers"
        )


def check_all_gather(whole: torch.Tensor, piece: torch.Tensor) -> None:
    """Raises ValueError unless `whole` can take `piece` as it is."""
    if whole.dtype != piece.dtype:
        raise ValueError(
            f"an all-gather copies, and converts nothing: input {piece.dtype}, output {whole.dtype}; "
            "convert the input first"
        )


def check_average(tensor: torch.Tensor) -> None:
    """Raises ValueError unless gloo's sums, divided, have `tensor`'s dtype."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"an average on gloo is of floating-point numbers: {tensor.dtype}; use SUM and divide")


def check_one_kind(tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless the tensors can be laid in one."""
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"tensors reduced as one have one dtype and device: {found}; make a call for each")


def check_pairs(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless each output has its input."""
    if len(outputs) != len(inputs):
        raise ValueError(
            f"each output has its input: {len(outputs)} outputs, {len(inputs)} inputs; give as many of both"
        )


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}" + ("" if tensor.is_contiguous() else f" of strides {tensor.stride()}")
