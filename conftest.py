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


# Known defects, each with a test that shows it; the names come off this list as the defects are mended.
KNOWN_DEFECTS = {
    "test_calls_that_cannot_be_are_refused_before_anything_is_sent",
    "test_autograd_does_not_see_collectives",
    "test_an_address_of_ip_version_6_stands_in_brackets",
    "test_a_world_of_no_ranks_is_refused_in_words",
    "test_a_rank_that_dies_is_named_at_once",
    "test_a_dead_rank_is_noticed_though_a_forked_child_lives_on",
    "test_ranks_in_different_collectives_are_told_which",
    "test_a_communicator_goes_with_its_group",
    "test_close_ends_a_job_that_waits_for_a_peer",
}

# Written and not yet green in full: run them by name, as `pytest tests/parity/test_corners.py` after removing this.
collect_ignore_glob = ["tests/parity/test_corner*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of known defects as expected to fail."""
    for item in items:
        if getattr(item, "originalname", item.name) in KNOWN_DEFECTS:
            item.add_marker(pytest.mark.xfail(reason="known defect", strict=False))
