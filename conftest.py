"""Fixtures that every package's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from testing.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(world)` is a pool of that many ranks, started at its first use and kept for the session."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools:
            pools[world] = RankPool(world)
        return pools[world]

    yield pool
    for each in pools.values():
        each.close()
