"""Collects the distances that parity tests measure and prints them as a table at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

ROWS = pytest.StashKey[list[tuple[str, ...]]]()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`report(case, world, cells, losses, gradients, weights)` adds a row to the table; None was not measured."""
    rows = request.config.stash.setdefault(ROWS, [])

    def add(case: str, world: int, cells: int, *far: float | None) -> None:
        rows.append((case, str(world), str(cells), *("-" if each is None else f"{each:.1e}" for each in far)))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table: the largest relative distance from plain PyTorch, by block of the matrix."""
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    header = ("parity with plain PyTorch", "world", "cells", "losses", "gradients", "weights")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    terminalreporter.section("parity: largest relative distance")
    for row in [header, *rows]:
        first = row[0].ljust(widths[0])
        rest = "  ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))
        terminalreporter.write_line(f"{first}  {rest}")
