"""GatheredParameters: sharded parameters whole, for as long as a block runs."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from ds_zero.group_storage import GroupStorage, group_of


class GatheredParameters:
    """Within the block, parameters have their values on every rank. Collective: all ranks enter and leave alike.

    What stands in a shard group with them is gathered too. Blocks nest. Parameters that nobody shards are left alone.

    Args:
        params: a parameter, several, or a module that has them.
        modifier_rank: the rank whose changes everybody takes over at the end of the block; None forgets changes.
            Default: None.
        fwd_module: accepted for the documented signature: a parameter used in another module's forward is found by
            itself. Default: None.
        enabled: False does nothing. Default: true.

    Raises:
        ValueError: there is no rank `modifier_rank`.

    Source: DeepSpeed API reference 5.1.4, "Manual Parameter Coordination".
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter] | nn.Module,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ):
        if isinstance(params, nn.Module):
            params = params.parameters()
        listed = [params] if isinstance(params, nn.Parameter) else list(params)
        found = (group_of(parameter) for parameter in listed) if enabled else ()
        self._groups: list[GroupStorage] = list(dict.fromkeys(group for group in found if group is not None))
        self._modifier_rank = modifier_rank
        for world in {group.comm.world for group in self._groups}:
            if modifier_rank is not None and not 0 <= modifier_rank < world:
                raise ValueError(f"modifier_rank is a rank or None: got {modifier_rank}; give 0..{world - 1}, or None")

    def __enter__(self) -> None:
        for group in self._groups:
            group.lend()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        in_graph = self._used_in_graphs() if kind is None else [False] * len(self._groups)
        for group, used in zip(self._groups, in_graph):
            if self._modifier_rank is not None and kind is None:
                group.adopt_gathered(self._modifier_rank)
            group.take_back(used)

    def _used_in_graphs(self) -> list[bool]:
        """By group: on any rank, for what stays gathered must stay so on all."""
        found = []
        for group in self._groups:
            used, group.in_graph = group.in_graph, False
            if group.sharded:
                count = torch.full((1,), float(used), device=group.device)
                group.comm.all_reduce(count)
                used = bool(count.item())
            found.append(used)
        return found
